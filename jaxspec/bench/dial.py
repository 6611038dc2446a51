"""Real sizes without real weights: random models whose early layers predict the whole at a chosen rate.

Speed at a shape does not need trained weights, but it needs drafts that are sometimes right. Scaling the
residual branches of the later layers by s makes an early exit agree with the full model at a rate that s
sets, while greedy text does not loop.
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

# Gains over N(0, 1 ÷ fan-in) with which greedy text neither loops nor is noise.
_GAINS = {"qkv": 1.5, "out": 0.35, "down": 0.7, "head": 4.0}
# What a sublayer writes to the residual stream goes through.
_WRITES = ("out", "down")


def dial_model(
    config: LlamaConfig, scale: float, exit_layer: int, key: jax.Array, dtype: DTypeLike = jnp.float32
) -> tuple[LlamaConfig, Params]:
    """Random parameters whose first `exit_layer` layers agree with all of them at a rate set by `scale`.

    Args:
      config: the shape; its head becomes untied, for a tied one repeats a token.
      scale: s, of the residual branches from `exit_layer` on: .5 / .2 / .1 / .03 agree about .24 / .57 /
        .70 / .90 of the time at an exit after a quarter of 16 × 384; the map depends on the shape.
      exit_layer: how many layers stay at full strength.
      key: of the random numbers.
      dtype: of the parameters.

    Returns:
      The config and its parameters.
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

    # In place: two sets of weights might not fit where one does.
    gained = jax.jit(lambda params: jax.tree.map_with_path(gain, params), donate_argnums=0)
    params: Params = gained(llama.init_params(config, key, dtype))
    return config, params


def turned(params: Params, factors: Sequence[float]) -> Params:
    """Dial parameters whose residual branches are turned up or down, in place: what changes is donated.

    Args:
      params: of `dial_model`; those of a layer whose factor is 1 stay as they are, and valid.
      factors: by which the branches of each layer are multiplied.

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
    """A dial model turned down altogether: the next token follows from the last one alone.

    So a text that comes back to a token repeats what followed it: what n-gram drafts live on.

    Args:
      config, key, dtype: as for `dial_model`.
    """
    return dial_model(config, 1e-3, 0, key, dtype)
