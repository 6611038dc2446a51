"""`method="auto"`: texts that change their drafter equal plain decoding's, or follow its distribution."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxspec import decoding
from jaxspec.choosing import policy
from jaxspec.choosing.beliefs import Expectation
from jaxspec.choosing.costs import DraftCost, StepCosts
from jaxspec.choosing.lookup import ReplayedLookup
from jaxspec.choosing.policy import ROUNDS, Policy
from jaxspec.cli.generate import explained
from jaxspec.cli.slower import slower, warn_slower_by
from jaxspec.drafting.draft_model_drafter import DraftModel
from jaxspec.engine import compiled
from jaxspec.engine.auto.candidates import Alternatives
from jaxspec.engine.auto.record import Record
from jaxspec.engine.auto.turns import Switching
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import played_rounds
from jaxspec.io.methods.choice_file import ChoiceFile, Entry, belongs_to
from jaxspec.io.trained_for import TrainedFor
from jaxspec.methods import Auto, Autoregressive, LayerSkip, NGram, TokenRecycling, registry
from jaxspec.methods.base import Candidate
from jaxspec.testing import contracts, reference
from tests import tiny
from tests.forced import CANDIDATES, PROMPTS, auto, forced, tiny_candidate

# Costs at which a row costs as much as a step, and costs at which rows are free.
DEAR, FREE = (
    StepCosts("a device", "tiny", "float32", 2, 0, ((1, 1, 9.0), (11, 1, last)), 1, 5.0, 0.0)
    for last in (99.0, 9.0)
)


@pytest.fixture(scope="module")
def model():
    """The model of this module, so that each program is compiled once."""
    return tiny.language_model()


# Exactness

TURNS = st.lists(
    st.tuples(st.integers(0, len(CANDIDATES)), st.integers(1, tiny.K), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


@pytest.mark.full
@settings(max_examples=6, deadline=None)
@given(turns=TURNS, budgets=st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_a_greedy_text_is_plain_decodings_whatever_is_chosen(model, turns, budgets):
    """Finished rows are refilled and caches grow at the same time."""
    with forced(turns), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.engine.buckets.START_CAPACITY", 32)
        rows = auto(model, max_new_tokens=budgets, max_batch=2, ignore_eos=True)
    for prompt, budget, row in zip(PROMPTS, budgets, rows, strict=True):
        assert row.tokens == tiny.greedy(tuple(prompt), budget)
        assert row.statistics.num_tokens == 1 + row.statistics.num_rounds + row.statistics.num_accepted_tokens
        assert len(row.statistics.acceptance_histogram) == tiny.K + 1


FOUR = dataclasses.replace(
    tiny.TARGET, vocab_size=4, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1
)


@pytest.mark.full
def test_a_sampled_text_follows_the_distribution_whatever_is_chosen():
    """Compared with the enumeration of every text."""
    many, budget, prompt = 1_500, 4, (1, 3)
    lm = LanguageModel(FOUR, tiny.params(FOUR))
    candidates = tuple(tiny_candidate(name, FOUR) for name in CANDIDATES)
    with forced([(4, 2, 1), (2, 1, 1), (0, 0, 1), (1, 3, 1)], candidates):
        rows = auto(
            lm, [prompt] * many, max_new_tokens=budget, temperature=1.0, max_batch=many, ignore_eos=True
        )
    assert sum(row.statistics.num_accepted_tokens for row in rows) > 0

    def next_probs(prefix):
        return tiny.warp(reference.forward(FOUR, tiny.params(FOUR), [*prompt, *prefix])[-1])

    texts = [tuple(row.tokens) for row in rows]
    assert tiny.chi_square(texts, tiny.text_distribution(next_probs, budget)) > 1e-3


@pytest.mark.representatives("2")
@pytest.mark.parametrize("name", [1, 2, 4])
def test_drafts_are_as_long_as_was_chosen(model, name):
    """The length is data: one program drafts one token and two."""
    lengths, compiled = [], []
    for most in (1, 2):
        with forced([(name, most, 3)]):
            (row,) = auto(model, [PROMPTS[1]], max_new_tokens=24, ignore_eos=True)
        lengths.append(max(drafted for drafted, _ in played_rounds(row.token_records)))
        compiled.append(model.executables.num_compilations)
    assert lengths == [1, 2]
    assert compiled[0] == compiled[1]


@pytest.mark.full
@pytest.mark.representatives("cache")
@pytest.mark.parametrize("kind", ["cache", "head"])
def test_a_state_is_as_if_it_had_been_there_from_the_start(kind):
    """A perfect draft is still right after rounds of others, a refill and a growth of the cache."""
    if kind == "cache":
        target = tiny.params(tiny.TARGET)
        drafter, own = DraftModel(tiny.TARGET, num_draft_tokens=tiny.K), target
    else:
        drafter, target, own = tiny.exact_head("eagle")
    lm = LanguageModel(tiny.TARGET, target)
    exact = Candidate("exact", drafter, own, DraftCost(layers=1, absorb_layers=3))
    with forced([(0, 0, 3), *[(1, tiny.K, 1)] * 9], (exact,)), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.engine.buckets.START_CAPACITY", 32)
        rows = auto(lm, max_new_tokens=[40, 12, 30], max_batch=2, ignore_eos=True)
    for row in rows:
        rounds = [(drafted, accepted) for drafted, accepted in played_rounds(row.token_records) if drafted]
        assert len(rounds) > 1
        assert all(drafted == accepted for drafted, accepted in rounds)


@pytest.mark.representatives("eagle3")
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_drafter_that_takes_a_text_up_says_what_one_says_that_was_there(name):
    """The head has random weights, so a missing token in its state changes its drafts."""
    loop = tiny.loop(tiny.Combination(name, "constant", "rejection"))
    state, _ = loop.begin(contracts.PROMPTS, contracts.BUDGETS)
    state, _ = loop.go_on(state, 2)
    up = jax.jit(decoding.catch_up, static_argnames=("config", "chunk_size"))
    taken = dataclasses.replace(
        state, drafter_state=up(loop.config, loop.weights, loop.parts, state, chunk_size=8)
    )
    there, after = (contracts.propose(loop.parts, loop.weights, one, 2)[0] for one in (state, taken))
    np.testing.assert_allclose(np.exp(after.log_probs), np.exp(there.log_probs), atol=1e-4)
    np.testing.assert_array_equal(after.tokens, there.tokens)


def begun(tmp_path, **options):
    """Returns texts with a known perfect head among the candidates, and the methods that ran for the last text."""
    drafter, target, own = tiny.exact_head("eagle")
    known = Expectation((0.99,), 20.0)
    exact = Candidate("exact", drafter, own, DraftCost(layers=1, absorb_layers=3), known)
    lm, ran = LanguageModel(tiny.TARGET, target), []
    lm.step_costs = FREE
    call = lm.executables.call
    lm.executables.call = lambda function, *args, **static: (
        ran.append(function) or call(function, *args, **static)
    )
    with lm.compiled_early(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Alternatives, "candidates", lambda self, *given: (exact,))
        for path in options.pop("files", (None, None, tmp_path / "choices")):
            ran.clear()
            rows = auto(
                lm, PROMPTS[:2], max_new_tokens=20, ignore_eos=True, choices=path, explain=True, **options
            )
            lm.executables.wait()
    return lm, rows, set(ran)


@pytest.mark.full
def test_a_text_begins_with_what_is_known_to_pay_and_feeds_its_prompt_once(tmp_path):
    lm, rows, ran = begun(tmp_path)
    for prompt, row in zip(PROMPTS[:2], rows, strict=True):
        assert row.tokens == lm.generate(prompt, max_new_tokens=20, ignore_eos=True).tokens
        assert row.choices[0].name == "exact"
        assert all(drafted == accepted for drafted, accepted in played_rounds(row.token_records))
        assert sum(row.statistics.acceptance_histogram) == row.statistics.num_drafts
        assert len(row.statistics.acceptance_histogram) == tiny.K + 1
    assert compiled.begin in ran
    assert not {compiled.prefill, compiled.catch_up} & ran


@pytest.mark.full
def test_what_a_text_began_with_begins_again(tmp_path):
    """The choices come from a file, and the model has compiled nothing yet."""
    _, first, _ = begun(tmp_path, temperature=1.0, seed=3)
    _, again, ran = begun(tmp_path, temperature=1.0, seed=3, files=[tmp_path / "choices"])
    assert compiled.begin in ran
    assert [row.tokens for row in again] == [row.tokens for row in first]


# The choice


def played(lm, prompt, **options):
    """Returns a text decoded with given costs, after all programs are compiled."""
    for _ in range(3):
        result = lm.generate(prompt, method="auto", among="ngram", explain=True, **options)
        lm.executables.wait()
    return result


@pytest.mark.parametrize(("costs", "chosen"), [(FREE, {"ngram"}), (DEAR, {"off"})])
def test_what_pays_is_chosen_and_nothing_else(costs, chosen):
    """The tiny model's greedy texts repeat themselves, which the texts before the last have shown."""
    lm = tiny.language_model()
    lm.step_costs, lm._alternatives.known.times.missed_ms["ngram"] = costs, 1e9
    with pytest.MonkeyPatch.context() as patch:  # the times of a machine are not those of the table
        patch.setattr(
            Policy, "_observe", lambda self, candidate, *ratio: self.times.ratios.update({("off", 1): 1.0})
        )
        result = played(lm, [7, 1, 7, 1], max_new_tokens=120, ignore_eos=True)
    assert result.tokens == tiny.greedy((7, 1, 7, 1), 120)
    assert {turn.name for turn in result.choices} == chosen
    assert sum(turn.num_tokens for turn in result.choices) == 119
    plain = "plain decoding, no draft is expected to pay"
    assert result.drafted_by == f"auto: {'ngram' if costs is FREE else plain}"


