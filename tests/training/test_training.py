"""The trainer's pieces: packing, loss, step, initial weights, tokenizer."""

from __future__ import annotations

import dataclasses
import json
import random
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from tests import refused
from tests.training.test_training_run import CONFIG, STORIES
from training.data import bpe_tokenizer, formats, packing
from training.loop import optimizer, step
from training.losses import base


def documents(rng: np.random.Generator, lengths) -> list[packing.Encoded]:
    """Random tokens, of which about one in six is only read."""
    return [
        packing.Encoded(
            rng.integers(0, CONFIG.vocab_size, length).astype(np.int32), rng.random(length) > 1 / 6
        )
        for length in lengths
    ]


def given(step: int = 0, seed: int = 0) -> base.Given:
    return base.Given(jnp.int32(step), jax.random.key(seed))


def batch_of(windows: packing.Windows) -> base.Batch:
    return {name: jnp.asarray(array) for name, array in windows.items()}


hidden_states = jax.jit(lambda params, batch: base.layer_outputs(CONFIG, params, batch)[-1])


# Packing


@settings(max_examples=50)
@hypothesis_given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), window=st.integers(2, 17))
def test_packing_loses_and_repeats_no_token(lengths, window):
    originals = documents(np.random.default_rng(0), lengths)
    windows = packing.pack(originals, window)
    packed = []
    for row in range(len(windows["tokens"])):
        for segment in range(1, windows["segments"][row].max() + 1):
            here = np.flatnonzero(windows["segments"][row] == segment)
            assert np.array_equal(here, np.arange(here[0], here[0] + len(here)))
            assert np.array_equal(windows["positions"][row, here], np.arange(len(here)))
            packed.append((*windows["tokens"][row, here], *windows["learn"][row, here]))
    pieces = [
        (*one.tokens[i : i + window], *one.learn[i : i + window])
        for one in originals
        for i in range(0, len(one.tokens), window)
    ]
    assert sorted(packed) == sorted(pieces)


@pytest.mark.full
def test_packed_documents_do_not_see_each_other(params):
    rng = np.random.default_rng(1)
    originals = documents(rng, [5, 7, 4])
    windows = packing.pack(originals, 16)
    assert windows["tokens"].shape == (1, 16)
    hidden = hidden_states(params, batch_of(windows))[0]
    for segment, document in enumerate(
        sorted(originals, key=lambda one: len(one.tokens), reverse=True), start=1
    ):
        alone = packing.pack([document], 16)
        expected = hidden_states(params, batch_of(alone))[0]
        here = np.flatnonzero(windows["segments"][0] == segment)
        np.testing.assert_allclose(hidden[here], expected[: len(document.tokens)], atol=1e-5)


def test_split_depends_on_the_origin_alone():
    stories = [formats.plain(story)[0] for story in STORIES]
    training, held_out = packing.split(stories, 5)
    assert sorted(one.text for one in [*training, *held_out]) == sorted(STORIES)
    shuffled = random.Random(0).sample(stories, len(stories))
    assert {one.text for one in packing.split(shuffled, 5)[1]} == {one.text for one in held_out}
    made_of_them = [formats.Document((formats.Span("task"),), story) for story in STORIES]
    assert {one.origin for one in packing.split(made_of_them, 5)[1]} == {one.text for one in held_out}
    with refused(r"1 document of 1 origin; .* <\|endoftext\|> separates documents"):
        packing.split(stories[:1], 5)


@pytest.mark.parametrize("one_in", [1, 10**9])
def test_each_part_of_a_split_has_a_document(one_in):
    stories = [formats.plain(story)[0] for story in STORIES]
    parts = packing.split(stories[:2], one_in)
    assert [len(part) for part in parts] == [1, 1]
    assert packing.split(stories[1::-1], one_in) == parts


