"""The key/value cache: fixed size, slot = position, no cursor.

The positions alone decide which slots a query sees, so a rollback is free: stale slots are invisible and
are overwritten later.

A layer with an attention window is a ring of R places if the capacity is larger: place p mod R holds slot p. A write to
slot p drops slot p − R, and a stale slot p is read as slot p − R. No query sees slot p − R, because a ring has at least
`SPARE` places more than its window. A pass that writes T rows needs T of them, and as many for the stale slots of the
pass before. The rest serves texts that continue from a slot before the last (`KVCache.continues`).

The memory layout of a layer is private to this file:

* merged, `[B·KV, S, hd]`: on one device. With `[B, KV, S, hd]` and one row, XLA copies every cache twice
  a step.
* split, `[B, KV, S, hd]`: on a mesh, where a merged axis cannot be divided by heads.

With `LlamaConfig.kv_cache_dtype` int8, keys and values are whole numbers of −127 to 127, and two more buffers,
`[..., S, 1]`, hold the largest magnitude of each key and of each value. (A TPU lays these out with the slots as the
last axis, without padding.) Products read the numbers, and the magnitudes multiply scores and weights of the softmax.
Divided by 127, they would often be too small for weights in float16.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jaxspec.model.config import LlamaConfig, Scores
from jaxspec.model.control import OneOf, apply_to_chosen, one_of
from jaxspec.model.numerics import (
    LANES,
    SUMMED,
    TPU_LANES,
    TPU_ROWS,
    capped,
    filled,
    of_two_rows,
    precision_of,
    sums,
)

# Up to this many rows a write is one in-place slice update per row; above, one scatter.
UNROLLED_ROWS = 8
# Slots per block where attention follows the live length on a CPU; on an accelerator a block has this many or more.
BLOCK = 128
# Above this number of scores, attention on a CPU always runs block by block: 16 MB in float32.
MOST_SCORES = 2**22
# The most scores of a block on an accelerator: 32 MB in float32, a quarter of the fast memory of a TPU.
SCORES_AT_ONCE = 2**23
# On a TPU a step reads only this many of the first slots if its texts have no more, else four times as many, and so on.
SHORTEST = 2048
# The most queries of a key/value head for which a product with an int8 cache is `_summed`: XLA reads the cache once for
# two to four of them, and writes it in 16 bits for a product.
SUMMED_QUERIES = 8
# The most queries of a key head, and the fewest heads of all rows, with which a product on a CPU is a sum, see
# `_summed_together`. For fewer heads it is as fast as a product, and has more instructions.
FEW_QUERIES, MANY_HEADS = 4, 9
# The most tokens of a text that a pass may write to a ring, and the places of a ring beside its window.
MOST_ROWS = 256
SPARE = 2 * MOST_ROWS + BLOCK
# The value of a masked score. It is finite, so that a block without visible slots gives no NaN.
_MASKED = -1e30

# Keys and values [..., S, hd]; with an int8 cache also the largest magnitudes of both, [..., S, 1]. The last buffer has
# the dtype of the computation.
Layer = tuple[jax.Array, ...]
# An attention window in positions, None for all, or `LlamaConfig.draft_window`.
Window = int | tuple[int, int] | None
# The largest whole number of an int8 cache.
_LEVELS = 127
# The sums of attention over some blocks: numerator [..., hd], denominator and maximum [..., 1].
Sums = tuple[jax.Array, jax.Array, jax.Array]


@struct.dataclass
class KVCache:
    """Keys and values of every layer.

    Attributes:
      layers: the buffers of each of the L layers; the layout is private to this file.
      rope_length: int32[B], the length of each row's prompt. Only dynamic RoPE reads it, see `rope.tables`.
      merged: whether the layout is merged, static.
      capacity: the slots per row, static.
      most: the most places of each layer, static; None for the capacity.
    """

    layers: list[Layer]
    rope_length: jax.Array
    merged: bool = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)
    most: tuple[int | None, ...] = struct.field(pytree_node=False)

    def is_ring(self, buffer: jax.Array) -> bool:
        """Whether a buffer of a layer has fewer places than slots."""
        return buffer.shape[-2] < self.capacity

    def held(self, layer: int, last: jax.Array) -> jax.Array:
        """Returns the slot that each place of a layer holds, int32[B, S], after a write to slots up to last int32[B].

        For a layer that is no ring the result is [1, S].
        """
        buffer = self.layers[layer][0]
        size = buffer.shape[-2]
        place = jnp.arange(size)[None]
        if not self.is_ring(buffer):
            return place
        lap = (last - last % size)[:, None]
        # In the first lap, the places after the last one hold later slots, which no query sees.
        return place + jnp.where(place <= last[:, None] - lap, lap, jnp.maximum(lap - size, 0))

    def continues(self, length: int, start: int) -> bool:
        """Whether a text can continue at slot `start` of a row that has held a text of `length` tokens.

        A ring that has dropped slots still holds what the last of its text saw, of `SPARE` − 2 · `MOST_ROWS` tokens.
        """
        rings = (most for most in self.most if most is not None)
        return start >= length - SPARE + 2 * MOST_ROWS or all(length + MOST_ROWS <= most for most in rings)


def create(
    config: LlamaConfig, batch_size: int, capacity: int, dtype: DTypeLike, merged: bool = True
) -> KVCache:
    """Returns an empty cache of `capacity` slots per row."""
    heads = (batch_size * config.held_kv_heads,) if merged else (batch_size, config.held_kv_heads)

    def layer(size: int) -> Layer:
        of = _widths(config, np.dtype(dtype))
        return tuple(jnp.zeros((*heads, size, width), kind) for width, kind in of)

    most = most_places(config)
    layers = [layer(size) for size in _sizes(most, capacity)]
    return KVCache(layers, jnp.zeros(batch_size, jnp.int32), merged, capacity, most)


def most_places(config: LlamaConfig) -> tuple[int | None, ...]:
    """Returns the most places of each layer; None for as many as a text has slots."""
    windows = [None if config.exact else config.window(layer) for layer in range(config.num_layers)]
    return tuple(None if window is None else -(-(window + SPARE) // BLOCK) * BLOCK for window in windows)


def _sizes(most: tuple[int | None, ...], capacity: int) -> list[int]:
    """Returns the number of places of each layer."""
    return [capacity if size is None else min(size, capacity) for size in most]


def _widths(config: LlamaConfig, dtype: np.dtype) -> list[tuple[int, np.dtype]]:
    """Returns the size of the last axis and the dtype of each buffer of a layer, for weights of a dtype."""
    if config.kv_cache_dtype == "int8":
        return [(config.head_dim, np.dtype(np.int8))] * 2 + [(1, dtype)] * 2
    return [(config.head_dim, dtype)] * 2


def size_bytes(config: LlamaConfig, batch_size: int, capacity: int, dtype: DTypeLike) -> int:
    """Returns the bytes of the layers that `create` would allocate."""
    of_head = sum(width * kind.itemsize for width, kind in _widths(config, np.dtype(dtype)))
    return of_head * config.held_kv_heads * batch_size * sum(_sizes(most_places(config), capacity))


@jax.named_scope("cache")
def write(
    layer: Layer, keys: jax.Array, values: jax.Array, start: jax.Array, merged: bool, ring: bool = False
) -> Layer:
    """Writes keys and values [B, T, KV, hd] to slots start[b] … start[b] + T − 1 of row b.

    The caller guarantees start + T ≤ S unless the layer is a ring: XLA would silently move a slice that reaches past
    the end.

    If an element of a key or of its value is not finite, the value's element is stored as 0 and the key's as NaN. A
    query that sees the slot then gets NaN through its score. For a query that does not see it, the weight 0 times a
    value of NaN would be NaN; with 0 it is 0. So a padded or rejected token cannot spoil a text. In an int8 cache the
    largest magnitudes take the place of the elements.
    """
    return put_slots(layer, stored(layer, keys, values), start, merged, ring)


def stored(layer: Layer, keys: jax.Array, values: jax.Array) -> Layer:
    """Returns keys and values [B, T, KV, hd] as `write` stores them in a layer, [B, T, KV, ·] each."""
    new = keys, values
    if len(layer) > 2:
        keys, values = (jnp.max(jnp.abs(x), axis=-1, keepdims=True) for x in new)
    keys, values = (x.astype(layer[-1].dtype) for x in (keys, values))  # may exceed the range of float16
    nan_or_zero = 0 * keys + 0 * values  # 0 or NaN
    clean: Layer = (keys + nan_or_zero, jnp.where(nan_or_zero == 0, values, 0))
    return clean if len(layer) == 2 else (*map(_whole, new, clean), *clean)


def no_rows(config: LlamaConfig, layer: Layer, hidden: jax.Array) -> Layer:
    """Returns zeros in place of `stored`, for tokens whose residual stream is hidden [B, T, D]."""
    shape = (*hidden.shape[:2], config.held_kv_heads)
    return tuple(jnp.zeros((*shape, x.shape[-1]), x.dtype) for x in layer)


def put_slots(layer: Layer, new: Layer, start: jax.Array, merged: bool, ring: bool = False) -> Layer:
    """Writes the results of `stored` to slots start[b] … start[b] + T − 1 of row b, see `write`."""
    return tuple(_put(buffer, x, start, merged, ring) for buffer, x in zip(layer, new, strict=True))


def _whole(x: jax.Array, largest: jax.Array) -> jax.Array:
    """Returns x [..., hd] ÷ `largest` [..., 1], its magnitude, as int8 of −127 to 127; 0 where that is 0 or NaN."""
    shares = x.astype(jnp.float32) / largest.astype(jnp.float32)
    numbers = jnp.clip(jnp.round(shares * _LEVELS), -_LEVELS, _LEVELS)
    return jnp.where(largest > 0, numbers, 0).astype(jnp.int8)


def _put(buffer: jax.Array, new: jax.Array, start: jax.Array, merged: bool, ring: bool) -> jax.Array:
    """Returns the buffer with `new` [B, T, KV, hd] in slots start[b] … start[b] + T − 1 of row b."""
    batch, length, kv_heads, _ = new.shape
    new = new.swapaxes(1, 2)  # [B, KV, T, hd]
    if ring:
        check_rows(length)
        start %= buffer.shape[-2]
    if merged and batch <= UNROLLED_ROWS and (length == 1 or not ring):
        for row in range(batch):
            corner = (row * kv_heads, start[row], 0)
            buffer = jax.lax.dynamic_update_slice(buffer, new[row], corner, allow_negative_indices=False)
        return buffer
    split = buffer.reshape(batch, kv_heads, *buffer.shape[-2:])
    rows = jnp.arange(batch)[:, None, None]
    heads = jnp.arange(kv_heads)[None, :, None]
    slots = start[:, None, None] + jnp.arange(length)[None, None, :]
    slots = slots % buffer.shape[-2] if ring else slots
    split = split.at[rows, heads, slots].set(new, mode="drop", unique_indices=True)
    return split.reshape(buffer.shape)


def as_read(cache: KVCache) -> KVCache:
    """Returns a cache that was written without being read, in the layout in which a TPU's products read it.

    There the slots of a head that is narrower than the lanes are on the lanes. XLA would choose another layout for such
    a write, and then copy the whole cache before each read. A mesh decides by itself.
    """

    def held(buffer: jax.Array) -> jax.Array:
        if not cache.merged or buffer.shape[-1] >= TPU_LANES:
            return buffer
        same: jax.Array = jax.lax.platform_dependent(
            buffer,
            tpu=lambda one: with_layout_constraint(one, Layout((0, 2, 1))),
            default=lambda one: one,
        )
        return same

    return dataclasses.replace(cache, layers=jax.tree.map(held, cache.layers))


def check_rows(count: int) -> None:
    """Raises ValueError if a pass writes more tokens of a text than a ring has places for."""
    if count > MOST_ROWS:
        raise ValueError(
            f"a pass writes {count} tokens of a text, and a layer with a sliding window takes {MOST_ROWS} at most; "
            "draft fewer tokens, or a smaller tree"
        )


@jax.named_scope("cache")
def move(cache: KVCache, start: jax.Array, path: jax.Array, rows: int) -> KVCache:
    """Copies slots start[b] + path[b, t] of every layer to slots start[b] + t.

    Keys are not rotated again: entry t of a path through a tree is the token at position start[b] + t.

    Args:
      cache: has at least start + R slots.
      start: int32[B].
      path: int32[B, T], offsets below R.
      rows: R, at least T, static.
    """
    batch = len(cache.rope_length)
    within = path[:, None, :, None]

    def gathered(slots: jax.Array) -> jax.Array:
        return jnp.take_along_axis(slots, within, axis=2, mode="clip")

    def take(buffer: jax.Array) -> jax.Array:
        split = buffer.reshape(batch, -1, *buffer.shape[-2:])
        if cache.merged and batch <= UNROLLED_ROWS and not cache.is_ring(buffer):
            # Slice first: to gather from the whole buffer, a TPU would copy all slots.
            few = _part(buffer, batch, start, rows, True).reshape(*split.shape[:2], rows, -1)
            # For a gather, a TPU would keep the whole cache in a layout that its products do not read.
            selected = functools.partial(summed_along, path=path)
            taken: jax.Array = jax.lax.platform_dependent(few, tpu=selected, default=gathered)
        else:
            place = within + start[:, None, None, None]
            place = place % buffer.shape[-2] if cache.is_ring(buffer) else place
            taken = jnp.take_along_axis(split, place, axis=2, mode="clip")
        return taken.swapaxes(1, 2)

    # The barrier separates reads from writes: XLA copies a buffer that one operation both reads and writes.
    taken = jax.lax.optimization_barrier(jax.tree.map(take, cache.layers))

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return _put(buffer, new, start, cache.merged, cache.is_ring(buffer))

    return dataclasses.replace(cache, layers=jax.tree.map(put, cache.layers, taken))


def _part(buffer: jax.Array, batch: int, start: jax.Array, count: int, merged: bool) -> jax.Array:
    """Returns slots start[b] … start[b] + count − 1 of row b, in the layout of the buffer, which is no ring."""
    split = buffer.reshape(batch, -1, *buffer.shape[-2:])
    if merged and batch <= UNROLLED_ROWS:
        size = (1, *split.shape[1:2], count, split.shape[-1])
        taken = jnp.concatenate(
            [jax.lax.dynamic_slice(split, (row, 0, start[row], 0), size) for row in range(batch)]
        )
    else:
        place = (start[:, None] + jnp.arange(count))[:, None, :, None]
        taken = jnp.take_along_axis(split, place, axis=2, mode="clip")
    return taken.reshape(*buffer.shape[:-2], count, -1)


def summed_along(slots: jax.Array, path: jax.Array) -> jax.Array:
    """Returns slots [B, KV, R, hd] along a path int32[B, P] as [B, KV, P, hd], without a gather."""
    here = path[..., None] == jnp.arange(slots.shape[2])
    few = jnp.where(here[:, None, :, :, None], slots[:, :, None], 0)
    return jnp.sum(few, axis=3, dtype=slots.dtype)


@jax.named_scope("attend")
def attend(
    queries: jax.Array,
    layer: Layer | OneOf,
    positions: jax.Array,
    window: Window,
    merged: bool,
    seen: jax.Array | None = None,
    places: jax.Array | None = None,
    exact: bool = False,
    scores: Scores = Scores(),
    begun: Sums | None = None,
) -> jax.Array:
    """Attention of queries [B, T, KV, G, hd] at positions int32[B, T] over a layer's slots.

    A query sees the slots up to its own position, or those of `window`. In a tree, `seen` bool[B, T, S] marks
    the visible slots instead, and `positions` are the slots of the queries. `places`, int32[B, S], is the position of
    each slot, or in a ring the slot in each place; None where it is the number of the place. `exact` is that of
    `LlamaConfig`, and needs `places`. `begun` are the sums over keys that are not in the layer, see `sums_over`.

    Returns:
      [B, T, KV, G, hd].
    """
    if isinstance(window, tuple):

        def some(queries: jax.Array, layer: Layer, positions: jax.Array) -> jax.Array:
            return attend_some(queries, layer, positions, positions, window, merged, scores, begun)

        def apart(queries: jax.Array, *given: Any) -> jax.Array:
            # Else XLA would fuse a slice with the write before it, and copy the cache, which both then read.
            ran: jax.Array = jax.lax.cond(
                jnp.any(given[1] >= 0), some, lambda queries, *_: jnp.zeros_like(queries), queries, *given
            )
            return ran

        found: jax.Array = jax.lax.platform_dependent(queries, layer, positions, cpu=apart, default=some)
        return found
    slots = one_of(layer)[0].shape[-2]
    if exact and places is not None:
        assert not isinstance(layer, OneOf)
        return _by_positions(queries, layer, positions, window, merged, places, seen, scores)
    num_queries = queries.size // queries.shape[-1]
    # Blocks before the window are left out, except where the order of the places is not that of the positions.
    skipped = window if seen is None and places is None else None

    def whole(
        queries: jax.Array,
        positions: jax.Array,
        layer: Layer | OneOf,
        seen: Any,
        places: Any,
        begun: Sums | None = None,
        apart: bool = False,
    ) -> jax.Array:
        if seen is None:
            assert not isinstance(layer, OneOf)
            slot = jnp.arange(layer[0].shape[-2])[None] if places is None else places
            seen = visible(positions, slot[:, None], window)
        return attend_where(queries, layer, seen, merged, scores, apart, begun)

    if slots <= BLOCK or slots % BLOCK:
        return whole(queries, positions, layer, seen, places, begun)

    blocks = functools.partial(_by_blocks, window=window, skipped=skipped, merged=merged, scores=scores)
    by_blocks = functools.partial(blocks, width=BLOCK)

    def by_live_length(queries: jax.Array, positions: jax.Array, *others: Any) -> jax.Array:
        # Slicing blocks takes a CPU more than half of the time for few queries, and less for many.
        share = 0.5 if queries.shape[1] <= 4 else 0.75
        first = _first_block(positions, skipped, BLOCK)
        mostly_live = jnp.max(positions) + 1 - first * BLOCK > share * slots
        attended: jax.Array = jax.lax.cond(mostly_live, whole, by_blocks, queries, positions, *others)
        return attended

    # The scores of all slots must fit into a processor's cache.
    on_cpu = by_live_length if num_queries * slots <= MOST_SCORES else by_blocks
    if isinstance(layer, OneOf):
        return on_cpu(queries, positions, layer, seen, places, begun)
    # On an accelerator the scores of a block must fit into fast memory. As long as those of all slots do, a loop would
    # only make each layer wait for its predicate; there the capacity bounds the cost.
    width = block_on_accelerator(num_queries)

    def on_accelerator(queries: jax.Array, positions: jax.Array, *others: Any) -> jax.Array:
        # A TPU would write a mask that all heads share once for each head. Compared with the positions of each head,
        # the slots become a part of the product.
        shape = (len(positions), num_queries // positions.size, positions.shape[1])
        by_head = jnp.broadcast_to(positions[:, None], shape)
        return blocks(queries, by_head, *others, width=width)

    # A TPU decides by itself how many of the first slots it reads; a GPU would wait for its host in each layer.
    lengths = [n for n in (SHORTEST * 4**i for i in range(16)) if n < slots]

    def shortest(queries: jax.Array, positions: jax.Array, *others: Any) -> jax.Array:
        def read(
            length: int, queries: jax.Array, positions: jax.Array, layer: Layer, *both: Any
        ) -> jax.Array:
            first = tuple(x[..., :length, :] for x in layer)
            seen, places = jax.tree.map(lambda x: x[..., :length], both)
            return whole(queries, positions, first, seen, places, apart=merged and queries.shape[1] > 1)

        index = jnp.sum(jnp.max(positions) >= jnp.array(lengths, jnp.int32))
        branches = [functools.partial(read, length) for length in (*lengths, slots)]
        attended: jax.Array = jax.lax.switch(index, branches, queries, positions, *others)
        return attended

    default, on_tpu = (on_accelerator, on_accelerator) if width < slots else (whole, shortest)
    attended: jax.Array = jax.lax.platform_dependent(
        queries, positions, layer, seen, places, cpu=on_cpu, tpu=on_tpu, default=default
    )
    return attended


@jax.named_scope("attend")
def attend_some(
    queries: jax.Array,
    layer: Layer | OneOf,
    positions: jax.Array,
    last: jax.Array,
    window: tuple[int, int],
    merged: bool,
    scores: Scores,
    begun: Sums | None = None,
) -> jax.Array:
    """Attention over few slots of a layer that is no ring, as many for a text of any length.

    Args:
      queries, layer, merged, scores, begun: as in `attend`.
      positions: int32[B, T], consecutive.
      last: int32[B, T] or [B, 1], the last slot of the layer that each query may see.
      window: `LlamaConfig.draft_window`.

    Returns:
      [B, T, KV, G, hd].
    """
    (batch, count), slots = positions.shape, one_of(layer)[0].shape[-2]
    sinks, near = window
    size = min(near + count - 1, slots)

    def over(first: jax.Array, size: int, beyond: int) -> Sums:
        """Returns the sums over the slots first[b] … first[b] + size − 1 that are at least `beyond`."""

        slot = (first[:, None] + jnp.arange(size))[:, None]
        seen = visible(positions, slot, window) & (slot <= last[..., None]) & (slot >= beyond)
        cut = functools.partial(_part, batch=batch, start=first, count=size, merged=merged)
        return _partial_softmax(_by_key_head(queries, merged), layer, seen, scores, cut)

    begin = jnp.clip(positions[:, 0] - near + 1, 0, slots - size)
    found = [over(begin, size, sinks), *([] if begun is None else [begun])]
    if sinks:
        # A 0 that XLA does not know: for a static slice, its CPU would copy a whole cache that the same loop writes.
        found.append(over(jnp.minimum(positions[:, 0], 0), sinks, 0))
    mixed, total, _ = functools.reduce(_joined, found)
    return _by_query(mixed / total, queries)


def block_on_accelerator(num_queries: int) -> int:
    """Returns the most slots whose scores an accelerator computes at once, for rows × tokens × heads queries."""
    return max(BLOCK, 1 << (SCORES_AT_ONCE // num_queries).bit_length() - 1)


def attend_where(
    queries: jax.Array,
    layer: Layer | OneOf,
    seen: jax.Array,
    merged: bool,
    scores: Scores = Scores(),
    apart: bool = False,
    begun: Sums | None = None,
) -> jax.Array:
    """Attention of queries [B, T, KV, G, hd] over the slots where `seen` bool[B, T, S] → [B, T, KV, G, hd].

    If `apart`, queries that share keys are not adjacent: one product per query head, which reads the keys of its group.
    `begun` is as in `attend`.
    """
    q, (_, length, _, group, _) = _by_key_head(queries, merged), queries.shape
    if apart:
        q = q.reshape(*q.shape[:-2], group, length, q.shape[-1])
        assert not isinstance(layer, OneOf)
        layer = tuple(jnp.broadcast_to(x[..., None, :, :], (*q.shape[:-2], *x.shape[-2:])) for x in layer)
    sums = _partial_softmax(q, layer, seen, scores)
    mixed, total, _ = sums if begun is None else _joined(begun, sums)
    return _by_query(mixed / total, queries)


def sums_over(queries: jax.Array, rows: Layer, seen: jax.Array, scores: Scores) -> Sums:
    """Returns the sums of queries [B, T, KV, G, hd] over the results of `stored` where `seen` bool[B, T, T]."""
    merged = tuple(x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in rows)
    return _partial_softmax(_by_key_head(queries, True), merged, seen, scores)


def _joined(one: Sums, other: Sums) -> Sums:
    """Returns the sums over the slots of both, which are rescaled to the common maximum before they are added."""
    (mixed, total, top), (new_mixed, new_total, new_top) = one, other
    highest = jnp.maximum(top, new_top)
    old, new = jnp.exp(top - highest), jnp.exp(new_top - highest)
    return mixed * old + new_mixed * new, total * old + new_total * new, highest


def _by_key_head(queries: jax.Array, merged: bool) -> jax.Array:
    """Returns [B·KV, G·T, hd] or [B, KV, G·T, hd]: queries that share keys are adjacent, one product per key head."""
    batch, length, kv_heads, group, head_dim = queries.shape
    heads = (batch * kv_heads,) if merged else (batch, kv_heads)
    return queries.transpose(0, 2, 3, 1, 4).reshape(*heads, group * length, head_dim)


def _by_query(mixed: jax.Array, queries: jax.Array) -> jax.Array:
    """Reverts `_by_key_head`: returns [B, T, KV, G, hd] in the dtype of the queries."""
    batch, length, kv_heads, group, head_dim = queries.shape
    mixed = mixed.astype(queries.dtype).reshape(batch, kv_heads, group, length, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4)


def _partial_softmax(
    q: jax.Array,
    layer: Layer | OneOf,
    seen: jax.Array,
    scores: Scores,
    cut: Callable[[jax.Array], jax.Array] = lambda buffer: buffer,
) -> Sums:
    """Returns the unnormalised softmax over the slots that `cut` leaves of each buffer; `seen` is as in `_masked`."""
    buffers = one_of(layer)
    dtype = buffers[-1].dtype
    q = q.astype(dtype)
    # Only the products differ by layer: the largest magnitudes are small enough to be copied.
    largest = [apply_to_chosen(layer, lambda layer, at=at: cut(layer[at])) for at in range(2, len(buffers))]
    products = apply_to_chosen(layer, lambda layer, q: _batched_product(q, cut(layer[0]), 1), q)
    scored = _masked(_scaled(products, q.shape[-1], scores, *largest[:1]), seen)
    if isinstance(layer, OneOf):
        scored = jax.lax.optimization_barrier(scored)  # two maxima read it
    # The maximum cancels out, so its gradient is zero.
    top = jax.lax.stop_gradient(jnp.max(scored, axis=-1, keepdims=True))
    weights = jnp.exp(scored - top)
    if isinstance(layer, OneOf):
        # XLA's library for a CPU computes the exponentials if nothing else reads the maximum.
        top = -jnp.min(-scored, axis=-1, keepdims=True)
    rounded = weights.astype(dtype)

    def by_product(weights: jax.Array, rounded: jax.Array) -> jax.Array:
        # XLA replaces a product with a single column by a sum, which takes fewer cycles for few rows.
        columns = TPU_ROWS if q.shape[-2] > LANES else 1
        ones, precision = jnp.ones((rounded.shape[-1], columns), dtype), precision_of(dtype)
        return jnp.matmul(rounded, ones, precision=precision, preferred_element_type=jnp.float32)[..., :1]

    def by_sum(weights: jax.Array, rounded: jax.Array) -> jax.Array:
        return jnp.sum(weights, axis=-1, keepdims=True)

    # By the compiler's estimate, the vector unit of a TPU takes six times as long for the sums as the matrix unit takes
    # for both products.
    total = jax.lax.platform_dependent(weights, rounded, tpu=by_product, default=by_sum)
    if largest:
        rounded = (weights * _by_slot(largest[1])).astype(dtype)
    mixed = apply_to_chosen(
        layer, lambda layer, rounded: _batched_product(rounded, cut(layer[1]), 0), rounded
    )
    return mixed * (1 / _LEVELS) if largest else mixed, total, top


def _by_slot(largest: jax.Array) -> jax.Array:
    """Returns the magnitudes [..., S, 1] of an int8 cache as float32[..., 1, S]."""
    return largest.swapaxes(-1, -2).astype(jnp.float32)


def _scaled(products: jax.Array, head_dim: int, scores: Scores, *largest: jax.Array) -> jax.Array:
    """Returns the scores [..., S] of products with keys; `largest`: of keys in int8, their magnitudes [..., S, 1]."""
    scored = products * (1.0 / math.sqrt(head_dim) if scores.scale is None else scores.scale)
    for each in largest:
        scored *= _by_slot(each) * (1 / _LEVELS)
    return capped(scored, scores.cap)


def _masked(scored: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns scores [..., S] where `seen` bool[B, T, S], or by head bool[B, KV·G, T, S], else `_MASKED`."""
    batch, *_, length, slots = seen.shape
    # Key heads have an axis of their own: over two axes, a TPU would write the mask once for each head.
    split = scored.reshape(batch, -1, scored.shape[-2] // length, length, slots)
    by_head = seen[:, None, None] if seen.ndim == 3 else seen.reshape(split.shape)
    return jnp.where(by_head, split, _MASKED).reshape(scored.shape)


def visible(positions: jax.Array, slots: jax.Array, window: Window) -> jax.Array:
    """Returns the mask of the slots [..., S] that queries at positions [B, ..., T] see, bool[B, ..., T, S]."""
    mask = slots <= positions[..., None]
    if window is None:
        return mask
    sinks, last = window if isinstance(window, tuple) else (0, window)
    near = slots > positions[..., None] - last
    return mask & (near | (slots < sinks) if sinks else near)


def _batched_product(a: jax.Array, b: jax.Array, contract: int, exact: bool = False) -> jax.Array:
    """Returns a [..., M, K] times b [..., N, K] (contract 1) or b [..., K, N] (contract 0), float32[..., M, N].

    b is in the dtype of a, or in int8. `exact`: see `linear`.
    """
    heads, last = tuple(range(a.ndim - 2)), a.ndim - 1
    dims = (((last,), (last - 1 + contract,)), (heads, heads))
    precision = precision_of(a.dtype)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        b = b.astype(a.dtype)
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    if b.dtype == jnp.int8 and SUMMED.value and a.shape[-2] <= SUMMED_QUERIES:
        summed: jax.Array = jax.lax.platform_dependent(
            a, b, cuda=functools.partial(_summed, contract), default=product
        )
        return summed
    many = a.ndim == 3 and a.shape[0] >= MANY_HEADS and a.shape[1] <= FEW_QUERIES
    if many and a.dtype == b.dtype == jnp.float32 and not exact:
        few: jax.Array = jax.lax.platform_dependent(
            a, b, cpu=functools.partial(_summed_together, contract), default=product
        )
        return few
    if a.shape[-2] > 1 or exact:
        return of_two_rows(lambda a: product(a, b), a)
    alone = functools.partial(filled, product)
    mixed: jax.Array = jax.lax.platform_dependent(a, b, tpu=alone, default=product)
    return mixed


def _summed(contract: int, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `_batched_product` as sums over b, which a CUDA device reads in int8, see `numerics.SUMMED`."""
    wide, rows = b.astype(jnp.float32), jnp.moveaxis(a, -2, 0).astype(jnp.float32)
    axis = -1 if contract else -2
    return jnp.stack([jnp.sum(wide * jnp.expand_dims(row, -3 - axis), axis) for row in rows], axis=-2)


def _summed_together(contract: int, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `_batched_product` as sums, which a CPU divides over its threads; XLA's library takes a single one."""
    if not contract:
        return jnp.sum(a[..., None] * b[:, None], axis=2)
    # One reduction for all queries reads b once.
    rows = tuple(b * jax.lax.slice_in_dim(a, row, row + 1, axis=1) for row in range(a.shape[1]))
    zeros = (jnp.zeros((), b.dtype),) * len(rows)
    each = jax.lax.reduce(rows, zeros, lambda x, y: tuple(map(jnp.add, x, y)), (2,))
    return jnp.stack(each, axis=1)


def _by_blocks(
    queries: jax.Array,
    positions: jax.Array,
    layer: Layer | OneOf,
    mask: jax.Array | None,
    places: jax.Array | None,
    begun: Sums | None = None,
    *,
    window: int | None,
    skipped: int | None,
    merged: bool,
    width: int,
    scores: Scores,
) -> jax.Array:
    """Attention over the visible slots only, block by block, with a running softmax (Milakov & Gimelshein 2018).

    `positions` are int32[B, T], or by head int32[B, KV·G, T]; `mask` is `seen` of `attend`; `skipped` is the window
    before which blocks are left out, or None.

    The cost follows the live length, or the window, not the capacity. A block without visible slots adds exactly 0 to a
    row. The longest row of a batch decides between this and one product over all slots, so it can change the last bits
    of the other rows.
    """
    q = _by_key_head(queries, merged)
    slots = one_of(layer)[0].shape[-2]

    def cut(layer: Layer, begin: jax.Array) -> Layer:
        # An index that may be negative takes three more instructions.
        sliced = functools.partial(jax.lax.dynamic_slice_in_dim, allow_negative_indices=False)
        return tuple(sliced(x, begin, width, q.ndim - 2) for x in layer)

    def add(index: jax.Array, sums: Sums) -> Sums:
        first = index * width
        # The last block may begin earlier; its first slots are then those of the block before.
        begin = first if slots % width == 0 else jnp.minimum(first, slots - width)
        block = apply_to_chosen(layer, cut, begin)
        slot = place = begin + jnp.arange(width)[None, None]
        if mask is not None:
            seen = jax.lax.dynamic_slice_in_dim(mask, begin, width, 2)
        else:
            if places is not None:
                slot = jax.lax.dynamic_slice_in_dim(places, begin, width, 1)
                slot = jnp.expand_dims(slot, tuple(range(1, positions.ndim)))
            seen = visible(positions, slot, window)
        if slots % width:
            seen &= place >= first
        return _joined(sums, _partial_softmax(q, block, seen, scores))

    live = positions if places is None else jnp.minimum(positions, slots - 1)
    return _by_query(_over_blocks(q, live, skipped, width, add, begun), queries)


def _over_blocks(
    q: jax.Array,
    positions: jax.Array,
    window: int | None,
    width: int,
    add: Callable[[jax.Array, Sums], Sums],
    begun: Sums | None = None,
) -> jax.Array:
    """Returns the attention [..., hd] of q [..., hd], summed over the blocks with slots that a query may see.

    `add` returns the sums with a block, whose index it gets, added; `begun` are the sums before the first block.
    """
    live = jnp.max(positions) + 1

    def body(carry: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
        index, sums = carry
        return index + 1, add(index, sums)

    column = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    begun = begun or (jnp.zeros(q.shape, jnp.float32), column, column + _MASKED)
    first = _first_block(positions, window, width)
    _, (mixed, total, _) = jax.lax.while_loop(lambda carry: carry[0] * width < live, body, (first, begun))
    return mixed / total


def _first_block(positions: jax.Array, window: int | None, width: int) -> jax.Array:
    """Returns the index of the first block of `width` slots in which a query at `positions` may see a slot."""
    return jnp.int32(0) if window is None else jnp.maximum(jnp.min(positions) - window + 1, 0) // width


def _by_positions(
    queries: jax.Array,
    layer: Layer,
    positions: jax.Array,
    window: int | None,
    merged: bool,
    places: jax.Array,
    seen: jax.Array | None,
    scores: Scores,
) -> jax.Array:
    """Attention over the visible slots, by blocks of positions: the result of a row depends on its own text alone.

    XLA's float32 kernel adds the products of a row in the order of the slots, and a masked slot adds exactly 0. So a
    row sums its own text in the order of positions, whether there are gaps or not. In a tree, the slot of a row is
    behind its position by less than the number of rows. Sizes are multiples of `LANES`: other kernels sum in another
    order, and the ends of XLA's vector loops compute another exponential.
    """
    q = _by_key_head(queries, merged)
    head_dim, slots = q.shape[-1], layer[0].shape[-2]
    width = min(BLOCK + (0 if seen is None else _lanes(queries.shape[1])), slots)
    padding = [(0, 0)] * (q.ndim - 2) + [(0, -width % LANES), (0, -head_dim % LANES)]

    def cut(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jnp.minimum(index * BLOCK, slots - width), width, axis)

    def add(index: jax.Array, so_far: Sums) -> Sums:
        mixed, total, top = so_far
        block = [cut(x, index, q.ndim - 2) for x in layer]
        place = cut(places, index, 1)[:, None]
        mask = visible(positions, place, window) if seen is None else cut(seen, index, 2)
        mask = jnp.pad(mask & (place // BLOCK == index), [(0, 0), (0, 0), padding[-2]])
        keys, *largest = (jnp.pad(x, [*padding[:-1], (0, 0)]) for x in block[::2])
        products = _batched_product(q, keys, 1, exact=True)
        scored = _masked(_scaled(products, head_dim, scores, *largest), mask)
        # The sums so far are one more slot, whose score is the maximum so far.
        before = jnp.broadcast_to(top, (*top.shape[:-1], LANES))
        scored = jnp.concatenate([scored, before], axis=-1)
        highest = jax.lax.optimization_barrier(jnp.max(scored, axis=-1, keepdims=True))
        weights = jax.lax.optimization_barrier(jnp.exp(scored - highest))
        new, old = weights[..., :-LANES], weights[..., -1:]
        values, *largest = (x.astype(jnp.float32) for x in block[1::2])
        if largest:
            values = values * (largest[0] * (1 / _LEVELS))
        values = jnp.pad(values, padding)
        new_mixed = _batched_product(new, values, 0, exact=True)[..., :head_dim]
        # Without the barrier, XLA could add a product to a sum without rounding it, in some programs only.
        mixed, total = jax.lax.optimization_barrier((mixed * old, total * old))
        return mixed + new_mixed, total + sums(new), highest

    return _by_query(_over_blocks(q, positions, None if seen is not None else window, BLOCK, add), queries)


def _lanes(count: int) -> int:
    return -(-count // LANES) * LANES


def grow(cache: KVCache, capacity: int) -> KVCache:
    """Returns the same cache with `capacity` slots per row; the new ones are empty."""

    def pad(size: int, buffer: jax.Array) -> jax.Array:
        extra = size - buffer.shape[-2]  # a layer that grows has not been a ring, so slots keep their places
        return jnp.pad(buffer, [(0, 0)] * (buffer.ndim - 2) + [(0, extra), (0, 0)])

    sizes = zip(_sizes(cache.most, capacity), cache.layers, strict=True)
    layers = [jax.tree.map(functools.partial(pad, size), layer) for size, layer in sizes]
    return dataclasses.replace(cache, layers=layers, capacity=capacity)


def resize(cache: KVCache, batch: int) -> KVCache:
    """Returns the first `batch` rows of a cache, with empty rows at the end if it has fewer."""
    rows = len(cache.rope_length)

    def cut_or_pad(buffer: jax.Array) -> jax.Array:
        size = buffer.shape[0] // rows * batch
        extra = max(size - buffer.shape[0], 0)
        return jnp.pad(buffer[:size], [(0, extra)] + [(0, 0)] * (buffer.ndim - 1))

    resized: KVCache = jax.tree.map(cut_or_pad, cache)
    return resized


def insert(cache: KVCache, row: jax.Array, others: KVCache, which: jax.Array | int = 0) -> KVCache:
    """Replaces row `row` by row `which` of `others`.

    If `others` has fewer slots, the row keeps its later ones; if it has more, they are cut off.
    """
    count = len(others.rope_length)

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        size, rest = new.shape[0] // count, (0,) * (buffer.ndim - 1)
        one = jax.lax.dynamic_slice(new, (which * size, *rest), (size, *new.shape[1:]))
        return jax.lax.dynamic_update_slice(buffer, one[..., : buffer.shape[-2], :], (row * size, *rest))

    layers = jax.tree.map(put, cache.layers, others.layers)
    rope_length = cache.rope_length.at[row].set(others.rope_length[which])
    return dataclasses.replace(cache, layers=layers, rope_length=rope_length)


def take_row(cache: KVCache, row: jax.Array, slots: int) -> KVCache:
    """Returns the first `slots` slots of row `row`, as a cache of one row."""
    count = len(cache.rope_length)

    def cut(buffer: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(buffer, row * (size := buffer.shape[0] // count), size)
        return one[..., :slots, :]

    return dataclasses.replace(
        cache,
        layers=jax.tree.map(cut, cache.layers),
        rope_length=jax.lax.dynamic_slice_in_dim(cache.rope_length, row, 1),
        capacity=slots,
    )
