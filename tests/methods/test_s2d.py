"""S2D's draft against its sub-models, each computed without a cache."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import methods
from jaxspec.cli import main
from jaxspec.costs.rounds import DraftCost
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.s2d_drafter import MAX_WAITING, S2DDrafter
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import method_files
from jaxspec.io.trained_for import TrainedFor
from jaxspec.methods.base import layers_of
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.prefill import run_prompts
from jaxspec.protocol import Outcome, Prefill, View, Weights
from jaxspec.sampling import Greedy
from jaxspec.stopping import Constant
from jaxspec.testing import reference
from tests import refused, tiny
from tests.commands import CONFIG, write_model, write_tokenizer

CAPACITY, ROUNDS, K = 64, 7, 4
DRAFT = dataclasses.replace(tiny.TARGET, num_layers=4)


def drafter(thresholds, exits, rule=None, **changes) -> S2DDrafter:
    config = DRAFT.truncated(exits[-1]) if not changes else DRAFT
    return S2DDrafter(config, exits, jnp.asarray(thresholds, jnp.float32), rule or Constant(), K, **changes)


@functools.cache
def exit_logits(layers: int, text: tuple[int, ...]) -> np.ndarray:
    """Returns the logits of the token after a text, by the first layers alone, without a cache."""
    weights = llama.truncate(tiny.params(DRAFT), layers)
    return reference.forward(DRAFT.truncated(layers), weights, list(text))[-1]


def expected_draft(text, exits, thresholds, count: int) -> list[int]:
    """Returns S2D's greedy draft after a text, one token at a time."""
    drafted: list[int] = []
    for _ in range(count):
        for layers, threshold in zip(exits, (*thresholds, 0.0), strict=True):
            logits = exit_logits(layers, (*text, *drafted))
            if tiny.warp(logits).max() >= threshold:
                break
        drafted.append(int(np.argmax(logits)))
    return drafted


@functools.partial(jax.jit, static_argnames="shared")
def init(method, weights, tokens, length, shared):
    config = method.config if shared else tiny.TARGET
    cache = kv.create(config, len(length), tokens.shape[1], jnp.float32)
    if shared:
        cache = fill(config, weights.target, tokens, length - 1, cache)
    view = View(tokens, length, cache, jnp.full(len(length), K))
    batch = len(length)
    prefill = Prefill(jnp.zeros((batch, config.hidden_size)), jnp.zeros((batch, config.num_layers, 2)), 1)
    return view.cache, method.init(weights, view, prefill)


@jax.jit
def propose(method, weights, state, view):
    keys = jax.random.split(jax.random.key(0), len(view.length))
    return method.propose(keys, weights, state, view, Greedy())


def run(
    method: S2DDrafter, exits, thresholds, prompts, script, capacity=CAPACITY
) -> tuple[list[int], ChainState]:
    """Runs rounds with scripted acceptances instead of a target, and compares each draft.

    Returns the number of waiting tokens after each round, and the final state.
    """
    shared, most = method.sorted_target, method.num_draft_tokens
    weights = Weights(tiny.params(DRAFT), None if shared else llama.truncate(tiny.params(DRAFT), exits[-1]))
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    cache, state = init(method, weights, jnp.asarray(tokens), jnp.asarray(length), shared)
    waited = []
    for round_, accepted in enumerate(script):
        view = View(jnp.asarray(tokens), jnp.asarray(length), cache, jnp.full(len(prompts), most))
        proposal, state, _ = propose(method, weights, state, view)
        if not shared:
            waiting = state.own[1]
            waited.append(int(jnp.max(waiting.passed[:, 0] - waiting.passed[:, -1])))
            assert waited[-1] <= MAX_WAITING - 2
        drafted = np.asarray(proposal.tokens)
        kept = np.minimum(accepted[: len(prompts)], proposal.count)
        for row in range(len(prompts)):
            text = tokens[row, : length[row]].tolist()
            limits = thresholds[row] if np.ndim(thresholds) == 2 else thresholds
            expected = expected_draft(text, exits, limits, int(proposal.count[row]))
            assert drafted[row, : proposal.count[row]].tolist() == expected, (round_, row)
            tokens[row, length[row] : length[row] + kept[row]] = expected[: kept[row]]
            length[row] += kept[row]
            tokens[row, length[row]] = (7 * round_ + 3 * row + 1) % tiny.TARGET.vocab_size
            length[row] += 1
        if shared:
            # Verification fills every layer.
            cache = kv.create(method.config, len(prompts), capacity, jnp.float32)
            cache = fill(method.config, weights.target, jnp.asarray(tokens), jnp.asarray(length) - 1, cache)
        outcome = Outcome(jnp.zeros((len(prompts), most + 1), jnp.int32), kept + 1, proposal.count, kept)
        state = method.observe(weights, state, outcome)
    return waited, state


