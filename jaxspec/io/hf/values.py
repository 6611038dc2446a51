"""Reads values of `config.json` and `generation_config.json`, checked for type and range, with one-line errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxspec.host.messages import shown

T = TypeVar("T")
# The largest index or size: both are 32-bit on the device.
MAX_INT = 2**31 - 1


def whole(values: Mapping[str, Any], key: str, least: int = 1, most: int = MAX_INT) -> int:
    """Returns the whole number under a key.

    Raises:
      ValueError: the value is not a whole number from `least` to `most`.
    """
    value = values[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {shown(value)}; expected a whole number from {least} to {most}")
    return value


def whole_or(usual: T, values: Mapping[str, Any], key: str, least: int = 1, most: int = MAX_INT) -> int | T:
    """Returns the whole number under a key, or `usual` if the key is missing or null.

    Raises:
      ValueError: the value is not a whole number in the range; one line.
    """
    return usual if values.get(key) is None else whole(values, key, least, most)


def number(values: Mapping[str, Any], key: str, least: float, most: float) -> float:
    """Returns the number under a key.

    Raises:
      ValueError: the value is not a finite number from `least` to `most`.
    """
    value = values[key]
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise ValueError(f"{key} is {shown(value)}; expected a number from {least:g} to {most:g}")
    return float(value)


def flag(values: Mapping[str, Any], key: str) -> bool:
    """Returns the truth value under a key; False if the key is missing or null.

    Raises:
      ValueError: the value is neither true, false nor null.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {shown(value)}; expected true or false")
    return bool(value)


def section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object under a key; an empty one if the key is missing or null.

    Raises:
      ValueError: the value is neither an object nor null.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {shown(value)}; expected an object or null")
    return value or {}


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns the token id or ids under a key, each once; () if the key is missing or null.

    Raises:
      ValueError: one of them is not a whole number from 0 to 2³¹ − 1.
    """
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or not 0 <= token <= MAX_INT for token in ids):
        raise ValueError(f"{key} is {shown(value)}; expected a token id from 0, a list of such, or null")
    return tuple(dict.fromkeys(ids))