def test_nothing_is_compiled_for_a_text_that_is_too_short_to_pay():
    lm = tiny.language_model()
    lm.generate([7, 1, 7, 1], method="auto", max_new_tokens=12, ignore_eos=True)
    before = lm.executables.num_compilations
    lm.generate([7, 1, 7, 1], method="auto", max_new_tokens=12, ignore_eos=True)
    lm.executables.wait()
    assert lm.executables.num_compilations == before


def make(costs=FREE, times=None, batch=1, file=None, measured=True):
    cost = DraftCost(lookup=True, replayed=True)
    made = Policy(["ngram"], [cost], [4], costs, batch, times=times, measured=measured)
    return Record(made, file)


def learn(one, rounds, took_ms, fair=True, disturbed=False):
    tokens = [0] * sum(1 + accepted for _, accepted in rounds)
    one.learn([rounds], [tokens], np.array([9]), took_ms, fair, disturbed=disturbed)


def turn(one, ready=True):
    return one.next(np.array([9]), np.array([500]), 64, None, lambda at: ready)


def test_observed_times_end_what_a_wrong_table_began():
    """Rows are free in the table, but a round with a draft really takes ten times as long."""
    one = make()
    one.policy.begin_row(0, [1, 2, 3])
    for _ in range(40):
        candidate, _, rounds = turn(one)
        learn(one, [(4, 2) if candidate else (0, 0)] * rounds, rounds * (90.0 if candidate else 9.0))
    late = [chosen.name for chosen in list(one.chosen)[-20:]]
    assert one.chosen[1].name == "ngram"
    assert late.count("off") >= 15


