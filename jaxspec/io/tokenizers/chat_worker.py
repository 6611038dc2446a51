"""Renders chat templates for `jaxspec.io.tokenizers.chat`: one line of JSON per request and per answer.

It runs in a separate process, because only a process can be stopped within a single operation such as
`'a' * 10**10`, and only a process can have a memory limit. It imports nothing from jaxspec.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
from importlib.machinery import PathFinder
from typing import Any

# Limits of one rendering. The longest conversations need a thousandth of them.
MEMORY = 2**29
CHARACTERS = 2**24


def main() -> None:
    """Answers requests until standard input ends."""
    # Output that a library prints must not mix with the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    render_jinja_template = _renderer()

    _limit_memory()
    if hasattr(signal, "SIGALRM"):
        # A process inherits ignored and blocked signals from its parent.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    for line in sys.stdin:
        request = json.loads(line)
        _limit_time(request["seconds"])
        try:
            rendered: Any = render_jinja_template([request["messages"]], **request["arguments"])
            (text,), answers = rendered
            reply = {"text": text, "answers": answers[0] if answers else []}
            if len(text) > CHARACTERS:
                reply = {"error": f"it writes more than {CHARACTERS} characters"}
        except MemoryError:
            reply = {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:  # a template can raise any exception
            reply = {"error": str(error)[:CHARACTERS] or type(error).__name__}
        _limit_time(0)
        print(json.dumps(reply), file=replies, flush=True)


def _renderer() -> Any:
    """Returns transformers' function, if possible without its packages' `__init__`s, which import for a second."""
    packages = ("transformers", "transformers.utils")
    with contextlib.suppress(Exception):
        found = importlib.util.find_spec(packages[0])
        for name in packages:
            assert found is not None
            sys.modules[name] = importlib.util.module_from_spec(found)
            found = PathFinder.find_spec(packages[1], found.submodule_search_locations)
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template
    for name in [name for name in sys.modules if name.partition(".")[0] == packages[0]]:
        del sys.modules[name]
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _limit_time(seconds: float) -> None:
    """Makes the system end this process after some seconds; 0 for no limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory() -> None:
    """Limits the memory that this process may add to its present memory."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, most))
    except (ImportError, OSError, ValueError):
        return  # not on Linux


if __name__ == "__main__":
    main()
