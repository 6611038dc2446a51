"""The few numerical choices that every product of the model shares."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.model.quantised import Quantised

# Up to this many rows a float32 product on a CPU keeps its weights unpacked, see `_few_rows`.
FEW_ROWS = 32
# On a TPU a single row is padded to this many rows, see `filled`: the rows of a register. Two rows cost as much.
TPU_ROWS = 8
# Numbers in a matrix below which calling the library costs more than streaming it again for a row.
SMALL_WEIGHT = 2**18


def precision_of(dtype: DTypeLike) -> jax.lax.Precision:
    """float32 is meant when it is asked for: accelerators would otherwise round its operands."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def linear(
    x: jax.Array,
    weight: jax.Array | Quantised,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """x [..., I] times weight [*O, I], plus bias [*O] → [..., *O].

    Weights keep their output axes in front: as fast as the other order for one row, faster for several. Of a quantised
    weight the small numbers are multiplied by, and the result is scaled: so no array of the whole weight is made.
    """
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, Quantised):
        # Before it is scaled, a result may be larger than float16 goes.
        between = jnp.float32 if out_dtype == jnp.float16 else out_dtype
        y = linear(x, weight.values().astype(x.dtype), out_dtype=between)
        scaled: jax.Array = (y * weight.scale.astype(between)).astype(out_dtype)
        return scaled if bias is None else scaled + bias
    rows = math.prod(x.shape[:-1])
    product = functools.partial(_product, out_dtype=out_dtype)
    special: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    if rows == 1:
        special["tpu"] = functools.partial(_alone, out_dtype=out_dtype)
    if rows <= FEW_ROWS and x.dtype == jnp.float32:
        special["cpu"] = _few_rows
    elif x.dtype == weight.dtype == jnp.bfloat16:
        special["cpu"] = functools.partial(_short_product, out_dtype=out_dtype)
    y = jax.lax.platform_dependent(x, weight, default=product, **special) if special else product(x, weight)
    biased: jax.Array = y if bias is None else y + bias
    return biased


def _product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(
        x, weight, contract, precision=precision_of(x.dtype), preferred_element_type=out_dtype
    )


def _alone(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Returns the same product of one row on a TPU, see `filled`."""
    y = filled(functools.partial(_product, out_dtype=out_dtype), x.reshape(1, -1), weight)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


def filled(
    product: Callable[[jax.Array, jax.Array], jax.Array], row: jax.Array, other: jax.Array
) -> jax.Array:
    """Returns product(row, other), [..., 1, *O], for one row [..., 1, I] that is padded with rows of zeros.

    On a TPU, XLA computes a product of one row on the vector unit, and a product of several rows on the matrix unit. By
    the compiler's estimate the vector unit takes three to four times as long as reading the weight; by its final
    schedule both units are as fast as the memory, and the matrix unit takes fewer cycles (docs/measurements.md). XLA
    fuses the zeros into the product. Copies of the row would need an array of their own, and a barrier to keep XLA from
    replacing them by one row.
    """
    axis = row.ndim - 2
    spare = [(0, 0)] * axis + [(0, TPU_ROWS - 1), (0, 0)]
    return jax.lax.slice_in_dim(product(jnp.pad(row, spare), other), 0, 1, axis=axis)


def _short_product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """The same product of bfloat16 on a CPU, and its gradient.

    XLA has a fast kernel for it there, but only for two rows or more and only with float32 results: one row without
    it takes ten times as long. So a row goes in twice, and results are rounded afterwards.
    """
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1])
    if rows.shape[0] == 1:
        twice = jax.lax.optimization_barrier(jnp.broadcast_to(rows, (2, rows.shape[1])))
        y = _float32_product(twice, matrix)[:1]
    else:
        y = _float32_product(rows, matrix)
    return y.astype(out_dtype).reshape(*x.shape[:-1], *weight.shape[:-1])


@jax.custom_vjp
def _float32_product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """bfloat16 rows [R, I] times matrix [O, I] → float32[R, O]; the two products of its gradient are of bfloat16."""
    return _product(rows, matrix, jnp.float32)


def _float32_product_forward(
    rows: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _float32_product(rows, matrix), (rows, matrix)


def _float32_product_backward(
    factors: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, matrix = factors
    # Without the barrier XLA would widen the factors, and multiply at half the speed.
    rounded = jax.lax.optimization_barrier(cotangent.astype(rows.dtype))
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    of_rows = product(rounded, matrix, (((1,), (0,)), ((), ())))
    of_matrix = product(rounded, rows, (((0,), (0,)), ((), ())))
    return of_rows.astype(rows.dtype), of_matrix.astype(matrix.dtype)


_float32_product.defvjp(_float32_product_forward, _float32_product_backward)


def _few_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product for one or a few float32 rows on a CPU, where decoding spends its time.

    For one row XLA has a kernel that streams the weights at memory speed, but only for plain matrices. For
    several, its CPU library packs the right operand, and XLA makes that the weights: several rows then cost
    2 to 3 times one. Here the weights are the left operand, kept there by the barrier, and only the few
    rows are packed, which costs half as much (padded to the widths that its kernels like). Weights so
    small that they stay in the processor's cache are streamed once a row instead.
    """
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1])
    count, precision = rows.shape[0], precision_of(x.dtype)
    contract = (((1,), (1,)), ((), ()))
    if count == 1:
        y = jax.lax.dot_general(rows, matrix, contract, precision=precision)
    elif count <= 4 and matrix.size <= SMALL_WEIGHT:
        # Without the barrier XLA would put the rows together again.
        apart = [jax.lax.optimization_barrier(rows[i : i + 1]) for i in range(count)]
        each = [jax.lax.dot_general(row, matrix, contract, precision=precision) for row in apart]
        y = jnp.concatenate(each)
    else:
        padded = 4 if count <= 4 else -(-count // 8) * 8
        rows = jnp.pad(rows, ((0, padded - count), (0, 0)))
        y = jax.lax.dot_general(matrix, rows, contract, precision=precision)
        y = jax.lax.optimization_barrier(y)[:, :count].T
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


@jax.named_scope("norm")
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, taken in float32, times weight [..., D]."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight


def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """The cosine of the angle between vectors, float32[...] for x and y [..., D]; 0 where one is zero."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=-1) * jnp.sum(y * y, axis=-1)
    return jnp.sum(x * y, axis=-1) * jax.lax.rsqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def widened(values: jax.Array, width: int) -> jax.Array:
    """Values [B, T, ...] with zeros behind them, [B, width, ...]."""
    return jnp.pad(values, ((0, 0), (0, width - values.shape[1]), *[(0, 0)] * (values.ndim - 2)))