def test_times_that_are_not_fair_teach_nothing():
    one = make()
    turn(one)
    learn(one, [(0, 0)] * 8, 800.0, fair=False)
    assert not one.policy.times.ratios
    learn(one, [(0, 0)] * 8, 72.0)
    assert one.policy.times.ratios == {("off", 1): pytest.approx(1.0)}


def test_a_disturbed_time_is_used_until_there_is_another():
    one = make(measured=False)
    turn(one)
    learn(one, [(0, 0)] * 8, 100.0, disturbed=True)
    learn(one, [(0, 0)] * 8, 300.0, disturbed=True)
    assert one.policy.times.ratios == {("off", 1): pytest.approx(100 / 72)}
    one.policy.informed = [1]
    assert one.policy.begin(np.array([9]), np.array([500]), lambda at: True) == (0, 0)
    learn(one, [(0, 0)] * 8, 72.0)
    assert one.policy.times.ratios == {("off", 1): pytest.approx(1.0)}
    assert one.policy.begin(np.array([9]), np.array([500]), lambda at: True) != (0, 0)


def test_a_draft_is_not_priced_by_a_disturbed_time_of_plain_decoding():
    one = make(measured=False)
    one.policy._observe(0, 3.0, disturbed=True)
    one.policy._observe(1, 1.0)
    assert one.policy.times.ratios["ngram", 1] == 1.0


def test_what_bringing_a_state_up_takes_is_expected_too():
    """This time is part of the round's time on the host."""
    costs = dataclasses.replace(FREE, absorb_ms=1.0)
    expected = []
    for taken_up in (False, True):
        one = Record(Policy(["head"], [DraftCost(layers=1, absorb_layers=2)], [4], costs, 2))
        one.choice = policy.Choice(1, 4, 1)
        one.learn([[(4, 1)], [(4, 1)]], [[0, 0]] * 2, np.array([20, 30]), 99.0, not taken_up, taken_up)
        expected.append(one.chosen[0].expected_ms)
    # The pass runs all texts through both layers without a head; 50 tokens add one millisecond each.
    assert expected[1] - expected[0] == pytest.approx(costs.step_ms(layers=2, head=False) + 50)