@functools.partial(jax.jit, static_argnames="config")
def fill(config, weights, tokens, length, cache):
    return run_prompts(config, weights, tokens, length, cache, 1)[2]


PROMPTS = ((1, 2, 3), (5, 4), (7, 1, 7, 1, 7, 1, 7, 2, 9, 11))
SCRIPTS = st.lists(st.tuples(*[st.integers(0, K)] * 3).map(np.array), min_size=ROUNDS, max_size=ROUNDS)
LIMITS = st.sampled_from([0.0, 0.35, 0.5, 0.65, 0.8, 1.0])


@pytest.mark.full
@settings(max_examples=12)
@given(script=SCRIPTS, first=LIMITS, second=LIMITS, rows=st.sampled_from([1, 3]))
def test_each_token_comes_from_the_first_exit_that_is_sure(script, first, second, rows):
    exits, thresholds = (1, 2, 4), (first, second)
    run(drafter(thresholds, exits), exits, thresholds, PROMPTS[:rows], script)


@pytest.mark.full
@settings(max_examples=6)
@given(script=SCRIPTS, limits=st.lists(st.tuples(LIMITS, LIMITS), min_size=3, max_size=3))
def test_rows_have_thresholds_of_their_own(script, limits):
    exits = (1, 3, 4)
    run(drafter(limits, exits), exits, np.array(limits), PROMPTS, script)


@pytest.mark.full
@settings(max_examples=6)
@given(script=SCRIPTS, limit=LIMITS, rows=st.sampled_from([1, 3]))
def test_a_sorted_target_drafts_below_its_last_layer(script, limit, rows):
    exits, thresholds = (1, 3), (limit,)
    run(drafter(thresholds, exits, sorted_target=True), exits, thresholds, PROMPTS[:rows], script)


def test_tokens_wait_until_the_buffer_is_full_and_no_longer():
    """All tokens use the first exit; then all use the last."""
    exits, script = (1, 2, 4), [np.array([accepted]) for accepted in (1, 3, 0, 4, 4, 4, 1)]
    waited, _ = run(drafter((1e-6, 1e-6), exits), exits, (1e-6, 1e-6), PROMPTS[:1], script)
    assert max(waited) == MAX_WAITING - 2
    waited, _ = run(drafter((1.0, 1.0), exits), exits, (1.0, 1.0), PROMPTS[:1], script)
    assert waited == [0] * len(script)


@pytest.mark.parametrize("thresholds", [(0.0, 0.0), (0.6, 0.0), (0.0, 0.6)])
def test_behind_a_threshold_of_0_no_layer_runs(thresholds):
    exits, prompt = (1, 2, 4), PROMPTS[0]
    script = [np.array([accepted]) for accepted in (1, 3, 0, 4, 4, 4, 1)]
    _, state = run(drafter(thresholds, exits), exits, thresholds, [prompt], script)
    used = exits[thresholds.index(0.0)]
    cache, _ = state.own
    written = [bool(jnp.any(keys[..., len(prompt) :, :] != 0)) for keys, _ in cache.layers]
    assert written == [True] * used + [False] * (4 - used)


@pytest.mark.representatives("True")
@pytest.mark.parametrize("sorted_target", [False, True])
def test_long_drafts_reach_to_the_last_slot(sorted_target):
    """K = 12, three rows at different positions, and a cache that ends exactly at `reach`."""
    exits, thresholds, script = (
        (1, 3),
        (0.6,),
        [np.array(counts) for counts in ((12, 0, 5), (2, 7, 12), (0,) * 3)],
    )
    method = drafter(thresholds, exits, **({"sorted_target": True} if sorted_target else {}))
    method = dataclasses.replace(method, num_draft_tokens=12)
    # Before the last round.
    length = max(len(p) + sum(counts[row] + 1 for counts in script[:-1]) for row, p in enumerate(PROMPTS))
    run(method, exits, thresholds, PROMPTS, script, capacity=length + method.reach)


# Names, files and models


