"""The program that renders chat templates for `jaxspec.io.chat`: a line of JSON in, a line of JSON out.

It runs as a process of its own, because only a process can be stopped inside a single operation, such as
`'a' * 10**10`, and can be kept from more memory than it may use. It imports nothing of jaxspec.
"""

import json
import os
import signal
import sys
from typing import Any

# What a rendering may need. The longest conversations need a thousandth of it.
MEMORY = 2**29
CHARACTERS = 2**24


def main() -> None:
    """Answers requests until standard input ends."""
    # Whatever a library prints must not be taken for a reply.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    if hasattr(signal, "SIGALRM"):
        # A program that ignores or blocks it hands that on to those that it starts.
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
        except Exception as error:  # what a template raises is up to its author
            reply = {"error": str(error)[:CHARACTERS] or type(error).__name__}
        _limit_time(0)
        print(json.dumps(reply), file=replies, flush=True)


def _limit_time(seconds: float) -> None:
    """Lets the system end this process after some time; 0 for no limit."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory() -> None:
    """Bounds what this process may add to the memory that it has now."""
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
