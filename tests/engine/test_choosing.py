"""The policy of `auto`: beliefs about acceptances, the choice, and both on synthetic texts."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import choosing
from jaxspec.choosing import beliefs, policy, prices
from jaxspec.choosing.beliefs import Expectation
from jaxspec.choosing.costs import DraftCost, StepCosts, guessed
from jaxspec.choosing.policy import Policy, Times
from jaxspec.choosing.prices import OFF
from tests import tiny

COSTS = StepCosts(
    "a device", "a model", "float32", 4, 0, ((1, 1, 10.0), (3, 1, 12.0)), 1, 4.0, 0.0, 0.0, 0.0, 0.1
)
# Plain decoding, a free draft, and one with a state of its own: 2 draft tokens at most.
TABLE = prices.Prices(
    np.array([[1.0, np.inf, np.inf], [1.0, 1.1, 1.2], [1.0, 1.5, np.inf]]),
    start_ms=np.array([0.0, 0.0, 3.0]),
    absorb_ms=np.array([0.0, 0.0, 0.01]),
    shortest=np.array([0, 1, 1]),
)
OPEN = np.array([True, True, True])


def flat(candidates, acceptance=0.5, strength=2.0, longest=2):
    return beliefs.prior_of([Expectation((acceptance,), strength)] * candidates, longest)


def played(candidates, longest, rounds):
    """The counts of one row after rounds of (candidate, drafted, accepted)."""
    counts = beliefs.no_counts(1, candidates, longest)
    for candidate, *of_round in rounds:
        counts = beliefs.with_rounds(counts, candidate, [[tuple(of_round)]])
    return counts


# Beliefs


def test_positions_are_counted_up_to_the_first_wrong_one():
    counts = played(2, 3, [(1, 3, 1), (1, 2, 2), (1, 0, 0), (0, 1, 0)])
    assert counts.accept[0, 1].tolist() == [[2, 0], [1, 1], [0, 0]]
    assert counts.accept[0, 0].tolist() == [[0, 1], [0, 0], [0, 0]]
    assert counts.draft[0].tolist() == [[[1, 0], [0, 0], [0, 0]], [[2, 1], [2, 0], [1, 0]]]


def test_rows_are_independent_and_ended_ones_learn_nothing():
    before = beliefs.no_counts(3, 2, 2)
    seen = beliefs.with_rounds(before, 0, [[(2, 2)], [], []])
    seen = beliefs.with_rounds(seen, 1, [[], [(2, 0)], []])
    assert seen.accept[:, :, 0].tolist() == [[[1, 0], [0, 0]], [[0, 0], [0, 1]], [[0, 0], [0, 0]]]
    assert not before.accept.any()  # what was given stays as it is


def test_the_mean_goes_from_the_prior_to_the_counts():
    prior = flat(1, 0.7, 4.0, longest=1)
    nothing, _ = beliefs.expected(prior, beliefs.no_counts(1, 1, 1))
    assert nothing[0, 0, 0] == pytest.approx(0.7)
    some, many = (beliefs.expected(prior, played(1, 1, [(0, 1, 0)] * n))[0][0, 0, 0] for n in (4, 400))
    assert 0.7 > some > 0.1 > 0.02 > many


def test_what_first_tokens_say_goes_for_later_ones_too():
    prior = beliefs.prior_of([Expectation((0.6, 0.8, 0.9), 4.0)], 3)
    bad, _ = beliefs.expected(prior, played(1, 3, [(0, 3, 0)] * 40))
    good, _ = beliefs.expected(prior, played(1, 3, [(0, 1, 1)] * 40))
    assert (bad[0, 0] < [0.1, 0.3, 0.5]).all()
    assert (good[0, 0] > [0.9, 0.9, 0.95]).all()
    assert bad[0, 0, 2] > bad[0, 0, 1]  # the profile stays


def test_optimism_falls_with_what_is_known():
    prior, known = flat(2), played(2, 2, [(1, 2, 1)] * 200)
    mean, hoped = (beliefs.expected(prior, known, deviations)[0][0, :, 0] for deviations in (0.0, 1.0))
    assert hoped[0] - mean[0] > 0.15
    assert 0 <= hoped[1] - mean[1] < 0.02


def test_expectations_are_fitted_to_other_texts():
    rng, rounds = np.random.default_rng(0), 10
    rates = np.stack([rng.beta(1.5, 1, 500), np.full(500, 0.25)], axis=1)
    right = rng.binomial(rounds, rates)
    accept = np.stack([right, rounds - right], axis=-1)[:, :, None].astype(float)
    one, other = beliefs.fitted(beliefs.Counts(accept, np.ones((500, 2, 1, 2))))
    assert [one.accept[0], other.accept[0]] == pytest.approx([0.6, 0.25], abs=0.03)
    assert one.strength == other.strength == beliefs.BELIEVED


def test_candidates_of_a_kin_share_what_a_text_shows():
    """Model-based drafts rejected for one candidate lower another's expectation, until it has counts of its own."""
    kin = np.array([False, False, True, True])
    prior = dataclasses.replace(flat(4, 0.7, 4.0), kin=kin)
    bad = played(4, 2, [(2, 2, 0)] * 40)
    accept, _ = beliefs.expected(prior, bad)
    assert accept[0, :2, 0].tolist() == pytest.approx([0.7, 0.7])  # not of the kin
    assert accept[0, 3, 0] == pytest.approx(accept[0, 3, 1])  # every position alike
    assert accept[0, 3, 0] < 0.2
    alone, _ = beliefs.expected(dataclasses.replace(prior, kin=None), bad)
    assert accept[0, 2].tolist() == pytest.approx(alone[0, 2].tolist())  # no shift by its own counts twice
    good = beliefs.with_rounds(bad, 3, [[(2, 2)] * 400])
    assert beliefs.expected(prior, good)[0][0, 3, 0] > 0.9


