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
