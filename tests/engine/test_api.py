"""The Python face at its edges: seeds, prompts, options, budgets, compilation that fails."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import re
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import testing
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.engine.scheduler import Scheduler
from jaxspec.model import cache
from jaxspec.programs import buckets, memory
from jaxspec.programs import executables as module
from jaxspec.programs.executables import Executables
from tests import refused, tiny


@pytest.mark.full
def test_a_step_of_training_compiles_nothing():
    """With other parameters the texts are theirs, and what is kept of the old ones is not used."""
    lm = jaxspec.LanguageModel(tiny.TARGET, tiny.params(), prefix_cache="1MB", name="old")
    prompt, options = list(range(1, 10)) * 8, {"method": "layerskip", "exit_layer": 1, "max_new_tokens": 8}
    lm.generate(prompt, **options)
    count, other = lm.executables.num_compilations, testing.params(tiny.TARGET, seed=1)
    new = lm.with_params(other)
    assert (len(lm.prefixes), len(new.prefixes)) == (1, 0)
    fresh = jaxspec.LanguageModel(tiny.TARGET, other)
    assert new.generate(prompt, **options).tokens == fresh.generate(prompt, **options).tokens
    assert new.executables.num_compilations == count
    assert (new.fingerprint, new.prefixes.max_bytes) == (fresh.fingerprint, lm.prefixes.max_bytes)
    assert new.fingerprint != lm.fingerprint
    assert (
        lm.generate(prompt, **options).tokens == lm.with_params(lm.params).generate(prompt, **options).tokens
    )
    for wrong in ({"embed": other["embed"]}, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), other)):
        with refused("other shapes or dtypes"):
            lm.with_params(wrong)


def test_a_text_may_fill_the_context_and_no_more(lm):
    prompt = [3] * (lm.config.context_length - 2)
    # A long prompt is no error where nobody asked for a number of tokens.
    for budget in (2, None):
        assert len(lm.generate(prompt, max_new_tokens=budget, ignore_eos=True).tokens) == 2
    with refused("exceed the model's context"):
        lm.generate(prompt, max_new_tokens=3)


def test_truth_values_of_numpy_and_no_stop_strings(lm):
    plain = lm.generate([3, 4], max_new_tokens=5, ignore_eos=True)
    assert lm.generate([3, 4], max_new_tokens=5, ignore_eos=np.True_, stop=None).tokens == plain.tokens


def test_messages_are_called_messages(lm, monkeypatch):
    monkeypatch.setattr(type(lm), "encode", lambda *_, **__: [3] * 600)
    turns = [{"role": "user", "content": "a"}]
    with refused(r"^messages\[0\] has 600 tokens"):
        lm.generate(messages=[turns, turns])


@pytest.mark.full
def test_a_draft_object_does_not_take_a_name(lm):
    """Which means another model: here the embedded one, whose vocabulary is not the target's."""
    lm.generate([3, 4], method="draft-model", draft=tiny.small_model(), max_new_tokens=2)
    with refused("draft small has a vocabulary of 1024 tokens"):
        lm.generate([3, 4], method="draft-model", draft="small", max_new_tokens=2)


@pytest.mark.parametrize("method", ["autoregressive", "draft-model", "s2d", "eagle"])
def test_a_cache_that_does_not_fit_is_refused(lm, monkeypatch, method):
    """With numbers, before anything is computed; a drafter's cache counts too."""
    options = {"max_new_tokens": 2, "method": tiny.drafter_of(method, config=lm.config)}
    size = cache.size_bytes(lm.config, 1, buckets.MIN_CAPACITY, "float32")
    free = 0.9 * size if method == "autoregressive" else 1.1 * size
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    compiled = lm.executables.num_compilations
    for generate in (lm.generate, Scheduler(lm).add):
        with refused(r"cache does not fit.*batch 1"):
            generate([3, 4], **options)
    assert lm.executables.num_compilations == compiled


def test_a_cache_that_cannot_grow_is_refused(lm, monkeypatch):
    """While a cache grows, the old one and the new one are in memory. A prompt that is as long needs only one."""
    monkeypatch.setattr(buckets, "START_CAPACITY", 16)
    needed, plain = 60, {"method": "autoregressive"}
    monkeypatch.setattr(
        memory, "free_bytes", lambda device: 1.1 * cache.size_bytes(lm.config, 1, 64, "float32")
    )
    with refused(r"cache does not fit.*64 tokens.* to grow from 16 tokens"):
        lm.generate([3, 4], max_new_tokens=needed - 2, **plain)
    lm.generate([3] * (needed - 1), max_new_tokens=1, **plain)


def test_a_failed_compilation_is_tried_again():
    """An interruption while compiling must not stay."""
    executables, fails = Executables(), [True]

    @jax.jit
    def double(x):
        if fails:
            fails.clear()
            raise KeyboardInterrupt
        return 2 * x

    with pytest.raises(KeyboardInterrupt):
        executables.call(double, jnp.ones(2))
    assert executables.call(double, jnp.ones(2)).tolist() == [2, 2]
    assert executables.num_compilations == 1