def sorted_draft(exits=(1, 2, 4), name="sorted", **changes) -> LanguageModel:
    config = dataclasses.replace(DRAFT, eos_token_ids=(tiny.EOS,), **changes)
    return LanguageModel(
        config, tiny.params(DRAFT), tiny.tokenizer(), name=name, trained_for=TrainedFor(exits)
    )


@pytest.fixture
def target(tmp_path):
    lm = tiny.language_model()
    lm.directory = tmp_path
    return lm


def draft_of(lm: LanguageModel, last: int) -> str:
    """Returns the fingerprint of the draft's layers up to the last exit."""
    return method_files.fingerprint(lm.config.truncated(last), llama.truncate(lm.params, last))


@pytest.mark.full
def test_a_sorted_target_drafts_for_itself_below_its_last_layer():
    lm = sorted_draft()
    drafter, weights = lm.drafter("s2d", stop_rule="confidence", gamma=0.2)
    assert (drafter.exits, drafter.sorted_target, weights) == ((1, 2), True, None)
    text = lm.generate("ab ab", method="s2d", max_new_tokens=20, ignore_eos=True)
    assert text.tokens == lm.generate("ab ab", max_new_tokens=20, ignore_eos=True).tokens
    assert text.statistics.num_accepted_tokens > 0


def test_a_token_costs_the_heads_that_it_looks_at():
    """That of its exit and those of the exits before it, a mean over the exits."""
    lm = tiny.language_model()
    one, three = (SimpleNamespace(exits=exits) for exits in ((2,), (1, 2, 3)))
    costs = [methods.S2D().cost(lm.loaded, made, None) for made in (one, three)]
    assert costs == [DraftCost(layers=2, heads=1), DraftCost(layers=2, heads=2)]
    alone, chosen = (methods.S2D(draft="x").cost(lm.loaded, made, lm.params) for made in (one, three))
    head = layers_of(lm.params["head"], lm.loaded)
    layers = lm.config.num_layers
    assert (alone.layers, chosen.layers) == pytest.approx((layers + head, layers * 2 / 3 + 2 * head))


def test_exits_are_read_from_a_models_config(tmp_path):
    write_model(tmp_path / "model", dataclasses.replace(CONFIG, num_layers=4))
    path = tmp_path / "model" / "config.json"
    content = json.loads(path.read_text())
    assert load(tmp_path / "model").exits == ()
    path.write_text(json.dumps({**content, "jaxspec": {"exits": [1, 3]}}))
    assert load(tmp_path / "model").exits == (1, 3)
    # A draft does not run layers above its last exit.
    assert load(tmp_path / "model").drafter("s2d", draft=str(tmp_path / "model"))[0].config.num_layers == 3
    for wrong in ([], [3, 1], [0, 2], [2, 5], [1, 1], "2", [True, 2], 3, None):
        path.write_text(json.dumps({**content, "jaxspec": {"exits": wrong}}))
        with refused(r"expected a (rising list of layers from 1 to 4|list, each entry a whole number)"):
            load(tmp_path / "model")
    path.write_text(json.dumps({**content, "jaxspec": [1, 3]}))
    with refused("expected an object"):
        load(tmp_path / "model")
    with refused("expected a rising list"):
        sorted_draft((4, 2))


def test_a_converted_draft_stays_sorted(tmp_path):
    source = write_model(tmp_path / "source", dataclasses.replace(CONFIG, num_layers=4))
    write_tokenizer(source)
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, "jaxspec": {"exits": [1, 3]}}))
    assert main(["convert", str(source), str(tmp_path / "copy")]) == 0
    assert load(tmp_path / "copy").exits == (1, 3)


