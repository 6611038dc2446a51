"""The heads of EAGLE as pure functions: a few layers that predict the target's auxiliary hidden states.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) predicts the input of the target's head: fc of (embedding, auxiliary hidden
state), a Llama layer without an input norm, then the target's own head. EAGLE-3 (Li et al. 2025, arXiv 2503.01840)
reads the residual streams of some of the target's layers, takes its own output for tokens that the target has not run,
and has a head of its own, often over a part of the vocabulary. P-EAGLE (arXiv 2602.01469) is an EAGLE-3 head that takes
a mask token and a learned auxiliary hidden state for tokens that the target has not run, so that one pass predicts a
whole draft.

A *pair* t is the auxiliary hidden state of token t and the embedding of token t + 1. It has position t and slot t, and
its output predicts token t + 2. Parameters, beside those of a layer in `llama.param_shapes`:

    eagle    fc [D, 2·D]     fc_bias [D], optional                                 layers[0].attention without norm
    eagle3   fc [D, n·D']    layers[0].attention  norm, embed_norm [D]  qkv [KV, (G+2)·hd, 2·D]
             norm [D]        head [V', D]      fc_norms[·].norm: n of [D'] or one of [n·D'], optional

             mask_hidden [n·D'], of P-EAGLE

with D' the width of the target and V' the number of draft tokens. Without `embed` [V, D] the head uses the target's
embedding, and without `head` the target's head; a `vocabulary` may replace the latter.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.head import aux_layers_within
from jaxspec.model.llama import FINAL, Attend, AuxLayer, Params
from jaxspec.model.numerics import linear, rms_norm
from jaxspec.model.tree import Tree

# The draft vocabulary size of published EAGLE-3 heads.
_USUAL_HEAD = 32_000


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The configuration of an EAGLE head.

    Attributes:
      block: its layers, with a RoPE of their own; `vocab_size` is the target's V, `hidden_size` the head's D.
      aux_layers: the target's hidden states that it reads; for EAGLE-1 the input of the target's head.
      kind: `eagle` (EAGLE-1 and EAGLE-2 have the same heads) or `eagle3`.
      target_width: D'; None for D.
      head_size: V', the rows of its own head; None without one.
      own_embedding: whether it has an embedding of its own.
      fc_bias: whether fc has a bias.
      aux_norm: the norm before fc: none, one over the concatenated auxiliary hidden states (`norm_before_fc`), or one
        per auxiliary layer (`fc_norm`).
      residual_is_normed: whether the residual stream begins with the normed auxiliary hidden state
        (`norm_before_residual`).
      output_is_normed: whether the fed-back output is normed (`norm_output`).
      mask_id: the mask token of P-EAGLE; None if the head feeds back its own output.
    """

    block: LlamaConfig
    aux_layers: tuple[AuxLayer, ...] = (FINAL,)
    kind: Literal["eagle", "eagle3"] = "eagle"
    target_width: int | None = None
    head_size: int | None = None
    own_embedding: bool = False
    fc_bias: bool = False
    aux_norm: Literal["none", "together", "each"] = "none"
    residual_is_normed: bool = False
    output_is_normed: bool = False
    mask_id: int | None = None

    @property
    def aux_width(self) -> int:
        """F, the width of a token's auxiliary hidden states, concatenated over the auxiliary layers."""
        return len(self.aux_layers) * (self.target_width or self.block.hidden_size)

    @property
    def shapes(self) -> Params:
        """The tree of its parameters, a shape tuple at each leaf."""
        return param_shapes(self)


def usual_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Returns EAGLE-3's default auxiliary layers for a target of L layers: the inputs of layers 2, L÷2 and L − 3."""
    return 2, num_layers // 2, num_layers - 3


def usual_eagle(target: LlamaConfig) -> EagleConfig:
    """Returns the shape of a typical published EAGLE-1 head of a target: one of its layers."""
    return EagleConfig(target.block())


def usual_eagle3(target: LlamaConfig) -> EagleConfig:
    """Returns the shape of a typical published EAGLE-3 head of a target, with at most 32,000 draft tokens."""
    aux_layers = aux_layers_within(usual_aux_layers(target.num_layers), target)
    return EagleConfig(target.block(), aux_layers, "eagle3", head_size=min(_USUAL_HEAD, target.vocab_size))


