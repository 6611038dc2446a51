"""Products on a CPU: no second array of a weight, and in bfloat16 the same numbers and gradients; rows on a TPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.numerics import TPU_ROWS, _one_row, _product, linear

ROWS = (1, 2, 5, 40)
OUTPUTS = ((24,), (2, 12), (3, 2, 4))


def drawn(*shape: int) -> jax.Array:
    """Normal numbers in bfloat16."""
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.bfloat16)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_products_of_bfloat16_are_summed_in_float32(rows, outputs):
    x, weight, bias = drawn(rows, 16), drawn(*outputs, 16), drawn(*outputs)
    wanted = np.tensordot(wide(x), wide(weight), axes=(-1, -1))
    exact = jax.jit(lambda x, w: linear(x, w, out_dtype=jnp.float32))(x, weight)
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(wide(exact), wanted, rtol=1e-5, atol=1e-5)
    rounded = jax.jit(linear)(x, weight, bias)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(rounded), wanted + wide(bias), rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_gradients_of_products_in_bfloat16(rows, outputs):
    x, weight, given = drawn(1, rows, 16), drawn(*outputs, 16), drawn(1, rows, *outputs)

    def total(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(linear(x, weight).astype(jnp.float32) * given.astype(jnp.float32))

    of_x, of_weight = jax.jit(jax.grad(total, (0, 1)))(x, weight)
    assert of_x.dtype == of_weight.dtype == jnp.bfloat16
    dims = len(outputs)
    wanted = np.tensordot(wide(given), wide(weight), axes=dims)
    np.testing.assert_allclose(wide(of_x), wanted, rtol=2**-7, atol=1e-3)
    wanted = np.tensordot(wide(given[0]), wide(x[0]), axes=(0, 0))
    np.testing.assert_allclose(wide(of_weight), wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs", [(1024,), (2, 512), (4, 4, 64)])
def test_no_second_array_of_a_weight_is_made(rows, outputs, dtype):
    x, weight = drawn(1, rows, 256).astype(dtype), drawn(*outputs, 256).astype(dtype)
    text = jax.jit(linear).lower(x, weight).compile().as_text()
    assert text is not None
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (\w+)\(", text)
    of_its_size = {op for shape, op in made if np.prod([int(n) for n in shape.split(",")]) == weight.size}
    assert of_its_size <= {"parameter", "bitcast"}, text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("row", "weight"), [((16,), (5, 16)), ((1, 1, 16), (3, 5, 16))])
def test_a_row_that_is_filled_up_for_a_tpu_is_the_same_row(dtype, row, weight):
    """And its gradient; a number of the weight that is not finite reaches its own result alone."""
    given = drawn(*row).astype(dtype), drawn(*weight).astype(dtype).at[..., 0, 0].set(jnp.inf)
    filled, plain = (functools.partial(one, out_dtype=jnp.float32) for one in (_one_row, _product))
    np.testing.assert_allclose(filled(*given), plain(*given), rtol=1e-5)
    grads = [jax.grad(lambda *args, one=one: one(*args).sum(), (0, 1))(*given) for one in (filled, plain)]
    for mine, expected in zip(*grads, strict=True):
        assert mine.dtype == expected.dtype
        np.testing.assert_allclose(
            mine.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize(("platform", "rows"), [("tpu", {TPU_ROWS}), ("cuda", {1})])
def test_a_lone_row_is_filled_up_on_a_tpu_alone(platform, rows):
    lowered = jax.jit(linear).trace(drawn(1, 48), drawn(64, 48)).lower(lowering_platforms=(platform,))
    products = re.findall(r"stablehlo\.dot_general.*: \(tensor<(\d+)x48xbf16>", lowered.as_text())
    assert {int(found) for found in products} == rows