def test_what_does_not_fit_is_one_line(target, tmp_path):
    draft, bare = sorted_draft(), sorted_draft(vocab_size=12)
    bare.tokenizer = None
    two = LanguageModel(tiny.SMALL, tiny.params(tiny.SMALL), tiny.tokenizer(), name="unsorted")
    for options, line in (
        ({}, "needs a draft with sorted exits, but tiny has none below its last layer; give draft='sorted'"),
        ({"draft": two}, "needs a draft with sorted exits, but unsorted has none; give draft='sorted'"),
        ({"draft": bare}, "has a vocabulary of 12 tokens, the target of 13, and one of them no tokenizer"),
        ({"draft": draft, "thresholds": str(tmp_path / "none.json")}, "none.json does not exist; make one"),
        ({"draft": draft, "stop_rule": "probe"}, "unknown stop_rule 'probe'; give one of constant,"),
        ({"draft": draft, "gamma": 0.3}, "s2d with stop_rule=adaptive-length has no option `gamma`"),
        ({"draft": draft, "draft_exit": 2}, "has no option `draft_exit`"),
    ):
        with refused(re.escape(line), (ValueError, FileNotFoundError)):
            target.drafter("s2d", **options)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": "jaxspec.plan/1"}, "expected jaxspec.thresholds/1"),
        ({"target": "0"}, "belongs to another model"),
        ({"draft": "0"}, "is for another draft (0 with exits [1, 2, 4]"),
        ({"exits": [1, 3, 4]}, "is for another draft"),
        ({"thresholds": [0.5, 0.5]}, "expected a number from 0 to 1 for each of 3 exits, 0 for the last"),
        ({"thresholds": [0.5, 0.5, 0.1]}, "expected a number from 0 to 1"),
        ({"thresholds": [0.5, 1.5, 0]}, "expected a number from 0 to 1"),
        ({"thresholds": ["a", 0.5, 0]}, "in `thresholds`, expected a list, each entry a number"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(target, tmp_path, change, line):
    draft = sorted_draft()
    path = tmp_path / "t.json"
    method_files.write_thresholds(path, target.fingerprint, draft_of(draft, 4), (1, 2, 4), (0.5, 0.4), {})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(re.escape(line)):
        target.drafter("s2d", draft=draft, thresholds=str(path))


# What a draft carries


@pytest.mark.full
def test_a_draft_drafts_with_what_its_config_records(target, tmp_path):
    """Exits, tokens and thresholds without options; a file for the target, or an option, takes precedence."""
    record = TrainedFor((1, 2, 4), (0, 1, 6, 12), (0.75, 0.25), target.fingerprint)
    directory = tmp_path / "draft"
    config = dataclasses.replace(DRAFT, eos_token_ids=(tiny.EOS,))
    huggingface.save(directory, config, tiny.params(DRAFT), trained_for=record)
    assert json.loads((directory / "config.json").read_text())["jaxspec"] == {
        "exits": [1, 2, 4],
        "draft_vocab": [0, 1, 6, 12],
        "thresholds": [0.75, 0.25],
        "target": target.fingerprint,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter, params = target.drafter("s2d", draft=str(directory))
    assert (drafter.exits, drafter.thresholds.tolist()) == ((1, 2, 4), [0.75, 0.25])
    assert params["vocabulary"].ids.tolist() == [0, 1, 6, 12]
    _, params = target.drafter("draft-model", draft=str(directory))
    assert params["vocabulary"].ids.tolist() == [0, 1, 6, 12]
    options = {"max_new_tokens": 12, "ignore_eos": True}
    text = target.generate("ab ab", method="s2d", draft=str(directory), **options)
    assert text.tokens == target.generate("ab ab", **options).tokens
    fingerprint = draft_of(load(directory), 4)
    path = tmp_path / method_files.thresholds_name(fingerprint)
    path.parent.mkdir()
    method_files.write_thresholds(path, target.fingerprint, fingerprint, (1, 2, 4), (0.5, 0.125), {})
    assert target.drafter("s2d", draft=str(directory))[0].thresholds.tolist() == [0.5, 0.125]


def test_a_draft_of_another_target_warns_once():
    lm, draft = tiny.language_model(), sorted_draft()
    draft.loaded = dataclasses.replace(draft.loaded, trained_for=TrainedFor((1, 2, 4), target="0123"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            lm.drafter("s2d", draft=draft)
    (said,) = [str(one.message) for one in caught]
    assert said.startswith(f"sorted was trained for another model (0123, this one is {lm.fingerprint})")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"draft_vocab": [1, 0]}, "draft_vocab are"),
        ({"draft_vocab": [10**6]}, "expected a rising list of tokens from 0 to"),
        ({"exits": [1, 2], "thresholds": [0.5, 0.5]}, "thresholds are"),
        ({"exits": [1, 2], "thresholds": [2]}, "thresholds are"),
        ({"target": 3}, "has 3 in `target`, expected a text or null"),
    ],
)
def test_a_record_that_does_not_fit_is_one_line(record, said):
    with refused(said) as caught:
        TrainedFor.read(record, 4, 99)
    assert len(str(caught.value)) <= 300