def test_a_program_is_wanted_once_enough_was_missed():
    times = policy.Times()
    rows = np.array([9]), np.array([10])
    wanted = []
    for _ in range(50):
        one = make(times=times)
        one.policy.wanted(*rows, lambda at: 1e3, lambda at: False)
        rounds = turn(one, ready=False)[2]
        learn(one, [(0, 0)] * rounds, 9.0 * rounds)
        wanted.append(one.policy.wanted(*rows, lambda at: 1e3, lambda at: False))
    assert wanted[0] == []
    assert wanted[-1] == [1]
    assert one.policy.wanted(*rows, lambda at: 1e3, lambda at: True) == []


def test_a_choice_that_stays_is_made_less_often():
    one, rounds = make(DEAR), []
    for _ in range(5):
        rounds.append(turn(one)[2])
        learn(one, [(0, 0)] * rounds[-1], 9.0 * rounds[-1])
    assert rounds == [ROUNDS, 4 * ROUNDS, *[policy.MOST_ROUNDS] * 3]


def test_where_nothing_can_be_chosen_the_host_is_asked_no_more_often_than_by_plain_decoding():
    assert turn(make(), ready=False) == (0, 0, policy.MOST_ROUNDS)


def test_what_has_not_drafted_yet_is_tried_for_a_few_rounds():
    one, rounds = make(), []
    for _ in range(3):
        rounds.append(turn(one)[2])
        learn(one, [(0, 0)] * rounds[0] if one.choice[0] == 0 else [(4, 4)] * rounds[-1], 9.0 * rounds[-1])
    assert rounds == [ROUNDS, policy.TRIAL, 4 * policy.TRIAL]


def test_what_lookup_would_have_drafted_says_nothing_of_a_hybrid():
    kinds = [DraftCost(lookup=True, replayed=True), DraftCost(layers=1, lookup=True)]
    one = Record(Policy(["ngram", "hybrid"], kinds, [4, 4], FREE, 1))
    one.policy.begin_row(0, [1, 2, 3, 1, 2])
    turn(one)
    one.learn([[(0, 0)] * 8], [[3, 1, 2, 3, 1, 2, 3, 1]], np.array([5]), 72.0, True)
    assert one.policy.counts.draft[0].any(axis=(1, 2)).tolist() == [True, True, False]


def test_after_a_trial_that_did_not_pay_plain_decoding_stays_for_longer():
    one, rounds = make(dataclasses.replace(FREE, full_ms=((1, 1, 9.0), (11, 1, 14.0)))), []
    for _ in range(3):
        candidate, _, many = turn(one)
        rounds.append((one.policy.names[candidate], many))
        learn(one, [(4, 0) if candidate else (0, 0)] * many, (90.0 if candidate else 9.0) * many)
    assert rounds == [("off", ROUNDS), ("ngram", policy.TRIAL), ("off", 4 * ROUNDS)]


def test_a_candidate_that_cannot_pay_even_with_luck_is_not_tried():
    """At best, all four draft tokens are accepted in half of the rounds, and a row costs as much as a step."""
    one = make(DEAR)
    for _ in range(20):
        assert turn(one)[0] == 0
        learn(one, [(0, 0)] * 8, 72.0)


def test_a_state_costs_what_prompts_took():
    """A token of a prompt is cheaper than a row of a step."""
    kinds = [DraftCost(lookup=True), DraftCost(layers=1, absorb_layers=3)]
    costs = dataclasses.replace(DEAR, absorb_ms=9.0)
    one = Policy(["ngram", "head"], kinds, [4, 4], costs, 1)

    def absorb_ms() -> list[float]:
        return one._table(np.array([50])).absorb_ms.tolist()

    assert absorb_ms() == [0, 0, 13.5]
    one.prefilled(100, 50.0)
    assert absorb_ms() == [0, 0, 0.75]
    one.prefilled(100, 100.0)
    assert 0.75 < absorb_ms()[2] < 1.5


@pytest.mark.parametrize(("prompt", "chosen"), [(100, "off"), (20, "head")])
def test_a_state_is_brought_up_late_in_a_text(prompt, chosen):
    """After a hundred tokens, with at most a hundred more: a text that has just begun may end soon."""
    costs = dataclasses.replace(FREE, absorb_ms=1.5)
    known = [Expectation((0.95,), 20.0)]
    one = Policy(["head"], [DraftCost(layers=0.5, absorb_layers=2)], [4], costs, 1, expectations=known)
    one.begin_row(0, [1] * prompt)
    lengths, usable = np.array([100]), np.array([True, True])
    candidate, _ = one._best(lengths, np.array([100]), one._table(lengths).state_ms(100.0), usable)
    assert one.names[candidate] == chosen


