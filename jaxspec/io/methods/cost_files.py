"""Stores the measured costs of steps in the user's cache for the next process.

A file belongs to one device, model shape, dtype and version of JAX, which it names; it is written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax

from jaxspec.costs.rounds import StepCosts
from jaxspec.host.messages import shown
from jaxspec.host.processor import processor
from jaxspec.host.user_cache import kept
from jaxspec.io.methods.method_files import identity
from jaxspec.io.records import record
from jaxspec.model.config import LlamaConfig

FORMAT = "jaxspec.costs/2"
# Config fields that do not affect the costs.
_TEXT_FIELDS = (
    "bos_token_id",
    "eos_token_ids",
    "model_type",
    "max_position_embeddings",
    "exact",
    "max_model_len",
)


def key(device_kind: str, platform: str, config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Returns the key of a cost file: everything that the costs depend on.

    Args:
      device_kind: as in `LanguageModel.device_kind`, which includes the mesh.
      platform: cpu, gpu or tpu.
      config: the model's configuration.
      dtype: the name of the compute dtype, with that of the weights if it differs.

    Returns:
      A dictionary of JSON values. For a CPU it includes the processor's name and the number of usable cores, because
      the device kind does not identify a CPU.
    """
    # The files of earlier versions have these fields whatever their values.
    shape = {"qk_norm": config.qk_norm, "kv_copies": config.kv_copies} | identity(config)
    shape = {name: value for name, value in shape.items() if name not in _TEXT_FIELDS}
    found: dict[str, Any] = {
        "format": FORMAT,
        "device": device_kind,
        "platform": platform,
        "dtype": dtype,
        "jax": jax.__version__,
        "shape": shape,
    }
    if platform == "cpu":
        found["processor"], found["cores"], _ = processor()
    given: dict[str, Any] = json.loads(json.dumps(found))
    return given


def read_step_costs(key: dict[str, Any]) -> StepCosts | None:
    """Returns the costs of a key; None if there are none, or their file is damaged."""
    content = kept("costs", key)
    try:
        return None if content is None else parse(content, "the file")
    except ValueError:
        return None


def parse(content: Any, where: str) -> StepCosts:
    """Returns the costs in a JSON value, the inverse of `dataclasses.asdict`.

    Args:
      content: the JSON value.
      where: its origin, for the message.

    Raises:
      ValueError: the value does not contain valid costs; one line.
    """
    costs = record(StepCosts, content, where)
    times = {name: value for name, value in vars(costs).items() if type(value) in (int, float)}
    for name, value in (*times.items(), *(("full_ms", value) for point in costs.full_ms for value in point)):
        if value < 0:
            raise ValueError(f"{where} has {value:g} in `{name}`, expected a number of at least 0")
    # By batch and rows.
    points = sorted(costs.full_ms, key=lambda point: (point[1], point[0]))
    sizes = [point[:2] for point in points]
    if (1, 1) not in sizes or not all(point[2] > 0 for point in points):
        raise ValueError(f"{where} has no time above 0 of a step of one row in `full_ms`")
    if not costs.cut_layers < costs.num_layers:
        raise ValueError(
            f"{where} has {shown(costs.cut_layers)} in `cut_layers`, expected fewer than `num_layers`"
        )
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"{where} has two times of one step in `full_ms`")
    return dataclasses.replace(costs, full_ms=tuple(points))
