"""Matrix products, norms and similarities, in the forms that are fast on each platform."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxspec.model.control import OneOf, apply_to_chosen
from jaxspec.model.lora import Adapted
from jaxspec.model.quantisation import Outliers, Quantised

# The most rows for which a float32 product on a CPU uses `_few_rows`.
FEW_ROWS = 64
# The rows and lanes of a TPU's register. A single row is padded to this many rows, see `filled`; two cost as much.
TPU_ROWS, TPU_LANES = 8, 128
# Where the result of a row must not depend on the others: the rows of one float32 product on a CPU, and the number of
# output channels from which XLA's float32 kernel adds the products of a row one after the other.
EXACT_ROWS, LANES = 8, 64
# The most elements of a matrix for which one read per row is faster on a CPU than a call of the library.
SMALL_WEIGHT = 2**18
# Whether a product of at most `SUMMED_ROWS` rows is `_summed` on a CUDA device, a static setting of a trace;
# `programs.compiler_options.tracing` sets it by the device.
SUMMED = jax.make_user_context(False)
SUMMED_ROWS = 9
# The mesh of a trace, None for one device; set likewise. Products that contract over its axis `model` use it.
MESH = jax.make_user_context(None)
# Whether a trace runs equal layers as a loop, see `llama.run_layers`; set likewise, on a CPU.
LOOPED = jax.make_user_context(False)
# The largest magnitude of a float16 operand of a product: half of float16's range.
LARGEST_HALF = 2.0**15


def stream_dtype(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of the residual stream, and of everything between products, for weights of a dtype.

    It is float32 for float16, because residual streams of published models exceed float16's range of 65,504.

    Examples:
      >>> stream_dtype(jnp.bfloat16) == jnp.bfloat16, stream_dtype(jnp.float16) == jnp.float32
      (True, True)
    """
    return jnp.float32 if dtype == jnp.float16 else dtype


