"""Models of common shapes, and the time of a device to read their weights once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.loading import int8
from jaxspec.loading.loading import fit_to_mesh, resolve_mesh, resolve_placement, resolve_weights
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.model import llama
from jaxspec.model.config import KVCacheDtype, LlamaConfig
from jaxspec.model.llama import floor_bytes
from jaxspec.model.quantisation import quantise
from jaxspec.model.sharding import param_shardings
from jaxspec.programs.memory import Texts, check_fits
from jaxspec.sampling import seed_key

# The cache slots for which weights and cache of a shape must fit.
LARGE = 1024

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


def floor_ms(lm: LanguageModel) -> float:
    """Returns the milliseconds to read all weights of a step once, the fastest of several turns."""
    run = stream(lm)
    run()
    return min(interleaved({"floor": run}, 9, mesh=lm.mesh)["floor"])


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
