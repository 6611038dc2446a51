"""Control flow that lets XLA update a cache in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


def run_if(run: bool | jax.Array, sublayer: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`sublayer(carry)` where `run`, else `carry` untouched.

    A Python bool decides while tracing. A traced one becomes a conditional whose other arm is the identity. Of what is
    carried, a GPU copies what a conditional gives back: a cache is carried by `once`.
    """
    if isinstance(run, bool):
        return sublayer(carry) if run else carry
    chosen: Carry = jax.lax.cond(run, sublayer, lambda same: same, carry)
    return chosen


def once(pred: bool | jax.Array, f: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`f(carry)` if `pred`, a bool scalar, as a loop of zero or one trip; a Python bool decides while tracing.

    A conditional would do the same, but several that write the cache make XLA copy it, on a GPU a single one does;
    loops do not. A loop whose number of trips is traced has no reverse-mode gradient.
    """
    if isinstance(pred, bool):
        return f(carry) if pred else carry
    _, carry = jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), f(c[1])), (pred, carry))
    return carry


def narrowest(
    widths: tuple[int, ...],
    needed: jax.Array,
    f: Callable[[int, Carry], Carry],
    carry: Carry,
    scope: str = "width",
) -> Carry:
    """`f(width, carry)` for the narrowest of the rising `widths` that holds `needed`, int32 scalar from 0 to the last.

    On a CPU, where every row costs, each width is compiled and one runs. On an accelerator, where rows are nearly free
    and each width is another copy of the model to compile, there is only the last one. For 0 none runs, unless only one
    width is given, which always does. A reader of the compiled program finds each by the name `scope`_WIDTH.
    """
    if len(widths) == 1:
        return f(widths[0], carry)

    def between(below: int, width: int, carry: Carry) -> Carry:
        with jax.named_scope(f"{scope}_{width}"):
            return once((below < needed) & (needed <= width), functools.partial(f, width), carry)

    for below, width in zip((0, *widths), widths[:-1], strict=False):
        on_cpu = functools.partial(between, below, width)
        carry = jax.lax.platform_dependent(carry, cpu=on_cpu, default=lambda same: same)
    others = jax.lax.platform_dependent(cpu=lambda: jnp.int32(widths[-2]), default=lambda: jnp.int32(0))
    with jax.named_scope(f"{scope}_{widths[-1]}"):
        return once(others < needed, functools.partial(f, widths[-1]), carry)
