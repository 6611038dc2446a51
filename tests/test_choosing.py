"""What drafts next: the estimate of acceptances, the choice, and both on synthetic texts."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import choosing
from jaxspec.choosing import acceptance, chooser
from jaxspec.choosing.chooser import OFF, Choice, Prices
from jaxspec.choosing.costs import DraftCost, StepCosts, guessed
from jaxspec.engine.choices import Choices
from jaxspec.engine.known import Known

# Plain decoding, a free draft, and one with a state of its own: 2 draft tokens at most.
TABLE = Prices(
    ("off", "free", "dear"),
    np.array([[1.0, np.inf, np.inf], [1.0, 1.1, 1.2], [1.0, 1.5, np.inf]]),
    start_ms=np.array([0.0, 0.0, 3.0]),
    absorb_ms=np.array([0.0, 0.0, 0.01]),
)


def played(prior, rounds, forgetting=1.0):
    """The estimate of one row after rounds of (candidate, drafted, accepted)."""
    estimate = acceptance.nothing_seen(prior, 1)
    for numbers in rounds:
        estimate = acceptance.observed(estimate, *(np.array([one]) for one in numbers), forgetting)
    return estimate


# The estimate


def test_positions_are_counted_up_to_the_first_wrong_one():
    prior = acceptance.flat_prior(2, 3)
    estimate = played(prior, [(1, 3, 1), (1, 2, 2), (1, 0, 0), (0, 1, 0)])
    assert estimate.accept[0, 1].tolist() == [[2, 0], [1, 1], [0, 0]]
    assert estimate.accept[0, 0].tolist() == [[0, 1], [0, 0], [0, 0]]
    assert estimate.draft[0].tolist() == [[[1, 0], [0, 0], [0, 0]], [[2, 1], [2, 0], [1, 0]]]


def test_rows_are_independent_and_ended_ones_learn_nothing():
    prior = acceptance.flat_prior(2, 2)
    before = acceptance.nothing_seen(prior, 3)
    seen = acceptance.observed(
        before,
        np.array([0, 1, 1]),
        np.array([2, 2, 2]),
        np.array([2, 0, 1]),
        live=np.array([True, True, False]),
    )
    assert seen.accept[:, :, 0].tolist() == [[[1, 0], [0, 0]], [[0, 0], [0, 1]], [[0, 0], [0, 0]]]
    assert not before.accept.any()  # what was given stays as it is
    again = acceptance.observed(
        seen,
        np.array([0, 1, 1]),
        np.array([0, 0, 2]),
        np.array([0, 0, 2]),
        0.5,
        np.array([True, False, True]),
    )
    assert again.accept[:, :, 0].tolist() == [[[0.5, 0], [0, 0]], [[0, 0], [0, 1]], [[0, 0], [1, 0]]]


def test_the_mean_goes_from_the_prior_to_the_counts_and_back():
    prior = acceptance.flat_prior(1, 1, 0.7, strength=4.0)
    nothing, _ = acceptance.mean(prior, acceptance.nothing_seen(prior, 1))
    assert nothing[0, 0, 0] == pytest.approx(0.7)
    some, _ = acceptance.mean(prior, played(prior, [(0, 1, 0)] * 4))
    many, _ = acceptance.mean(prior, played(prior, [(0, 1, 0)] * 400))
    assert 0.7 > some[0, 0, 0] > 0.1 > 0.02 > many[0, 0, 0]
    forgotten = played(prior, [(0, 1, 0)] * 400)
    forgotten = dataclasses.replace(forgotten, accept=forgotten.accept * 1e-9)
    assert acceptance.mean(prior, forgotten)[0][0, 0, 0] == pytest.approx(0.7, abs=1e-3)


def test_what_first_tokens_say_goes_for_later_ones_too():
    prior = acceptance.Prior(np.array([[0.6, 0.8, 0.9]]), np.array([4.0]), np.ones((1, 3)))
    bad, _ = acceptance.mean(prior, played(prior, [(0, 3, 0)] * 40))
    good, _ = acceptance.mean(prior, played(prior, [(0, 1, 1)] * 40))
    assert (bad[0, 0] < [0.1, 0.3, 0.5]).all()
    assert (good[0, 0] > [0.9, 0.9, 0.95]).all()
    assert bad[0, 0, 2] > bad[0, 0, 1]  # the profile stays


def test_what_a_text_says_of_one_goes_for_its_kin():
    prior = acceptance.flat_prior(3, 2, 0.8, strength=5.0)
    kin = dataclasses.replace(prior, kin=np.array([False, True, True]))
    failed = played(prior, [(1, 2, 0)] * 10)
    alone, together = (acceptance.mean(one, failed)[0][0] for one in (prior, kin))
    assert alone[2] == pytest.approx([0.8, 0.8])
    assert (together[2] < 0.6).all()
    assert (together[2] > together[1]).all()
    # The others, and one's own rounds, count as before.
    assert together[:2] == pytest.approx(alone[:2])
    # Enough rounds of its own outweigh its kin's.
    own = played(prior, [(1, 2, 0)] * 10 + [(2, 2, 2)] * 100)
    assert (acceptance.mean(kin, own)[0][0, 2] > 0.9).all()


def test_drawn_acceptances_spread_as_what_is_known_allows():
    prior = acceptance.flat_prior(2, 2, 0.5, strength=2.0)
    known = played(prior, [(1, 2, 1)] * 200)
    many = dataclasses.replace(
        known, accept=np.repeat(known.accept, 4000, axis=0), draft=np.repeat(known.draft, 4000, axis=0)
    )
    accept, found = acceptance.sampled(np.random.default_rng(0), prior, many)
    assert ((accept > 0) & (accept < 1)).all()
    assert accept[:, 0, 0].std() > 0.15
    assert accept[:, 1, 0].std() < 0.02
    assert found[:, 1, 0].mean() > 0.98
    still, _ = acceptance.sampled(np.random.default_rng(0), prior, many, exploration=0.0)
    assert (still == acceptance.mean(prior, many)[0]).all()


def test_a_prior_is_fitted_to_other_texts():
    rng, rounds = np.random.default_rng(0), 10
    rates = rng.beta(6, 3, (500, 2))
    rates[:, 1] = 0.25
    right = rng.binomial(rounds, rates)
    accept = np.stack([right, rounds - right], axis=-1)[:, :, None].astype(float)
    prior = acceptance.fitted_prior(acceptance.Estimate(accept, np.ones((500, 2, 1, 2))))
    assert prior.accept[:, 0] == pytest.approx([2 / 3, 0.25], abs=0.02)
    assert prior.strength[0] == pytest.approx(
        9, rel=0.25
    )  # 4.5 if what drawing adds were taken for the texts' own
    assert prior.strength[1] == 20  # all texts are alike


@pytest.mark.parametrize("numbers", [{"acceptance": 1.0}, {"strength": 0.0}])
def test_a_prior_out_of_range_is_refused(numbers):
    with pytest.raises(ValueError, match=r"; give a number"):
        acceptance.flat_prior(1, 1, **numbers)


# The choice


def best(accept, made=(1, 1, 1), behind=(0, 0, 0), horizon=100.0, **options):
    accept = np.array([accept], float)
    choice = chooser.best(
        TABLE,
        accept,
        np.array([made], float)[..., None] * np.ones_like(accept),
        np.array([behind]),
        np.array([horizon]),
        **options,
    )
    return choice.candidate.tolist(), choice.length.tolist()


def test_the_choice_gives_the_most_tokens_per_millisecond():
    nothing = [0, 0]
    assert best([nothing, [0.05, 0.9], [0.3, 0]]) == ([OFF], [0])  # 1.05 ÷ 1.1, 1.3 ÷ 1.5
    assert best([nothing, [0.2, 0.1], [0.3, 0]]) == ([1], [1])
    assert best([nothing, [0.2, 0.9], [0.3, 0]]) == ([1], [2])  # 1.38 ÷ 1.2 > 1.2 ÷ 1.1
    assert best([nothing, [0.2, 0.9], [0.9, 0]]) == ([2], [1])
    # A round that finds nothing is a plain one.
    assert best([nothing, [0.0, 0.9], [0.5, 0]], made=(1, 0.0, 1)) == ([OFF], [0])
    assert best([nothing, [0.09, 0.9], [0.5, 0]]) == ([OFF], [0])  # 1.17 ÷ 1.2
    assert best([nothing, [0.09, 0.9], [0.5, 0]], made=(1, 0.1, 1)) == ([1], [2])


def test_no_draft_is_the_choice_of_plain_decoding_alone():
    """Although a measured round without a draft may, by noise, seem to cost less than one of plain decoding."""
    noisy = dataclasses.replace(TABLE, round_ms=TABLE.round_ms - np.array([[0.0], [0.05], [0.0]]))
    given = np.zeros((1, 3, 2)), np.ones((1, 3, 2)), np.zeros((1, 3)), np.ones(1)
    choice = chooser.best(noisy, *given)
    assert (choice.candidate.tolist(), choice.length.tolist()) == ([OFF], [0])


def test_a_state_is_brought_up_only_where_it_pays():
    accept = [[0, 0], [0.05, 0], [0.9, 0]]  # 1.27 tokens per millisecond, after 3 + .01 · behind
    assert best(accept, behind=(9, 9, 0), horizon=4) == ([2], [1])
    assert best(accept, behind=(9, 9, 50), horizon=4) == ([OFF], [0])
    assert best(accept, behind=(9, 9, 50), horizon=40) == ([2], [1])
    assert best(accept, behind=(9, 9, 5000), horizon=40) == ([OFF], [0])


def test_rows_together_take_what_is_best_for_all():
    accept = np.array([[[0, 0], [0.9, 0.9], [0, 0]], [[0, 0], [0, 0], [0.9, 0]]])
    given = (np.ones((2, 3, 2)), np.zeros((2, 3), int), np.full(2, 50.0))
    each = chooser.best(TABLE, accept, *given)
    assert (each.candidate.tolist(), each.length.tolist()) == ([1, 2], [2, 1])
    both = chooser.best(TABLE, accept, *given, together=True)  # 3.71 ÷ 1.2, 2.9 ÷ 1.5
    assert (both.candidate.tolist(), both.length.tolist()) == ([1, 1], [2, 2])
    swapped = chooser.best(TABLE, accept[::-1], *given, together=True)
    assert (swapped.candidate.tolist(), swapped.length.tolist()) == ([1, 1], [2, 2])


def test_an_ended_row_has_no_say_in_what_the_others_do():
    prior = acceptance.flat_prior(3, 2, strength=1.0)
    state = chooser.begin(prior, np.array([0, 10**6]))
    for _ in range(200):  # the free draft is never right in the first row, and always in the second
        last = np.array([1, 1])
        state = chooser.after_round(
            state, TABLE, Choice(last, 2 * last), 2 * last, np.array([0, 2]), np.array([1, 3])
        )
        dear = np.array([2, 2])
        state = chooser.after_round(
            state, TABLE, Choice(dear, last), last, np.array([0, 1]), np.array([1, 2])
        )
    both = {"prior": prior, "exploration": 0.0, "together": True}
    live, _ = chooser.choose(state, TABLE, remaining=np.array([50, 50]), **both)
    ended, _ = chooser.choose(state, TABLE, remaining=np.array([50, 0]), **both)
    assert (live.candidate.tolist(), live.length.tolist()) == ([1, 1], [2, 2])
    assert (ended.candidate.tolist(), ended.length.tolist()) == ([OFF, OFF], [0, 0])


def test_a_trial_waits_until_it_can_be_lost():
    prior = acceptance.flat_prior(3, 2, 0.3, strength=2.0)
    both = {"prior": prior, "remaining": np.array([200]), "exploration": 0.0, "rounds": 10}
    state = chooser.begin(prior, np.array([0]))
    assert chooser.choose(state, TABLE, **both)[0].candidate.tolist() == [1]
    # The whole allowed loss but one token is spent. A long plain text, or a text that gained, earns it again.
    spent = chooser.with_time(state, 0, 2.5)
    assert chooser.choose(spent, TABLE, **both)[0].candidate.tolist() == [OFF]
    assert chooser.choose(chooser.with_time(spent, 400, 400), TABLE, **both)[0].candidate.tolist() == [1]
    assert chooser.choose(chooser.with_time(spent, 20, 15), TABLE, **both)[0].candidate.tolist() == [1]
    # A candidate that gains even with bad luck is always open. If its state must be updated first, it is open only if
    # the remaining tokens earn that time too.
    sure = acceptance.flat_prior(3, 2, 0.95, strength=1000.0)
    both |= {"prior": sure}
    assert chooser.choose(chooser.with_time(state, 0, 50), TABLE, **both)[0].candidate.tolist() == [1]
    behind = dataclasses.replace(chooser.with_time(state, 0, 50), behind=np.array([[0, 10**4, 10**4]]))
    slow = dataclasses.replace(TABLE, start_ms=np.array([0.0, 3.0, 3.0]), absorb_ms=np.full(3, 0.01))
    assert chooser.choose(behind, slow, **both)[0].candidate.tolist() == [1]
    both |= {
        "prior": acceptance.flat_prior(3, 2, 0.7, strength=5.0),
        "remaining": np.array([1000]),
        "memory": 1000.0,
    }
    assert chooser.choose(dataclasses.replace(state, behind=behind.behind), slow, **both)[
        0
    ].candidate.tolist() == [1]
    soon = both | {"memory": 150.0}  # the expected gain would still pay
    assert chooser.choose(dataclasses.replace(state, behind=behind.behind), slow, **soon)[
        0
    ].candidate.tolist() == [OFF]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_large_budget_does_not_keep_a_good_head_away(batch):
    """The end of a text is not known: a state must pay over the likely number of tokens, not over the budget."""
    for budget in (300, 4096, 32_000):
        choices = Choices(
            ["head"],
            [DraftCost(layers=1, absorb_layers=1)],
            [6],
            guessed(12, 0.01),
            batch,
            known=Known(ratios={("off", batch): 1.0}),
        )
        for row in range(batch):
            choices.begin_row(row, list(range(64)))
        lengths, remaining = np.full(batch, 65), np.full(batch, budget)
        first, _, count = choices.next(lengths, remaining, 8, None, lambda at: True)
        choices.learn([[(0, 0)] * count] * batch, [[9] * count] * batch, lengths, count * 1.0, True)
        after, _, _ = choices.next(lengths + count, remaining - count, 8, None, lambda at: True)
        assert (first, after) == (0, 1), budget


def test_rows_that_choose_together_share_what_may_be_lost():
    prior = acceptance.flat_prior(3, 2, 0.3, strength=2.0)
    both = {
        "prior": prior,
        "remaining": np.array([200, 200]),
        "exploration": 0.0,
        "rounds": 10,
        "together": True,
    }
    state = chooser.begin(prior, np.zeros(2, int))
    for lost, candidate in (((2.5, 2.5), OFF), ((2.5, -3.0), 1)):
        spent = chooser.with_time(state, 0, np.array(lost))
        assert chooser.choose(spent, TABLE, **both)[0].candidate.tolist() == [candidate] * 2, lost
    fresh = chooser.with_new_row(chooser.with_time(state, 9, np.array([11.5, 11.5])), 1)
    assert (fresh.lost.tolist(), fresh.tokens.tolist()) == ([2.5, 0.0], [9.0, 0.0])


def run_choices(seed, batch=2, rounds=30):
    """What is chosen on counts that depend on the choices alone."""
    prior = acceptance.flat_prior(3, 2)
    state = chooser.begin(prior, np.full(batch, 8), seed)
    chosen = []
    for number in range(rounds):
        choice, state = chooser.choose(state, TABLE, prior, np.full(batch, 200 - number))
        accepted = np.minimum(choice.length, (choice.candidate + number) % 3)
        state = chooser.after_round(state, TABLE, choice, choice.length, accepted, accepted + 1)
        chosen.append((choice.candidate.tolist(), choice.length.tolist()))
    return chosen, state


def test_choices_come_back_with_the_seed():
    assert run_choices(3)[0] == run_choices(3)[0]
    assert run_choices(3)[0] != run_choices(4)[0]


def test_states_fall_behind_while_others_draft():
    prior = acceptance.flat_prior(3, 2)
    state = chooser.begin(prior, np.array([8, 8, 8]))
    choice = Choice(np.array([2, 1, 1]), np.array([1, 2, 2]))
    counts = np.array([1, 2, 0]), np.array([1, 0, 0]), np.array([2, 1, 0])
    after = chooser.after_round(state, TABLE, choice, *counts)
    assert after.behind.tolist() == [[10, 10, 0], [9, 0, 9], [8, 8, 8]]
    assert state.behind.tolist() == [[8, 8, 8]] * 3
    assert not after.estimate.draft[2].any()


def test_prices_follow_from_costs():
    costs = StepCosts(
        *("a device", "a model", "float32", 4, 100), ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0, 0.5, 0.25, 0.2
    )
    drafts = [("ngram", DraftCost(lookup=True)), ("head", DraftCost(layers=1, absorb_layers=2))]
    table = chooser.prices(costs, drafts, [1, 4])
    assert table.names == ("off", "ngram", "head")
    assert table.round_ms[OFF].tolist() == [10.5] + [np.inf] * 4
    assert table.round_ms[1].tolist() == [10.75, 11.75, np.inf, np.inf, 14.75]
    assert table.round_ms[2, 4] == pytest.approx(4 * 4 + 14.5)
    assert table.start_ms == pytest.approx([0, 0, 4])
    assert table.absorb_ms == pytest.approx([0, 0, 0.1])
    with pytest.raises(ValueError, match=r"lengths are .*; give at least one"):
        chooser.prices(costs, drafts, [0])


def test_a_prior_is_the_mean_round_of_texts():
    """Not the product of means: a text on which drafts are short does not reach the positions behind."""
    rounds = {0: [(4, 4)] * 6, 1: [(4, 0)] * 60}
    seen = acceptance.observed_rounds(
        acceptance.nothing_seen(acceptance.flat_prior(1, 4), 20),
        0,
        [rounds[at % 2] for at in range(20)],
        1.0,
        asked=4,
    )
    tokens = chooser.tokens_of_rounds(acceptance.fitted_prior(seen).accept[None])[0, 0, 4]
    # Of those that suit there are fewer rounds, which count a little less: 6 ÷ (6 + 4) and 60 ÷ (60 + 4).
    assert tokens == pytest.approx(1 + 4 * 0.6 / (0.6 + 60 / 64), rel=0.1)


def test_a_round_is_paid_for_as_far_as_it_drafts():
    """Straight on from what is known of drafts that begin, and of those that go on."""
    table = chooser.Prices(
        ("off", "lookup", "hybrid"),
        np.array([[1.0, np.inf, np.inf], [1.0, 2.0, 4.0], [1.0, 2.0, np.inf]]),
        np.zeros(3),
        np.zeros(3),
        shortest=np.array([0, 2, 1]),
    )
    times = chooser.times_of_rounds(table, np.array([[[0.0, 0.0], [0.5, 0.25], [0.5, 0.25]]]))
    assert times.tolist() == [[[1, np.inf, np.inf], [1, np.inf, 2.0], [1, 1.5, np.inf]]]
    prior = acceptance.joined(
        [
            acceptance.Expectation((0.5,), 2.0, (0.5, 0.75)),
            acceptance.Expectation((0.5,), 2.0),
        ],
        3,
    )
    _, drafted = acceptance.mean(prior, acceptance.nothing_seen(prior, 1))
    np.testing.assert_allclose(drafted, [[[0.5, 0.375, 0.28125], [1] * 3]], atol=4e-3)
    rounds = [[(3, 1), (0, 0), (1, 1), (2, 0)]]
    seen = acceptance.observed_rounds(acceptance.nothing_seen(prior, 1), 0, rounds, 1.0, asked=3)
    assert seen.draft[0, 0].tolist() == [[3, 1], [2, 1], [1, 1]]
    assert seen.accept[0, 0].tolist() == [[2, 2], [0, 2], [0, 0]]


def test_what_is_expected_of_each_candidate():
    prior = acceptance.flat_prior(3, 2, 0.8, strength=8.0)
    seen = chooser.outlook(TABLE, prior, acceptance.nothing_seen(prior, 1))
    assert np.argsort(-seen.speedup[0]).tolist() == [1, 2, OFF]
    assert (seen.length[0, 1], seen.accept[0, 1]) == (2, pytest.approx(0.8))
    assert seen.round_ms[0, 1] == pytest.approx(0.9 * 1.2 + 0.1, rel=1e-3)
    assert seen.speedup[0, 1] == pytest.approx((1 + 1.44) / seen.round_ms[0, 1], rel=1e-3)
    assert (seen.speedup[0, OFF], seen.length[0, OFF], seen.round_ms[0, OFF]) == (1.0, 0, 1.0)


# The simulation

SMALL = choosing.Options(texts=150, tokens=128)


@pytest.fixture(scope="module")
def simulated():
    return choosing.measure(SMALL)


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
    table = Prices(
        ("off", "lookup", "early exit"),
        np.where(np.arange(11) > 0, 2.0, 1.0) * np.ones((3, 1)),
        np.array([0.0, 0.0, 7.0]),
        np.zeros(3),
    )
    prior = acceptance.flat_prior(3, 10)
    for candidate, length in ((OFF, 0), (1, 4), (2, 3)):
        policy = choosing._alone(candidate, length)
        taken = choosing.play(table, texts, policy, SMALL, prior, learning=True).ms[:, -1]
        for row in range(40):
            place, ms = 0, 7.0 if candidate == 2 else 0.0
            while place < 60:
                drafted = length if texts.drafts[row, candidate, place] else 0
                ms += 2.0 if drafted else 1.0
                place += 1 + min(int(texts.run[row, candidate, place]), drafted)
            assert taken[row] == ms


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
        ("--forgetting 0", "--forgetting is 0.0; give a number above 0"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert choosing.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"jaxspec: error: {message}")
