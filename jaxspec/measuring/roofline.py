"""Roofline model of decoding steps: predicts their cost from an accelerator's published figures.

A step takes the time to read each weight once at the published bandwidth or to multiply by it at the published peak,
whichever is longer, plus one launch per operation. Several devices divide the weights, and exchange results in
each layer. Real devices reach .6 to .9 of this bound; ratios of predicted steps
are more accurate than the steps themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxspec.costs.rounds import DraftCost, StepCosts, kinds, speedup_table
from jaxspec.host.messages import shown
from jaxspec.measuring.accelerators import (
    ACCELERATORS,
    LAYER_OPERATIONS,
    OTHER_OPERATIONS,
    Accelerator,
    parse_topology,
)
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.bench.suite_options import check_count
from jaxspec.model import cache as kv
from jaxspec.model.config import KVCacheDtype, LlamaConfig
from jaxspec.programs.memory import needed_bytes

_ROWS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 33, 65)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LIVE = 512
# Bytes of a number of the cache, and of a weight that is not quantised.
_BYTES = 2
# Exchanges between devices, of a layer and of the rest of a step, and their assumed microseconds.
EXCHANGES, EXCHANGE_US = (2, 4), 5.0
# The share of the memory that weights and the cache of a text of `CAPACITY` tokens may take.
USABLE, CAPACITY = 0.9, 4096
# The shape of the usual draft model for each target shape.
_DRAFTS = {"1b": "134m", "7b": "1b", "8b": "1.2b", "13b": "1b", "70b": "7b"}


def weights(config: LlamaConfig) -> tuple[int, int]:
    """Returns the number of weights that a step reads in one layer's matrices and in the output head.

    Examples:
      >>> layer, head = weights(SHAPES["7b"])
      >>> round((32 * layer + head) / 1e9, 2)  # of 6.74 billion, the rest the embedding
      6.61
    """
    attention = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    return (
        attention + 3 * config.hidden_size * config.intermediate_size,
        config.hidden_size * config.vocab_size,
    )


def roofline(
    accelerator: Accelerator,
    config: LlamaConfig,
    name: str,
    launch_us: float | None = None,
    chips: int = 1,
    bits: int | None = None,
) -> StepCosts:
    """Returns the roofline costs of a model's steps in 16 bits (`Accelerator.dtype`), or with quantised weights.

    Args:
      accelerator: the device.
      config: the model's shape.
      name: name of the shape.
      launch_us: microseconds to start one operation; None for the accelerator's figure.
      chips: the number of devices over which the weights are divided.
      bits: the bits of quantised weights; None for 16.

    Examples:
      >>> costs = roofline(ACCELERATORS["h100"], SHAPES["8b"], "8b", launch_us=0.0)
      >>> round(costs.step_ms(), 2)  # 15 GB at 3.35 TB/s, and a cache of 512 tokens
      4.5
    """
    layer, head = weights(config)
    launch_ms = 1e-3 * (accelerator.launch_us if launch_us is None else launch_us)
    live_ms = 1e3 * kv.size_bytes(config, 1, 1, accelerator.dtype) / accelerator.bandwidth / chips
    size, exchange_ms = _BYTES if bits is None else bits / 8, 1e-3 * EXCHANGE_US * (chips > 1)

    def product_ms(numbers: int, rows: int) -> float:
        return 1e3 * numbers / chips * max(size / accelerator.bandwidth, 2 * rows / accelerator.flops)

    def part_ms(numbers: int, rows: int, operations: int, part: int, read_ms: float = 0.0) -> float:
        return product_ms(numbers, rows) + read_ms + EXCHANGES[part] * exchange_ms + operations * launch_ms

    def step_ms(rows: int, batch: int, layers: int) -> float:
        text_ms = batch * LIVE * live_ms / config.num_layers
        of_layer = part_ms(layer, rows * batch, LAYER_OPERATIONS, 0, text_ms)
        return layers * of_layer + part_ms(head, rows * batch, OTHER_OPERATIONS, 1)

    cut = max(0, config.num_layers // 4)
    return StepCosts(
        device=accelerator.name,
        model=name,
        dtype=accelerator.dtype,
        num_layers=config.num_layers,
        live=LIVE,
        full_ms=tuple(
            (rows, batch, step_ms(rows, batch, config.num_layers)) for batch in _BATCHES for rows in _ROWS
        ),
        cut_layers=cut,
        cut_ms=step_ms(1, 1, cut),
        live_token_ms=live_ms,
        lookup_ms=2 * LAYER_OPERATIONS * launch_ms,
        absorb_ms=2e3 * config.num_layers * layer / accelerator.flops / chips,
    )


def usual(
    accelerator: Accelerator,
    shape: str,
    launch_us: float | None = None,
    chips: int = 1,
    bits: int | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> tuple[StepCosts, dict[str, DraftCost]]:
    """Returns the step costs of a named shape and the draft costs by name, including its usual draft model if any.

    The cost of a step of the draft model is expressed in layers of the target. It includes the launches of the draft
    model's own layers, whose share of the launches exceeds their share of the weights.

    Args:
      accelerator, launch_us, chips, bits: see `roofline`.
      shape: a name in `SHAPES`.
      kv_cache_dtype: see `LlamaConfig`.
    """

    def steps_of(name: str) -> StepCosts:
        config = dataclasses.replace(SHAPES[name], kv_cache_dtype=kv_cache_dtype)
        return roofline(accelerator, config, name, launch_us, chips, bits)

    costs = steps_of(shape)
    drafts = kinds(costs.num_layers)
    if shape in _DRAFTS:
        draft = steps_of(_DRAFTS[shape])
        layer_ms = costs.step_ms(layers=1) - costs.step_ms(layers=0)
        absorbed = costs.num_layers * draft.absorb_ms / costs.absorb_ms
        drafts["draft model"] = DraftCost(layers=draft.step_ms() / layer_ms, heads=0, absorb_layers=absorbed)
    return costs, drafts


def needed_gb(config: LlamaConfig, chips: int = 1, bits: int | None = None) -> float:
    """Returns the gigabytes of each device for the weights and the cache of a text of `CAPACITY` tokens.

    Examples:
      >>> [round(needed_gb(SHAPES["8b"], bits=bits), 1) for bits in (None, 8)]
      [16.6, 9.1]
    """
    return sum(needed_bytes(config, jnp.bfloat16, 1, CAPACITY, bits)) / chips / 1e9


def remedies(
    accelerator: Accelerator, config: LlamaConfig, chips: int = 1, bits: int | None = None
) -> list[str]:
    """Returns the options with which a model fits so many devices or more; [""] if it fits as it is.

    Examples:
      >>> remedies(ACCELERATORS["t4"], SHAPES["8b"])
      ['--weights int8', '--mesh model=2']
      >>> remedies(ACCELERATORS["h100"], SHAPES["8b"])
      ['']
    """
    found: dict[int | None, str] = {}
    for more in (chips * 2**power for power in range(9)):
        for kind in dict.fromkeys((bits, 8)):
            if kind not in found and needed_gb(config, more, kind) <= USABLE * accelerator.memory_bytes / 1e9:
                options = ["--weights int8"] * (kind != bits) + [f"--mesh model={more}"] * (more > chips)
                found[kind] = " ".join(options)
    return [""] if found.get(bits) == "" else sorted(found.values(), key=len)


def report(
    device: str,
    shape: str,
    batch: int = 1,
    launch_us: float | None = None,
    bits: int | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> dict[str, Any]:
    """Returns predicted speed-ups of several drafts on a device.

    Args:
      device: a name in `ACCELERATORS`, or a topology such as v5e:2x4, over which the model is divided.
      shape: a name in `SHAPES`.
      batch: number of texts decoded together.
      launch_us: see `roofline`.
      bits: see `roofline`.
      kv_cache_dtype: see `LlamaConfig`.

    Returns:
      `prediction` (True: nothing is measured), `device`,
      `shape`, `dtype`, `kv_cache_dtype`, `batch`, `live`, the device's `bandwidth`, `flops`, `launch_us` and `source`,
      `needed_gb` and `remedies` (see the functions), `plain_ms` (a step of plain decoding), `drafts` (the layers and
      heads that each draft runs), `speedups` (see `speedup_table`; each with its draft length).

    Raises:
      ValueError: the device or the shape is unknown, or a number is out of range; one line.
    """
    if device.partition(":")[0] not in ACCELERATORS:
        raise ValueError(f"unknown device_model {shown(device)}; give one of {', '.join(ACCELERATORS)}")
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shown(shape)}; give one of {', '.join(SHAPES)}")
    check_count("batch", batch)
    if launch_us is not None and not 0 <= launch_us < float("inf"):
        raise ValueError(f"launch_us is {launch_us}; give a number from 0 on")
    accelerator, chips = ACCELERATORS[device.partition(":")[0]], 1
    if ":" in device:
        chips = parse_topology(device).num_devices
    costs, drafts = usual(accelerator, shape, launch_us, chips, bits, kv_cache_dtype)
    table = speedup_table(costs, drafts, batch=batch)
    return {
        "prediction": True,
        "device": device,
        "shape": shape,
        "dtype": costs.dtype if bits is None else f"{costs.dtype}, int{bits} weights",
        "kv_cache_dtype": kv_cache_dtype,
        "batch": batch,
        "live": costs.live,
        "bandwidth": accelerator.bandwidth,
        "flops": accelerator.flops,
        "launch_us": accelerator.launch_us if launch_us is None else launch_us,
        "source": accelerator.source,
        "needed_gb": needed_gb(SHAPES[shape], chips, bits),
        "remedies": remedies(accelerator, SHAPES[shape], chips, bits),
        "plain_ms": DraftCost().round_ms(costs, 0, batch=batch),
        "drafts": {name: dataclasses.asdict(draft) for name, draft in drafts.items()},
        "speedups": {
            name: {rate: dataclasses.asdict(one) for rate, one in by_rate.items()}
            for name, by_rate in table.items()
        },
    }
