"""The Llama blocks as pure functions: embed, run_layers, logits. Layers are unrolled on accelerators.

Parameters are a plain dict, so that gradients, shardings and optimiser state can have the same tree. Output axes of
weights come first. Weights with the same input are one array, grouped by key/value head: one device runs one product,
and a mesh can still divide it by heads (KV and G count copies of key/value heads, see `LlamaConfig.kv_copies`):

    embed  [V, D]          norm [D]          head [V, D], absent where tied
    layers[l].attention    norm [D]   qkv [KV, (G+2)·hd, D] (G query heads, key, value)   out [D, H·hd]
    layers[l].mlp          norm [D]   gate_up [2, F, D]                                   down [D, F]

with `qkv_bias` [KV, (G+2)·hd], `out_bias` [D], `gate_up_bias` [2, F], `down_bias` [D], `post_norm` [D] in place of a
sublayer's `norm` or beside it, `q_norm` [hd] and `k_norm` [hd], or over all heads `wide_q_norm` [H, hd] and
`wide_k_norm` [num_kv_heads, hd], where configured. A matrix, or a tied embedding, may be `Quantised`. The parameters of
a draft may have a `vocabulary`, a `Vocabulary` of some tokens, in place of the head, and `embed_rows` int32[V], the row
of `embed` for each token of a target with another vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.model import cache as kv
from jaxspec.model import rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LayerType, LlamaConfig, Scores
from jaxspec.model.control import OneOf, once, run_if
from jaxspec.model.lora import Adapted
from jaxspec.model.numerics import (
    LOOPED,
    added,
    capped,
    kept_rounded,
    linear,
    normed_linear,
    rms_norm,
    stream_dtype,
)
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import Quantised
from jaxspec.model.tree import Tree
from jaxspec.model.vocabulary import Vocabulary

Params = dict[str, Any]
# The names of weights, or of their parts, that are operands of products.
OPERANDS = {"qkv", "out", "gate_up", "down", "packed"}
# Queries per attention product in training: the scores must fit into a processor's cache.
QUERIES_AT_ONCE = 128
# (queries [B,T,KV,G,hd], keys [B,T,KV,hd], values [B,T,KV,hd], layer's cache) -> mixed [B,T,KV,G,hd], cache
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
# A place at which a drafter reads the target's residual stream: the input of layer l (from 0; L is the output of the
# last layer), or `FINAL`, the input of the head, after the final norm.
FINAL: Literal["final"] = "final"
AuxLayer = int | Literal["final"]
# Called with the residual stream [B, T, D] before and after each sublayer, in their order; returns what is collected.
Watch = Callable[[jax.Array, jax.Array], jax.Array]


def param_shapes(config: LlamaConfig) -> Params:
    """Returns the tree of parameters, a shape tuple at each leaf."""
    width, inner = config.hidden_size, config.intermediate_size
    qkv = (config.held_kv_heads, (config.group_size + 2) * config.head_dim)
    placed = {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "post_norm")}
    norms = dict.fromkeys(placed[config.norm_placement], (width,))
    attention = norms | {"qkv": (*qkv, width), "out": (width, config.num_heads * config.head_dim)}
    mlp = norms | {"gate_up": (2, inner, width), "down": (width, inner)}
    if config.qkv_bias:
        attention["qkv_bias"] = qkv
    if config.output_bias:
        attention["out_bias"] = (width,)
    if config.qk_norm and config.qk_norm_over_heads:
        heads = {"wide_q_norm": config.num_heads, "wide_k_norm": config.num_kv_heads}
        attention |= {name: (count, config.head_dim) for name, count in heads.items()}
    elif config.qk_norm:
        attention |= dict.fromkeys(("q_norm", "k_norm"), (config.head_dim,))
    if config.mlp_bias:
        mlp |= {"gate_up_bias": (2, inner), "down_bias": (width,)}
    layer = {"attention": attention, "mlp": mlp}
    shapes: Params = {
        "embed": (config.vocab_size, width),
        "layers": [layer] * config.num_layers,
        "norm": (width,),
    }
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, width)
    return shapes


def is_shape(node: Any) -> bool:
    """Returns whether a node of `param_shapes` is a leaf."""
    return isinstance(node, tuple)


def floor_bytes(config: LlamaConfig, params: Params) -> int:
    """Returns the bytes that a step must read: every weight except an untied input embedding."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    size: int = total if config.tie_embeddings else total - params["embed"].nbytes
    return size


