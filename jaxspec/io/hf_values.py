"""Values of `config.json` and `generation_config.json`, each checked to be what it should: one line where it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.io.messages import shown

# Largest number that an index or a size may be: they are 32-bit on the device.
MAX_INT = 2**31 - 1


def whole(values: Mapping[str, Any], key: str, least: int = 1, most: int = MAX_INT) -> int:
    """The whole number under a key.

    Raises:
      ValueError: it is none, or not from `least` to `most`.
    """
    value = values[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {shown(value)}; expected a whole number from {least} to {most}")
    return value


def number(values: Mapping[str, Any], key: str, least: float, most: float) -> float:
    """The number under a key; NaN and infinities are none.

    Raises:
      ValueError: it is none, or not from `least` to `most`.
    """
    value = values[key]
    if type(value) not in (int, float) or not least <= value <= most or not math.isfinite(value):
        raise ValueError(f"{key} is {shown(value)}; expected a number from {least:g} to {most:g}")
    return float(value)


def flag(values: Mapping[str, Any], key: str) -> bool:
    """Whether a key is set; missing and null are false.

    Raises:
      ValueError: it is something else than true or false.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {shown(value)}; expected true or false")
    return bool(value)


def section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; missing, null and empty are an empty one.

    Raises:
      ValueError: it is something else.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {shown(value)}; expected an object or null")
    return value or {}


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The token id or ids under a key, each once; missing and null are none.

    Raises:
      ValueError: one is no whole number from 0.
    """
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or not 0 <= token <= MAX_INT for token in ids):
        raise ValueError(f"{key} is {shown(value)}; expected a token id from 0, a list of such, or null")
    return tuple(dict.fromkeys(ids))
