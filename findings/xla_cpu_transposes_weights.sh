#!/usr/bin/env bash
# XLA's CPU compiler copies a whole weight in each call of a product, if the weight has two output axes.
#
# Versions: jax and jaxlib 0.10.2, on Linux x86-64 (0.12.0.1 behaves the same).
# Behaviour: `dot_general` of x [R, I] and a weight [2, F, I] over I, with R = 33, becomes a copy of the weight as
#   [I, 2 F], and then a product. The copy is made in each call, because the weight is an argument. The same product
#   with the weight reshaped to [2 F, I] reads the weight in place, and gives the same numbers. In a Llama block the
#   gate and the up projection, or q, k and v, kept in one array, are such weights.
# Output seen:
#   two output axes: 1 copy of the weight
#   one matrix: 0 copies of the weight
#   equal numbers: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'jax==0.10.2' 'jaxlib==0.10.2'
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PYTHON' | tee "$work/output"
import re

import jax
import jax.numpy as jnp
import numpy as np

rows, features, inputs = 33, 1536, 576
x = jax.random.normal(jax.random.key(0), (rows, inputs))
weight = jax.random.normal(jax.random.key(1), (2, features, inputs))


def product(x, weight):
    dims = ((1,), (weight.ndim - 1,)), ((), ())
    return jax.lax.dot_general(x, weight, dims, precision=jax.lax.Precision.HIGHEST)


def as_matrix(x, weight):
    return product(x, weight.reshape(-1, inputs)).reshape(rows, 2, features)


def copies(function):
    """The number of operations `copy` whose result has the size of the weight."""
    text = jax.jit(function).lower(x, weight).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)
    return sum(np.prod([int(n) for n in shape.split(",")]) == weight.size for shape in shapes)


print(f"two output axes: {copies(product)} copy of the weight")
print(f"one matrix: {copies(as_matrix)} copies of the weight")
print("equal numbers:", np.allclose(jax.jit(product)(x, weight), jax.jit(as_matrix)(x, weight), atol=1e-3))
PYTHON
diff <(sed -n 's/^#   \(two output axes\|one matrix\|equal numbers\)/\1/p' "$0") "$work/output"