def test_the_programs_used_least_recently_are_dropped(monkeypatch):
    """Nothing holds them, and they are compiled again when they are needed."""
    monkeypatch.setattr(module, "_USED", type(module._USED)())
    monkeypatch.setattr(module, "MAX_PROGRAMS", 3)
    executables = Executables()
    add = jax.jit(lambda x, *, number: x + number, static_argnames="number")
    keys = [executables.key(add, jnp.ones(2), number=number) for number in range(4)]
    programs = {}
    for number in (0, 1, 2, 0, 3):
        program = executables.compiled(add, jnp.ones(2), number=number)
        programs[number] = weakref.ref(program)
        assert program(jnp.ones(2)).tolist() == [1 + number] * 2
    del program
    gc.collect()
    assert [executables.ready(key) for key in keys] == [True, False, True, True]
    assert [programs[number]() is None for number in range(4)] == [False, True, False, False]
    assert (executables.num_compilations, executables.num_dropped) == (4, 1)
    assert executables.call(add, jnp.ones(2), number=1).tolist() == [2, 2]
    assert executables.num_compilations == 5


def test_models_of_a_process_share_the_limits_of_programs(monkeypatch):
    """A deleted model does not count, and a program is not dropped while it is compiled."""
    monkeypatch.setattr(module, "_USED", type(module._USED)())
    monkeypatch.setattr(module, "MAX_PROGRAMS", 3)
    add = jax.jit(lambda x, *, number: x + number, static_argnames="number")
    first, second, deleted = Executables(), Executables(), Executables()
    deleted.call(add, jnp.ones(2), number=0)
    del deleted
    gc.collect()
    for number, one in enumerate((first, first, second)):
        one.call(add, jnp.ones(2), number=number)
    assert (first.num_dropped, second.num_dropped) == (0, 0)
    second.call(add, jnp.ones(2), number=3)
    assert (first.num_dropped, second.num_dropped) == (1, 0)
    assert not first.ready(first.key(add, jnp.ones(2), number=0))

    # Each program has a quarter of the mappings that the system allows.
    share = {"used": lambda: (len(first._futures) + len(second._futures)) / 4}
    monkeypatch.setattr(memory, "used_mappings", lambda: share["used"]())
    monkeypatch.setattr(module, "MAX_PROGRAMS", 100)
    monkeypatch.setattr(module, "MIN_PROGRAMS", 1)
    for number in (4, 5):
        first.call(add, jnp.ones(2), number=number)
    assert (first.num_dropped, second.num_dropped) == (2, 1)

    @jax.jit
    def outer(x):
        first.compiled(add, jax.ShapeDtypeStruct((2,), x.dtype), number=9)  # while this program is compiled
        return x

    monkeypatch.setattr(module, "MIN_PROGRAMS", 0)
    share["used"] = lambda: 1.0
    second.call(outer, jnp.ones(2))
    assert (len(first._futures), len(second._futures)) == (1, 1)
    assert second.call(add, jnp.ones(2), number=3).tolist() == [4, 4]


def test_queued_programs_do_not_exceed_the_mappings(monkeypatch):
    """Room is made when a program is compiled: when it is queued, those before it have no mappings yet."""
    monkeypatch.setattr(module, "_USED", type(module._USED)())
    monkeypatch.setattr(module, "MIN_PROGRAMS", 1)
    executables, began, most = Executables(), threading.Event(), []

    def used():
        compiled = sum(future.done() for future in executables._futures.values())
        most.append(compiled)
        return compiled / 4

    def traced(x, *, number):
        began.wait()
        return x + number

    monkeypatch.setattr(memory, "used_mappings", used)
    add = jax.jit(traced, static_argnames="number")
    for number in range(8):
        executables.prepare(add, jnp.ones(2), number=number)
    began.set()
    executables.wait()
    assert max(most) == 4
    assert len(executables._futures) == 4


def test_who_waits_for_a_program_in_the_queue_compiles_it():
    """A text must not wait for the programs before it in the queue, which take minutes."""
    executables, free, ended = Executables(), threading.Event(), []
    executables._worker.submit(lambda: ended.append(free.wait(30)))
    add = jax.jit(lambda x, *, number: x + number, static_argnames="number")
    executables.prepare(add, jnp.ones(2), number=1)
    assert executables.call(add, jnp.ones(2), number=1).tolist() == [2, 2]
    assert not ended
    free.set()
    executables.wait()
    executables._worker.submit(lambda: None).result()
    assert executables.num_compilations == 1


def test_a_process_without_mappings_for_more_keeps_the_programs_in_use(monkeypatch):
    """Its other mappings would otherwise make each text compile all its programs."""
    monkeypatch.setattr(module, "_USED", type(module._USED)())
    monkeypatch.setattr(memory, "used_mappings", lambda: 0.95)
    model, prompt = tiny.language_model(), [7, 1, 7, 1, 7, 2]
    for _ in range(2):
        model.generate(prompt, method="ngram", max_new_tokens=4)
        model.executables.wait()
        compiled = model.executables.num_compilations
        model.generate(prompt, method="ngram", max_new_tokens=4)
        assert model.executables.num_compilations == compiled


