"""The head of DFlash (Chen et al. 2026, arXiv 2602.06036) as pure functions: a few layers draft a block in one pass.

A block is the pending token followed by mask tokens, embedded by the target. The layers are Qwen3's; each row of a
block attends to the whole block and to the text before it, or in a layer with a window to a part of them. The head
reads the text through the target's auxiliary hidden states: those of a token are fused to one vector, which gives its
keys and values in every layer, at the token's position. The output at a position predicts the token of that position,
by the target's head. Parameters, with the layers of `llama.param_shapes` and n auxiliary layers:

    fc [D, n·D]   hidden_norm [D]   layers   norm [D]   head [V', D], optional

A `vocabulary` may replace the target's head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model import cache as kv
from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.head import aux_layers_within
from jaxspec.model.llama import AuxLayer, Params
from jaxspec.model.numerics import linear, rms_norm
from jaxspec.model.tree import Tree


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """The configuration of a DFlash head.

    Attributes:
      block: its layers, with a RoPE of their own; `vocab_size` and `hidden_size` are the target's.
      aux_layers: the target's hidden states that it reads.
      block_size: the rows of a block in training, including the pending token's.
      mask_id: the mask token, which takes the place of an unknown token.
      head_size: V', the rows of its own head over a part of the vocabulary; None for the target's head.
      first: the row of the block that predicts the first draft token; 0 if each row predicts the token after its own.
      causal_windows: whether, in layers with a window, a row of a block sees only itself and the rows before it.
      anchored_windows: whether a window of W ends with the W tokens before the block, as in speculators; otherwise with
        each row, which sees fewer than W tokens back, and fewer than W ahead, as in the authors' code.
    """

    block: LlamaConfig
    aux_layers: tuple[AuxLayer, ...]
    block_size: int
    mask_id: int
    head_size: int | None = None
    first: int = 1
    causal_windows: bool = True
    anchored_windows: bool = False
    kind: ClassVar[str] = "dflash"

    @property
    def shapes(self) -> Params:
        """The tree of its parameters, a shape tuple at each leaf."""
        whole, width = llama.param_shapes(self.block), self.block.hidden_size
        fused = {"fc": (width, len(self.aux_layers) * width), "hidden_norm": (width,)}
        own = {} if self.head_size is None else {"head": (self.head_size, width)}
        return {**fused, "layers": whole["layers"], "norm": whole["norm"], **own}

    @property
    def longest(self) -> int:
        """The number of draft tokens of a block."""
        return self.block_size - self.first


@struct.dataclass
class Block(Tree):
    """The rows of a block, in the form of a tree: they see each other and the text, in layers with a window a part.

    Attributes:
      causal, anchored: `causal_windows` and `anchored_windows` of the head, static.
    """

    causal: bool = struct.field(pytree_node=False, default=True)
    anchored: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def of_rows(cls, count: int, head: DFlashConfig) -> Block:
        """Returns a block of `count` rows at consecutive positions."""
        place = jnp.arange(count)[None]
        every = jnp.ones((1, count, count), bool)
        how = {"causal": head.causal_windows, "anchored": head.anchored_windows}
        return cls(jnp.maximum(place - 1, 0), place, every, place, **how)

    def visible(self, start: jax.Array, slots: jax.Array, window: int | None) -> jax.Array:
        """Returns the mask of the cache slots that each row sees, see `Tree.visible`; its slot is its position."""
        seen = super().visible(start, slots, None)
        if window is None:
            return seen
        row, slot = self.positions(start)[:, :, None], slots[:, None]
        seen &= slot >= (start[:, None, None] if self.anchored else row + 1) - window
        if self.causal:
            return seen & (slot <= row)
        return seen if self.anchored else seen & (slot < row + window)


def usual_aux_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns the default auxiliary layers of a head of `count` layers: the layers of the target whose input it reads.

    They are spaced evenly from the output of layer 1 to that of layer L − 3, as in the authors' code.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (count - 1)
    return tuple(round(1 + number * step) + 1 for number in range(count))


def usual(target: LlamaConfig) -> DFlashConfig:
    """Returns the shape of a typical published head of a target: 5 layers, blocks of 16 tokens."""
    block = target.block(num_layers=5, qk_norm=True, model_type="qwen3")
    return DFlashConfig(
        block, aux_layers_within(usual_aux_layers(target.num_layers, 5), target), 16, mask_id=0
    )


def absorb(
    head: DFlashConfig, params: Params, aux_hidden_states: jax.Array, start: jax.Array, cache: KVCache
) -> KVCache:
    """Writes the keys and values of committed tokens to the head's cache.

    Args:
      head: the head's configuration.
      params: its parameters.
      aux_hidden_states: [B, T, F], the auxiliary hidden states of the tokens at positions start[b] + t.
      start: int32[B]; start + T ≤ the cache's capacity.
      cache: the head's.

    Returns:
      The cache with these positions.
    """
    positions = start[:, None] + jnp.arange(aux_hidden_states.shape[1])
    turns = rope.tables(head.block, head.block.layer_type(0), positions, cache.rope_length)
    found = pairs(head, params, aux_hidden_states, turns)
    layers = [
        kv.write(written, keys, values, start, cache.merged, cache.is_ring(written[0]))
        for written, (keys, values) in zip(cache.layers, found, strict=True)
    ]
    return kv.as_read(dataclasses.replace(cache, layers=layers))


def pairs(
    head: DFlashConfig, params: Params, aux_hidden_states: jax.Array, turns: rope.Tables
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields the keys and values of committed tokens in each layer, [B, T, KV, hd] each.

    Args:
      head, params: the head.
      aux_hidden_states: [B, T, F], the auxiliary hidden states of the tokens.
      turns: the RoPE of their positions.
    """
    block = head.block
    fused = rms_norm(linear(aux_hidden_states, params["fc"]), params["hidden_norm"], block.rms_norm_eps)
    for layer in params["layers"]:
        p, queries = layer["attention"], block.group_size * block.head_dim
        bias = p["qkv_bias"][:, queries:] if "qkv_bias" in p else None
        both = linear(fused, p["qkv"][:, queries:], bias)
        both = both.reshape(*fused.shape[:2], block.held_kv_heads, 2, block.head_dim)
        keys = both[..., 0, :]
        if block.qk_norm:
            keys = rms_norm(keys, p["k_norm"], block.rms_norm_eps)
        yield rope.rotate(keys, turns), both[..., 1, :]


def run_head(
    head: DFlashConfig, params: Params, embedded: jax.Array, start: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Runs the head over a block of T rows.

    Args:
      head: the head's configuration.
      params: its parameters.
      embedded: [B, T, D], the embeddings of the pending token and T − 1 mask tokens.
      start: int32[B], the position of the pending token; start + T ≤ the cache's capacity.
      cache: the head's, with every position before `start`.

    Returns:
      The hidden states [B, T, D] for `logits`, and the cache, whose slots from `start` on are not valid.
    """
    together = Block.of_rows(embedded.shape[1], head)
    return llama.run_layers(head.block, params, embedded, start, cache, tree=together)


def logits(
    head: DFlashConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """Returns the logits of each row's own token: [..., D] → float32[..., V], or [..., N] of a vocabulary."""
    return llama.logits_of_draft(target, target_params, params, head.block.rms_norm_eps, hidden)
