"""The head of DFlash (Chen et al. 2026, arXiv 2602.06036) as pure functions: a few layers draft a block in one pass.

A block is the pending token and then mask tokens, embedded by the target. Its layers are those of Qwen3; each row of a
block sees all of it, and the text before it. Of the text the head knows what the target computed: the taps of a token,
fused to one vector, are its keys and values in every layer, at the token's own position. The row at a position says the
token of that position; the target's head makes its logits. Parameters, of a layer what `llama.param_shapes` says:

    fc [D, n·D]   hidden_norm [D]   layers   norm [D]

with n taps. In place of the target's head there may be a `vocabulary`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.model import cache as kv
from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, Tap
from jaxspec.model.numerics import linear, rms_norm
from jaxspec.model.tree import Tree


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """What a head of DFlash is made of.

    Attributes:
      block: its layers, with a RoPE of their own; `vocab_size` and `hidden_size` are the target's.
      taps: what it reads of the target.
      block_size: the rows of a block that it was trained for, the pending token's among them.
      mask_id: the token that stands for one that is not known.
    """

    block: LlamaConfig
    taps: tuple[Tap, ...]
    block_size: int
    mask_id: int
    kind: ClassVar[str] = "dflash"

    @property
    def shapes(self) -> Params:
        """The tree of its parameters, a shape tuple at each leaf."""
        whole, width = llama.param_shapes(self.block), self.block.hidden_size
        fused = {"fc": (width, len(self.taps) * width), "hidden_norm": (width,)}
        return {**fused, "layers": whole["layers"], "norm": whole["norm"]}


def usual_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """What a head of `count` layers taps of a target of `num_layers` where it does not say: what these layers enter.

    Evenly from what leaves layer 1 to what leaves layer L − 3, as the authors' code has it.

    Examples:
      >>> usual_taps(36, count=5)
      (2, 10, 18, 26, 34)
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (count - 1)
    return tuple(round(1 + number * step) + 1 for number in range(count))


def absorb(
    head: DFlashConfig, params: Params, features: jax.Array, start: jax.Array, cache: KVCache
) -> KVCache:
    """Puts what the target computed of tokens into the head's cache.

    Args:
      head: the head.
      params: its parameters.
      features: [B, T, F], the taps of tokens at positions start[b] + t.
      start: int32[B]; start + T ≤ the cache's capacity.
      cache: the head's.

    Returns:
      The cache with these positions.
    """
    block = head.block
    fused = rms_norm(linear(features, params["fc"]), params["hidden_norm"], block.rms_norm_eps)
    tables = rope.tables(block, start[:, None] + jnp.arange(features.shape[1]), cache.rope_length)
    layers = []
    for layer, written in zip(params["layers"], cache.layers, strict=True):
        p, queries = layer["attention"], block.group_size * block.head_dim
        bias = p["qkv_bias"][:, queries:] if "qkv_bias" in p else None
        both = linear(fused, p["qkv"][:, queries:], bias)
        both = both.reshape(*fused.shape[:2], block.held_kv_heads, 2, block.head_dim)
        keys = both[..., 0, :]
        if block.qk_norm:
            keys = rms_norm(keys, p["k_norm"], block.rms_norm_eps)
        layers.append(kv.write(written, rope.rotate(keys, *tables), both[..., 1, :], start, cache.merged))
    return dataclasses.replace(cache, layers=layers)


def run(
    head: DFlashConfig, params: Params, embedded: jax.Array, start: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Runs the head over a block of T rows, each of which sees all of them.

    Args:
      head: the head.
      params: its parameters.
      embedded: [B, T, D], of the pending token and T − 1 masks.
      start: int32[B], the position of the pending token; start + T ≤ the cache's capacity.
      cache: the head's, which holds every position before it.

    Returns:
      What `logits` takes, [B, T, D], and the cache, in whose slots from start on nothing is true.
    """
    together = Tree.block(embedded.shape[1])
    return llama.run_layers(head.block, params, embedded, start, cache, tree=together)


def logits(
    head: DFlashConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """The logits of each row's own token: [..., D] from `run` → float32[..., V], or [..., N] of a vocabulary of N."""
    return llama.logits_of_draft(target, target_params, params, head.block.rms_norm_eps, hidden)