def test_a_choice_outlasts_polls_of_the_host(tmp_path):
    """A stream polls after every few rounds, but makes no more choices than a text without streaming."""
    path = tmp_path / "choices.jsonl"
    one = make(DEAR, file=ChoiceFile(path, ["off", "ngram"], 4))
    for _ in range(7):
        assert one.next(np.array([9]), np.array([500]), ROUNDS, None, lambda at: True) == (0, 0, ROUNDS)
        learn(one, [(0, 0)] * ROUNDS, 72.0)
    rounds = [entry.round for entry in ChoiceFile(path, ["off", "ngram"], 4).entries]
    assert rounds == [0, ROUNDS, 5 * ROUNDS]
    assert [(turn.round, turn.num_rounds) for turn in one.chosen] == [
        (0, ROUNDS),
        (ROUNDS, 4 * ROUNDS),
        (5 * ROUNDS, 2 * ROUNDS),
    ]
    assert one.chosen[1].took_ms == 288.0
    one.policy.begin_row(0, [1, 2, 3])  # another text: nothing holds for it
    assert one.policy.wanted(np.array([9]), np.array([500]), lambda at: 1e3, lambda at: False) == []
    one.next(np.array([9]), np.array([500]), ROUNDS, None, lambda at: True)
    assert len(ChoiceFile(path, ["off", "ngram"], 4).entries) == 4


def test_choices_of_a_file_leave_the_host_its_polls(tmp_path):
    path = written(tmp_path / "choices.jsonl", [(0, "off", 0), (50, "off", 0)], num_draft_tokens=4)
    one = make(DEAR, file=ChoiceFile(path, ["off", "ngram"], 4))
    assert turn(one)[2] == 50
    assert one.next(np.array([9]), np.array([500]), ROUNDS, None, lambda at: True)[2] == ROUNDS


def test_programs_are_described_once_for_all_texts_and_only_where_they_may_pay():
    """Tracing takes as long as many rounds. A program that cannot be traced is not tried again."""
    lm, asked = tiny.language_model(), []

    def described(self, at, *given):
        asked.append(at)
        raise ValueError("cannot be traced")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Switching, "_describe", described)
        text = functools.partial(lm.generate, [5], method="auto", max_new_tokens=6, ignore_eos=True)
        text()
        assert asked == []
        with lm.compiled_early():
            for _ in range(2):
                assert text().tokens == tiny.greedy((5,), 6)
                lm.executables.wait()
    assert sorted(asked) == [1, 2]


def test_a_candidate_whose_state_does_not_fit_is_no_candidate():
    lm = tiny.language_model()
    with pytest.MonkeyPatch.context() as patch, lm.compiled_early():
        patch.setattr("jaxspec.engine.memory.fits", lambda tree, device: False)
        result = played(lm, [7, 1, 7, 1], max_new_tokens=60, ignore_eos=True)
    assert {one.name for one in result.expected if one.ready} == {"off"}
    assert result.tokens == tiny.greedy((7, 1, 7, 1), 60)


@pytest.mark.full
def test_where_times_are_taken_all_programs_are_there_after_the_first_text():
    lm = tiny.language_model()
    with lm.compiled_early():
        for _ in range(2):
            result = lm.generate(
                [5], method="auto", among=("ngram", "suffix"), max_new_tokens=4, explain=True, ignore_eos=True
            )
            lm.executables.wait()
    assert all(one.ready for one in result.expected)


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    parts=st.lists(st.integers(1, 9), max_size=12),
)
def test_replayed_lookup_plays_the_rounds_that_lookup_has(model, prompt, parts):
    """For any division of the text into pieces; the budget may cut the last round."""
    result = model.generate(
        prompt, method="ngram", num_draft_tokens=tiny.K, max_new_tokens=40, ignore_eos=True
    )
    lookup, rounds = ReplayedLookup(tiny.K, [*prompt, result.tokens[0]]), []
    text = result.tokens[1:]
    for size in [*parts, len(text)]:
        rounds += lookup.played(text[:size])
        text = text[size:]
    true = played_rounds(result.token_records)
    # Near the end of the budget drafts are shortened; undecided rounds are not reported.
    sure = max(0, len(true) - tiny.K - 1)
    assert len(rounds) >= sure
    assert rounds[:sure] == true[:sure]


# The file of choices, and --explain

LINES = [(0, "off", 0), (3, "ngram", 2), (5, "ngram", 3), (9, "off", 0)]