def precision_of(dtype: DTypeLike) -> jax.lax.Precision:
    """Returns the precision of a product: the highest for float32, whose operands accelerators would else round."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def linear(
    x: jax.Array,
    weight: jax.Array | Quantised | Adapted | OneOf,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    exact: bool = False,
    parts: int = 1,
) -> jax.Array:
    """Returns x [..., I] times weight [*O, I], plus bias [*O], as [..., *O].

    With output axes first, several rows are faster than with the other order, and one row is as fast. A quantised
    weight is multiplied as whole numbers and the result is scaled, so that no full-width copy of the weight is made;
    x is rounded to int8 if the weight has `outliers`. If `exact`, the result of a row depends neither on the other rows
    nor on their number, on a CPU: XLA's kernel for two rows or more sums each row in the same order. With the weights
    on the left, as in `_few_rows`, the order depends on the number of rows, which is therefore fixed.

    A float32 x is rounded to a float16 weight's dtype for the product, see `_rounded_product`. The I inputs are divided
    over the axis `model` of a mesh if its size divides `parts`.
    """
    out_dtype = out_dtype or x.dtype
    rows = math.prod(x.shape[:-1])
    if isinstance(weight, OneOf):
        few = isinstance(weight.each[0], jax.Array) and x.dtype == weight.dtype == jnp.float32
        if few and rows <= FEW_ROWS:
            y = _few_rows(x, weight)
        else:
            y = apply_to_chosen(weight, lambda one, x: linear(x, one, None, out_dtype, exact, parts), x)
        return y if bias is None else y + bias
    if isinstance(weight, Adapted):
        base = linear(x, weight.base, bias, out_dtype, exact, parts)
        return base + _low_rank(x, weight, exact).astype(out_dtype)
    if isinstance(weight, Quantised):
        if weight.outliers is not None:
            y = _int8_product(x, weight.packed, weight.outliers)
        else:
            # An unscaled result may exceed the range of float16.
            between = jnp.float32 if out_dtype == jnp.float16 else out_dtype
            whole = weight.values().astype(jnp.float16 if weight.dtype == jnp.float16 else x.dtype)
            y = linear(x, whole, out_dtype=between, exact=exact, parts=parts)
        scale = weight.scale.astype(y.dtype)
        scaled: jax.Array = (y * scale).astype(out_dtype)
        if exact:
            scaled = kept_rounded(scaled, scale < 0)
        return scaled if bias is None else scaled + bias
    product = functools.partial(_product, out_dtype=out_dtype)
    special: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    if rows == 1:
        special["tpu"] = functools.partial(_one_row, out_dtype=out_dtype, parts=parts)
    if rows <= SUMMED_ROWS and SUMMED.value:
        special["cuda"] = functools.partial(_summed, out_dtype=out_dtype)
    if x.dtype == weight.dtype == jnp.float32 and exact:
        special["cpu"] = _eight_rows
    elif x.dtype == weight.dtype == jnp.float32 and rows <= FEW_ROWS:
        special["cpu"] = _few_rows
    elif x.dtype == weight.dtype == jnp.bfloat16:
        special["cpu"] = functools.partial(_bfloat16_product, out_dtype=out_dtype)
    elif weight.ndim > 2:
        special["cpu"] = functools.partial(_flat, out_dtype=out_dtype)
    y = jax.lax.platform_dependent(x, weight, default=product, **special) if special else product(x, weight)
    biased: jax.Array = y if bias is None else y + bias
    return biased


def normed_linear(
    x: jax.Array,
    norm: jax.Array | None,
    eps: float,
    weight: jax.Array | Quantised | Adapted,
    bias: jax.Array | None = None,
    *,
    offset: float = 0.0,
    gate: Literal["silu", "gelu_tanh"] | None = None,
    out_dtype: DTypeLike | None = None,
    exact: bool = False,
) -> jax.Array:
    """Returns `linear` of `rms_norm(x, norm, eps, offset)`, [..., *O]; x is not normed if `norm` is None.

    With a `gate`, the weight is [2, F, I], and the result is gate(first) × second, [..., F].
    """
    seen = x if norm is None else rms_norm(x, norm, eps, exact, offset)
    y = linear(seen, weight, bias, out_dtype, exact)
    if gate is None:
        return y
    activation = jax.nn.silu if gate == "silu" else jax.nn.gelu  # by tanh
    return activation(y[..., 0, :]) * y[..., 1, :]


def added(residual: jax.Array, write: jax.Array, keep: jax.Array | None, exact: bool) -> jax.Array:
    """Returns residual + write, [B, T, D]; the residual alone in rows where `keep` bool[B] is False."""
    if keep is not None:
        write = write * keep[:, None, None].astype(write.dtype)
    if not exact or residual.dtype == jnp.float32:
        return residual + write
    # XLA may keep more digits than the dtype has, but not where an early exit hands the stream to another program.
    wide, info = residual.astype(jnp.float32) + write.astype(jnp.float32), jnp.finfo(residual.dtype)
    return jax.lax.reduce_precision(wide, info.nexp, info.nmant).astype(residual.dtype)


def kept_rounded(product: jax.Array, never: jax.Array) -> jax.Array:
    """Returns a product as its dtype rounds it; `never` is False everywhere, which the compiler cannot know.

    A product and a sum that follows it become one instruction, with one rounding, in programs where they are fused. The
    compiler cannot do so across an operation on the bits.
    """
    bits = jnp.uint16 if product.dtype.itemsize == 2 else jnp.uint32
    kept = jax.lax.bitcast_convert_type(product, bits) ^ never.astype(bits)
    return jax.lax.bitcast_convert_type(kept, product.dtype)


def _low_rank(x: jax.Array, weight: Adapted, exact: bool) -> jax.Array:
    """Returns the adapters' result [B, T, *O] for x [B, T, I], zero in the rows without them."""
    few = linear(x, weight.a, exact=exact) * weight.scale
    if weight.rows is not None:
        few = jnp.where(weight.rows[:, None, None], few, 0)
    ends = np.cumsum(weight.sizes)[:-1].tolist()
    parts = jnp.split(weight.b, ends, axis=weight.axis)
    wide = [linear(few[:, :, number], part, exact=exact) for number, part in enumerate(parts)]
    return jnp.concatenate(wide, axis=2 + weight.axis)


