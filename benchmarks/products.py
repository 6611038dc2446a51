"""The time of int8 and bfloat16 products on a CPU: `python -m benchmarks.products` prints JSON.

`int8`: all products of one decoding step of a model's shape in one program, by rows. `bfloat16`: one product in several
forms, beside float32.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks import command
from jaxspec.host.progress import OnProgress
from jaxspec.model.numerics import int32_sums, linear

ROWS = (1, 2, 3, 5, 9, 16)
BFLOAT16, FLOAT32 = jnp.bfloat16, jnp.float32


@dataclasses.dataclass(frozen=True)
class Options:
    """The time of products on a CPU. The default shape is that of SmolLM2-135M.

    Attributes:
      layers: number of layers.
      width: width of the residual stream.
      qkv: number of output channels of a layer's queries, keys and values.
      inner: width of an MLP's inner activations.
      vocabulary: number of output channels of the head.
      square: width of a square matrix for the bfloat16 products, which also multiply the head.
      repeats: number of measurements, of which the fastest counts.
    """

    layers: int = 30
    width: int = 576
    qkv: int = 960
    inner: int = 1536
    vocabulary: int = 49152
    square: int = 4096
    repeats: int = 20


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Measures milliseconds.

    Returns:
      `int8`: `bytes` of the matrices, `memory_ms` (a float32 product of one row that reads as many bytes), and `ms` by
      rows; `bfloat16`: milliseconds by shape of the matrix and form of the product.
    """
    return {
        "int8": _int8(options, on_progress),
        "bfloat16": {
            f"{rows} x {columns}": _bfloat16(rows, columns, options.repeats, on_progress)
            for rows, columns in ((options.square, options.square), (options.vocabulary, options.width))
        },
    }


def _int8(options: Options, on_progress: OnProgress) -> dict[str, Any]:
    random = np.random.default_rng(0)
    width, inner = options.width, options.inner
    shapes = [(options.qkv, width), (width, width), (2 * inner, width), (width, inner)] * options.layers
    matrices = [
        jnp.asarray(random.integers(-127, 128, shape, np.int8))
        for shape in (*shapes, (options.vocabulary, width))
    ]
    size = sum(matrix.size for matrix in matrices)
    runs: dict[str, Any] = {"memory": (linear, (jnp.ones((1, width)), jnp.ones((size // 4 // width, width))))}
    for count in ROWS:
        rows = jnp.asarray(random.integers(-127, 128, (count, width), np.int8))
        runs[str(count)] = (_step, (rows, matrices))
    on_progress("int8 products")
    found = _milliseconds(runs, options.repeats)
    return {"bytes": size, "memory_ms": found.pop("memory"), "ms": found}


def _step(rows: jax.Array, matrices: list[jax.Array]) -> jax.Array:
    """Returns the head's sums; each product takes numbers from the one before, as in a model."""
    for matrix in matrices:
        inputs = jnp.tile(rows, -(-matrix.shape[1] // rows.shape[1]))[:, : matrix.shape[1]]
        sums = int32_sums(inputs, matrix)
        rows = (sums >> 8).astype(jnp.int8)
    return sums


def _bfloat16(outputs: int, inputs: int, repeats: int, on_progress: OnProgress) -> dict[str, float]:
    weight = jax.random.normal(jax.random.key(0), (outputs, inputs))
    narrow = weight.astype(BFLOAT16)
    transposed = jnp.asarray(narrow.T)

    def product(left: int, right: int, dtype: DTypeLike, swapped: bool = False) -> Callable[..., jax.Array]:
        def run(x: jax.Array, matrix: jax.Array) -> jax.Array:
            a, b = (matrix, x) if swapped else (x, matrix)
            contract = (((left,), (right,)), ((), ()))
            return jax.lax.dot_general(a, b, contract, preferred_element_type=dtype)

        return run

    def summed(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.sum(matrix[None] * x[:, None], axis=-1, dtype=FLOAT32)

    def rows(count: int, dtype: DTypeLike = BFLOAT16) -> jax.Array:
        return jax.random.normal(jax.random.key(1), (count, inputs)).astype(dtype)

    right, left = product(1, 1, FLOAT32), product(1, 1, FLOAT32, swapped=True)
    runs: dict[str, Any] = {"float32, 1 row": (right, (rows(1, FLOAT32), weight))}
    runs |= {f"weights right, {n} rows": (right, (rows(n), narrow)) for n in (1, 2, 5)}
    runs |= {f"weights left, {n} rows": (left, (rows(n), narrow)) for n in (1, 2, 4, 8)}
    runs["weights left, 8 rows, bfloat16 results"] = (
        product(1, 1, BFLOAT16, swapped=True),
        (rows(8), narrow),
    )
    runs["weights right as [in, out], 2 rows"] = (product(1, 0, FLOAT32), (rows(2), transposed))
    runs |= {f"multiply and sum, {n} rows": (summed, (rows(n), narrow)) for n in (1, 2)}
    on_progress("bfloat16 products")
    return _milliseconds(runs, repeats)


def _milliseconds(runs: dict[str, Any], repeats: int) -> dict[str, float]:
    """Returns the fastest run of each (function, operands), measured in turns."""
    programs = {name: functools.partial(jax.jit(run), *operands) for name, (run, operands) in runs.items()}
    fastest = dict.fromkeys(programs, float("inf"))
    for _ in range(repeats + 1):  # the first run compiles, and is never the fastest
        for name, program in programs.items():
            began = perf_counter()
            jax.block_until_ready(program())
            fastest[name] = min(fastest[name], (perf_counter() - began) * 1e3)
    return {name: round(time, 2) for name, time in fastest.items()}


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.products", Options, measure))