def test_fixed_batches_cover_all_windows_once():
    windows = packing.pack(documents(np.random.default_rng(2), [6, 5, 6, 3, 6]), 6)
    parts = packing.fixed_batches(windows, 2, 100)
    stacked = np.concatenate([part["tokens"] for part in parts])
    assert np.array_equal(stacked[: len(windows["tokens"])], windows["tokens"])
    assert all(part["tokens"].shape == (2, 6) for part in parts)
    assert not np.concatenate([part["segments"] for part in parts])[len(windows["tokens"]) :].any()


def test_batches_resume_where_they_stopped_and_cover_every_epoch():
    windows = packing.pack(documents(np.random.default_rng(3), [4] * 6), 4)
    stream = packing.batches({"a": windows}, {"a": 1.0}, batch=1, accumulate=2, seed=7)
    epochs = [np.concatenate([next(stream)["tokens"][:, 0] for _ in range(3)]) for _ in range(2)]
    for epoch in epochs:
        assert sorted(map(tuple, epoch)) == sorted(map(tuple, windows["tokens"]))
    assert not np.array_equal(epochs[0], epochs[1])
    state = json.loads(json.dumps(stream.get_state()))
    following = [next(stream) for _ in range(4)]
    again = packing.batches({"a": windows}, {"a": 1.0}, batch=1, accumulate=2, seed=7)
    again.set_state(state)
    for expected in following:
        assert np.array_equal(next(again)["tokens"], expected["tokens"])
    # With other rows a step, the next window is still the one after the last.
    rows = np.concatenate([batch["tokens"].reshape(-1, 4) for batch in following])
    other = packing.batches({"a": windows}, {"a": 1.0}, batch=3, accumulate=1, seed=7)
    other.set_state(state)
    assert np.array_equal(next(other)["tokens"].reshape(-1, 4), rows[:3])


def test_kinds_are_mixed_by_weight_and_each_covers_its_epochs():
    rng = np.random.default_rng(9)
    kinds = {
        "rare": packing.pack(documents(rng, [4] * 3), 4),
        "often": packing.pack(documents(rng, [4] * 9), 4),
    }
    stream = packing.batches(kinds, {"rare": 1.0, "often": 3.0}, batch=4, accumulate=1, seed=0)
    drawn = np.concatenate([next(stream)["tokens"][0] for _ in range(6)])
    rows = {kind: [tuple(row) for row in windows["tokens"]] for kind, windows in kinds.items()}
    counts = {kind: [list(map(tuple, drawn)).count(row) for row in own] for kind, own in rows.items()}
    assert counts == {"rare": [2] * 3, "often": [2] * 9}


def test_cache_is_used_while_its_key_stands(tmp_path):
    windows = packing.pack(documents(np.random.default_rng(4), [3, 4]), 4)
    calls = []

    def make():
        calls.append(1)
        return {"training": {"a": windows}, "held_out": {"a": windows}}

    for key in ("a", "a", "b"):
        got = packing.cached(tmp_path / "tokens.npz", key, make)
        assert np.array_equal(got["training"]["a"]["learn"], windows["learn"])
    assert len(calls) == 2


def test_one_process_makes_the_windows_and_the_others_read_them(tmp_path, monkeypatch):
    windows = packing.pack(documents(np.random.default_rng(4), [3, 4]), 4)
    made = {part: {"a": windows} for part in ("training", "held_out")}
    file, waited = tmp_path / "tokens.npz", []

    def first_process(where):
        waited.append(where)
        with monkeypatch.context() as there:
            there.setattr(packing.files, "written_here", lambda: True)
            there.setattr(packing.processes, "wait_for_all", lambda where: None)
            packing.cached(file, "key", lambda: made)

    monkeypatch.setattr(packing.files, "written_here", lambda: False)
    monkeypatch.setattr(packing.processes, "wait_for_all", first_process)
    never = unittest.mock.Mock(side_effect=AssertionError("made twice"))
    found = packing.cached(file, "key", never)
    assert np.array_equal(found["held_out"]["a"]["tokens"], windows["tokens"])
    assert isinstance(found["training"]["a"]["tokens"].base, np.memmap)
    assert len(waited) == 1
    packing.cached(file, "key", never)
    assert len(waited) == 1
    with refused("has other text than this process"):
        packing.cached(file, "other", never)


