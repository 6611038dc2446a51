"""Uno (arXiv 2609.04010) as pure functions: the target itself drafts a block in one pass, with a LoRA.

A block is the pending token followed by noise tokens, at consecutive positions with causal attention. The adapters
apply to the noise tokens' rows only. So the row of the pending token gives the target's own distribution of the next
token, and the row after it that of the token after next, which does not know the next token, and so on. Parameters,
with r the rank and the shapes of `llama.param_shapes` otherwise:

    layers[l].attention    qkv_a [3, r, D]       qkv_b [KV, (G+2)·hd, r]    out_a [1, r, H·hd]    out_b [D, r]
    layers[l].mlp          gate_up_a [2, r, D]   gate_up_b [2, F, r]        down_a [1, r, F]      down_b [D, r]
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.model import llama, lora
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.lora import PARTS
from jaxspec.model.sharding import with_copies


@dataclasses.dataclass(frozen=True)
class UnoConfig:
    """The configuration of an adapter.

    Attributes:
      target: the model, with one copy of each key/value head.
      rank: r.
      alpha: the adapters' result is scaled by alpha ÷ r.
      noise: the noise tokens are drawn from the first of these numbers up to, and without, the second.
    """

    target: LlamaConfig
    rank: int
    alpha: float
    noise: tuple[int, int]
    kind: ClassVar[str] = "uno"

    @property
    def shapes(self) -> Params:
        """The tree of the parameters, a shape tuple at each leaf."""
        whole = llama.param_shapes(self.target)["layers"][0]
        layer: Params = {}
        for sublayer, matrices in PARTS.items():
            layer[sublayer] = {}
            for name, parts in matrices.items():
                *out, width = whole[sublayer][name]
                layer[sublayer] |= {f"{name}_a": (parts, self.rank, width), f"{name}_b": (*out, self.rank)}
        return {"layers": [layer] * self.target.num_layers}


def usual(target: LlamaConfig) -> UnoConfig:
    """Returns the shape of the published adapter: rank 128 for a model of 8 billion parameters."""
    return UnoConfig(target, 128, 128.0, (1, target.vocab_size))


def adapted(config: LlamaConfig, params: Params, head: UnoConfig, own: Params, rows: jax.Array) -> Params:
    """Returns the target's parameters with the adapters on the rows bool[T] of a pass.

    Args:
      config, params: the target, perhaps with several copies of each key/value head, and perhaps quantised.
      head, own: the adapters.
      rows: as in `lora.Adapted`.
    """
    return lora.adapted(config, params, with_copies(config, own), rows, head.alpha / head.rank)


def noise(head: UnoConfig, pending: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns noise tokens, int32[...], a fixed function of the pending tokens and the positions, int32[...] each.

    A draft thus depends on the text alone.
    """
    first, end = head.noise
    # The mixing steps of MurmurHash3.
    mixed = positions.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    mixed += pending.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    drawn: jax.Array = ((mixed ^ (mixed >> 16)) % jnp.uint32(end - first)).astype(jnp.int32)
    return first + drawn


def block(head: UnoConfig, pending: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Returns a block of `count` tokens, int32[B, count]: the pending token int32[B] at `start`, then noise."""
    positions = start[:, None] + jnp.arange(1, count)
    drawn = noise(head, jnp.broadcast_to(pending[:, None], positions.shape), positions)
    return jnp.concatenate([pending[:, None], drawn], axis=1)


def run_head(
    config: LlamaConfig,
    params: Params,
    head: UnoConfig,
    own: Params,
    tokens: jax.Array,
    start: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Runs the target over a block, with the adapters on every row except the first.

    Args:
      config, params: the target.
      head, own: the adapters.
      tokens: int32[B, L], see `block`.
      start: int32[B], the position of the pending token.
      cache: the target's; start + L ≤ its capacity.

    Returns:
      The hidden states [B, L, D] before the final norm, and the cache. The slots of the noise tokens are not valid.
    """
    rows = jnp.arange(tokens.shape[1]) > 0
    mixed = adapted(config, params, head, own, rows)
    return llama.run_layers(config, mixed, llama.embed(config, params, tokens), start, cache)


def logits(own: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the logits of the token after each row: [..., D] → float32[..., V], or [..., N] of a `vocabulary`."""
    return llama.logits_of_draft(target, target_params, own, target.rms_norm_eps, hidden)
