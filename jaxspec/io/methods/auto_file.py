"""Keeps the acceptances that texts of method `auto` have shown in the user's cache, for the next process.

A file belongs to one model in one form of its weights, which it names. It is written whole or not at all, so processes
that run at once each write a valid file, and the last one stays. A file that is damaged or belongs to something else is
ignored, and replaced by the next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.host.user_cache import keep, kept, user_cache

FORMAT = "jaxspec.auto/3"
# Limits of a file's contents: a longer one is damaged.
_MAX_POSITIONS, _MAX_NAMES = 256, 1000


def path_of(key: dict[str, Any]) -> Path | None:
    """Returns the path of a key's file; None if there is no user's cache."""
    cache = user_cache()
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return None if cache is None else cache / "auto" / f"{name}.json"


def write(path: Path | None, key: dict[str, Any], seen: Mapping[str, np.ndarray]) -> None:
    """Writes accepted and rejected draft tokens by position, float[K, 2], by candidate; see `user_cache.keep`."""
    counts = {name: one.round(3).tolist() for name, one in seen.items()}
    keep(path, {"format": FORMAT, "key": key, "seen": counts})


def read(path: Path | None, key: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the counts of a file; {} if it is missing, damaged or belongs to something else."""
    try:
        content = kept(path)
        if content["format"] != FORMAT or content["key"] != key or len(content["seen"]) > _MAX_NAMES:
            return {}
        return {name: _counts(one) for name, one in content["seen"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def _counts(given: Any) -> np.ndarray:
    found = np.array(given, np.float64)
    if found.ndim != 2 or found.shape[1] != 2 or not 0 < len(found) <= _MAX_POSITIONS:
        raise ValueError
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError
    return found
