#!/usr/bin/env bash
# XLA's CPU compiler refuses an argmax of two dimensions in one branch of a conditional, if the other branch returns a
# transposed array.
#
# Versions: jax and jaxlib 0.12.0.1, with Python 3.13, on Linux x86-64. jax 0.10.2 compiles the program.
# Behaviour: the branches must return the same layout. XLA gives the indices of the argmax the layout of the other
#   branch, and the maxima, which are its second result, keep their own. The pass `reduce-decomposer` then raises an
#   internal error. With one row, or with any arithmetic after the argmax, the program compiles. A tree's accepted path,
#   taken by argmax in one branch and by a loop over its depth in the other, is such a program.
# Output seen:
#   argmax: JaxRuntimeError INTERNAL RET_CHECK
#   argmax, then + 1: compiled
#   sum of the numbers of the rows: compiled
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.13}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'jax==0.12.0.1' 'jaxlib==0.12.0.1'
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$work/venv/bin/python" - <<'PYTHON' | tee "$work/output"
import jax
import jax.numpy as jnp


def compiled(first):
    """What compiling a conditional gives, whose first branch is `first`."""

    def program(p, x, y):
        return jax.lax.cond(p, lambda: first(x), lambda: jax.lax.map(lambda row: row + 1, y).T)

    shapes = (jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((2, 2, 2), jnp.float32))
    try:
        jax.jit(program).lower(*shapes, jax.ShapeDtypeStruct((2, 2), jnp.int32)).compile()
    except jax.errors.JaxRuntimeError as error:
        return " ".join([type(error).__name__, *(word for word in ("INTERNAL", "RET_CHECK") if word in str(error))])
    return "compiled"


print("argmax:", compiled(lambda x: jnp.argmax(x, 2)))
print("argmax, then + 1:", compiled(lambda x: jnp.argmax(x, 2) + 1))
print("sum of the numbers of the rows:", compiled(lambda x: jnp.sum((x > 0) * jnp.arange(2), axis=2)))
PYTHON
diff <(sed -n 's/^#   \(argmax\|sum of the numbers\)/\1/p' "$0") "$work/output"
