"""The heads of EAGLE as pure functions: a layer or a few that predict the target's features, one token a pass.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) predicts what the target's head reads: a Llama layer without an input norm
over fc of (embedding, feature), then the target's own head. EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads streams
of three of the target's layers, is fed its own output in place of what it does not know, and has a head of its own,
often over a part of the vocabulary.

A *pair* t is the feature of token t and the embedding of token t + 1; it stands at position t, in slot t, and its
output predicts token t + 2. Parameters, beside what `llama.param_shapes` says of a layer:

    eagle    fc [D, 2·D]     fc_bias [D], where it has one                         layers[0].attention without norm
    eagle3   fc [D, n·D']    layers[0].attention  norm, embed_norm [D]  qkv [KV, (G+2)·hd, 2·D]
             norm [D]        head [V', D]      fc_norms[·].norm: n of [D'] or one of [n·D'], where it has them

with D' the width of the target, V' tokens of the draft, and `embed` [V, D] where the target's will not do. A `head`
that is not there is the target's; in its place there may be a `vocabulary`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL, Attend, Params, Tap
from jaxspec.model.numerics import linear, rms_norm
from jaxspec.model.tree import Tree


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What an EAGLE head is made of.

    Attributes:
      block: its layers, with a RoPE of their own; `vocab_size` is the target's V, `hidden_size` the head's D.
      taps: what it reads of the target; of EAGLE-1 what the target's head reads.
      kind: `eagle` (EAGLE-1 and EAGLE-2 have the same heads) or `eagle3`.
      target_width: D'; None for D.
      head_size: V', rows of its own head; None if it has none.
      own_embedding: whether it has an embedding.
      fc_bias: whether fc has a bias.
      feature_norm: what is normed before fc: nothing, the taps together (`norm_before_fc`) or each (`fc_norm`).
      residual_is_normed: whether the residual stream begins with the normed feature (`norm_before_residual`).
      output_is_normed: whether what it is fed back is normed (`norm_output`).
    """

    block: LlamaConfig
    taps: tuple[Tap, ...] = (FINAL,)
    kind: Literal["eagle", "eagle3"] = "eagle"
    target_width: int | None = None
    head_size: int | None = None
    own_embedding: bool = False
    fc_bias: bool = False
    feature_norm: Literal["none", "together", "each"] = "none"
    residual_is_normed: bool = False
    output_is_normed: bool = False

    @property
    def feature_width(self) -> int:
        """F, the width of a feature: all taps of a token."""
        return len(self.taps) * (self.target_width or self.block.hidden_size)

    @property
    def shapes(self) -> Params:
        """The tree of its parameters, a shape tuple at each leaf."""
        return param_shapes(self)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 taps of a target of `num_layers` layers where a head does not say: what enters 2, L÷2 and L − 3."""
    return 2, num_layers // 2, num_layers - 3


def param_shapes(head: HeadConfig) -> Params:
    """The tree of a head's parameters, a shape tuple at each leaf."""
    width, eagle3 = head.block.hidden_size, head.kind == "eagle3"
    layers = [dict(layer) for layer in llama.param_shapes(head.block)["layers"]]
    first = dict(layers[0]["attention"])
    if eagle3:
        first |= {"embed_norm": (width,), "qkv": (*first["qkv"][:-1], 2 * width)}
    else:
        del first["norm"]
    layers[0]["attention"] = first
    shapes: Params = {"fc": (width, head.feature_width if eagle3 else 2 * width), "layers": layers}
    if head.fc_bias:
        shapes["fc_bias"] = (width,)
    if eagle3:
        shapes["norm"] = (width,)
    if head.feature_norm == "together":
        shapes["fc_norms"] = [{"norm": (head.feature_width,)}]
    elif head.feature_norm == "each":
        shapes["fc_norms"] = [{"norm": (head.feature_width // len(head.taps),)}] * len(head.taps)
    if head.head_size is not None:
        shapes["head"] = (head.head_size, width)
    if head.own_embedding:
        shapes["embed"] = (head.block.vocab_size, width)
    return shapes


def fuse(head: HeadConfig, params: Params, features: jax.Array) -> jax.Array:
    """What the head reads of a token's features: [..., F] → [..., D]."""
    if head.kind == "eagle":
        return features
    if norms := params.get("fc_norms"):
        parts, eps = jnp.split(features, len(norms), axis=-1), head.block.rms_norm_eps
        normed = [rms_norm(part, p["norm"], eps) for part, p in zip(parts, norms, strict=True)]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, params["fc"], params.get("fc_bias"))


def run(
    head: HeadConfig,
    params: Params,
    embedded: jax.Array,
    feature: jax.Array,
    start: jax.Array,
    cache: KVCache,
    tree: Tree | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the head over pairs.

    Args:
      head: the head.
      params: its parameters.
      embedded: [B, T, D], the embedding of the token after each.
      feature: [B, T, D], from `fuse`, or from `fed_back` where the target has not run.
      start: int32[B], the position of the first pair, or its slot in a tree; start + T ≤ the cache's capacity.
      cache: the head's, which holds every pair before it.
      tree: what the pairs are where each does not follow the one before it, see `llama.run_layers`.

    Returns:
      What `logits` and `fed_back` take, [B, T, D], and the cache with these pairs.
    """
    block = head.block
    slots = positions = start[:, None] + jnp.arange(feature.shape[1])
    mask = None
    if tree is not None:
        positions = tree.positions(start)
        mask = tree.visible(start, cache.capacity, block.window(0))
    tables = rope.tables(block, positions, cache.rope_length)
    attend = llama.cached(start, slots, block.window(0), cache.merged, mask)
    hidden, layer = run_first(head, params, embedded, feature, tables, attend, cache.layers[0])
    cache = dataclasses.replace(cache, layers=[layer, *cache.layers[1:]])
    rest = range(1, block.num_layers)
    return llama.run_layers(block, params, hidden, start, cache, layers=rest, tree=tree)


def run_first(
    head: HeadConfig,
    params: Params,
    embedded: jax.Array,
    feature: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    attend: Attend,
    layer_cache: Any,
) -> tuple[jax.Array, Any]:
    """Runs the head's first layer, the one that reads pairs.

    Args:
      head, params, embedded, feature: as of `run`.
      tables: of `rope.tables`, for the pairs' positions.
      attend: how they see each other and what came before.
      layer_cache: what `attend` reads and writes.

    Returns:
      The residual stream [B, T, D] after the layer, and the cache as `attend` has left it.
    """
    block, first = head.block, params["layers"][0]
    p, eps = first["attention"], block.rms_norm_eps
    if head.kind == "eagle":
        pair = jnp.concatenate([embedded, feature], axis=-1)
        hidden = seen = linear(pair, params["fc"], params.get("fc_bias"))
    else:
        normed = rms_norm(feature, p["norm"], eps)
        seen = jnp.concatenate([rms_norm(embedded, p["embed_norm"], eps), normed], axis=-1)
        hidden = normed if head.residual_is_normed else feature
    write, layer_cache = llama.attention(block, p, seen, tables, attend, layer_cache)
    return llama.mlp(block, first["mlp"], hidden + write), layer_cache


def fed_back(head: HeadConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """What stands for the feature of a token that the target has not run: [..., D] from `run` → [..., D]."""
    return llama.final_norm(head.block, params, hidden) if head.output_is_normed else hidden


def logits(
    head: HeadConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """The logits of the token after a pair's: [..., D] from `run` → float32[..., V], or [..., V'] of its own head."""
    if head.kind == "eagle3":
        hidden = llama.final_norm(head.block, params, hidden)
    if "vocabulary" in params:
        matrix = params["vocabulary"].head
    else:
        matrix = params["head"] if "head" in params else llama.head(target, target_params)
    return linear(hidden, matrix, out_dtype=jnp.float32)