def num_params(config: LlamaConfig) -> int:
    """Returns the number of parameters."""
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=is_shape)
    return sum(math.prod(shape) for shape in shapes)


def init_params(
    config: LlamaConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    scale: float = 1.0,
    shardings: Params | None = None,
) -> Params:
    """Returns random parameters: matrices N(0, scale² ÷ fan-in), embedding N(0, scale² ÷ D), norms 1, biases 0.

    The norms are 1 with their `norm_offset`. With `shardings`, a tree of them, each device draws only its own shards of
    the same numbers.
    """
    return draw(param_shapes(config), key, dtype, scale, shardings, 1 - config.norm_offset)


def draw(
    shapes: Params,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    scale: float = 1.0,
    shardings: Params | None = None,
    norm: float = 1.0,
) -> Params:
    """Returns random parameters as `init_params` does, for any tree of shapes."""
    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=is_shape)
    places = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    drawn = []
    for index, ((path, shape), place) in enumerate(zip(leaves, places, strict=True)):
        name = path[-1].key
        if name.endswith("norm"):
            drawn.append(jnp.full(shape, norm, dtype, device=place))
        elif name.endswith("bias"):
            drawn.append(jnp.zeros(shape, dtype, device=place))
        else:
            # Only the noise is compiled: one program for all operations would round differently.
            normal = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=place)
            noise = normal(jax.random.fold_in(key, index), shape, jnp.float32)
            drawn.append((noise * scale * shape[-1] ** -0.5).astype(dtype))
    params: Params = jax.tree.unflatten(tree, drawn)
    return params


def truncate(params: Params, num_layers: int) -> Params:
    """Returns the parameters with only the first `num_layers` layers, without a copy."""
    return {**params, "layers": params["layers"][:num_layers]}


def stream_of(params: Params) -> DTypeLike:
    """Returns the dtype of the residual stream of a model, see `numerics.stream_dtype`."""
    return stream_dtype(params["embed"].dtype)


