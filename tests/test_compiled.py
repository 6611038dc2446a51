"""What the compiled programs are made of: no cache copied, no weight inside, and fit for TPU and GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from jaxspec.engine import session as engine
from jaxspec.model.cache import KVCache
from tests import tiny

PROMPTS = ([5], [7, 1, 7, 1, 7, 1, 7, 2])
each_method = pytest.mark.parametrize("method", tiny.METHODS)
each_batch = pytest.mark.parametrize("batch", [1, 2])


class Call:
    """One call of a compiled function: the shapes of its arguments, and the executable."""

    def __init__(self, function: Callable, args: Any, static: dict[str, Any], future: Any) -> None:
        self.function, self.static, self._future = function, static, future
        self.args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)

    def text(self) -> str:
        return self._future.result().as_text()


def calls(lm, method: str, batch: int, **options: Any) -> dict[Callable, Call]:
    """What the engine runs for a method; compiled already if another test has asked for the same."""
    seen = {}
    claim = lm.executables._claim

    def spy(function, args, static):
        key, future, mine = claim(function, args, static)
        seen.setdefault(function, Call(function, args, static, future))
        return key, future, mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.executables, "_claim", spy)
        prompts = PROMPTS[:batch]
        lm.generate(prompts, **tiny.options(method), max_new_tokens=14, ignore_eos=True, **options)
    return seen


def cache_shapes(call: Call) -> set[tuple[int, ...]]:
    """Of every cache in a chunk's state: they end in capacity and head size."""
    state = call.args[2]
    caches = [node for node in jax.tree.leaves(state, is_leaf=is_cache) if is_cache(node)]
    assert len(caches) == (1 if state.drafter_state == () else 2)
    return {leaf.shape for cache in caches for leaf in jax.tree.leaves(cache.layers)}


def is_cache(node: object) -> bool:
    return isinstance(node, KVCache)


def on_caches(text: str, shapes: set[tuple[int, ...]]) -> set[str]:
    """The operations of optimised HLO that make something of a cache's shape, anywhere in the program."""

    def squeezed(dims: Iterable[int]) -> tuple[int, ...]:
        return tuple(dim for dim in dims if dim != 1)

    wanted = {squeezed(shape) for shape in shapes}
    made = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text)
    return {operation for dims, operation in made if squeezed(map(int, dims.split(","))) in wanted}


@each_batch
@each_method
def test_no_cache_is_copied(lm, method, batch):
    """Caches are passed on and updated in place, in the loops and around them."""
    chunk = calls(lm, method, batch)[engine._chunk]
    used = on_caches(chunk.text(), cache_shapes(chunk))
    assert "dynamic-update-slice" in used
    assert used <= {"parameter", "get-tuple-element", "dynamic-update-slice", "fusion", "bitcast"}


def test_a_copied_cache_is_noticed():
    """Two arms that both write."""

    def loop(buffer):
        def write(value):
            return lambda b: jax.lax.dynamic_update_slice(b, jnp.full((2, 1, 4), value), (0, 3, 0))

        def body(carry):
            i, b = carry
            b = jax.lax.cond(jnp.sum(b[0, 0]) + i > 3, write(1.0), write(2.0), b)
            return i + 1, jax.lax.cond(jnp.sum(b[0, 1]) > 3, write(3.0), write(4.0), b)

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, buffer))[1]

    text = jax.jit(loop, donate_argnums=0).lower(jnp.zeros((2, 32, 4))).compile().as_text()
    assert "copy" in on_caches(text, {(2, 32, 4)})


@each_method
def test_no_weight_is_in_the_program(lm, method):
    """Parameters are arguments of everything that the engine compiles."""
    for function, call in calls(lm, method, 2).items():
        closed = function.trace(*call.args, **call.static).jaxpr
        assert sum(const.size for const in all_constants(closed)) < 64


def all_constants(closed: Any) -> list[Any]:
    """Of a jaxpr and of all those within it."""
    found = [const for const in closed.consts if hasattr(const, "size")]
    for equation in closed.jaxpr.eqns:
        inner = jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "consts"))
        found += [const for one in inner if hasattr(one, "consts") for const in all_constants(one)]
    return found


@each_method
def test_the_widths_of_verification(lm, method):
    """One, about half of and all of K + 1 rows, where a draft may be short."""
    call = calls(lm, method, 2)[engine._chunk]
    text = call.function.trace(*call.args, **call.static).lower().as_text()
    vocabulary = tiny.TARGET.vocab_size
    heads = re.findall(rf"-> tensor<2x(\d+)x{vocabulary}xf32>", text)
    widths = call.args[1].drafter.verify_widths
    assert {int(width) for width in heads} >= set(widths)
    expected = {"autoregressive": (1,), "draft-model": (4,)}
    assert widths == expected.get(method, (1, 2, 4))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@each_method
def test_every_loop_lowers_for_accelerators(lm, method, platform):
    """On a machine that has none, in bfloat16 as there."""
    used = calls(lm, method, 2)
    assert {engine._prefill, engine._chunk} <= set(used)
    for function, call in used.items():
        args = jax.tree.map(as_bfloat16, call.args)
        lowered = export.export(jax.jit(functools.partial(function, **call.static)), platforms=[platform])(
            *args
        )
        assert lowered.platforms == (platform,)


def as_bfloat16(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    large = shape.dtype == jnp.float32 and shape.size > 2
    return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16 if large else shape.dtype)
