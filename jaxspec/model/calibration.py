"""Chooses, from a short text, the input channels of each matrix that products with int8 activations compute apart."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model import llama, rope
from jaxspec.model.config import LayerType, LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantisation import NUM_OUTLIERS, with_outliers


def calibrated(config: LlamaConfig, params: Params, tokens: jax.Array, count: int = NUM_OUTLIERS) -> Params:
    """Returns int8 parameters for products with int8 activations.

    Args:
      config: the model.
      params: its parameters, with matrices in int8 by `quantise`.
      tokens: int32[T], a text.
      count: number of input channels of each matrix that are computed apart, see `quantisation.Outliers`.
    """

    def merged(node: Any, largest: Any) -> Any:
        if isinstance(largest, dict):
            return {**node, **{name: merged(node[name], inner) for name, inner in largest.items()}}
        if isinstance(largest, list):
            return [merged(*pair) for pair in zip(node, largest, strict=True)]
        return with_outliers(node, largest, count)

    made: Params = merged(params, largest_inputs(config, params, tokens[None]))
    return made


def largest_inputs(config: LlamaConfig, params: Params, tokens: jax.Array) -> dict[str, Any]:
    """Returns the largest magnitude of each input channel of each matrix, float32[I], in texts int32[B, T].

    The result has the tree of the parameters, without the leaves that are not matrices of products.
    """
    hidden = llama.embed(config, params, tokens)
    layers = []
    for number, p in enumerate(params["layers"]):  # all layers of a type share one program
        hidden, largest = _layer(config, config.layer_type(number), p, hidden)
        layers.append(largest)
    head = "embed" if config.tie_embeddings else "head"
    return {"layers": layers, head: _largest(llama.final_norm(config, params, hidden))}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(
    config: LlamaConfig, of: LayerType, p: Params, hidden: jax.Array
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the residual stream [B, T, D] after a layer, and the largest inputs of its matrices."""
    batch, length, _ = hidden.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    turns = rope.tables(config, of, positions, jnp.full(batch, length))
    attend = llama.packed(positions, jnp.zeros_like(positions), of.window, config.scores)
    mixed: list[jax.Array] = []

    def recorded(*arguments: Any) -> tuple[jax.Array, None]:
        out, _ = attend(*arguments)
        mixed.append(out.reshape(batch, length, -1))
        return out, None

    seen = llama.sublayer_input(config, p["attention"], hidden)
    hidden, _ = llama.attention_sublayer(config, p["attention"], hidden, turns, recorded)
    normed = llama.sublayer_input(config, p["mlp"], hidden)
    inputs = {
        "attention": {"qkv": seen, "out": mixed[0]},
        "mlp": {"gate_up": normed, "down": llama.gated(config, p["mlp"], normed)},
    }
    return llama.mlp(config, p["mlp"], hidden), jax.tree.map(_largest, inputs)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(0, 1))