# The choice


def best(accept, state_ms=(0, 0, 0), horizon=100.0, drafted=1.0, table=TABLE, **changes):
    """The choice by acceptances that are as good as known."""
    sure = [Expectation(tuple(one), 1e9, (drafted, 1.0)) for one in accept]
    given = {"usable": OPEN, "allowed": 1e9, "rounds": 4} | changes
    state = np.array(state_ms, float)
    counts = beliefs.no_counts(1, 3, 2)
    return policy.choose(table, beliefs.prior_of(sure, 2), counts, state_ms=state, horizon=horizon, **given)


def test_the_choice_gives_the_most_tokens_per_millisecond():
    nothing = [0, 0]
    assert best([nothing, [0.05, 0.9], [0.3, 0]]) == (OFF, 0)  # 1.05 ÷ 1.1, 1.3 ÷ 1.5
    assert best([nothing, [0.2, 0.1], [0.3, 0]]) == (1, 1)
    assert best([nothing, [0.2, 0.9], [0.3, 0]]) == (1, 2)  # 1.38 ÷ 1.2 > 1.2 ÷ 1.1
    assert best([nothing, [0.2, 0.9], [0.9, 0]]) == (2, 1)
    # A round that finds nothing is a plain one.
    assert best([nothing, [0.09, 0.9], [0.1, 0]]) == (OFF, 0)  # 1.17 ÷ 1.2
    assert best([nothing, [0.09, 0.9], [0.1, 0]], drafted=0.1) == (1, 2)


def test_no_draft_is_the_choice_of_plain_decoding_alone():
    """Although a measured round without a draft may, by noise, seem to cost less than one of plain decoding."""
    noisy = dataclasses.replace(TABLE, round_ms=TABLE.round_ms - np.array([[0.0], [0.05], [0.0]]))
    assert best(np.zeros((3, 2)), table=noisy) == (OFF, 0)


def test_a_state_is_brought_up_only_where_it_pays():
    accept = [[0, 0], [0.05, 0], [0.9, 0]]  # 1.27 tokens per millisecond
    assert best(accept, horizon=4) == (2, 1)
    assert best(accept, (0, 0, 3.5), horizon=4) == (OFF, 0)
    assert best(accept, (0, 0, 3.5), horizon=40) == (2, 1)
    assert best(accept, (0, 0, 53.0), horizon=40) == (OFF, 0)


def test_rows_together_take_what_is_best_for_all():
    sure, counts = flat(3, 0.5, 1e-6), beliefs.no_counts(2, 3, 2)
    for candidate, length, row in ((1, 2, 0), (2, 1, 1)):
        for other in (1, 2):
            accepted = length if other == candidate else 0
            rounds = [[], []]
            rounds[row] = [(2 if other == 1 else 1, accepted)] * 1000
            counts = beliefs.with_rounds(counts, other, rounds)
    given = {"usable": OPEN, "state_ms": np.zeros(3), "horizon": 50.0, "allowed": 1e9, "rounds": 4}
    assert policy.choose(TABLE, sure, counts.of(np.array([True, False])), **given) == (1, 2)
    assert policy.choose(TABLE, sure, counts.of(np.array([False, True])), **given) == (2, 1)
    assert policy.choose(TABLE, sure, counts, **given) == (1, 2)  # 4 ÷ 1.2, 3 ÷ 1.5