def test_the_used_mappings_are_a_share():
    assert memory.used_mappings() < 1
    assert (memory.used_mappings() > 0) == (sys.platform == "linux")


@pytest.mark.parametrize("how", ["prepare", "variant"])
def test_what_compiles_in_the_background_has_the_callers_precision(how):
    executables, matrix = Executables(), jnp.ones((2, 2))
    multiply = jax.jit(jnp.dot)
    with jax.default_matmul_precision("highest"):
        getattr(executables, how)(multiply, matrix, matrix)
    executables.wait()
    find = executables.compiled if how == "prepare" else executables.variant
    assert "highest" in find(multiply, matrix, matrix).as_text()


@pytest.mark.full
@pytest.mark.representatives("numpy")
@pytest.mark.parametrize("home", [np, jnp])
def test_arrays_are_lists_and_scalars_numbers(lm, home):
    """Of NumPy and of JAX, wherever a call takes numbers."""
    plain = {"top_k": 5, "method": "layerskip", "exit_layer": 1, "stop_rule": ["confidence"], "gamma": 0.5}
    expected = lm.generate(
        [[3, 4], [5, 6]], seed=[7, 8], temperature=[1.0, 0.5], max_new_tokens=[3, 4], **plain
    )
    options = plain | {"top_k": home.int32(5), "exit_layer": home.int32(1), "gamma": home.float32(0.5)}
    rows = lm.generate(
        home.array([[3, 4], [5, 6]]),
        seed=home.array([7, 8]),
        temperature=home.array([1.0, 0.5]),
        max_new_tokens=home.array([3, 4]),
        **options,
    )
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    one = lm.generate(
        home.array([3, 4]),
        seed=home.array([7]),
        temperature=home.float32(1.0),
        max_new_tokens=home.int32(3),
        **plain,
    )
    assert one.tokens == expected[0].tokens


@pytest.mark.full
def test_none_among_numbers_is_the_default(lm):
    rows = lm.generate([[3], [3]], max_new_tokens=[2, None], temperature=[None, 0.0], ignore_eos=True)
    assert [len(row.tokens) for row in rows] == [2, 128]


def test_what_a_model_and_a_text_look_like(lm):
    assert repr(lm) == "<LanguageModel tiny: 2 layers, 4,336 parameters, float32, on device cpu:0>"
    result = lm.generate("ab", max_new_tokens=3, ignore_eos=True)
    assert str(result) == result.text
    assert repr(result).startswith(f"<Result {result.text!r}: 3 tokens, length")


def test_only_public_names_are_listed():
    assert sorted(dir(jaxspec)) == sorted([*jaxspec.__all__, "__version__"])
    assert all(getattr(jaxspec, name) is not None for name in dir(jaxspec))


def test_stream_is_checked_when_it_is_called(lm):
    """Not when the first piece is asked for."""
    with refused("max_batch is 0"):
        lm.stream([3, 4], max_batch=0)


def test_generate_and_stream_have_the_same_arguments(lm):
    """Each option has one line of the help, and is given by its name."""
    functions = type(lm).generate, type(lm).stream
    shown, streamed = ({**inspect.signature(one).parameters} for one in functions)
    assert {name: (one.kind, one.default) for name, one in shown.items()} == {
        name: (one.kind, one.default) for name, one in streamed.items()
    }
    for name in [field.name for field in dataclasses.fields(jaxspec.GenerationOptions)]:
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        for one in functions:
            assert len(re.findall(rf"^ +(?:\w+, )*{name}(?:, \w+)*: ", one.__doc__, re.MULTILINE)) == 1, name


@pytest.mark.full
def test_an_acceptor_belongs_to_every_method(lm):
    options = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0}
    for method in ("autoregressive", "ngram", NGramDrafter()):
        rows = [lm.generate([3, 4], method=method, acceptor=name, **options) for name in (None, "block")]
        assert rows[0].tokens == rows[1].tokens
        with refused("acceptor='greedy' needs temperature 0"):
            lm.generate([3, 4], method=method, acceptor="greedy", **options)


@pytest.mark.parametrize("model", [3, b"small", ["small"]])
def test_a_model_that_is_no_name_is_refused(model):
    with refused(r"model is .*; give a directory, a hub id or the name"):
        jaxspec.load(model)


def test_a_mesh_with_other_axes_is_refused(lm):
    """Else every array would be on every device, without a word."""
    mesh = jax.make_mesh((1,), ("x",))
    with refused(r"mesh has the axes x; name them data .* and model"):
        jaxspec.load(mesh=mesh)
    with refused("mesh has the axes x"):
        jaxspec.LanguageModel(lm.config, lm.params, mesh=mesh)
    with refused("mesh is int; give a text such as data=2"):
        jaxspec.load(mesh=3)


def test_a_draft_must_be_where_the_target_is(lm):
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    spread = jaxspec.LanguageModel(lm.config, lm.params, mesh=mesh)
    with refused(r"draft small is on device cpu:0, the target on a mesh of .*; load both"):
        spread.generate([3], method="draft-model", draft=tiny.small_model())
