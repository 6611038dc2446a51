"""Profiles a model shape on a device: the memory-bandwidth floor, and the step time by rows."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.loading import int8
from jaxspec.loading.loading import fit_to_mesh, resolve_mesh, resolve_placement, resolve_weights
from jaxspec.measuring.bench.steps import (
    CAPACITY,
    PREFILL,
    ROUNDS,
    Steps,
    SubmodelSteps,
    WrongDrafts,
    WrongTrees,
)
from jaxspec.measuring.bench.timing import interleaved, median_ratio
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import KVCacheDtype, LlamaConfig
from jaxspec.model.llama import floor_bytes
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import quantise
from jaxspec.model.sharding import param_shardings
from jaxspec.model.tree import Shape
from jaxspec.programs.memory import Texts, check_fits
from jaxspec.protocol import Weights
from jaxspec.sampling import seed_key

ROWS = (1, 2, 5, 9)
# A tree with as many rows as the longest chain above: two tokens at each of four depths.
TREE = WrongTrees(4, Shape((-1, -1, 0, 0, 2, 2, 4, 4)))
# The larger of the two compared cache capacities.
LARGE = 1024
# (live tokens, cache slots) of the two steps whose difference is the cost of live tokens.
SHORT, LONG = (100, 512), (1000, 1024)

SHAPES: dict[str, LlamaConfig] = {
    "31m": LlamaConfig(8192, 384, 1024, 16, 6, 6, 64),
    "134m": LlamaConfig(32000, 768, 2048, 12, 12, 12, 64),
    "1b": LlamaConfig(32000, 2048, 5632, 22, 32, 4, 64),
    "1.2b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, 8192, tie_embeddings=True),
    "7b": LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192),
    "13b": LlamaConfig(32000, 5120, 13824, 40, 40, 40, 128, 4096),
    "70b": LlamaConfig(32000, 8192, 28672, 80, 64, 8, 128, 4096),
    "405b": LlamaConfig(128256, 16384, 53248, 126, 128, 8, 128, 8192),
}


def stream(lm: LanguageModel) -> Callable[[], Any]:
    """A function that reads as many bytes as `floor_bytes` once, and returns when the device is done.

    It reads the weights themselves. On a CPU the sum of int8 numbers takes longer than reading them, so one float32
    array of the same size replaces quantised weights.
    """
    read = lm.params if lm.config.tie_embeddings else {k: v for k, v in lm.params.items() if k != "embed"}
    if lm.platform == "cpu" and lm.weights is not None:
        read = {"bytes": jnp.ones(floor_bytes(lm.config, lm.params) // 4)}
    total = jax.jit(lambda tree: [jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(tree)])
    return lambda: jax.block_until_ready(total(read))


@shows_progress
def profile(
    model: str | None = None,
    shape: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    mesh: str | None = None,
    *,
    weights: str | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    repeats: int = 25,
    on_progress: OnProgress = lambda step: None,
) -> dict[str, Any]:
    """Times a model, or random weights of a named shape, on a device.

    Measurements alternate in `repeats` turns, so that all have the same noise. Figures are medians; the floor is the
    fastest turn. Steps are rounds of the decoding loop, at a live length of about 40 tokens.

    Args:
      model: directory or hub id; None for the embedded model, unless a shape is named.
      shape: a name in `SHAPES`.
      dtype, device, mesh, weights, kv_cache_dtype: as in `load`.
      repeats: turns.
      on_progress: called with a description of the current step.

    Returns:
      `model`, `device`, `dtype`, `weights` (the quantisation, None without), `floor_bytes`, `floor_ms` (time to read
      every weight once, the fastest turn), `step_ms` by number of rows, `floor_fraction` (floor ÷ the fastest step of
      one row; above 1 through noise or weights in the processor's cache), `capacity_ratio` (step with a KV cache 8
      times larger at the same live length ÷ step without), `tree_ratio` and `traced_tree_ratio` (step of a tree,
      static or traced, ÷ step of a chain with as many rows), `live_token_us` (additional time of a step per live
      token, from 100 to 1,000) and `live_token_floor_us` (its bytes at the bandwidth of the floor),
      `prefill_tokens_per_second`, `compile_ms` (of the plain loop: prefill and rounds).

    Raises:
      ValueError, FileNotFoundError: an unknown shape, both a model and a shape, or an error of `load`.
    """
    on_progress("loading the model")
    lm = language_model(model, shape, dtype, device, mesh, weights, kv_cache_dtype)
    params = Weights(lm.params)

    on_progress("compiling the plain loop")
    began = time.perf_counter()
    plain = Steps(lm, params, Autoregressive(), CAPACITY)
    plain()
    compile_ms = 1e3 * (time.perf_counter() - began)
    by_rows = {1: plain}
    for number, rows in enumerate(ROWS[1:], 2):
        on_progress(f"compiling the loop of {rows} rows: row counts {number} of {len(ROWS)}")
        by_rows[rows] = Steps(lm, params, WrongDrafts(rows - 1), CAPACITY)
        by_rows[rows]()
    on_progress("compiling the other measurements")
    timed: dict[str, Callable[[], Any]] = {str(rows): steps for rows, steps in by_rows.items()}
    timed["floor"] = stream(lm)
    for name, traced in {"tree": False, "traced tree": True}.items():
        timed[name] = Steps(lm, params, dataclasses.replace(TREE, traced=traced), CAPACITY)
    timed["large"] = Steps(lm, params, Autoregressive(), LARGE)
    every = LayerPlan.skipping(lm.config.num_layers)
    for name, (live, capacity) in {"short": SHORT, "long": LONG}.items():
        timed[name] = SubmodelSteps(lm, every, live=live, capacity=capacity)
    timed["prefill"] = lambda: jax.block_until_ready(plain.prefill())
    for run in timed.values():
        run()

    taken = interleaved(timed, repeats, lambda turn: on_progress(f"timing, {turn}"), lm.mesh)
    floors, ones, larges, chains = (taken[name] for name in ("floor", "1", "large", str(ROWS[-1])))
    longer_ms = statistics.median(b - a for a, b in zip(taken["short"], taken["long"], strict=True)) / ROUNDS
    token_bytes = kv.size_bytes(lm.config, 1, 1, lm.params["embed"].dtype)
    return {
        "model": lm.name,
        "device": lm.device_kind,
        "dtype": lm.precision,
        "weights": lm.weights,
        "floor_bytes": floor_bytes(lm.config, lm.params),
        "floor_ms": min(floors),
        "step_ms": {str(rows): statistics.median(taken[str(rows)]) / ROUNDS for rows in ROWS},
        "floor_fraction": ROUNDS * min(floors) / min(ones),
        "capacity_ratio": median_ratio(larges, ones),
        "tree_ratio": median_ratio(taken["tree"], chains),
        "traced_tree_ratio": median_ratio(taken["traced tree"], chains),
        "live_token_us": 1e3 * longer_ms / (LONG[0] - SHORT[0]),
        "live_token_floor_us": 1e3 * min(floors) * token_bytes / floor_bytes(lm.config, lm.params),
        "prefill_tokens_per_second": 1e3 * PREFILL / statistics.median(taken["prefill"]),
        "compile_ms": compile_ms,
    }


def language_model(
    model: str | None,
    shape: str | None,
    dtype: str | None,
    device: str | None,
    mesh: str | None,
    weights: str | None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> LanguageModel:
    if shape is None:
        where: dict[str, Any] = {"dtype": dtype, "device": device, "mesh": mesh}
        return load(model, weights=weights, kv_cache_dtype=kv_cache_dtype, **where)
    if model is not None:
        raise ValueError(f"got both model={model!r} and shape={shape!r}; give one of them")
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; give one of {', '.join(SHAPES)}")
    over = resolve_mesh(mesh, device)
    place, kind = resolve_placement(dtype, device, over)
    config = dataclasses.replace(SHAPES[shape], kv_cache_dtype=kv_cache_dtype)
    config = config if over is None else fit_to_mesh(over, config, shape)
    init = functools.partial(llama.init_params, config, dtype=kind)
    bits = resolve_weights(weights)
    with jax.default_device(place):
        if over is None:
            check_fits(Texts(config, kind, 1, place, bits), LARGE)
            params = init(seed_key(0))
        else:
            params = jax.jit(init, out_shardings=param_shardings(over, config))(seed_key(0))
        if bits is not None:
            params = quantise(config, params, bits)
            if over is None:
                int8.warn_if_slower(place)
                params = int8.for_device(config, params, place)
    return LanguageModel(config, params, name=shape, device=place, mesh=over)