def param_shapes(head: EagleConfig) -> Params:
    """Returns the tree of a head's parameters, a shape tuple at each leaf."""
    width, eagle3 = head.block.hidden_size, head.kind == "eagle3"
    layers = [dict(layer) for layer in llama.param_shapes(head.block)["layers"]]
    first = dict(layers[0]["attention"])
    if eagle3:
        first |= {"embed_norm": (width,), "qkv": (*first["qkv"][:-1], 2 * width)}
    else:
        del first["norm"]
    layers[0]["attention"] = first
    shapes: Params = {"fc": (width, head.aux_width if eagle3 else 2 * width), "layers": layers}
    if head.fc_bias:
        shapes["fc_bias"] = (width,)
    if eagle3:
        shapes["norm"] = (width,)
    if head.mask_id is not None:
        shapes["mask_hidden"] = (head.aux_width,)
    if head.aux_norm == "together":
        shapes["fc_norms"] = [{"norm": (head.aux_width,)}]
    elif head.aux_norm == "each":
        shapes["fc_norms"] = [{"norm": (head.aux_width // len(head.aux_layers),)}] * len(head.aux_layers)
    if head.head_size is not None:
        shapes["head"] = (head.head_size, width)
    if head.own_embedding:
        shapes["embed"] = (head.block.vocab_size, width)
    return shapes


def fuse(head: EagleConfig, params: Params, aux_hidden_states: jax.Array) -> jax.Array:
    """Returns the head's input for a token's auxiliary hidden states: [..., F] → [..., D]."""
    if head.kind == "eagle":
        return aux_hidden_states
    if norms := params.get("fc_norms"):
        parts, eps = jnp.split(aux_hidden_states, len(norms), axis=-1), head.block.rms_norm_eps
        normed = [rms_norm(part, p["norm"], eps) for part, p in zip(parts, norms, strict=True)]
        aux_hidden_states = jnp.concatenate(normed, axis=-1)
    return linear(aux_hidden_states, params["fc"], params.get("fc_bias"))


def run_head(
    head: EagleConfig,
    params: Params,
    embedded: jax.Array,
    aux_hidden_state: jax.Array,
    start: jax.Array,
    cache: KVCache,
    tree: Tree | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the head over pairs.

    Args:
      head: the head's configuration.
      params: its parameters.
      embedded: [B, T, D], the embedding of each pair's token.
      aux_hidden_state: [B, T, D], from `fuse`, or from `fed_back` for tokens that the target has not run.
      start: int32[B], the position of the first pair, or its slot in a tree; start + T ≤ the cache's capacity.
      cache: the head's, with every pair before `start`.
      tree: the tree of the pairs; None for a chain. See `llama.run_layers`.

    Returns:
      The hidden states [B, T, D] for `logits` and `fed_back`, and the cache with these pairs.
    """
    block = head.block
    positions, attentions = llama.cached(block, cache, range(1), start, aux_hidden_state.shape[1], tree)
    turns = rope.tables(block, block.layer_type(0), positions, cache.rope_length)
    attend = attentions[block.window(0)]
    hidden, layer = run_first(head, params, embedded, aux_hidden_state, turns, attend, cache.layers[0])
    cache = dataclasses.replace(cache, layers=[layer, *cache.layers[1:]])
    rest = range(1, block.num_layers)
    return llama.run_layers(block, params, hidden, start, cache, layers=rest, tree=tree)


def run_first(
    head: EagleConfig,
    params: Params,
    embedded: jax.Array,
    aux_hidden_state: jax.Array,
    turns: rope.Tables,
    attend: Attend,
    layer_cache: Any,
) -> tuple[jax.Array, Any]:
    """Runs the head's first layer, which reads the pairs.

    Args:
      head, params, embedded, aux_hidden_state: as in `run_head`.
      turns: from `rope.tables`, for the pairs' positions.
      attend: the attention of the pairs to each other and to those before them.
      layer_cache: the cache that `attend` reads and writes.

    Returns:
      The residual stream [B, T, D] after the layer, and the cache from `attend`.
    """
    block, first = head.block, params["layers"][0]
    p, eps = first["attention"], block.rms_norm_eps
    if head.kind == "eagle":
        pair = jnp.concatenate([embedded, aux_hidden_state], axis=-1)
        hidden = seen = linear(pair, params["fc"], params.get("fc_bias"))
    else:
        normed = rms_norm(aux_hidden_state, p["norm"], eps)
        seen = jnp.concatenate([rms_norm(embedded, p["embed_norm"], eps), normed], axis=-1)
        hidden = normed if head.residual_is_normed else aux_hidden_state
    write, layer_cache = llama.attention(block, p, seen, turns, attend, layer_cache)
    return llama.mlp(block, first["mlp"], hidden + write), layer_cache


def fed_back(head: EagleConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the auxiliary hidden state of a token that the target has not run: [..., D] of `run_head` → [..., D]."""
    return llama.final_norm(head.block, params, hidden) if head.output_is_normed else hidden


def logits(
    head: EagleConfig, params: Params, target: LlamaConfig, target_params: Params, hidden: jax.Array
) -> jax.Array:
    """Returns the logits of the token after a pair's: [..., D] of `run_head` → float32[..., V or V']."""
    if head.kind == "eagle3":
        hidden = llama.final_norm(head.block, params, hidden)
    if "vocabulary" in params:
        matrix = params["vocabulary"].head
    else:
        matrix = params["head"] if "head" in params else llama.head(target, target_params)
    products = linear(hidden, matrix, out_dtype=jnp.float32)
    return products if "head" in params else llama.scaled_logits(target, products)
