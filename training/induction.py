"""Weights that copy: an induction circuit laid into the first two layers of a model.

An induction head looks for an earlier occurrence of the present token and predicts what followed it there. It
takes two layers: a head of the first writes into each position which token stands before it, a head of the
second seeks the positions before which the present token stands (Elhage et al. 2021, "A Mathematical Framework
for Transformer Circuits"). Training finds the circuit after a long plateau (Olsson et al. 2022, "In-context
Learning and Induction Heads"), longer than a small computer trains at all. Here it is laid into the weights,
and training does with it what it likes; Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention
Layers", is the same idea in a weaker form.

Rotary embeddings decide how. The first head must see positions and no content: one coordinate of the embedding
is the same for all tokens, its queries and keys are made of that alone, and the fast rotations, shifted by one
position, are in phase for the token before and for no other. The second must see content and no positions: it
uses only the rotations so slow that a text of a few hundred tokens does not turn them.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params

# Size of a coordinate of the embedding, and of the constant one.
_EMBEDDING, _CONSTANT = 0.5, 2.0
# Rotary pairs faster than this many radians a position tell neighbours apart; those slower than the other carry
# content.
_FAST, _SLOW = 0.1, 0.0101
# Softmax inputs: of the token before, and of a match in the mean.
_BEFORE, _MATCH = 60.0, 20.0
# The logit of what is copied.
_COPIED = 6.0
# What all other heads and MLPs write at first: little, or the circuit would not be seen through their noise.
_OTHERS = 0.1


def add_circuit(config: LlamaConfig, params: Params, seed: int) -> Params:
    """Random parameters with the circuit instead of the first head of each of the first two layers.

    Args:
      config: the model, with a head of its own: what is copied is written where the embedding says nothing and
        the head reads, or each token would predict itself.
      params: as `training.start.init_params` draws them; at least two layers.
      seed: of the embedding.

    Raises:
      ValueError: the model is too shallow, too narrow, or has tied embeddings.
    """
    width, head = config.hidden_size, config.head_dim
    pairs = head // 2
    speed = config.rope_theta ** (-np.arange(pairs) / pairs)
    fast, slow = np.flatnonzero(speed >= _FAST), np.flatnonzero(speed < _SLOW)
    content = np.concatenate([slow, pairs + slow])
    count = len(content)
    least = 1 + count + 2 * head
    if config.tie_embeddings or len(params["layers"]) < 2 or len(slow) < 4 or width < least:
        raise ValueError(
            f"an induction circuit wants a head apart from the embedding, 2 layers, heads of at least 16 and a "
            f"width of at least {least}; the model has tie_embeddings {config.tie_embeddings}, "
            f"{len(params['layers'])} layers, heads of {head}, width {width}"
        )
    # Coordinates of the residual stream: a constant, the token before, what is copied; the present token is
    # given by all the others.
    constant, before, copied, present = np.split(np.arange(width), [1, 1 + count, 1 + count + head])
    embed = np.random.default_rng(seed).normal(size=params["embed"].shape).astype(np.float32) * _EMBEDDING
    embed[:, constant] = _CONSTANT
    embed[:, before] = embed[:, copied] = 0.0
    size = math.sqrt(float(np.mean(np.square(embed))))  # what the first norm divides by

    queries, keys, values, outs = np.zeros((4, 2, head, width), np.float32)
    strength = math.sqrt(_BEFORE * math.sqrt(head) / len(fast)) * size / _CONSTANT
    # A key turned by one position more meets the query in phase one position later.
    queries[0, fast, 0] = strength
    keys[0, fast, 0] = strength * np.cos(speed[fast])
    keys[0, pairs + fast, 0] = strength * np.sin(speed[fast])
    values[0, np.arange(count), present[:count]] = size
    outs[0, np.arange(count), before] = 1.0

    strength = math.sqrt(_MATCH * math.sqrt(head) / count) * size / _EMBEDDING
    queries[1, content, present[:count]] = strength
    keys[1, content, before] = strength
    values[1, np.arange(head), present[:head]] = size
    outs[1, np.arange(head), copied] = 1.0
    laid = [
        _with_head(config, _quiet(layer), *weights)
        for layer, *weights in zip(params["layers"], queries, keys, values, outs, strict=False)
    ]
    own = np.array(params["head"])
    own[:, copied] = embed[:, present[:head]] * _COPIED / (head * _EMBEDDING**2) * size
    return {
        **params,
        "embed": jnp.asarray(embed),
        "head": jnp.asarray(own),
        "layers": [*laid, *map(_quiet, params["layers"][2:])],
    }


def _quiet(layer: Params) -> Params:
    attention, mlp = layer["attention"], layer["mlp"]
    return {
        **layer,
        "attention": {**attention, "out": attention["out"] * _OTHERS},
        "mlp": {**mlp, "down": mlp["down"] * _OTHERS},
    }


def _with_head(
    config: LlamaConfig, layer: Params, query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray
) -> Params:
    """A layer whose first query head, key and value are given, [hd, D] each, and what it writes, [hd, D]."""
    attention, head = layer["attention"], config.head_dim
    gain = np.array(attention["norm"])
    qkv = np.array(attention["qkv"]).reshape(config.num_kv_heads, config.group_size + 2, head, -1)
    # Other query heads of the group share the key and value: they see what this one sees.
    qkv[0, 0], qkv[0, -2], qkv[0, -1] = query / gain, key / gain, value / gain
    written = np.array(attention["out"])
    written[:, :head] = out.T
    replaced = {"qkv": jnp.asarray(qkv.reshape(attention["qkv"].shape)), "out": jnp.asarray(written)}
    return {**layer, "attention": {**attention, **replaced}}
