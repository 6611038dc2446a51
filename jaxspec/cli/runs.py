"""A run of `jaxspec bench` as it is typed: a method with its options in one word of the shell."""

from __future__ import annotations

import shlex

from jaxspec.console.parsing import parse_as
from jaxspec.methods import Method, registry
from jaxspec.methods.flat import flat_options, given_options


def parse_run(words: str) -> Method:
    """A run as typed → the method with its options.

    Raises:
      ValueError: an unknown method or option, or a value that is none; one line.
    """
    try:
        name, *rest = shlex.split(words) or [""]
        options = flat_options(registry.find(name).readers())
        return registry.make(
            name, given_options(parse_as(options, f"jaxspec generate --method {name}", rest))
        )
    except ValueError as error:
        raise ValueError(f"`runs` {words!r}: {error}") from None