def embed(config: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Tokens int32[B, T] → residual stream [B, T, D], in `stream_of` these parameters."""
    rows = embedding_rows(params, tokens)
    if config.embedding_multiplier == 1:
        return rows
    # The factor has the dtype of the weights, as in transformers.
    return rows * jnp.asarray(config.embedding_multiplier, params["embed"].dtype).astype(rows.dtype)


def embedding_rows(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the rows of the embedding for tokens int32[B, T], [B, T, D], in `stream_of` these parameters."""
    if "embed_rows" in params:
        tokens = params["embed_rows"][tokens]
    if tokens.size == 1:
        # XLA turns a gather of one row into a slice. A slice of a sharded table makes several GPUs gather the whole
        # table, and a TPU copy an int8 table into another layout. A gather of two rows avoids both.
        alone: dict[str, Any] = {"cuda": _of_two}
        if isinstance(params["embed"], Quantised):
            alone["tpu"] = _of_two
        rows = jax.lax.platform_dependent(params["embed"], tokens, default=_rows, **alone)
    else:
        rows = _rows(params["embed"], tokens)
    if not isinstance(rows, Quantised):
        embedded: jax.Array = rows.astype(stream_of(params))
        return embedded
    # Else the product with the scale and the first sum of the residual stream would round once in some programs.
    return kept_rounded(rows.whole(), rows.scale[..., None] < 0).astype(stream_of(params))


def _rows(table: jax.Array | Quantised, tokens: jax.Array) -> jax.Array | Quantised:
    return table[tokens]


def _of_two(table: jax.Array | Quantised, tokens: jax.Array) -> jax.Array | Quantised:
    return table[jnp.tile(tokens, (1, 2))][:, :1]


@jax.named_scope("head")
def logits(config: LlamaConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Applies final norm and head: hidden [..., D] → float32[..., V], or [..., N] if `params` has a `vocabulary`."""
    norm, eps, matrix = params["norm"], config.rms_norm_eps, head(config, params)
    products = normed_linear(
        hidden, norm, eps, matrix, offset=config.norm_offset, out_dtype=jnp.float32, exact=config.exact
    )
    return scaled_logits(config, products)


def scaled_logits(config: LlamaConfig, products: jax.Array) -> jax.Array:
    """Returns the logits for the products of the head, float32[..., V], with their factor and cap."""
    scaled = products if config.logit_multiplier == 1 else products * config.logit_multiplier
    return capped(scaled, config.logit_cap)


def logits_of_draft(
    target: LlamaConfig, target_params: Params, own: Params, eps: float, hidden: jax.Array
) -> jax.Array:
    """Returns `logits` by the target's head with a draft's own norm, its ε, and its `vocabulary` if it has one."""
    mine: Params = {name: own[name] for name in ("norm", "vocabulary") if name in own}
    offset = 0.0 if "norm" in own else target.norm_offset
    read_as = dataclasses.replace(target, rms_norm_eps=eps, norm_offset=offset)
    return logits(read_as, {**target_params, **mine}, hidden)


def final_norm(config: LlamaConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Applies the final norm to hidden [..., D]."""
    return _norm(config, hidden, params["norm"])


def _norm(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x, weight, config.rms_norm_eps, config.exact, config.norm_offset)


def head(config: LlamaConfig, params: Params) -> jax.Array | Quantised:
    """Returns the head's matrix: [V, D], or [N, D] if `params` has a `vocabulary`."""
    if "vocabulary" in params:
        few: jax.Array | Quantised = params["vocabulary"].head
        return few
    whole: jax.Array | Quantised = params["embed"] if config.tie_embeddings else params["head"]
    return whole


def vocabulary(config: LlamaConfig, params: Params, rows: jax.Array) -> Vocabulary:
    """Returns the `Vocabulary` of rows `rows` of the head, int32[N], rising, for a draft's parameters."""
    few = params.get("vocabulary")
    return Vocabulary(head(config, params)[rows], rows if few is None else few.ids[rows], config.vocab_size)


def attention(
    config: LlamaConfig,
    p: Params,
    seen: jax.Array,
    turns: rope.Tables,
    attend: Attend,
    layer_cache: Any,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    keep: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Runs attention on its input `seen` [B, T, ·], as wide as `qkv`; returns its output [B, T, D] and the cache.

    The input is normed by `norm` [·] and the output added to `residual` [B, T, D], if they are given; `keep` as in
    `run_block`.
    """
    batch, length, _ = seen.shape
    eps, offset, hd = config.rms_norm_eps, config.norm_offset, config.head_dim
    qkv = normed_linear(seen, norm, eps, p["qkv"], p.get("qkv_bias"), offset=offset, exact=config.exact)
    qkv = qkv.reshape(batch, length, config.held_kv_heads, config.group_size + 2, hd)
    mixed, layer_cache = attended(config, p, qkv, turns, attend, layer_cache)
    mixed = mixed.reshape(batch, length, config.num_heads * hd)
    if residual is None:
        exact, parts = config.exact, config.held_kv_heads
        return linear(mixed, p["out"], p.get("out_bias"), exact=exact, parts=parts), layer_cache
    return _added(config, p, residual, mixed, "out", keep), layer_cache


def _over_heads(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x [B, T, KV, N, hd] after a norm over all heads."""
    return _norm(config, x.reshape(*x.shape[:2], -1), weight.reshape(-1)).reshape(x.shape)


def attention_sublayer(
    config: LlamaConfig,
    p: Params,
    hidden: jax.Array,
    turns: rope.Tables,
    attend: Attend,
    layer_cache: Any = None,
    keep: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the residual stream [B, T, D] after attention with its norms, and the cache; `keep` as in `run_block`."""
    return attention(config, p, hidden, turns, attend, layer_cache, p.get("norm"), hidden, keep)


def attended(
    config: LlamaConfig,
    p: Params,
    qkv: jax.Array,
    turns: rope.Tables,
    attend: Attend,
    layer_cache: Any,
) -> tuple[jax.Array, Any]:
    """Rotates queries and keys of `qkv` [B, T, KV, G + 2, hd] and attends; returns [B, T, KV, G, hd] and the cache."""
    group = config.group_size
    turning, values = qkv[..., : group + 1, :], qkv[..., group + 1, :]
    if config.qk_norm and config.qk_norm_over_heads:
        weights = p["wide_q_norm"], jnp.repeat(p["wide_k_norm"], config.kv_copies, axis=0)
        parts = zip(jnp.split(turning, (group,), axis=-2), weights, strict=True)
        turning = jnp.concatenate([_over_heads(config, part, weight) for part, weight in parts], axis=-2)
    elif config.qk_norm:
        turning = _norm(config, turning, jnp.stack([p["q_norm"]] * group + [p["k_norm"]]))
    turned = rope.rotate(turning, turns)
    queries = turned[..., :group, :]
    if (factor := turns.query_factor) is not None:
        queries = (queries * factor[:, :, None, None, None]).astype(queries.dtype)
    return attend(queries, turned[..., group, :], values, layer_cache)


def mlp(config: LlamaConfig, p: Params, hidden: jax.Array, keep: jax.Array | None = None) -> jax.Array:
    """Returns the residual stream [B, T, D] after an MLP with its norms; `keep` as in `run_block`."""
    return _added(config, p, hidden, gated(config, p, hidden, p.get("norm")), "down", keep)


def gated(config: LlamaConfig, p: Params, x: jax.Array, norm: jax.Array | None = None) -> jax.Array:
    """Returns the gated inner activations of an MLP [B, T, F] for x [B, T, D], which `norm` norms if given."""
    eps, bias, offset = config.rms_norm_eps, p.get("gate_up_bias"), config.norm_offset
    gate, exact = config.activation, config.exact
    return normed_linear(x, norm, eps, p["gate_up"], bias, offset=offset, gate=gate, exact=exact)


def sublayer_input(config: LlamaConfig, p: Params, hidden: jax.Array) -> jax.Array:
    """Returns the input [B, T, D] of a sublayer's first product: the residual stream, after a norm if it has one."""
    return _norm(config, hidden, p["norm"]) if "norm" in p else hidden


def _added(
    config: LlamaConfig, p: Params, hidden: jax.Array, x: jax.Array, name: str, keep: jax.Array | None
) -> jax.Array:
    """Returns the residual stream with the output of a sublayer added, the product of x with the matrix `name`."""
    bias, exact = p.get(f"{name}_bias"), config.exact
    parts = {"out": config.held_kv_heads, "down": config.intermediate_size}[name]
    write = linear(x, p[name], bias, exact=exact, parts=parts)
    if "post_norm" in p:
        write = _norm(config, write, p["post_norm"])
    if config.residual_multiplier != 1:
        write = write * config.residual_multiplier
    return added(hidden, write, keep, exact)


@dataclasses.dataclass(frozen=True)
class Cached:
    """An attention of tokens at slots int32[B, T], start[b] + t, that writes a layer's cache, then reads it.

    `ring` is as in `cache.write`, the others are as in `cache.attend`.
    """

    start: jax.Array
    slots: jax.Array
    window: kv.Window
    merged: bool
    ring: bool = False
    seen: jax.Array | None = None
    places: jax.Array | None = None
    exact: bool = False
    scores: Scores = Scores()

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer_cache: kv.Layer
    ) -> tuple[jax.Array, kv.Layer]:
        layer_cache = kv.write(layer_cache, k, v, self.start, self.merged, self.ring)
        how = self.window, self.merged, self.seen, self.places, self.exact, self.scores
        return kv.attend(q, layer_cache, self.slots, *how), layer_cache


@dataclasses.dataclass(frozen=True)
class Unwritten:
    """An attention of T tokens to the slots of a layer before them and to each other, which writes nothing.

    Attributes:
      slots: int32[B, T], their slots.
      last: int32[B, 1], the last place that holds a slot before them.
      before: bool[B, 1 or T, S], the slots that each of them sees.
      own: bool[B, T, T], the tokens that each of them sees.
      window, scores: as in `cache.attend`.
    """

    slots: jax.Array
    last: jax.Array
    before: jax.Array
    own: jax.Array
    window: kv.Window
    scores: Scores

    def __call__(
        self, layer: OneOf, q: jax.Array, k: jax.Array, v: jax.Array, rows: kv.Layer
    ) -> tuple[jax.Array, kv.Layer]:
        """Returns the attention, and what is to be written in the layer: `cache.stored` in place of `rows`."""
        rows = kv.stored(rows, k, v)
        begun = kv.sums_over(q, rows, self.own, self.scores)
        if isinstance(self.window, tuple):
            few = self.slots, self.last, self.window, True, self.scores, begun
            return kv.attend_some(q, layer, *few), rows
        mixed = kv.attend(q, layer, self.last, None, True, self.before, scores=self.scores, begun=begun)
        return mixed, rows


def cached(
    config: LlamaConfig, cache: KVCache, layers: range, start: jax.Array, count: int, tree: Tree | None
) -> tuple[jax.Array, dict[int | None, Attend]]:
    """Returns the attention over `count` tokens at slots start[b] + t, which writes a layer's cache, then reads it.

    Args:
      config, cache, layers, start, tree: as in `run_layers`.
      count: T, static.

    Returns:
      The positions of the tokens, int32[B, T], and the attention of the layers with each window.
    """
    slots = start[:, None] + jnp.arange(count)[None, :]

    def of_layer(layer: int) -> Attend:
        window, exact = _window(config, cache, layer), config.exact
        ring = cache.is_ring(cache.layers[layer][0])
        held = cache.held(layer, slots[:, -1])
        seen = None if tree is None else tree.visible(start, held, config.window(layer))
        places = tree.places(start, held) if exact and tree is not None else held if exact or ring else None
        return Cached(start, slots, window, cache.merged, ring, seen, places, exact, config.scores)

    positions = slots if tree is None else tree.positions(start)
    return positions, {window: of_layer(layer) for window, layer in _by_window(config, layers).items()}


def unwritten(
    config: LlamaConfig, cache: KVCache, layers: range, start: jax.Array, count: int, tree: Tree | None
) -> dict[int | None, Unwritten]:
    """Returns the attention of the layers with each window, as `cached` does, before their caches are written."""
    slots = start[:, None] + jnp.arange(count)[None, :]

    def of_layer(layer: int) -> Unwritten:
        window, places = _window(config, cache, layer), cache.layers[layer][0].shape[-2]
        held = cache.held(layer, jnp.maximum(start - 1, 0))

        def seen(slot: jax.Array) -> jax.Array:
            if tree is not None:
                return tree.visible(start, slot, config.window(layer))
            return kv.visible(slots, slot[:, None], window)

        before = (held < start[:, None])[:, None]
        if tree is not None or window is not None:
            before &= seen(held)
        last = jnp.minimum(start, places)[:, None] - 1
        return Unwritten(slots, last, before, seen(slots), window, config.scores)

    return {window: of_layer(layer) for window, layer in _by_window(config, layers).items()}


def _window(config: LlamaConfig, cache: KVCache, layer: int) -> kv.Window:
    """Returns the window of a layer, or the draft's if it has none and more slots than that one reads."""
    window, few = config.window(layer), config.draft_window
    reads_all = few is None or cache.layers[layer][0].shape[-2] <= sum(few)
    return window if reads_all or window is not None else few


def _by_window(config: LlamaConfig, layers: range) -> dict[int | None, int]:
    """Returns the first layer with each window. Layers with equal windows have as many places, and share a mask."""
    return {config.window(layer): layer for layer in reversed(layers)}


def run_layers(
    config: LlamaConfig,
    params: Params,
    hidden: jax.Array,
    start: jax.Array,
    cache: KVCache,
    *,
    plan: LayerPlan | jax.Array | None = None,
    layers: range | None = None,
    tree: Tree | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs layers over the rows of a batch, reading and writing the cache.

    Args:
      config: the model.
      params: its parameters.
      hidden: [B, T, D], the residual stream of tokens at positions start[b] + t.
      start: int32[B]; start + T must not exceed the cache's capacity, see `cache.write`.
      cache: contains every position below start[b] that these layers attend to.
      plan: the sublayers that run: None for all, a static `LayerPlan`, or a traced bool[L, 2]. A skipped
        sublayer is the identity on the residual stream. A traced plan has no reverse-mode gradient, because a loop
        carries the cache; training uses `run_block`.
      layers: the layers to run, None for all; `range(E)` is an early exit, `range(E, L)` the remaining layers.
      tree: if the tokens are rows of a tree, these rows. They are in slots start[b] + t, have positions by their
        depths, and see the slots before the tree and those on their own path.

    Returns:
      hidden [B, T, D] before the final norm, and the cache with these positions written.
    """
    ran = run_with_aux(config, params, hidden, start, cache, (), plan=plan, layers=layers, tree=tree)
    return ran.hidden, ran.cache


class Ran(NamedTuple):
    """The result of `run_with_aux`.

    Attributes:
      hidden: [B, T, D], before the final norm.
      aux_hidden_states: [B, T, F], concatenated over the auxiliary layers; None without any.
      cache: with these positions written.
      watched: the results of `watch`, [N, 2, ...] for N layers and their sublayers; None without it.
    """

    hidden: jax.Array
    aux_hidden_states: jax.Array | None
    cache: KVCache
    watched: jax.Array | None


def run_with_aux(
    config: LlamaConfig,
    params: Params,
    hidden: jax.Array,
    start: jax.Array,
    cache: KVCache,
    aux_layers: tuple[AuxLayer, ...],
    *,
    plan: LayerPlan | jax.Array | None = None,
    layers: range | None = None,
    watch: Watch | None = None,
    tree: Tree | None = None,
) -> Ran:
    """Runs layers as `run_layers` does, and collects auxiliary hidden states.

    On a CPU, layers of the same kind run as a loop (`numerics.LOOPED`), in which only the products with weights and
    caches are one operation for each layer. Its caches are written after the loop, because XLA would copy caches that
    several branches write.

    Args:
      config, params, hidden, start, cache, plan, layers, tree: as in `run_layers`.
      aux_layers: the places to collect, in this order, see `AuxLayer`; within the layers that run.
      watch: see `Watch`.

    Raises:
      ValueError: an auxiliary layer is outside the layers that run.
    """
    layers = range(config.num_layers) if layers is None else layers
    first, last = layers.start, layers.stop
    if foreign := [layer for layer in aux_layers if layer != FINAL and not first <= layer <= last]:
        raise ValueError(
            f"auxiliary layers {foreign} are outside the layers that run; give numbers from {first} to {last}"
        )
    period = _period(config, params, cache, layers, plan)
    trips = len(layers) // period if LOOPED.value and cache.merged and not config.exact else 0
    looped = layers[: trips * period if trips > 1 else 0]
    written, watched, streams = list(cache.layers), [], []
    types = {layer: config.layer_type(layer) for layer in layers}
    positions, attentions = cached(config, cache, layers, start, hidden.shape[1], tree)
    # In the order of the layers, so that each process traces the same program.
    turns = {
        of: rope.tables(config, of, positions, cache.rope_length) for of in dict.fromkeys(types.values())
    }

    def planned(layer: Any) -> Any:
        return (True, True) if plan is None else plan[layer]

    def run(
        layer: int, p: Params, attend: Attend, runs: Any, hidden: jax.Array, layer_cache: kv.Layer
    ) -> tuple[jax.Array, kv.Layer, jax.Array | None]:
        of, (run_attention, run_mlp) = turns[types[layer]], runs

        def attend_in(carry: tuple[jax.Array, kv.Layer]) -> tuple[jax.Array, kv.Layer]:
            return attention_sublayer(config, p["attention"], carry[0], of, attend, carry[1])

        between, layer_cache = once(run_attention, attend_in, (hidden, layer_cache))
        after = run_if(run_mlp, functools.partial(mlp, config, p["mlp"]), between)
        seen = None if watch is None else jnp.stack([watch(hidden, between), watch(between, after)])
        return after, layer_cache, seen

    if looped:
        reading = unwritten(config, cache, looped, start, hidden.shape[1], tree)
        places = [looped[place::period] for place in range(period)]
        equal = [_side_by_side([params["layers"][one] for one in which]) for which in places]

        def trip(hidden: jax.Array, given: Any) -> Any:
            (index, small), made = given, []
            for place, which in enumerate(places):
                layer, stream = which[0], hidden if aux_layers else None
                caches = OneOf(tuple(cache.layers[one] for one in which), index)
                attend = functools.partial(reading[config.window(layer)], caches)
                runs = planned(layer + period * index if isinstance(plan, jax.Array) else layer)
                rows = kv.no_rows(config, cache.layers[layer], hidden)
                hidden, rows, seen = run(
                    layer, equal[place][1](index, small[place]), attend, runs, hidden, rows
                )
                made.append((rows, seen, stream))
            return hidden, made

        with jax.named_scope("layers"):
            hidden, made = jax.lax.scan(trip, hidden, (jnp.arange(trips), [stacks for stacks, _ in equal]))
        for at, layer in enumerate(looped):
            rows, seen, stream = jax.tree.map(operator.itemgetter(at // period), made[at % period])
            ring = cache.is_ring(written[layer][0])
            written[layer] = kv.put_slots(written[layer], rows, start, cache.merged, ring)
            watched.append(seen)
            streams.append(stream)
    for layer in layers[len(looped) :]:
        attend = attentions[config.window(layer)]
        streams.append(hidden)
        with jax.named_scope(f"layer_{layer}"):  # for a reader of the compiled program
            ran = run(layer, params["layers"][layer], attend, planned(layer), hidden, written[layer])
        hidden, written[layer], seen = ran
        watched.append(seen)
    here = tuple(layer if layer == FINAL else layer - first for layer in aux_layers)
    return Ran(
        hidden,
        aux_hidden_states_of(config, params, [*streams, hidden], here) if here else None,
        dataclasses.replace(cache, layers=written),
        None if watch is None else jnp.stack(watched),
    )


def _period(
    config: LlamaConfig, params: Params, cache: KVCache, layers: range, plan: LayerPlan | jax.Array | None
) -> int:
    """Returns the smallest distance at which layers are of the same kind."""

    def kind(layer: int) -> Any:
        arrays, tree = jax.tree.flatten((params["layers"][layer], cache.layers[layer]))
        runs = plan[layer] if isinstance(plan, LayerPlan) else None
        return config.layer_type(layer), runs, tree, [(x.shape, x.dtype) for x in arrays]

    kinds = [kind(layer) for layer in layers]
    return next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), max(len(kinds), 1))


def _side_by_side(
    layers: list[Params],
) -> tuple[list[jax.Array], Callable[[jax.Array, list[jax.Array]], Params]]:
    """Returns the arrays of equal layers that are no operands of products, stacked: norms, biases and scales.

    Also returns a function, of the index of a layer and its arrays in these stacks, to the parameters of the layer. The
    products of int8 activations are split into arrays, because most of what surrounds them is equal in all layers.
    """

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Adapted) or (isinstance(node, Quantised) and node.outliers is None)

    trees = [jax.tree.flatten_with_path(layer, is_leaf=is_leaf) for layer in layers]
    names = [getattr(path[-1], "key", getattr(path[-1], "name", None)) for path, _ in trees[0][0]]
    each = list(zip(*([leaf for _, leaf in leaves] for leaves, _ in trees), strict=True))
    operands = [name in OPERANDS for name in names]

    def chosen(index: jax.Array, small: list[jax.Array]) -> Params:
        rest = iter(small)
        leaves = [
            OneOf(one, index) if is_operand else next(rest)
            for one, is_operand in zip(each, operands, strict=True)
        ]
        params: Params = jax.tree.unflatten(trees[0][1], leaves)
        return params

    stacks = [jnp.stack(one) for one, is_operand in zip(each, operands, strict=True) if not is_operand]
    return stacks, chosen


def aux_hidden_states_of(
    config: LlamaConfig, params: Params, streams: Sequence[jax.Array], aux_layers: tuple[AuxLayer, ...]
) -> jax.Array:
    """Returns the auxiliary hidden states [B, T, F] at `aux_layers`, from L layers' inputs and the last output.

    `streams` are these L + 1 residual streams, [B, T, D] each.
    """
    kept = [
        final_norm(config, params, streams[-1]) if layer == FINAL else streams[layer] for layer in aux_layers
    ]
    return jnp.concatenate(kept, axis=-1)


def run_block(
    config: LlamaConfig,
    of: LayerType,
    p: Params,
    hidden: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    keep: jax.Array | None = None,
) -> jax.Array:
    """Runs one layer without a cache, for training: every token attends within its own segment.

    Args:
      config: the model.
      of: the type of the layer, from `config.layer_type`.
      p: one entry of `params["layers"]`.
      hidden: [B, T, D].
      positions: int32[B, T], counted from the start of each segment.
      segments: int32[B, T], the number of the packed document of each token.
      keep: bool[B], the rows for which the layer runs; it is the identity for the others. None for all rows.

    Returns:
      hidden [B, T, D].
    """
    turns = rope.tables(config, of, positions, jnp.zeros(hidden.shape[0], jnp.int32))
    attend = packed(positions, segments, of.window, config.scores)
    # `keep` multiplies each sublayer's output. With a `where` over the whole layer, XLA's CPU compiler computes the
    # stream below again in each of its readers: a backward pass took twice the time.
    hidden, _ = attention_sublayer(config, p["attention"], hidden, turns, attend, None, keep)
    return mlp(config, p["mlp"], hidden, keep)


def packed(
    positions: jax.Array, segments: jax.Array, window: int | None = None, scores: Scores = Scores()
) -> Attend:
    """Returns an attention without a cache, for training; `positions` and `segments` as in `run_block`."""
    same = segments[:, :, None] == segments[:, None, :]
    mask = same & kv.visible(positions, positions[:, None, :], window)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer_cache: None) -> tuple[jax.Array, None]:
        # No query sees a later key, so a chunk of queries needs only the keys up to its own end.
        mixed = []
        for begin in range(0, q.shape[1], QUERIES_AT_ONCE):
            end = min(begin + QUERIES_AT_ONCE, q.shape[1])
            split = (k[:, :end].swapaxes(1, 2), v[:, :end].swapaxes(1, 2))
            mixed.append(kv.attend_where(q[:, begin:end], split, mask[:, begin:end, :end], False, scores))
        return jnp.concatenate(mixed, axis=1), layer_cache

    return attend


def forward(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    start: jax.Array,
    cache: KVCache,
    *,
    plan: LayerPlan | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Embeds tokens int32[B, T] at start[b] + t, runs all layers and applies the head.

    Returns:
      logits float32[B, T, V], hidden [B, T, D] before the final norm, cache. See `run_layers`.
    """
    hidden, cache = run_layers(config, params, embed(config, params, tokens), start, cache, plan=plan)
    return logits(config, params, hidden), hidden, cache
