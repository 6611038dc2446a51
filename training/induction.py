"""Initial weights with an induction circuit in the first two layers of a model.

An induction circuit finds an earlier occurrence of the present token, and predicts the token after it. A head of the
first layer writes the previous token into each position. A head of the second layer attends to the positions whose
previous token is the present one (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). Training
finds the circuit after a long plateau (Olsson et al. 2022, "In-context Learning and Induction Heads"), which is longer
than training on a small computer. Here the initial weights contain it, and training may change it. Trockman and Kolter
2023, "Mimetic Initialization of Self-Attention Layers", is the same idea in a weaker form.

Rotary embeddings determine the construction. The first head must see only positions: its queries and keys depend on one
coordinate of the embedding, the same for all tokens. Its fast rotations, shifted by one position, are in phase only for
the previous token. The second head must see only content: it uses rotations so slow that they barely turn within a few
hundred tokens.
"""

from __future__ import annotations

import math

import numpy as np

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.sharding import fetched

# Standard deviation of an embedding coordinate, and the value of the constant coordinate.
_EMBEDDING, _CONSTANT = 0.5, 2.0
# Rotary pairs of at least _FAST radians per position separate neighbours; those below _SLOW carry content.
_FAST, _SLOW = 0.1, 0.0101
# Softmax inputs: for the previous token, and the mean for a match.
_BEFORE, _MATCH = 60.0, 20.0
# Logit of the copied token.
_COPIED = 6.0
# Scale of the initial output of all other heads and MLPs: small, because their noise would hide the circuit.
_OTHERS = 0.1


def add_circuit(config: LlamaConfig, params: Params, seed: int) -> Params:
    """Returns random parameters in which the first head of each of the first two layers forms the circuit.

    The changed leaves are NumPy arrays.

    Args:
      config: the model, with an untied head: the copied token is written to coordinates that are zero in the
        embedding. With tied weights, each token would predict itself.
      params: random parameters, as from `training.start.init_params`; at least two layers.
      seed: seed of the embedding.

    Raises:
      ValueError: the model is too shallow or too narrow, or has tied embeddings.
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
            f"an induction circuit needs a head apart from the embedding, 2 layers, heads of at least 16 and a "
            f"width of at least {least}; the model has tie_embeddings {config.tie_embeddings}, "
            f"{len(params['layers'])} layers, heads of {head}, width {width}"
        )
    # Coordinates of the residual stream: a constant, the previous token, the copied token, the present token.
    constant, before, copied, present = np.split(np.arange(width), [1, 1 + count, 1 + count + head])
    embed = np.random.default_rng(seed).normal(size=params["embed"].shape).astype(np.float32) * _EMBEDDING
    embed[:, constant] = _CONSTANT
    embed[:, before] = embed[:, copied] = 0.0
    size = math.sqrt(float(np.mean(np.square(embed))))  # the divisor of the first norm

    queries, keys, values, outs = np.zeros((4, 2, head, width), np.float32)
    strength = math.sqrt(_BEFORE * math.sqrt(head) / len(fast)) * size / _CONSTANT
    # The key is turned back by one position, so that it is in phase with the query of the next position.
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
    own = np.array(fetched(params["head"]))
    own[:, copied] = embed[:, present[:head]] * _COPIED / (head * _EMBEDDING**2) * size
    return {
        **params,
        "embed": embed,
        "head": own,
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
    """Returns a layer with a given first query head, key, value and output projection, [hd, D] each."""
    attention, head = layer["attention"], config.head_dim
    gain = fetched(attention["norm"])
    qkv = np.array(fetched(attention["qkv"])).reshape(config.num_kv_heads, config.group_size + 2, head, -1)
    # The other query heads of the group share the key and value, so they attend to the same content.
    qkv[0, 0], qkv[0, -2], qkv[0, -1] = query / gain, key / gain, value / gain
    written = np.array(fetched(attention["out"]))
    written[:, :head] = out.T
    replaced = {"qkv": qkv.reshape(attention["qkv"].shape), "out": written}
    return {**layer, "attention": {**attention, **replaced}}