# Loss and step


def test_loss_is_the_one_numpy_computes(params):
    windows = packing.pack(documents(np.random.default_rng(5), [9, 4, 3, 6]), 12)
    batch = batch_of(windows)
    total, weight = jax.jit(base.next_token(CONFIG))(params, batch, given())
    hidden = hidden_states(params, batch)
    logits = np.asarray(llama.logits(CONFIG, params, hidden), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected, count = 0.0, 0
    rows, length = windows["tokens"].shape
    for row in range(rows):
        for t in range(length - 1):
            segment = windows["segments"][row, t]
            if segment and segment == windows["segments"][row, t + 1] and windows["learn"][row, t + 1]:
                expected -= log_probs[row, t, windows["tokens"][row, t + 1]]
                count += 1
    assert float(weight) == count
    assert 10 < count < 8 + 3 + 2 + 5
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_rematerialisation_changes_no_gradient(params):
    batch = batch_of(packing.pack(documents(np.random.default_rng(6), [9, 4]), 12))
    kept, again = (
        jax.jit(jax.grad(lambda p, remat=remat: base.next_token(CONFIG, remat)(p, batch, given())[0]))(params)
        for remat in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept, again)


@pytest.mark.full
def test_accumulated_micro_batches_are_one_large_batch(params):
    """Micro-batches with different numbers of tokens: a mean of means would differ."""
    windows = packing.pack(documents(np.random.default_rng(7), [12, 5, 10, 11]), 12)
    options = optimizer.OptimizerOptions(learning_rate=1e-2, warmup=1)
    results = []
    for rows, micro in ((4, 1), (1, 4)):
        transform = optimizer.make_optimizer(options, 10)
        state = step.init_state(jax.tree.map(jnp.copy, params), transform)
        batch = {name: array.reshape(micro, rows, -1) for name, array in windows.items()}
        results.append(step.make_step(base.next_token(CONFIG), transform, 0)(state, batch)[1])
    for name in ("loss", "gradient_norm", "tokens"):
        assert float(results[0][name]) == pytest.approx(float(results[1][name]), rel=1e-5), name


def test_weight_decay_spares_norms_and_biases():
    config = LlamaConfig(31, 8, 12, 1, 2, 1, 4, qkv_bias=True, mlp_bias=True)
    chosen = optimizer.decayed(llama.init_params(config, jax.random.key(0)))
    assert all((chosen["embed"], chosen["head"], chosen["layers"][0]["mlp"]["down"]))
    attention, mlp = chosen["layers"][0]["attention"], chosen["layers"][0]["mlp"]
    spared = (chosen["norm"], attention["norm"], attention["qkv_bias"], mlp["norm"], mlp["gate_up_bias"])
    assert not any(spared)


@pytest.mark.representatives("muon")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_without_a_gradient_matrices_decay_and_norms_stay(kind, params):
    options = optimizer.OptimizerOptions(kind, learning_rate=0.1, weight_decay=0.5, warmup=1)
    transform = optimizer.make_optimizer(options, 10)
    state, still = transform.init(params), jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):  # the warm-up has one step
        moved, state = transform.update(still, state, params)

    def check(on, change, leaf):
        np.testing.assert_allclose(change, -0.05 * leaf if on else 0 * leaf, rtol=1e-5, atol=1e-9)

    jax.tree.map(check, optimizer.decayed(params), moved, params)


