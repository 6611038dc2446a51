"""Grows the width of a model before training: repeats every unit, and keeps the function of the narrow model.

This is Net2WiderNet of Chen, Goodfellow and Shlens 2016, "Net2Net: Accelerating Learning via Knowledge Transfer"
(section 2.2), for a whole transformer. The residual stream h becomes [h, h, …]; the units of each MLP, the query heads
and the key/value heads are repeated too. The outputs of a product are repeated. Its input weights are divided among the
copies, in shares that add up to 1. The root mean square of [h, h] is that of h, so norms do not change. A tied
embedding would need both at once, so the final norm is divided instead.

The shares are random and differ for every single weight. The paper replicates units at random, and adds noise where
nothing else breaks the symmetry. With equal shares, the copies of a unit would get the same gradient and stay equal
for ever. With one share per unit, their gradients would differ only in length, a difference that Adam and Muon
normalise away.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.sharding import fetched

# A weight's share is drawn from 1 ± SPREAD and divided by the sum over its copies: 0.25 to 0.75 with two copies.
SPREAD = 0.5
# The output axis of the leaves that write repeated units. Key/value heads are repeated as a whole: each copy has the
# query heads of its group.
_WRITES = dict.fromkeys(("norm", "post_norm", "wide_q_norm", "wide_k_norm"), 0)
_WRITES |= dict.fromkeys(("qkv", "qkv_bias", "out", "out_bias", "down", "down_bias"), 0)
_WRITES |= dict.fromkeys(("embed", "gate_up", "gate_up_bias"), 1)
# Products that read repeated units, along their last axis.
_READS = ("qkv", "out", "gate_up", "down", "head")


def widen(config: LlamaConfig, params: Params, factor: int, seed: int) -> tuple[LlamaConfig, Params]:
    """Makes a model with the same function and `factor` times the hidden size, MLP width, heads and key/value heads.

    Args:
      config: the narrow model.
      params: parameters of the narrow model, float32.
      factor: number of copies of each unit, at least 2.
      seed: seed of the shares; the same seed gives the same weights on every machine.

    Returns:
      config and parameters of the wide model, NumPy arrays. After every layer, its logits equal those of the narrow
      one up to rounding.

    Raises:
      ValueError: `factor` is below 2.

    Examples:
      >>> from jaxspec.model import llama
      >>> narrow = LlamaConfig(11, 8, 12, 1, num_heads=2, num_kv_heads=1, head_dim=4)
      >>> wide, params = widen(narrow, llama.init_params(narrow, jax.random.key(0)), 3, seed=0)
      >>> wide.hidden_size, wide.num_heads, wide.num_kv_heads, params["layers"][0]["mlp"]["down"].shape
      (24, 6, 3, (24, 36))
    """
    if factor < 2:
        raise ValueError(f"factor is {factor}; give a whole number of at least 2")
    rng = np.random.default_rng(seed)

    def wider(path: Any, leaf: jax.Array) -> np.ndarray:
        name, weight = path[-1].key, fetched(leaf)
        if name in _WRITES:
            weight = np.concatenate([weight] * factor, axis=_WRITES[name])
        if name in _READS:
            shares = rng.uniform(1 - SPREAD, 1 + SPREAD, (factor, *weight.shape))
            parts = (shares / shares.sum(axis=0) * weight).astype(weight.dtype)
            weight = np.concatenate(list(parts), axis=-1)
        return weight

    wide: Params = jax.tree_util.tree_map_with_path(wider, params)
    if config.tie_embeddings:
        offset = config.norm_offset
        wide["norm"] = (wide["norm"] + offset) / factor - offset
    larger = dataclasses.replace(
        config,
        hidden_size=factor * config.hidden_size,
        intermediate_size=factor * config.intermediate_size,
        num_heads=factor * config.num_heads,
        num_kv_heads=factor * config.num_kv_heads,
    )
    return larger, wide
