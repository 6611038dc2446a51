"""Kernels for CUDA devices from compute capability 8.0 on, in Pallas' language for Triton.

Nobody has run them on a GPU yet. `programs.kernel_check` compares them on the device before their first use.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

# The most rows of a product; and the most that are multiplied in float32, without tensor cores.
MOST_ROWS, FEW_ROWS = 16, 4
# Without tensor cores: the sums of a program, 64 for each of 128 threads.
_SUMS = 2**13
# Programs of a product with many output channels, about 4 for each multiprocessor of an H100.
_PROGRAMS = 512
# With tensor cores: the output channels of a program, the fewest that they take, and the input channels of a step.
_CHANNELS, _STEP = 16, 256
# The most queries of a key/value head in attention, rows times queries of a group.
MOST_QUERIES = 128
# The slots of a step of attention; programs of all heads and rows, about one for each multiprocessor of an H100; and
# programs of a head of a row.
_BLOCK, _SPLIT_PROGRAMS, _MOST_SPLITS = 64, 128, 32
# The value of a masked score, as in `model.cache`.
_MASKED = -1e30


def product(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float = 0.0,
    gated: bool = False,
    out_dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Returns a product of a few rows, with what comes before and after it, by one kernel that reads the weight once.

    Sums, norm and gate are computed in float32, and the result is rounded once. The norm divides the sums, so that a
    program need not read x twice. Above `FEW_ROWS` rows, x times the norm's weight is rounded to bfloat16.

    Args:
      x: [R, I], at most `MOST_ROWS` rows of bfloat16, or `FEW_ROWS` of float32.
      weight: [*O, I], N channels in all, or [2, N, I] if `gated`; 16-bit floats or int8.
      scale, bias: [*O], or [2, N] if `gated`; the product is multiplied by `scale`, then `bias` is added.
      norm: [I], the weight of an RMS norm of x with `eps`; None for no norm.
      residual: [R, N], added to the result.
      eps: see `norm`.
      gated: whether the result is silu(x · weight[0]) × (x · weight[1]).
      out_dtype: the dtype of the result.
      interpret: whether to emulate the kernel, on any device.

    Returns:
      [R, N].
    """
    (rows, size), gates = x.shape, 1 + gated
    channels = weight.size // size // gates
    if rows <= FEW_ROWS:
        width = max(min(channels // _PROGRAMS, 16), 2) // gates
        width = 1 << width.bit_length() - 1
        step = min(_SUMS // gates // width // rows, size)
        step = 1 << (step - 1).bit_length() if step == size else 1 << step.bit_length() - 1
    else:
        width, step = _CHANNELS, _STEP
    by_gate = {"scale": scale, "bias": bias}
    more = {name: array.reshape(gates, channels) for name, array in by_gate.items() if array is not None}
    more |= {name: a for name, a in {"norm": norm, "residual": residual}.items() if a is not None}
    made: jax.Array = pl.pallas_call(
        functools.partial(_product, names=tuple(more), eps=eps, width=width, step=step),
        out_shape=jax.ShapeDtypeStruct((rows, channels), out_dtype),
        grid=(pl.cdiv(channels, width),),
        compiler_params=triton.CompilerParams(num_warps=4 if rows <= FEW_ROWS else 2, num_stages=3),
        interpret=interpret,
    )(x, weight.reshape(gates, channels, size), *more.values())
    return made


def _product(
    x: Any, weight: Any, *refs: Any, names: tuple[str, ...], eps: float, width: int, step: int
) -> None:
    """Computes `width` output channels of `product`.

    A part is a row of x, or with tensor cores all rows, filled up to `MOST_ROWS`. Its sums are [width, step], to be
    added in the end, or [width, rows].
    """
    more, out = dict(zip(names, refs, strict=False)), refs[-1]
    (gates, channels, size), rows = weight.shape, x.shape[0]
    few = rows <= FEW_ROWS
    parts = [*range(rows)] if few else [jnp.arange(MOST_ROWS)]
    place = pl.program_id(0) * width + jnp.arange(width)
    exists = None if channels % width == 0 else place < channels

    def add(number: jax.Array, carry: Any) -> Any:
        inner = number * step + jnp.arange(step)
        inside = None if size % step == 0 else inner < size
        both = _both(_column(exists), _row(inside))
        tiles = [_load(weight.at[gate, place[:, None], inner[None]], both) for gate in range(gates)]
        scaled = _load(more["norm"].at[inner], inside).astype(jnp.float32) if "norm" in more else None
        added = []
        for part, (sums, squares) in zip(parts, carry, strict=True):
            index, mask = (part, inner), inside
            if not few:
                index, mask = (part[:, None], inner[None]), _both(_column(part < rows), _row(inside))
            seen = _load(x.at[index], mask).astype(jnp.float32)
            if scaled is not None:
                squares = squares + seen * seen
                seen = seen * (scaled if few else scaled[None])
            sums = [one + _products(tile, seen, few) for one, tile in zip(sums, tiles, strict=True)]
            added.append((sums, squares))
        return added

    empty = jnp.zeros((width, step if few else MOST_ROWS), jnp.float32)
    zeros = jnp.zeros(step if few else (MOST_ROWS, step), jnp.float32)
    carry = [([empty] * gates, zeros if "norm" in more else None) for _ in parts]
    carry = jax.lax.fori_loop(0, pl.cdiv(size, step), add, carry)
    for part, (sums, squares) in zip(parts, carry, strict=True):
        index, mask = (part, place), exists
        if not few:
            index, mask = (part[None], place[:, None]), _both(_column(exists), (part < rows)[None])
        ys = [jnp.sum(one, axis=-1) if few else one for one in sums]
        if "norm" in more:
            inverse = jax.lax.rsqrt(jnp.sum(squares, axis=-1) / size + eps)
            ys = [y * inverse for y in ys]
        for name, of in ("scale", jnp.multiply), ("bias", jnp.add):
            if name in more:
                channel = [
                    _load(more[name].at[gate, place], exists).astype(jnp.float32) for gate in range(gates)
                ]
                ys = [of(y, one if few else one[:, None]) for y, one in zip(ys, channel, strict=True)]
        y = ys[0] if gates == 1 else ys[0] / (1 + jnp.exp(-ys[0])) * ys[1]
        if "residual" in more:
            y = y + _load(more["residual"].at[index], mask).astype(jnp.float32)
        triton.store(out.at[index], y.astype(out.dtype), mask=mask)


def _products(tile: jax.Array, seen: jax.Array, few: bool) -> jax.Array:
    if few:
        return tile.astype(jnp.float32) * seen[None]
    operands = tile.astype(jnp.bfloat16), seen.astype(jnp.bfloat16)
    return jax.lax.dot_general(*operands, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Returns the elements, 0 where a mask is False."""
    return triton.load(ref, mask=mask, other=None if mask is None else 0)


def _column(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[:, None]


def _row(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[None]


def _both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def attention(
    qkv: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    start: jax.Array,
    layer: tuple[jax.Array, ...],
    window: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns attention with rotation and the write to the cache, by a kernel that reads the live slots only.

    Programs share the live slots of a head of a row (flash-decoding, Dao et al. 2023). A second kernel merges their
    sums. No program reads what another writes: the new keys and values are attended to from registers.

    Args:
      qkv: [B, T, KV, G + 2, hd], queries, key and value of tokens at positions start[b] + t, not rotated.
      tables: cosine and sine, float32[B, T, hd/2] each, of `rope.tables`.
      start: int32[B], the live slots of each row.
      layer: keys and values of a layer's cache, merged, see `model.cache`; they are updated in place.
      window: as in `cache.attend`.
      interpret: whether to emulate the kernels, on any device.

    Returns:
      [B, T, KV, G, hd], and the layer's cache as `cache.write` returns it.
    """
    batch, length, kv_heads, group, head_dim = qkv.shape
    group, queries = group - 2, length * (group - 2)
    splits = max(1, min(_SPLIT_PROGRAMS // (batch * kv_heads), -(-layer[0].shape[1] // _BLOCK), _MOST_SPLITS))
    splits = 1 << splits.bit_length() - 1
    sums = jax.ShapeDtypeStruct((batch, kv_heads, splits, queries), jnp.float32)
    parts = jax.ShapeDtypeStruct((*sums.shape, head_dim), jnp.float32)
    same = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layer]
    warps = 4 if queries <= 64 else 8
    keys, values, *partial = pl.pallas_call(
        functools.partial(_attention, window=window),
        out_shape=[*same, parts, sums, sums],
        grid=(batch, kv_heads, splits),
        input_output_aliases={4: 0, 5: 1},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
    )(qkv, *tables, start, *layer)
    mixed = pl.pallas_call(
        _merge,
        out_shape=jax.ShapeDtypeStruct((batch, length, kv_heads, group, head_dim), qkv.dtype),
        grid=(batch, kv_heads, queries),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(*partial)
    return mixed, (keys, values)


def has_attention(qkv: jax.Array, layer: tuple[jax.Array, ...]) -> bool:
    """Returns whether `attention` takes arguments of these shapes."""
    _, length, _, group, head_dim = qkv.shape
    dtypes = (jnp.bfloat16, jnp.float16)
    return (
        length <= MOST_ROWS
        and length * (group - 2) <= MOST_QUERIES
        and head_dim in (32, 64, 128, 256)
        and layer[0].dtype in dtypes
    )


def _attention(
    qkv: Any,
    cos: Any,
    sin: Any,
    start: Any,
    keys: Any,
    values: Any,
    new_keys: Any,
    new_values: Any,
    mixed: Any,
    total: Any,
    top: Any,
    *,
    window: int | None,
) -> None:
    """Computes the sums of `attention` over a part of the slots of one head of a row.

    Queries, keys and values are pairs of halves [n, hd/2], which a rotation mixes.
    """
    _, length, kv_heads, group, head_dim = qkv.shape
    group, dtype = group - 2, keys.dtype
    row, head, split = (pl.program_id(axis) for axis in range(3))
    place, splits, first = row * kv_heads + head, total.shape[2], start[row]
    channels = [jnp.arange(head_dim // 2)[None] + part * head_dim // 2 for part in range(2)]
    query, token = jnp.arange(max(16, 1 << (length * group - 1).bit_length())), jnp.arange(16)
    query_token = query // group

    def halves(number: Any, tokens: jax.Array, exists: jax.Array) -> list[jax.Array]:
        index = row, tokens[:, None], head, number
        return [_load(qkv.at[*index, channel], exists[:, None]).astype(jnp.float32) for channel in channels]

    def rotated(number: Any, tokens: jax.Array, exists: jax.Array) -> list[jax.Array]:
        one, other = halves(number, tokens, exists)
        c, s = (_load(table.at[row, tokens[:, None], channels[0]], exists[:, None]) for table in (cos, sin))
        turned = one * c - other * s, other * c + one * s
        return [half.astype(qkv.dtype).astype(dtype) for half in turned]

    exists = token < length
    q = rotated((query % group)[:, None], query_token, query < length * group)
    k, v = rotated(group, token, exists), [half.astype(dtype) for half in halves(group + 1, token, exists)]
    for part in range(2):  # see `cache.write`
        nan_or_zero = 0 * k[part] + 0 * v[part]
        k[part], v[part] = k[part] + nan_or_zero, jnp.where(nan_or_zero == 0, v[part], 0).astype(dtype)
        index, mask = (place, (first + token)[:, None], channels[part]), (exists & (split == 0))[:, None]
        triton.store(new_keys.at[index], k[part], mask=mask)
        triton.store(new_values.at[index], v[part], mask=mask)

    def dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)

    def add(k: list[jax.Array], v: list[jax.Array], slots: jax.Array, exists: jax.Array, carry: Any) -> Any:
        mixed, total, top = carry
        position = (first + query_token)[:, None]
        seen = exists[None] & (slots[None] <= position)
        if window is not None:
            seen &= slots[None] > position - window
        scores = (dot(q[0], k[0], 1) + dot(q[1], k[1], 1)) * head_dim**-0.5
        scores = jnp.where(seen, scores, _MASKED)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, old = jnp.where(seen, jnp.exp(scores - highest[:, None]), 0.0), jnp.exp(top - highest)
        mixed = [
            m * old[:, None] + dot(weights.astype(dtype), half, 0) for m, half in zip(mixed, v, strict=True)
        ]
        return mixed, total * old + jnp.sum(weights, axis=1), highest

    def add_block(number: jax.Array, carry: Any) -> Any:
        slots = (begin + split + number * splits) * _BLOCK + jnp.arange(_BLOCK)
        exists = slots < first
        k, v = (
            [_load(buffer.at[place, slots[:, None], channel], exists[:, None]) for channel in channels]
            for buffer in (keys, values)
        )
        return add(k, v, slots, exists, carry)

    zeros = jnp.zeros(query.shape, jnp.float32)
    carry = [jnp.zeros((len(query), head_dim // 2), jnp.float32)] * 2, zeros, zeros + _MASKED
    carry = add(k, v, first + token, exists & (split == 0), carry)
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0) // _BLOCK
    blocks = pl.cdiv(first, _BLOCK) - begin - split
    halves_mixed, *sums = jax.lax.fori_loop(0, jnp.maximum(pl.cdiv(blocks, splits), 0), add_block, carry)
    here = query < length * group
    for half, channel in zip(halves_mixed, channels, strict=True):
        triton.store(mixed.at[row, head, split, query[:, None], channel], half, mask=here[:, None])
    for ref, one in zip((total, top), sums, strict=True):
        triton.store(ref.at[row, head, split, query], one, mask=here)


def _merge(mixed: Any, total: Any, top: Any, out: Any) -> None:
    """Computes the attention of one query from the sums of all splits."""
    row, head, query = (pl.program_id(axis) for axis in range(3))
    group = out.shape[3]
    split, channel = jnp.arange(mixed.shape[2]), jnp.arange(out.shape[-1])
    tops = top[row, head, split, query]
    weights = jnp.exp(tops - jnp.max(tops))
    parts = mixed[row, head, split[:, None], query, channel[None]]
    merged = jnp.sum(parts * weights[:, None], axis=0) / jnp.sum(total[row, head, split, query] * weights)
    out[row, query // group, head, query % group, channel] = merged.astype(out.dtype)
