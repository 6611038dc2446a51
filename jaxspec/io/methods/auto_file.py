"""Keeps the acceptances that texts of method `auto` have shown in the user's cache, for the next process.

A file belongs to one model in one form of its weights, which it names. It is written whole or not at all, so processes
that run at once each write a valid file, and the last one stays. A file that is damaged or belongs to something else is
ignored, and replaced by the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.host.user_cache import keep, kept

FORMAT = "jaxspec.auto/4"
# Limits of a file's contents: a longer one is damaged.
_MAX_POSITIONS, _MAX_NAMES = 256, 1000


def write(key: dict[str, Any], seen: Mapping[str, np.ndarray]) -> None:
    """Writes accepted and rejected draft tokens by position, float[K, 2], by candidate; see `user_cache.keep`."""
    keep("auto", [FORMAT, key], {name: one.round(3).tolist() for name, one in seen.items()})


def read(key: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the counts that were written; {} if there are none, or their file is damaged."""
    try:
        seen = kept("auto", [FORMAT, key])
        return {name: _counts(one) for name, one in seen.items()} if len(seen) <= _MAX_NAMES else {}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return {}


def _counts(given: Any) -> np.ndarray:
    found = np.array(given, np.float64)
    if found.ndim != 2 or found.shape[1] != 2 or not 0 < len(found) <= _MAX_POSITIONS:
        raise ValueError
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError
    return found
