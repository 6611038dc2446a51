"""How a command line names a method and gives it options: `--method NAME` and `--run "NAME --OPTION ..."`."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from jaxspec.console.errors import in_options
from jaxspec.console.parsing import Positional, parse_as
from jaxspec.methods import Method, registry


@dataclasses.dataclass(frozen=True)
class _Run:
    """A method and its options.

    Attributes:
      method: the name of the method.
    """

    method: Annotated[str, Positional]
    drafting: Any = None


def method_field() -> str:
    """Returns the field of the option --method, whose help names every method, also those of other packages."""
    methods, problems = registry.available()
    for problem in problems:
        _warn_once(problem)
    details = f"One of {', '.join(methods)}. --help --method NAME describes one and its options."
    metadata = {"metavar": "NAME", "details": details}
    return dataclasses.field(default_factory=lambda: registry.DEFAULT, metadata=metadata)


@functools.cache
def _warn_once(problem: str) -> None:
    """Several commands have the option --method, and each looks for the methods of other packages."""
    print(f"jaxspec: warning: {problem}", file=sys.stderr)


def names() -> dict[str, str]:
    """Returns the command-line option of each option of any method, by its name in Python."""
    options = {name for method in registry.available()[0].values() for name in method.options()}
    return {name: "--" + name.replace("_", "-") for name in sorted(options)}


def made_of(named: str | None, runs: Sequence[str]) -> dict[str, Method] | None:
    """Returns the methods of --methods and --run, by the words that name each; None if none is given.

    Raises:
      ValueError: an unknown method or option, or an invalid value; one line.
    """
    if named is None and not runs:
        return None
    names = [] if named is None else named.replace(",", " ").split() or [named]
    return {name: registry.make(name, {}) for name in names} | {words: parse_run(words) for words in runs}


def parse_run(words: str) -> Method:
    """Returns the method of a value of --run, such as "layerskip --exit-layer 3".

    Raises:
      ValueError: an unknown method or option, or an invalid value; one line.
    """
    try:
        return parse_method(words)
    except ValueError as error:
        raise ValueError(f"`runs` {words!r}: {in_options(str(error), names())}") from None


def parse_method(words: str) -> Method:
    """Returns the method of a name and options, such as "layerskip --exit-layer 3".

    Raises:
      ValueError: an unknown method or option, or an invalid value; one line.
    """
    argv = shlex.split(words) or [""]
    prog = f"jaxspec generate --method {argv[0]}"
    method: Method = parse_as(_Run, argv, prog, kinds=registry).drafting
    return method


def usual_methods(num_layers: int) -> list[str]:
    """Returns the methods that are measured where none is named.

    Args:
      num_layers: of the model.
    """
    return [
        name
        for name, method in registry.available()[0].items()
        if method.compared and not method.needs and num_layers >= method.min_layers
    ]
