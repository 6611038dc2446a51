"""The costs of steps that were measured on a device, kept in the user's cache for the next process.

A file belongs to one device, model shape, dtype and version of JAX, which it names; it is written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform as platform_module
import sys
from pathlib import Path
from typing import Any

import jax

from jaxspec.choosing.costs import StepCosts
from jaxspec.io.files import read_json, write_json
from jaxspec.io.messages import shown
from jaxspec.io.user_cache import user_cache
from jaxspec.model.config import LlamaConfig

FORMAT = "jaxspec.costs/1"
# What of a config changes no cost.
_TEXT_FIELDS = ("bos_token_id", "eos_token_ids", "model_type", "max_position_embeddings")


def key(device_kind: str, platform: str, config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """What costs depend on.

    Args:
      device_kind: as `LanguageModel.device_kind`, the mesh with it.
      platform: cpu, gpu or tpu.
      config: the model's shape.
      dtype: of what is computed, in words, with that of the weights where these are held otherwise.

    Returns:
      as JSON gives it back. On a CPU, whose kind says nothing, its name and the cores that this process may use
      are part of it.
    """
    shape = {name: value for name, value in dataclasses.asdict(config).items() if name not in _TEXT_FIELDS}
    found: dict[str, Any] = {
        "device": device_kind,
        "platform": platform,
        "dtype": dtype,
        "jax": jax.__version__,
        "shape": shape,
    }
    if platform == "cpu":
        usable = getattr(os, "sched_getaffinity", None)
        found["cores"] = len(usable(0)) if usable else os.cpu_count()
        found["processor"] = _processor()
    given: dict[str, Any] = json.loads(json.dumps(found))
    return given


def _processor() -> str:
    """What the CPU is called; where Linux does not say it, what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform_module.processor())


def path_of(key: dict[str, Any]) -> Path | None:
    """Where the costs of a key are kept; None where nothing may be kept."""
    cache = user_cache()
    if cache is None:
        return None
    return (
        cache / "costs" / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    )


def write(path: Path, key: dict[str, Any], costs: StepCosts) -> None:
    """Keeps costs.

    Raises:
      OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "key": key, "costs": dataclasses.asdict(costs)})


def read(path: Path, key: dict[str, Any] | None = None) -> StepCosts:
    """The costs in a file.

    Args:
      path: the file.
      key: what they must be of; None for a file that the user named.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is of another format, device, shape, dtype or version of JAX, or damaged; one line.
    """
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {shown(content.get('format'))}, expected {FORMAT!r}")
    found = content.get("key")
    if key is not None and found != key:
        of = found if isinstance(found, dict) else {}
        other = next((name for name in key if of.get(name) != key[name]), "key")
        raise ValueError(
            f"{path} is of another {other}: {shown(of.get(other))}, expected {shown(key.get(other))}"
        )
    return parse(content.get("costs"), str(path))


def parse(content: Any, where: str) -> StepCosts:
    """Costs from what `dataclasses.asdict` made of them and JSON kept.

    Args:
      content: the JSON value.
      where: it comes from, for the message.

    Raises:
      ValueError: it holds no costs; one line.
    """
    fields = {field.name: field for field in dataclasses.fields(StepCosts)}
    if not isinstance(content, dict) or set(content) != set(fields):
        raise ValueError(f"{where} holds no costs of steps, expected the fields {', '.join(fields)}")
    given = dict(content)
    points = given["full_ms"]
    if not isinstance(points, list) or not all(isinstance(one, list) and len(one) == 3 for one in points):
        raise ValueError(f"{where} has a `full_ms` that is no list of [rows, batch, milliseconds]")
    given["full_ms"] = tuple(map(tuple, points))
    texts = ("device", "model", "dtype")
    numbers = {name: value for name, value in given.items() if name not in (*texts, "full_ms")}
    for name, value in (*numbers.items(), *(("full_ms", value) for point in points for value in point)):
        good = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number may be larger than any float.
        if not good or not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{where} has {shown(value)} in `{name}`, expected a number from 0 on")
    whole = [given["num_layers"], given["cut_layers"], given["live"], *(n for p in points for n in p[:2])]
    if not all(isinstance(number, int) for number in whole):
        raise ValueError(f"{where} counts layers, tokens, rows or texts by numbers that are not whole")
    if [1, 1] not in [point[:2] for point in points] or not all(point[2] > 0 for point in points):
        raise ValueError(f"{where} has no time above 0 of a step of one row in `full_ms`")
    if not given["cut_layers"] < given["num_layers"]:
        raise ValueError(
            f"{where} has {shown(given['cut_layers'])} in `cut_layers`, expected fewer than `num_layers`"
        )
    by_batch = [(batch, rows) for rows, batch, _ in points]
    if sorted(set(by_batch)) != sorted(by_batch):
        raise ValueError(f"{where} has two times of one step in `full_ms`")
    given["full_ms"] = tuple(sorted(given["full_ms"], key=lambda point: (point[1], point[0])))
    return StepCosts(**given)
