"""Random models with synthetic acceptance: their early layers predict the whole model at a chosen rate.

Speed at a shape does not depend on trained weights, but on the share of accepted drafts. Scaling the residual branches
of the later layers by s makes an early exit agree with the full model at a rate that depends on s, while greedy text
does not loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params

# Gains over N(0, 1 ÷ fan-in), chosen so that greedy text neither loops nor is noise.
_GAINS = {"qkv": 1.5, "out": 0.35, "down": 0.7, "head": 4.0}
# The output projections of the sublayers.
_WRITES = ("out", "down")


def dial_model(
    config: LlamaConfig, scale: float, exit_layer: int, key: jax.Array, dtype: DTypeLike = jnp.float32
) -> tuple[LlamaConfig, Params]:
    """Makes random parameters whose first `exit_layer` layers agree with all layers at a rate set by `scale`.

    Args:
      config: the shape; its head becomes untied, because a tied one repeats a token.
      scale: s, the scale of the residual branches from `exit_layer` on: .5 / .2 / .1 / .03 agree about .24 / .57 /
        .70 / .90 of the time at an exit after a quarter of 16 × 384; the map depends on the shape.
      exit_layer: number of layers at full strength.
      key: random key.
      dtype: dtype of the parameters.

    Returns:
      the config and its parameters.
    """
    config = dataclasses.replace(config, tie_embeddings=False)

    def gain(path: Any, leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "embed":
            scaled: jax.Array = leaf * config.hidden_size**0.5
            return scaled
        factor = _GAINS.get(name, 1.0)
        later = path[0].key == "layers" and path[1].idx >= exit_layer
        return leaf * (factor * scale if later and name in _WRITES else factor)

    # In place, because two sets of weights might not fit the device.
    gained = jax.jit(lambda params: jax.tree.map_with_path(gain, params), donate_argnums=0)
    params: Params = gained(llama.init_params(config, key, dtype))
    return config, params


def turned(params: Params, factors: Sequence[float]) -> Params:
    """Scales the residual branches of a `dial_model` in place: changed parameters are donated.

    Args:
      params: parameters from `dial_model`; those of a layer with factor 1 stay unchanged and valid.
      factors: the factor for the branches of each layer.

    Examples:
      >>> from jaxspec.testing import TARGET
      >>> config, params = dial_model(TARGET, 0.5, 1, jax.random.key(0))
      >>> before = float(params["layers"][1]["mlp"]["down"][0, 0])
      >>> params = turned(params, (1.0, 2.0))
      >>> float(params["layers"][1]["mlp"]["down"][0, 0]) == 2 * before
      True
    """
    layers = list(params["layers"])
    for index, (layer, factor) in enumerate(zip(layers, factors, strict=True)):
        if factor != 1.0:
            by = jnp.float32(factor)
            layers[index] = {
                part: {name: _times(leaf, by) if name in _WRITES else leaf for name, leaf in leaves.items()}
                for part, leaves in layer.items()
            }
    return {**params, "layers": layers}


@functools.partial(jax.jit, donate_argnums=0)
def _times(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    return (leaf * factor).astype(leaf.dtype)


def walk_model(
    config: LlamaConfig, key: jax.Array, dtype: DTypeLike = jnp.float32
) -> tuple[LlamaConfig, Params]:
    """Makes a `dial_model` at scale 0: the next token depends only on the last one.

    So a text that returns to a token repeats its earlier continuation, as n-gram drafts require.

    Args:
      config, key, dtype: see `dial_model`.
    """
    return dial_model(config, 1e-3, 0, key, dtype)
