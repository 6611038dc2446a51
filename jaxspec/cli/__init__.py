"""The command line: `jaxspec`, or `python -m jaxspec`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from jaxspec.console import distributed
from jaxspec.console.environment import defer_linen
from jaxspec.console.errors import Guard

DESCRIPTION = """Lossless speculative decoding of Llama-type models in JAX: the same text, faster.

Try: jaxspec generate "Once upon a time" --method ngram

What a command takes: jaxspec COMMAND --help. The version: jaxspec --version."""
ENVIRONMENT = """
environment:
  JAXSPEC_CACHE    directory of compiled programs, of ready weights and of measured costs, or off;
                   default: the user's cache directory
  JAXSPEC_DATA     directory of plans, thresholds and other numbers found for models, where
                   the model's directory cannot hold them; default: the user's data directory
  JAXSPEC_API_KEY  the key that requests to jaxspec serve must have
  JAXSPEC_DEBUG    1 shows the traceback of an error"""


# The module and class of each command, in the order of the help, and whether it reads a `method` with its options, or
# several `methods`: its errors may name their options.
_COMMANDS = {
    "generate": ("jaxspec.cli.generate:Generate", "method"),
    "chat": ("jaxspec.cli.chat:Chat", "method"),
    "batch": ("jaxspec.serving.commands.batch:Batch", "method"),
    "serve": ("jaxspec.serving.commands.serve:Serve", "method"),
    "compare": ("jaxspec.measuring.commands.compare:Compare", "methods"),
    "bench": ("jaxspec.measuring.commands.bench:Bench", "methods"),
    "profile": ("jaxspec.measuring.commands.profile:Profile", ""),
    "compile": ("jaxspec.measuring.commands.compile:Compile", "method"),
    "convert": ("jaxspec.cli.convert:Convert", ""),
    "inspect": ("jaxspec.measuring.commands.inspect:Inspect", ""),
    "search": ("jaxspec.measuring.commands.search:Search", ""),
    "tune": ("jaxspec.measuring.commands.tune:Tune", ""),
    "vocab": ("jaxspec.measuring.commands.vocab:Vocab", ""),
    "train": ("jaxspec.cli.train:Train", ""),
}


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
    if arguments[:1] == ["train"]:
        from jaxspec.cli.train import train

        return train(arguments[1:])
    command = _parsed(arguments, guard)
    distributed.join(*distributed.options_in(command), command)
    defer_linen()
    from jaxspec.programs import compilation_cache, jax_settings

    compilation_cache.enable()
    jax_settings.keep_needed()
    status: int = command.run()
    return status


def _parsed(arguments: list[str], guard: Guard) -> Any:
    """Returns the command that the arguments name, with its options; only its own modules are imported."""
    from jaxspec.cli.methods import names
    from jaxspec.console.parsing import option_names, parse_as, without_command
    from jaxspec.methods import registry

    name = arguments[0] if arguments else "--help"
    if name not in _COMMANDS:
        try:
            without_command("jaxspec", name, DESCRIPTION, {one: _COMMANDS[one][0] for one in _COMMANDS})
        finally:
            if name in ("-h", "--help"):
                print(ENVIRONMENT)
    place, reads = _COMMANDS[name]
    command = resolve_name(place)
    guard.options = lambda: (names() if reads else {}) | option_names(command)
    kinds = registry if reads == "method" else None
    return parse_as(command, arguments[1:], f"jaxspec {name}", kinds=kinds)
