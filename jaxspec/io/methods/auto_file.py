"""Keeps what method `auto` has learnt about a model on this machine in the user's cache, for the next process.

A file belongs to one model, form of the weights, device, version of JAX and of jaxspec, and table of step costs, which
it names. It is written whole or not at all, so processes that run at once each write a valid file, and the last one
stays. A file that is damaged or belongs to something else is ignored, and replaced by the next one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.choosing.beliefs import Counts
from jaxspec.choosing.policy import Times
from jaxspec.host.user_cache import keep, kept, user_cache

FORMAT = "jaxspec.auto/2"
# Limits of a file's contents: a longer one is damaged.
_MAX_POSITIONS, _MAX_NAMES = 256, 1000
# The programs of which times are written, the last ones.
_MAX_PROGRAMS = 500


def path_of(key: dict[str, Any]) -> Path | None:
    """Returns the path of a key's file; None if there is no user's cache."""
    cache = user_cache()
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return None if cache is None else cache / "auto" / f"{name}.json"


def write(path: Path, key: dict[str, Any], times: Times, counts: dict[str, Counts]) -> None:
    """Writes times and counts, see `user_cache.keep`.

    Args:
      path: the file.
      key: what they belong to.
      times: of this machine.
      counts: of the drafts of earlier texts, by candidate: arrays [K, 2] each.
    """
    content = {
        "format": FORMAT,
        "key": key,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ratios": [[*of, ratio] for of, ratio in times.ratios.items() if of not in times.disturbed],
        "prefill_ms": times.prefill_ms,
        "compile_ms": times.compile_ms,
        "programs": dict(list(times.programs.items())[-_MAX_PROGRAMS:]),
        "counts": {
            name: {"accept": one.accept.round(3).tolist(), "draft": one.draft.round(3).tolist()}
            for name, one in counts.items()
        },
    }
    keep(path, content)


def read(path: Path, key: dict[str, Any]) -> tuple[Times, dict[str, Counts]] | None:
    """Returns the times and counts of a file; None if it is missing, damaged or belongs to something else."""
    try:
        content = kept(path)
        if content["format"] != FORMAT or content["key"] != key:
            return None
        ratios = {(_name(name), _whole(batch)): _positive(ratio) for name, batch, ratio in content["ratios"]}
        prefill_ms, compile_ms = (
            None if content[name] is None else _positive(content[name])
            for name in ("prefill_ms", "compile_ms")
        )
        programs = {_name(name): _positive(ms) for name, ms in content["programs"].items()}
        counts = {
            _name(name): Counts(_counts(one["accept"]), _counts(one["draft"]))
            for name, one in content["counts"].items()
        }
        if any(len(one.accept) != len(one.draft) for one in counts.values()) or 0.0 in ratios.values():
            return None
        if len(ratios) + len(programs) + len(counts) > _MAX_NAMES:
            return None
        return Times(ratios, prefill_ms, compile_ms, programs=programs), counts
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _name(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given


def _whole(given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ValueError
    return given


def _positive(given: Any) -> float:
    if type(given) not in (int, float) or not 0 <= given < math.inf:
        raise ValueError
    return float(given)


def _counts(given: Any) -> np.ndarray:
    found = np.array(given, np.float64)
    if found.ndim != 2 or found.shape[1] != 2 or not 0 < len(found) <= _MAX_POSITIONS:
        raise ValueError
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError
    return found
