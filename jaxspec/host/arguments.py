"""Converts arguments of Python callers: NumPy and JAX numbers to Python's, wrong values to one-line errors."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

from jaxspec.host.messages import shown

# No argument needs a larger integer, and Python does not print integers of more than 4300 digits.
_MAX_BITS = 1024


def whole(name: str, value: Any, kind: str = "whole number") -> int:
    """Returns an integer of Python, NumPy or JAX as Python's.

    Args:
      name: the argument's name, for the message.
      value: the given value.
      kind: the expected values, for the message.

    Raises:
      ValueError: the value is not an integer, or has more than 1024 bits.
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


def num_bytes(name: str, value: Any) -> int:
    """Returns a number of bytes, given as a whole number or as a text with a unit: kB, MB, GB, KiB, MiB or GiB.

    Args:
      name: the argument's name, for the message.
      value: the given value.

    Raises:
      ValueError: the value is not such a number or text, or is negative.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMG])(i)?)?B?", value) if isinstance(value, str) else None
    if found is not None:
        number, prefix, binary = found.groups()
        return int(float(number) * (1024 if binary else 1000) ** " KMG".index((prefix or " ").upper()))
    wanted = "number of bytes, such as 2**29 or 512MB"
    if isinstance(value, str) or (size := whole(name, value, wanted)) < 0:
        raise ValueError(f"{name} is {shown(value)}; give a {wanted}")
    return size


def real(name: str, value: Any) -> float:
    """Returns a number of Python, NumPy or JAX as Python's.

    Args:
      name: the argument's name, for the message.
      value: the given value.

    Raises:
      ValueError: the value is not a number.
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
      name: the argument's name, for the message.
      value: the given value.

    Raises:
      ValueError: the value is not a truth value, such as the text "no", which Python treats as true.
    """
    if getattr(value, "ndim", 0) or not _is_bool(value):
        raise ValueError(f"{name} is {shown(value)}; give True or False")
    return bool(value)


def listed(value: Any) -> list[Any] | None:
    """Returns the items of a sequence or array of at least one dimension; None for anything else."""
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return None
    if hasattr(value, "ndim"):
        # `tolist` gives Python numbers, and is faster than access to the items one by one.
        return value.tolist() if value.ndim and hasattr(value, "tolist") else None
    return list(value) if isinstance(value, Sequence) else None


def _is_bool(value: Any) -> bool:
    kind: Any = getattr(value, "dtype", type(value).__name__)
    return str(kind) == "bool"


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the axis lengths of a mesh such as data=1,model=4. An axis that is left out has length 1.

    Raises:
      ValueError: the text is not a mesh; one line.
    """
    pairs = [re.fullmatch(r"\s*(data|model)\s*=\s*([1-9]\d{0,5})\s*", part) for part in text.split(",")]
    axes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if not all(pairs) or len(axes) < len(pairs):
        raise ValueError(
            f"mesh is {shown(text)}; give its axes data (rows) and model (heads), such as data=1,model=4"
        )
    return {"data": axes.get("data", 1), "model": axes.get("model", 1)}