def written(path, lines=LINES, **changes):
    header = {"format": "jaxspec.choices/1", "candidates": ["off", "ngram"], "num_draft_tokens": tiny.K}
    entries = [dict(zip(("round", "candidate", "length"), line, strict=True)) for line in lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in (header | changes, *entries)), encoding="utf-8")
    return path


@pytest.mark.full
def test_choices_that_were_written_are_made_again(model, tmp_path):
    path = tmp_path / "choices.jsonl"
    text = functools.partial(
        auto, model, [[7, 1, 7, 1, 7], [3]], among="ngram", max_new_tokens=60, temperature=1.0, seed=3,
        ignore_eos=True, explain=True, choices=path,
    )  # fmt: skip
    first = text()
    lines = path.read_text(encoding="utf-8")
    again = text()
    assert [row.tokens for row in again] == [row.tokens for row in first]
    assert [turn[:5] for turn in again[0].choices] == [turn[:5] for turn in first[0].choices]
    assert path.read_text(encoding="utf-8") == lines
    written(path, **belongs_to(model.fingerprint, [[7, 1, 7, 1, 7], [3]], 8))
    other = text()
    assert [turn[:3] for turn in other[0].choices][: len(LINES)] == LINES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a file of choices"),
        ('{"format": "jaxspec.plan/1"}\n', "its first line has no format"),
        ({"candidates": ["off", "suffix"]}, "has the candidates"),
        ({"num_draft_tokens": 9}, "has the num draft tokens 9"),
        ({"model": "another"}, "has the model 'another', this text .*; give the model, the prompts"),
        ({"prompts": "others"}, "has the prompts 'others'"),
        ({"rows": 2}, "has the rows 2, this text 3"),
        ([(0, "off", -1)], "line 2 of .* expected a round, a candidate and a length from 0 to 3"),
        ([(0, "guess", 1)], "line 2 of"),
        ([(0.5, "ngram", 1)], "line 2 of"),
        ([(0, "ngram", 4)], "line 2 of"),
        ([(0, "off", 0), (9, "ngram", 2), (4, "off", 0)], "line 4 of .* has round 4 after round 9"),
    ],
)
def test_a_damaged_file_of_choices_is_one_line(model, tmp_path, content, message):
    path = tmp_path / "choices.jsonl"
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        of = belongs_to(model.fingerprint, PROMPTS, 8)
        written(path, **of | ({"lines": content} if isinstance(content, list) else content))
    with pytest.raises(ValueError, match=message) as error:
        auto(model, among="ngram", choices=path)
    assert "\n" not in str(error.value)


