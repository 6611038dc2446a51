"""Control flow that lets XLA update a cache in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

Carry = TypeVar("Carry")


@struct.dataclass
class OneOf:
    """A tree of arrays at a traced index of several: a weight, or a cache that is read, in a loop over layers.

    The CPU's products read the arrays in place, in one branch for each. A loop over stacked arrays would copy them.

    Attributes:
      each: the trees, whose results below have equal shapes.
      index: int32[].
    """

    each: tuple[Any, ...]
    index: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each, if they are arrays."""
        shape: tuple[int, ...] = self.each[0].shape
        return shape

    @property
    def dtype(self) -> Any:
        """The dtype of each, if they are arrays."""
        return self.each[0].dtype


def one_of(chosen: Any) -> Any:
    """Returns the tree, or the first of a `OneOf`, whose shapes and dtypes all have."""
    return chosen.each[0] if isinstance(chosen, OneOf) else chosen


def apply_to_chosen(chosen: Any, f: Callable[..., Any], *args: Any) -> Any:
    """Returns `f(tree, *args)` of a tree, or of the tree at the index of a `OneOf`."""
    if not isinstance(chosen, OneOf):
        return f(chosen, *args)
    return jax.lax.switch(chosen.index, [functools.partial(f, one) for one in chosen.each], *args)


def run_if(run: bool | jax.Array, sublayer: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns `sublayer(carry)` if `run`, else `carry`.

    A Python bool decides while tracing; a traced one becomes a conditional whose other branch is the identity. A GPU
    copies the outputs of a conditional, so use `once` for a carry with a cache.
    """
    if isinstance(run, bool):
        return sublayer(carry) if run else carry
    chosen: Carry = jax.lax.cond(run, sublayer, lambda same: same, carry)
    return chosen


def either(pred: bool | jax.Array, f: Callable[[], Carry], g: Callable[[], Carry]) -> Carry:
    """Returns `f()` if `pred`, else `g()`; a Python bool decides while tracing. For results without caches."""
    if isinstance(pred, bool):
        return f() if pred else g()
    chosen: Carry = jax.lax.cond(pred, f, g)
    return chosen


def once(pred: bool | jax.Array, f: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns `f(carry)` if `pred`, a bool scalar, as a loop of zero or one trip; a Python bool decides while tracing.

    XLA copies a cache that several conditionals write, and on a GPU one that a single conditional writes; loops update
    it in place. Such a loop has no reverse-mode gradient.
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
    """Returns `f(width, carry)` for the smallest of the rising `widths` that is at least `needed`.

    `needed` is an int32 scalar from 0 to the last width. For 0, `carry` is returned, except that a single width always
    runs. On a CPU, where every row costs time, each width is compiled. On an accelerator, where rows are nearly free
    and each width means another copy of the model to compile, only the last is. In the compiled program each has the
    name `scope`_WIDTH.
    """
    if len(widths) == 1:
        return f(widths[0], carry)

    def between(below: int, width: int, carry: Carry) -> Carry:
        with jax.named_scope(f"{scope}_{width}"):
            return once((below < needed) & (needed <= width), functools.partial(f, width), carry)

    for below, width in zip((0, *widths), widths[:-1], strict=False):
        on_cpu = functools.partial(between, below, width)
        carry = jax.lax.platform_dependent(carry, cpu=on_cpu, default=lambda same: same)
    # On a CPU the narrower widths have covered up to widths[-2]; elsewhere none of them ran.
    covered = jax.lax.platform_dependent(cpu=lambda: jnp.int32(widths[-2]), default=lambda: jnp.int32(0))
    with jax.named_scope(f"{scope}_{widths[-1]}"):
        return once(covered < needed, functools.partial(f, widths[-1]), carry)