def test_a_trial_waits_until_it_can_be_lost():
    unsure = [Expectation((0.3,), 2.0)] * 3
    given = {"usable": OPEN, "state_ms": np.zeros(3), "horizon": 200.0, "rounds": 10}
    prior, nothing = beliefs.prior_of(unsure, 2), beliefs.no_counts(1, 3, 2)
    assert policy.choose(TABLE, prior, nothing, allowed=2.56, **given)[0] == 1
    assert policy.choose(TABLE, prior, nothing, allowed=0.06, **given)[0] == OFF
    # A candidate that gains even with pessimistic acceptances is always open.
    sure = flat(3, 0.95, 1000.0)
    assert policy.choose(TABLE, sure, nothing, allowed=-50.0, **given)[0] == 1
    # Its state has to be earned too.
    late = given | {"state_ms": np.array([0.0, 1e3, 1e3])}
    assert policy.choose(TABLE, sure, nothing, allowed=-50.0, **late)[0] == OFF


def head(batch=1, **options):
    return Policy(["head"], [DraftCost(layers=1, absorb_layers=1)], [6], guessed(12, 0.01), batch, **options)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_large_budget_does_not_keep_a_good_head_away(batch):
    """The end of a text is not known: a state must pay over the likely number of tokens, not over the budget."""
    for budget in (300, 4096, 32_000):
        one = head(batch, times=Times(ratios={("off", batch): 1.0}))
        for row in range(batch):
            one.begin_row(row, list(range(64)))
        lengths, remaining = np.full(batch, 65), np.full(batch, budget)
        (first, _, count), _ = one.next(lengths, remaining, 8, None, lambda at: True)
        rounds = [[(0, 0)] * count] * batch
        one.learn((OFF, 0), rounds, [[9] * count] * batch, lengths, count * 1.0, True)
        (after, *_), _ = one.next(lengths + count, remaining - count, 8, None, lambda at: True)
        assert (first, after) == (0, 1), budget


@pytest.mark.parametrize("batch", [1, 4])
def test_the_states_of_all_rows_must_be_paid_for(batch):
    """A round serves all rows at once, but each row's state is updated from its own text."""
    one = head(batch, times=Times(ratios={("off", batch): 1.0}))
    for row in range(batch):
        one.begin_row(row, list(range(512)))
    lengths, remaining = np.full(batch, 513), np.full(batch, 300)
    (_, _, count), _ = one.next(lengths, remaining, 8, None, lambda at: True)
    one.learn((OFF, 0), [[(0, 0)] * count] * batch, [[9] * count] * batch, lengths, count * 1.0, True)
    (after, *_), _ = one.next(lengths + count, remaining - count, 8, None, lambda at: True)
    assert after == (1 if batch == 1 else OFF)


def test_an_ended_row_has_no_say_in_what_the_others_do():
    one = head(2)
    for row in range(2):
        one.begin_row(row, [1])
    one.counts = beliefs.with_rounds(one.counts, 1, [[(6, 6)] * 99, [(6, 0)] * 99])
    lengths, both = np.array([9, 9]), (np.array([50, 50]), np.array([0, 50]))
    speedups = [one.outlook(lengths, remaining).speedup[1] for remaining in both]
    assert speedups[0] > 1.5 > 1 > speedups[1]


def test_a_new_row_has_nothing_to_repay():
    one = head(2)
    one._lost, one._tokens = np.array([2.5, 2.5]), np.array([9.0, 9.0])
    one.begin_row(1, [1, 2])
    assert (one._lost.tolist(), one._tokens.tolist()) == ([2.5, 0.0], [9.0, 0.0])


def test_prices_follow_from_costs():
    costs = StepCosts(
        *("a device", "a model", "float32", 4, 100), ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0, 0.5, 0.25, 0.2
    )
    drafts = DraftCost(lookup=True), DraftCost(layers=1, absorb_layers=2)
    table = prices.price_table(costs, drafts, (1, 4), None, 1)
    assert table.round_ms[OFF].tolist() == [10.5] + [np.inf] * 4
    assert table.round_ms[1].tolist() == [10.75, 11.75, np.inf, np.inf, np.inf]
    assert table.absorb_ms.tolist() == [0.0, 0.0, 0.1]
    assert table.start_ms.tolist() == [0.0, 0.0, costs.step_ms(layers=2, head=False)]
    assert table.shortest.tolist() == [0, 1, 1]


def test_a_round_is_paid_for_as_far_as_it_drafts():
    table = prices.Prices(
        np.array([[1.0, np.inf, np.inf], [1.0, 2.0, 4.0], [1.0, 2.0, np.inf]]),
        np.zeros(3),
        np.zeros(3),
        np.array([0, 2, 1]),
    )
    times = prices.times_of_rounds(table, np.array([[[0.0, 0.0], [0.5, 0.25], [0.5, 0.25]]]))
    assert times.tolist() == [[[1, np.inf, np.inf], [np.inf, np.inf, 2.0], [np.inf, 1.5, np.inf]]]