def _product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    if x.dtype == jnp.float32 and weight.dtype == jnp.float16:
        return _rounded_product(x, weight).astype(out_dtype)
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(
        x, weight, contract, precision=precision_of(x.dtype), preferred_element_type=out_dtype
    )


def _flat(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Returns `_product` as that of two matrices; from a weight with more axes, XLA would make a transposed copy."""
    y = _product(x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1]), out_dtype)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


def _rounded_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `_product` of float32 x [..., I] and a float16 weight [*O, I] as float32[..., *O], with float16 operands.

    A row whose largest element exceeds `LARGEST_HALF` is divided before it is rounded, and its result is multiplied.
    """
    divisor = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST_HALF, 1)
    y = _product((x / divisor).astype(jnp.float16), weight, jnp.float32)
    return y * divisor.reshape(*x.shape[:-1], *[1] * (weight.ndim - 1))


def _summed(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Returns `_product` of a few rows [..., I] as sums over the weight [*O, I], in float32.

    XLA makes one kernel of it, which reads the weight in its own dtype, also if the weight is converted from int8. For
    the library's product on a CUDA device below compute capability 8.0, XLA would write many weights as float32 first.
    """
    wide = weight.astype(jnp.float32)
    each = [jnp.sum(wide * row, axis=-1) for row in x.reshape(-1, x.shape[-1]).astype(jnp.float32)]
    return jnp.stack(each).reshape(*x.shape[:-1], *weight.shape[:-1]).astype(out_dtype)


def _one_row(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike, parts: int = 1) -> jax.Array:
    """Returns `_product` of one row on a TPU, see `filled`; `parts` as in `linear`."""
    row, mesh = x.reshape(1, -1), MESH.value
    product = functools.partial(filled, functools.partial(_product, out_dtype=out_dtype))
    chips = 1 if mesh is None else mesh.shape.get("model", 1)
    if chips > 1 and parts % chips == 0:
        # Without this, the chips would exchange the rows of zeros too.
        inputs = (PartitionSpec(*[None] * (of.ndim - 1), "model") for of in (row, weight))
        y = jax.shard_map(
            lambda row, weight: jax.lax.psum(product(row, weight), "model"),
            mesh=mesh, in_specs=tuple(inputs), out_specs=PartitionSpec(), axis_names={"model"},
        )(row, weight)  # fmt: skip
    else:
        y = product(row, weight)
    whole: jax.Array = y.reshape(*x.shape[:-1], *weight.shape[:-1])
    return whole


def filled(
    product: Callable[[jax.Array, jax.Array], jax.Array], row: jax.Array, other: jax.Array
) -> jax.Array:
    """Returns product(row, other), [..., 1, *O], for one row [..., 1, I] that is padded with rows of zeros.

    On a TPU, XLA computes a product of one row on the vector unit, and a product of several rows on the matrix unit. By
    the compiler's estimate the vector unit takes three to four times as long as reading the weight; by its final
    schedule both units are as fast as the memory, and the matrix unit takes fewer cycles (docs/laboratory.md). XLA
    fuses the zeros into the product. Copies of the row would need an array of their own, and a barrier to keep XLA from
    replacing them by one row.
    """
    axis = row.ndim - 2
    padding = [(0, 0)] * axis + [(0, TPU_ROWS - 1), (0, 0)]
    return jax.lax.slice_in_dim(product(jnp.pad(row, padding), other), 0, 1, axis=axis)


def _int8_product(x: jax.Array, packed: jax.Array | OneOf, outliers: Outliers) -> jax.Array:
    """Returns x [..., I], rounded to int8, times int8 numbers [*O, I], as float32[..., *O].

    Integer sums are exact, so the result of a row depends neither on the other rows nor on their number.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    count = rows.shape[0]
    # A row has one scale, so a few large activations would leave few levels for the others. These few channels have a
    # scale of their own, and a second row for what rounding leaves of them.
    numbers, scale = _rounded(rows * outliers.rest)
    large = rows[:, outliers.channels]
    large_numbers, large_scale = _rounded(large)
    # At most half a step is left: at most 127 in steps of 1 ÷ 254.
    left = jnp.round((large / large_scale - large_numbers) * 254).astype(jnp.int8)
    both = _int32_product(jnp.concatenate([large_numbers, left]), outliers.packed)
    y = scale * _int32_product(numbers, packed) + large_scale * (both[:count] + both[count:] / 254)
    return y.reshape(*x.shape[:-1], *packed.shape[:-1])


def _rounded(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows float32[R, I] as int8[R, I] and scales float32[R, 1], not finite for a row that is not."""
    scale = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / 127
    scale = jnp.where(scale == 0, 1.0, scale)
    return jnp.round(rows / scale).astype(jnp.int8), scale


def _int32_product(rows: jax.Array, packed: jax.Array | OneOf) -> jax.Array:
    """Returns int8 rows [R, I] times int8 numbers [*O, I] as float32[R, O]."""
    return int32_sums(rows, packed).astype(jnp.float32)


def int32_sums(rows: jax.Array, packed: jax.Array | OneOf) -> jax.Array:
    """Returns int8 rows [R, I] times int8 numbers [*O, I] as int32[R, O].

    On a CPU, XLA has a fast kernel for two rows or more and takes 30 times as long for one, so a single row is padded.
    The barrier keeps XLA from removing the padding.
    """
    count = rows.shape[0]
    if count == 1:
        rows = jax.lax.optimization_barrier(jnp.pad(rows, ((0, 1), (0, 0))))

    def product(packed: jax.Array, rows: jax.Array) -> jax.Array:
        matrix, contract = packed.reshape(-1, packed.shape[-1]), (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(rows, matrix, contract, preferred_element_type=jnp.int32)

    sums: jax.Array = apply_to_chosen(packed, product, rows)
    return sums[:count]


def _bfloat16_product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Returns `_product` of bfloat16 on a CPU, differentiable.

    XLA's fast kernel requires two rows or more and float32 results; without it one row takes ten times as long. So a
    single row is duplicated, and the results are rounded afterwards.
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
    """Returns bfloat16 rows [R, I] times matrix [O, I] as float32[R, O]; its gradient uses bfloat16 products."""
    return _product(rows, matrix, jnp.float32)


def _float32_product_forward(
    rows: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _float32_product(rows, matrix), (rows, matrix)


def _float32_product_backward(
    factors: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, matrix = factors
    # Without the barrier XLA would convert the factors to float32 and multiply at half the speed.
    rounded = jax.lax.optimization_barrier(cotangent.astype(rows.dtype))
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    of_rows = product(rounded, matrix, (((1,), (0,)), ((), ())))
    of_matrix = product(rounded, rows, (((0,), (0,)), ((), ())))
    return of_rows.astype(rows.dtype), of_matrix.astype(matrix.dtype)


_float32_product.defvjp(_float32_product_forward, _float32_product_backward)


def _few_rows(x: jax.Array, weight: jax.Array | OneOf) -> jax.Array:
    """Returns `_product` for one or a few float32 rows on a CPU, the common case of decoding.

    For one row XLA has a kernel that reads the weights at memory speed, but only for plain matrices. For
    several rows, its CPU library packs the right operand. XLA would make that the weights, and several rows would
    cost 2 to 3 times one. Here the weights are the left operand, and only the rows are packed, which costs half as
    much. The rows are padded to widths that have fast kernels. Weights that fit into the processor's cache are read
    once per row instead.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 1:
        y = _weights_times(weight, rows[0])
    elif count <= 4 and math.prod(weight.shape) <= SMALL_WEIGHT:

        def apart(weight: jax.Array, rows: jax.Array) -> jax.Array:
            # Without the barrier XLA would merge the rows again.
            each = [jax.lax.optimization_barrier(rows[i : i + 1]) for i in range(count)]
            return jnp.concatenate([_weights_times(weight, row) for row in each], axis=1)

        y = apply_to_chosen(weight, apart, rows).T
    else:
        y = _weights_left(rows, weight, 4 if count <= 4 else -(-count // 8) * 8)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


def _weights_times(weight: jax.Array | OneOf, rows: jax.Array) -> jax.Array:
    """Returns the weight [*O, I] times rows [R, I] as [O, R], or times a row [I] as [O]."""

    def product(weight: jax.Array, rows: jax.Array) -> jax.Array:
        contract = (((1,), (rows.ndim - 1,)), ((), ()))
        matrix = weight.reshape(-1, weight.shape[-1])
        return jax.lax.dot_general(matrix, rows, contract, precision=precision_of(rows.dtype))

    made: jax.Array = apply_to_chosen(weight, product, rows)
    return made


def _weights_left(rows: jax.Array, weight: jax.Array | OneOf, padded: int) -> jax.Array:
    """Returns rows [R, I], padded to `padded` rows, times the weight [*O, I] as [R, O], see `_few_rows`."""
    count = rows.shape[0]
    y = _weights_times(weight, jnp.pad(rows, ((0, padded - count), (0, 0))))
    # The barrier keeps the weights on the left: XLA would else fold the transpose into the product.
    product: jax.Array = jax.lax.optimization_barrier(y)[:, :count].T
    return product


def _eight_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns `_product` of float32 on a CPU, eight rows at a time, so that each row is summed in the same order."""
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1])
    count = rows.shape[0]
    if count <= EXACT_ROWS:
        return _weights_left(rows, matrix, EXACT_ROWS).reshape(*x.shape[:-1], *weight.shape[:-1])
    parts = jnp.pad(rows, ((0, -count % EXACT_ROWS), (0, 0))).reshape(-1, EXACT_ROWS, rows.shape[1])
    y: jax.Array = jax.lax.map(lambda part: _weights_left(part, matrix, EXACT_ROWS), parts)
    return y.reshape(-1, matrix.shape[0])[:count].reshape(*x.shape[:-1], *weight.shape[:-1])


@jax.named_scope("norm")
def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, exact: bool = False, offset: float = 0.0
) -> jax.Array:
    """Returns x [..., D] over its root mean square, computed in float32, times weight [..., D].

    If `exact`, a row does not depend on the number of rows: XLA has several kernels for a sum, but see `linear`. A
    nonzero `offset` is added to the weight, and the product is computed in float32 too.
    """
    wide = x.astype(jnp.float32)
    if exact:
        total = sums(wide * wide) + x.shape[-1] * eps
        normed = wide / jnp.sqrt(total / x.shape[-1])
    else:
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if offset:
        return (normed * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
    return normed.astype(x.dtype) * weight


def sums(x: jax.Array) -> jax.Array:
    """Returns the sums of float32 x [..., R, I] over the last axis, [..., R, 1], each row summed in the same order."""
    ones, rows = jnp.ones((LANES, x.shape[-1]), x.dtype), x.reshape(-1, x.shape[-1])
    total = of_two_rows(functools.partial(_product, weight=ones, out_dtype=x.dtype), rows)
    return total[:, :1].reshape(*x.shape[:-1], 1)


def of_two_rows(product: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Returns product(rows) for rows [..., R, I]; a single row is padded, because XLA sums it in another order."""
    if rows.shape[-2] > 1:
        return product(rows)
    padding = [(0, 0)] * (rows.ndim - 2) + [(0, 1), (0, 0)]
    two = product(jax.lax.optimization_barrier(jnp.pad(rows, padding)))
    return jax.lax.slice_in_dim(two, 0, 1, axis=rows.ndim - 2)


def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cosine similarity of x and y [..., D], float32[...]; 0 where one of them is zero."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    squares = jnp.sum(x * x, axis=-1) * jnp.sum(y * y, axis=-1)
    return jnp.sum(x * y, axis=-1) * jax.lax.rsqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns c·tanh(x ÷ c) for the cap c, or x without one."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def widened(values: jax.Array, width: int) -> jax.Array:
    """Returns values [B, T, ...] padded with zeros to [B, width, ...]."""
    return jnp.pad(values, ((0, 0), (0, width - values.shape[1]), *[(0, 0)] * (values.ndim - 2)))
