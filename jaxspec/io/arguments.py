"""Arguments of Python callers: NumPy's and JAX's numbers become Python's; what is wrong becomes one line."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Sequence
from typing import Any

# Integers beyond this are never meant, and Python does not write out those of more than 4300 digits.
_MAX_BITS = 1024


def whole(name: str, value: Any, kind: str = "whole number") -> int:
    """Returns an integer of Python, NumPy or JAX as Python's.

    Args:
      name: of the argument, for the message.
      value: what was given.
      kind: what was expected, for the message.

    Raises:
      ValueError: it is something else, or has more than 1024 bits.

    Examples:
      >>> whole("seed", 3)
      3
    """
    try:
        if _is_bool(value):
            raise TypeError
        number = operator.index(value)
        if number.bit_length() > _MAX_BITS:
            raise TypeError
        return number
    except TypeError:
        raise ValueError(f"{name} is {shown(value)}; give a {kind}") from None


def real(name: str, value: Any) -> float:
    """Returns a number of Python, NumPy or JAX as Python's.

    Args:
      name: of the argument, for the message.
      value: what was given.

    Raises:
      ValueError: it is no number.

    Examples:
      >>> real("top_p", 1)
      1.0
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {shown(value)}; give a number") from None


def flag(name: str, value: Any) -> bool:
    """Returns a truth value of Python or NumPy as Python's.

    Args:
      name: of the argument, for the message.
      value: what was given.

    Raises:
      ValueError: it is something else, such as the text "no", which Python would take as true.

    Examples:
      >>> flag("chat", True)
      True
    """
    if getattr(value, "ndim", 0) or not _is_bool(value):
        raise ValueError(f"{name} is {shown(value)}; give True or False")
    return bool(value)


def listed(value: Any) -> list[Any] | None:
    """Returns the items of a sequence or array of at least one dimension; None for anything else.

    Examples:
      >>> listed((1, 2)), listed("text")
      ([1, 2], None)
    """
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return None
    if hasattr(value, "ndim"):
        # An array's own list holds Python's numbers: its items one by one would be slow to reach.
        return value.tolist() if value.ndim and hasattr(value, "tolist") else None
    return list(value) if isinstance(value, Sequence) else None


def shown(value: Any) -> str:
    """Returns a value as a message shows it: short, in one line.

    Examples:
      >>> shown("a text")
      "'a text'"
    """
    return " ".join(_SHORT.repr(value).split())


def _is_bool(value: Any) -> bool:
    kind: Any = getattr(value, "dtype", type(value).__name__)
    return str(kind) == "bool"


class _Short(reprlib.Repr):
    """Shortens values; integers of thousands of digits too, which Python refuses to write out."""

    def repr_int(self, x: int, level: int) -> str:
        """Returns an integer as text; of a long one only how long it is."""
        bits = x.bit_length()
        if bits > _MAX_BITS:
            return f"a number of about {round(bits * math.log10(2))} digits"
        return super().repr_int(x, level)


_SHORT = _Short()