def test_what_is_expected_of_each_candidate():
    seen = prices.outlook(TABLE, flat(3, 0.8, 8.0), beliefs.no_counts(1, 3, 2))
    assert np.argsort(-seen.speedup).tolist() == [1, 2, OFF]
    assert (seen.length[1], seen.accept[1]) == (2, pytest.approx(0.8))
    assert seen.speedup[1] == pytest.approx((1 + 1.44) / 1.2, rel=1e-2)
    assert (seen.speedup[OFF], seen.length[OFF], seen.round_ms[OFF]) == (1.0, 0, 1.0)


# The simulation

SMALL = choosing.Options(texts=24, tokens=128)


@pytest.fixture(scope="module")
def simulated():
    return choosing.measure(SMALL)


@pytest.mark.full
def test_the_chooser_is_between_a_candidate_alone_and_the_oracle(simulated):
    assert list(simulated["kinds"]) == list(choosing.KINDS)
    for kind, row in simulated["kinds"].items():
        assert row["speedup"]["off"] == 1, kind
        assert row["speedup"]["auto"] < row["speedup"]["oracle"], kind
        assert row["auto_over_best_fixed"] > {"adversarial": 0.85, "hopeless": 0.85}.get(kind, 0.95), kind
        regret = row["regret"]["auto"]
        assert len(regret) == len(row["at"]), kind
        assert row["at"][-1] == SMALL.tokens
        assert regret[-1] > regret[0], kind
    # Trials are few if nothing pays but a free lookup.
    assert simulated["kinds"]["hopeless"]["speedup"]["auto"] > 0.96
    # One that has to learn loses less than what was right for other texts.
    regret = simulated["kinds"]["drifting"]["regret"]
    assert regret["auto"][-1] < min(regret[name][-1] for name in simulated["candidates"])


def test_texts_are_played_as_they_are():
    texts = choosing.make_texts("stationary", ["lookup", "early exit"], 40, 60, seed=5)
    drafts = DraftCost(lookup=True), DraftCost(layers=1, absorb_layers=1)
    game = choosing.Game(COSTS, ("lookup", "early exit"), drafts, [])
    for candidate, length in ((OFF, 0), (1, 4), (2, 3)):
        cost = (DraftCost(), *drafts)[candidate]
        for row in range(40):
            place = 0
            ms = 0.0 if candidate < 2 else COSTS.step_ms(layers=1, head=False) + 0.025 * 256
            while place < 60:
                drafted = length if texts.drafts[row, candidate, place] else 0
                drafted = min(drafted, 60 - place)
                ms += cost.round_ms(COSTS, drafted)
                place += 1 + min(int(texts.run[row, candidate, place]), drafted)
            assert game.run(choosing.Alone(candidate, length), texts, row)[-1] == pytest.approx(ms)


def test_the_simulation_and_the_engine_play_one_policy(monkeypatch):
    """Both ask `Policy`, and nothing else, what drafts next."""
    asked = []
    given = Policy.next
    monkeypatch.setattr(Policy, "next", lambda self, *args: asked.append(type(self)) or given(self, *args))
    texts = choosing.make_texts("stationary", ["lookup"], 1, 40, seed=5)
    game = choosing.Game(COSTS, ("lookup",), (DraftCost(lookup=True),), [Expectation((0.5,), 2.0)])
    game.play("auto", texts, 0)
    assert asked
    asked.clear()
    tiny.language_model().generate([5], method="auto", max_new_tokens=8, ignore_eos=True)
    assert asked


def test_runs_are_what_is_right_in_a_row():
    texts = choosing.make_texts("adversarial", ["lookup", "half the layers"], 200, 128, seed=1)
    assert not texts.run[:, OFF].any()
    assert not texts.drafts[:, OFF].any()
    run = texts.run[:, 1:].astype(int)
    # From the next place on a run is one shorter, but for those that are cut at the longest draft.
    after = run[:, :, 1:][run[:, :, :-1] > 0]
    before = run[:, :, :-1][run[:, :, :-1] > 0]
    assert ((after == before - 1) | (before == 10)).all()
    rates = (run > 0).mean(axis=(0, 2))
    assert rates == pytest.approx(texts.right[:, 1:, :128].mean(axis=(0, 2)), abs=0.02)
    again = choosing.make_texts("adversarial", ["lookup", "half the layers"], 200, 128, seed=1)
    assert (again.run == texts.run).all()


def test_the_command_prints_both(capsys, tmp_path):
    costs = StepCosts(*("a device", "a model", "float32", 4, 100), ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": dataclasses.asdict(costs)}))
    assert choosing.main(["--texts", "20", "--tokens", "32", "--costs", str(file)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["device"], report["candidates"][0]) == ("a device", "off")
    assert "speed-up over plain decoding: 20 texts of 32 tokens, costs of a model on a device" in " ".join(
        err.split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--texts 0", "--texts is 0; give at least 1"),
        ("--device-model x", "unknown --device-model 'x'; give one of"),
        ("--shape x", "unknown shape 'x'; give one of"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert choosing.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.choosing: error: {message}")