def test_a_place_where_no_file_can_be_is_one_line(tmp_path):
    for path, message in (
        (tmp_path, f"{tmp_path} is a directory; give choices=FILE"),
        (
            tmp_path / "no" / "choices.jsonl",
            f"cannot write {tmp_path}/no/choices.jsonl (No such file or directory); ",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            ChoiceFile(path, ["off", "ngram"], 4)


def test_a_file_without_a_choice_is_written_anew(tmp_path):
    """The file was begun for a text that ended or was abandoned before its first choice."""
    path = tmp_path / "choices.jsonl"
    for _ in range(2):
        file = ChoiceFile(path, ["off", "ngram"], 4)
        assert file.entries is None
    file.add(Entry(0, "ngram", 2))
    assert ChoiceFile(path, ["off", "ngram"], 4).entries == [Entry(0, "ngram", 2)]


@pytest.mark.full
def test_a_stream_makes_the_choices_of_a_quiet_text_again(model, tmp_path):
    """Waiting prompts get a row after the same number of rounds, so that the same methods draft for them."""
    prompts, turns = [[7, 1, 7, 1, 7], [3], [5, 5]], itertools.cycle([(1, 3), (0, 0), (1, 1)])
    options = {
        "method": "auto", "among": "ngram", "num_draft_tokens": tiny.K, "max_new_tokens": [120, 26, 40],
        "temperature": 1.0, "max_batch": 2, "ignore_eos": True, "choices": tmp_path / "choices.jsonl",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Switching, "_ready", lambda self, *given, **shapes: True)
        patch.setattr(Policy, "wanted", lambda self, *given: [])
        patch.setattr(Policy, "_best", lambda self, *given: next(turns))
        first = model.generate(prompts, **options)
    pieces = model.stream(prompts, **options)
    again = {piece.index: piece.result.tokens for piece in pieces if piece.result is not None}
    assert sum(row.statistics.num_draft_tokens for row in first) > 0
    assert again == dict(enumerate(row.tokens for row in first))


@pytest.mark.full
def test_a_choice_that_lies_far_ahead_is_waited_for(model, tmp_path):
    of = belongs_to(model.fingerprint, PROMPTS[:1], 8)
    path = written(tmp_path / "choices.jsonl", [(2, "ngram", 2), (10**12, "off", 0)], **of)
    (row,) = auto(model, PROMPTS[:1], among="ngram", max_new_tokens=60, ignore_eos=True, choices=path)
    assert row.tokens == tiny.greedy(tuple(PROMPTS[0]), 60)


@pytest.mark.full
def test_explain_says_what_was_expected_and_what_was_chosen(model):
    with forced([(0, 0, 3), (1, 2, 3)]):
        (row,) = auto(model, PROMPTS[:1], max_new_tokens=9, ignore_eos=True, explain=True)
        (silent,) = auto(model, PROMPTS[:1], max_new_tokens=9, ignore_eos=True)
    assert (silent.expected, silent.choices) == ((), ())
    assert [turn[:3] for turn in row.choices][:2] == [(0, "off", 0), (3, "ngram", 2)]
    row = dataclasses.replace(row, expected=model.generate([5], method="auto", explain=True).expected)
    lines = explained(row).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["candidate", *(one.name for one in row.expected[:2])]
    off, ngram = (next(one for one in row.expected if one.name == name) for name in ("off", "ngram"))
    best = "of those that are ready off was expected to be the fastest: "
    for first, why in ((off, "nothing else pays"), (ngram, "what pays more is not compiled")):
        rest = [one for one in (off, ngram) if one != first]
        unready = [one._replace(ready=one.name == "off") for one in (first, *rest)]
        assert best + why in explained(dataclasses.replace(row, expected=tuple(unready))).splitlines()


def test_what_is_guessed_is_no_milliseconds(model):
    """Before the first measurement costs are only ratios, and explain shows no times."""
    result = tiny.language_model().generate(
        [5], method="auto", max_new_tokens=30, among="ngram", explain=True
    )
    assert {one.round_ms for one in result.expected} == {None}
    assert [one.acceptance is None for one in result.expected] == [
        one.name == "off" for one in result.expected
    ]
    # No text has shown yet how many drafts are accepted.
    assert [one.assumed for one in result.expected] == [one.name != "off" for one in result.expected]
    assert "  assumed 0.50  " in explained(result)
    assert result.choices[0].expected_ms is None
    assert "no time was measured yet: costs are guessed; jaxspec profile --costs measures them" in explained(
        result
    )


def test_a_named_method_that_cannot_pay_gets_a_line():
    lm = tiny.language_model()
    assert slower(lm, NGram()) is None
    lm.step_costs = DEAR
    assert slower(lm, NGram()) == (
        "method ngram is expected to reach 0.67 times plain decoding's speed here, where 80% of its drafts are "
        "accepted; method auto chooses what pays"
    )
    assert slower(lm, Autoregressive()) is None
    lm.step_costs = FREE
    assert slower(lm, NGram()) is None


@pytest.mark.parametrize(
    ("accepted", "costs", "line"),
    [
        (2, None, "ngram is slower here than plain decoding (0.51× by guessed costs; 2% of its drafts were accepted;"),
        (7, "DEAR", "ngram is slower here than plain decoding (0.14× by measured costs; 7% of its drafts"),
        (100, None, ""),
        (7, "FREE", ""),
    ],
)  # fmt: skip
def test_a_text_that_took_longer_gets_a_line(capsys, accepted, costs, line):
    """The warning uses the numbers of drafted and accepted tokens, as `compare` does."""
    lm = tiny.language_model()
    lm.step_costs = None if costs is None else globals()[costs]
    counts = {"num_rounds": 14, "num_drafts": 14, "num_draft_tokens": 100, "num_accepted_tokens": accepted}
    text = lm.generate([5], method="ngram", max_new_tokens=9)
    statistics = dataclasses.replace(text.statistics, num_tokens=15 + accepted, **counts)
    warn_slower_by(lm, NGram(), statistics)
    assert line in capsys.readouterr().err
    if not line:
        assert not capsys.readouterr().err
    warn_slower_by(lm, Autoregressive(), statistics)
    warn_slower_by(lm, NGram(), dataclasses.replace(statistics, num_draft_tokens=10))
    assert not capsys.readouterr().err


# The method


def test_among_takes_options_of_its_methods():
    made = Auto.of({"among": ("layerskip", "ngram"), "exit_layer": 1})
    assert [str(one) for one in made.methods()] == ["layerskip exit_layer=1", "ngram"]
    assert made == Auto(among=(LayerSkip(exit_layer=1), "ngram"))
    assert dataclasses.replace(made, explain=True).methods() == made.methods()
    assert made != Auto.of({"among": ("layerskip", "ngram"), "exit_layer": 2})


CHOOSABLE = [name for name in registry.built_in() if name not in ("auto", "autoregressive")]


def candidate_of(name, monkeypatch):
    """Returns a tiny model and the candidate that `among` makes of a method, whose drafter needs no files."""
    case = next(case for case in tiny.DRAFTERS.values() if name in case.methods)
    config = tiny.engine_config(case.config)
    made = case.make(config, tiny.RULES["constant"](config.hidden_size))
    monkeypatch.setattr(registry.find(name), "build", lambda self, *given: made)
    lm = LanguageModel(config, tiny.params(config))
    (one,) = lm.candidates(Auto(among=(name,), num_draft_tokens=16))
    return lm, one


@pytest.mark.parametrize("name", CHOOSABLE)
def test_every_method_that_drafts_can_be_chosen(name, monkeypatch):
    lm, one = candidate_of(name, monkeypatch)
    assert one.name.split()[0] == name
    costs = dataclasses.replace(FREE, num_layers=lm.config.num_layers)
    plain, short, long = (one.cost.round_ms(costs, length) for length in (0, 1, 4))
    assert 0 < plain <= short <= long < float("inf")


@pytest.mark.full
@pytest.mark.parametrize("name", ["s2d", "dflash", "asd", "clasp", "hybrid", "eagle3", "kangaroo", "hydra"])
def test_a_method_that_was_chosen_decodes_the_same_text(name, monkeypatch):
    lm, one = candidate_of(name, monkeypatch)
    wanted = lm.generate([3, 4, 3], max_new_tokens=24, ignore_eos=True).tokens
    with forced([(1, 2, 3), (0, 0, 1), (1, 1, 2)], (one,)):
        (row,) = auto(lm, [[3, 4, 3]], max_new_tokens=24, ignore_eos=True, explain=True)
    assert row.tokens == wanted
    assert one.name in {turn.name for turn in row.choices}


def test_candidates_are_made_once_for_batches_of_any_size_and_lie_where_the_model_does():
    lm, method = tiny.language_model(), Auto(among="suffix")
    (one,) = made = lm.candidates(method, ("greedy", "greedy"))
    assert made is lm.candidates(method)
    assert made is not lm.candidates(method, ("greedy", "temperature-1"))
    numbers = jax.tree.leaves(one.drafter)
    assert [number.committed for number in numbers] == [True, True]


def test_candidates_of_one_method_have_names_of_their_own():
    """Files of choices and learned estimates distinguish them by name."""
    method = Auto(among=(NGram(), NGram(ngram_max=2), "suffix"))
    assert [one.name for one in tiny.language_model().candidates(method)] == ["ngram", "ngram (2)", "suffix"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"among": "auto"}, "among names 'auto'"),
        ({"among": "autoregressive"}, "among names 'autoregressive'"),
        ({"exit_layer": 1}, "method auto has no option `exit_layer`"),
        (
            {"among": TokenRecycling(tree="24x12")},
            "token-recycling drafts up to 12 tokens in a row; give auto",
        ),
        ({"among": "ngram", "num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(model, options, message):
    with pytest.raises(ValueError, match=message) as error:
        model.generate([5], method="auto", **options)
    assert "\n" not in str(error.value)


def test_a_model_offers_what_it_was_trained_for():
    lm = tiny.language_model()
    trained = LanguageModel(lm.config, lm.params, trained_for=TrainedFor((1, 2)))
    names = [one.name for one in Auto().candidates(trained.loaded, trained._resources(("greedy",), None))]
    assert names == ["layerskip 1", "ngram", "suffix"]


@pytest.mark.full
def test_on_a_mesh_nothing_is_chosen_and_the_result_says_so():
    lm, axes = tiny.language_model(), ("data", "model")
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), axes)
    spread = LanguageModel(lm.config, lm.params, mesh=mesh)
    result = spread.generate([5], method="auto", max_new_tokens=6, ignore_eos=True)
    assert result.drafted_by == "auto: plain decoding, nothing is chosen on a mesh"
    assert result.tokens == tiny.greedy((5,), 6)


@pytest.mark.parametrize(
    ("options", "replayed"), [({}, True), ({"num_draft_tokens": 4}, True), ({"ngram_max": 5}, False)]
)
def test_usual_prompt_lookup_alone_can_be_replayed(model, options, replayed):
    """`ReplayedLookup` supports only the default lookup."""
    (one,) = model.candidates(Auto(among=(NGram(**options),)))
    assert one.cost.replayed == replayed