@pytest.mark.full
def test_muon_moves_each_matrix_of_a_layer_alike_in_all_directions_and_the_rest_as_adamw_does(params):
    gradient = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    options = optimizer.OptimizerOptions("muon", learning_rate=0.5, weight_decay=0, warmup=1)
    plain = optax.adamw(
        optimizer.schedule(options, 10), options.b1, options.b2, weight_decay=0, nesterov=True
    )
    clipped = optax.chain(optax.clip_by_global_norm(options.clip), plain)
    moved = {}
    for kind, transform in (("adamw", clipped), ("muon", optimizer.make_optimizer(options, 10))):
        state = transform.init(params)
        for _ in range(2):  # the warm-up has one step
            moved[kind], state = transform.update(gradient, state, params)
    muon, adamw = moved["muon"], moved["adamw"]
    layer = muon["layers"][0]
    matrices = [
        layer["attention"]["out"],
        layer["mlp"]["down"],
        *layer["attention"]["qkv"],
        *layer["mlp"]["gate_up"],
    ]
    for matrix in matrices:
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert 0.4 < singular.min() / singular.max() <= 1
        # As large as AdamW's usual update: 0.2 of the rate.
        assert float(jnp.sqrt(jnp.mean(jnp.square(matrix)))) == pytest.approx(
            0.5 * 0.2 * min(1, (min(matrix.shape) / matrix.shape[1]) ** 0.5), rel=0.35
        )
    for tree in (muon, adamw):
        for one in tree["layers"]:
            for part, names in (("attention", ("qkv", "out")), ("mlp", ("gate_up", "down"))):
                for name in names:
                    del one[part][name]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), muon, adamw)


def test_schedules_warm_up_and_end():
    options = optimizer.OptimizerOptions(learning_rate=0.5, final_fraction=0.1, warmup=10)
    rate = optimizer.schedule(options, 100)
    rates = [float(rate(i)) for i in (0, 1, 9, 10, 100)]
    assert rates == pytest.approx([0.5 / 11, 1 / 11, 5 / 11, 0.5, 0.05])
    assert float(optimizer.schedule(dataclasses.replace(options, warmup=0), 100)(0)) == 0.5
    assert all(float(rate(i)) > float(rate(i + 1)) for i in range(10, 100, 7))
    flat = dataclasses.replace(options, schedule="constant", decay_steps=20)
    rate = optimizer.schedule(flat, 100)
    assert [float(rate(i)) for i in (4, 10, 80, 90, 100)] == pytest.approx([2.5 / 11, 0.5, 0.5, 0.275, 0.05])


def test_a_few_steps_learn(params):
    windows = packing.pack(documents(np.random.default_rng(8), [12] * 2), 12)
    transform = optimizer.make_optimizer(optimizer.OptimizerOptions(learning_rate=1e-2, warmup=2), 60)
    state = step.init_state(jax.tree.map(jnp.copy, params), transform)
    step_fn = step.make_step(base.next_token(CONFIG), transform, 0)
    batch = {name: array[None] for name, array in windows.items()}
    seen = []
    for _ in range(60):
        state, metrics = step_fn(state, batch)
        seen.append(float(metrics["loss"]))
    assert seen[-1] < 0.25 * seen[0]
    assert step_fn._cache_size() == 1


# Tokenizer


@settings(max_examples=200)
@hypothesis_given(text=st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_comes_back_from_its_tokens(words, text):
    ids = words.encode(text, add_special_tokens=False).ids
    if not any(mark in text for mark in (bpe_tokenizer.BOS, bpe_tokenizer.EOS)):
        assert words.decode(ids, skip_special_tokens=False) == text


def test_transformers_loads_the_tokenizer(words, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bpe_tokenizer.save(words, tmp_path, 128)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (bpe_tokenizer.BOS_ID, bpe_tokenizer.EOS_ID)
    for text in ("Once upon a time", "é ∆ 🙂\n  <b> , . n't\t", " x ", "a , b ."):
        ids = loaded(text).input_ids
        assert ids[0] == bpe_tokenizer.BOS_ID
        assert ids.count(bpe_tokenizer.BOS_ID) == 1
        assert loaded.decode(ids, skip_special_tokens=True) == text


@pytest.mark.full
def test_a_vocabulary_must_hold_all_bytes():
    with refused("at least 258"):
        bpe_tokenizer.train(STORIES, 100)
