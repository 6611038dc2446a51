"""Runs a program of this project that is not `jaxspec` itself, such as `python -m training.sft`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from jaxspec.console.errors import Guard
from jaxspec.console.parsing import option_names, parse_as

Options = TypeVar("Options")
# Reads the options of a dataclass from words, for a program of this name; `jaxspec.console.parsing.parse_as` does.
Read = Callable[[type[Any], Sequence[str], str], Any]
# The words that ran the program, such as `jaxspec train soft`; None for `python -m MODULE`.
CALLED: ContextVar[str | None] = ContextVar("called", default=None)


def run_command(
    module: str,
    options: type[Options],
    work: Callable[[Options], int | None],
    argv: Sequence[str] | None = None,
    read: Read = parse_as,
) -> int:
    """Reads the options of `python -m module`, or of the program in `CALLED`, then works with them.

    Args:
      module: its full name, with which lines on standard error begin.
      options: the dataclass of its options; errors that name its fields are translated into names of options.
      work: returns the exit status, or None for 0.
      argv: by default the arguments of the process.
      read: how the options are read.

    Returns:
      the exit status, see `jaxspec.console.errors.Guard`.
    """
    given = sys.argv[1:] if argv is None else argv
    called = CALLED.get()
    guard = Guard(called or module, lambda: option_names(options))
    return guard(lambda: work(read(options, given, called or f"python -m {module}")) or 0)
