"""The command line: `jaxspec`, or `python -m jaxspec`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from jaxspec.console import distributed
from jaxspec.console.errors import Guard, option_names

DESCRIPTION = """Lossless speculative decoding of Llama-type models in JAX: the same text, faster.

Try: jaxspec generate "Once upon a time" --method ngram

What a command takes: jaxspec COMMAND --help. The version: jaxspec --version."""
ENVIRONMENT = """
environment:
  JAXSPEC_CACHE    directory of compiled programs and of what method auto has learnt, or off; default:
                   the user's cache directory
  JAXSPEC_DATA     directory of plans, thresholds and other numbers found for models, where
                   the model's directory cannot hold them; default: the user's data directory
  JAXSPEC_API_KEY  the key that requests to jaxspec serve must have
  JAXSPEC_DEBUG    1 shows the traceback of an error"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments; by default those of the process.

    Returns:
      the exit status: 0; 2 after a wrong use and 1 where the machine failed, with one line on standard
      error (`JAXSPEC_DEBUG=1` shows the traceback); 130 after Ctrl-C; 141 where the reader of standard
      output went away.
    """
    guard = Guard("jaxspec")
    arguments = list(sys.argv[1:] if argv is None else argv)
    status = guard(lambda: _run(arguments, guard))
    if argv is None:
        # Leaves at once: the usual way waits for what compiles in the background, perhaps for a long time.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the guard has already reported that a disk is full
                stream.flush()
        os._exit(status)
    return status


def _run(arguments: list[str], guard: Guard) -> int:
    if arguments == ["--version"]:
        from jaxspec import __version__

        print(f"jaxspec {__version__}")
        return 0
    from jaxspec.cli.batch import Batch
    from jaxspec.cli.bench import Bench
    from jaxspec.cli.chat import Chat
    from jaxspec.cli.compare import Compare
    from jaxspec.cli.compile import Compile
    from jaxspec.cli.convert import Convert
    from jaxspec.cli.generate import Generate
    from jaxspec.cli.inspect import Inspect
    from jaxspec.cli.methods import names, with_options
    from jaxspec.cli.profile import Profile
    from jaxspec.cli.search import Search
    from jaxspec.cli.serve import Serve
    from jaxspec.cli.tune import Tune
    from jaxspec.cli.vocab import Vocab
    from jaxspec.console.parsing import parse

    commands = {
        "generate": Generate,
        "chat": Chat,
        "batch": Batch,
        "serve": Serve,
        "compare": Compare,
        "bench": Bench,
        "profile": Profile,
        "compile": Compile,
        "convert": Convert,
        "inspect": Inspect,
        "search": Search,
        "tune": Tune,
        "vocab": Vocab,
    }
    arguments = arguments or ["--help"]
    if arguments[0] in ("generate", "chat", "batch", "serve", "compile"):
        commands[arguments[0]] = with_options(commands[arguments[0]], arguments[1:])
    try:
        command = parse(commands, arguments, DESCRIPTION)
    finally:
        if arguments in (["--help"], ["-h"]):
            print(ENVIRONMENT)
    guard.options = option_names(type(command))
    if isinstance(
        command, (Generate, Chat, Batch, Serve, Compare, Bench, Compile)
    ):  # their errors may name options of methods
        guard.options = names() | guard.options
    distributed.join(*distributed.options_in(command), "jaxspec", command)
    from jaxspec.engine import compilation_cache, jax_settings

    compilation_cache.enable()
    jax_settings.keep_needed()
    status: int = command.run()
    return status
