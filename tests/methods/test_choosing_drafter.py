"""The drafter that chooses among others: its choice, its bounded loss, and the states of its candidates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec import methods
from jaxspec.cli.methods import parse_run
from jaxspec.costs.prices import measured_prices
from jaxspec.costs.rounds import DraftCost, StepCosts
from jaxspec.decoding import Parts
from jaxspec.drafting import choice_rule
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.drafting.choice_rule import Choice, ChoiceRule, ChoiceState, Found
from jaxspec.drafting.choosing_drafter import ChoosingDrafter, _with, widths_of
from jaxspec.drafting.draft_model_drafter import DraftModelDrafter
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.drafting.lookup import LookupDrafter, joined
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.methods import registry
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Shape
from jaxspec.protocol import Drafter, Outcome, Proposal, Weights
from jaxspec.sampling import Greedy, Sampling
from jaxspec.testing import contracts
from tests import refused, tiny
from tests.core.test_conformance import whole_drafts

PROMPTS, BUDGETS = ((1, 2, 3), (5,), (7, 1, 7, 1, 7, 1)), (30, 26, 33)


@struct.dataclass
class Boaster(LookupDrafter):
    """Expects `much` if `length % period < often`, and proposes wrong tokens."""

    period: int = struct.field(pytree_node=False, default=1)
    often: int = struct.field(pytree_node=False, default=1)
    much: float = struct.field(pytree_node=False, default=1e6)
    num_draft_tokens: int = struct.field(pytree_node=False, default=2)

    def look_up(self, keys, view):
        now = view.length % self.period < self.often
        return Proposal(jnp.zeros((len(now), 2), jnp.int32), 2 * now), jnp.where(now, self.much, 0.0)


@struct.dataclass
class Counting(Drafter):
    """Proposes wrong tokens and counts its calls."""

    num_draft_tokens: int = struct.field(pytree_node=False, default=2)
    verify_widths = (1, 3)

    def init(self, params, view, prefill):
        return jnp.zeros(len(view.length), jnp.int32)

    def propose(self, keys, params, state, view, distribution):
        return (
            Proposal(jnp.zeros((len(state), 2), jnp.int32), jnp.minimum(view.budget, 2)),
            state + 1,
            view.cache,
        )


def pair(first, second, config=tiny.TARGET, **numbers) -> ChoosingDrafter:
    return tiny.choosing(config, (first, second), **numbers)


def loop(drafter, target=None, own=None, config=tiny.TARGET) -> tiny.Loop:
    target = tiny.params(config) if target is None else target
    own = (None, own) if isinstance(drafter, ChoosingDrafter) else own
    return tiny.Loop(Parts(drafter, tiny.ACCEPTORS["greedy"](), Greedy()), Weights(target, own), config)


def generous(monkeypatch) -> None:
    """Allows any loss."""
    monkeypatch.setattr(choice_rule, "FIRST", 1e6)


def ended(made: tiny.Loop):
    state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
    while not state.done.all():
        state, _ = made.go_on(state)
    return state


# The choice


COPIES = {"began": 20, "went_on": 60}
GOOD, BAD = {"right": 60}, {"wrong": 60}
# The array, the candidate and the column of each count.
COUNTS = {
    "began": ("right", 0, 0),
    "went_on": ("right", 0, 1),
    "began_wrong": ("wrong", 0, 0),
    "went_wrong": ("wrong", 0, 1),
    "right": ("right", 1, 0),
    "wrong": ("wrong", 1, 0),
}


def state_of(num_candidates: int, rows: int = 1, credit: float = 1e6, **seen: float) -> ChoiceState:
    """Returns a state in the middle of a text, with these counts of candidates 0 and 1 in every row."""
    counts = {name: np.zeros((rows, num_candidates, 2), np.float32) for name in ("right", "wrong")}
    for name, number in seen.items():
        array, candidate, column = COUNTS[name]
        counts[array][:, candidate, column] = number
    return ChoiceState(**counts, used=None, credit=jnp.full(rows, credit), choice=None, found=())


def found_of(*counts: int) -> Found:
    """Returns a lookup's drafts of these lengths, one for each row, all expected to be right."""
    count = jnp.array(counts)
    return Found(jnp.zeros((len(counts), 9), jnp.int32), count, count.astype(jnp.float32))


# A cheap model and a dearer one.
MODELS = tuple(DraftModelDrafter(tiny.TARGET, num_draft_tokens=length) for length in (3, 6))


def rule_of(costs, row_cost, accept, models=MODELS, widths=None) -> ChoiceRule:
    """Returns the choice among a lookup of 9 tokens and models."""
    candidates = tiny.suffix().replace(num_draft_tokens=9), *models
    widths = widths or widths_of(candidates)
    return ChoiceRule(candidates, tiny.prices_of(widths, 9, costs, row_cost, accept), 0.95, widths)


def chosen(found, seen, cost, *, budget=9, row_cost=0.0, accept=0.75, credit=1e6, widths=None):
    """Returns whether the lookup is chosen or nothing, and the length; the model drafts at most 3 tokens."""

    rule = rule_of((0.0, cost), row_cost, ((0.5, 0.75), accept), MODELS[:1], widths or (1, 10))
    state = state_of(2, credit=credit, **seen)
    choice = rule.choose(state, (found_of(found),), jnp.array([20]), jnp.array([budget]))
    return choice.candidate.item() != 1, choice.length.item()


@pytest.mark.parametrize(
    ("found", "seen", "cost", "takes"),
    [
        (3, {}, 0.5, True),
        # Without observations, little more than one token of a match is expected to be right.
        (3, {}, 0.05, False),
        (9, {}, 0.1, True),
        (0, {}, 0.25, False),
        # All drafts of the model are accepted: 4 tokens for 1.75.
        (1, GOOD, 0.25, False),
        (2, GOOD | COPIES, 0.25, True),
        (2, GOOD | COPIES, 0.05, False),
        # A text with long repetitions.
        (9, GOOD | COPIES, 0.0, True),
        # The first token of a lookup is seldom right.
        (3, {"began_wrong": 20}, 0.25, False),
        # No draft of the model is accepted: a plain step is better, if drafts cost something.
        (0, BAD, 0.25, True),
        (0, BAD, 0.0, False),
    ],
)
def test_the_draft_with_the_larger_rate_is_taken(found, seen, cost, takes):
    assert chosen(found, seen, cost)[0] == takes


EVERY = tuple(range(1, 11))


@pytest.mark.parametrize(
    ("found", "seen", "cost", "row", "expected"),
    [
        # Rows are free: the longest drafts of both methods.
        (9, COPIES, 0.5, 0.0, (True, 9)),
        (0, {}, 0.0, 0.0, (False, 3)),
        # Rows are expensive: only the tokens that are probably accepted.
        (9, {"began": 20, "went_on": 20, "went_wrong": 20}, 0.5, 0.2, (True, 2)),
        (0, {}, 0.25, 0.3, (False, 2)),
        (0, GOOD, 0.25, 0.3, (False, 3)),
        (9, {"began_wrong": 20}, 0.5, 0.4, (True, 0)),
    ],
)
def test_a_draft_is_as_long_as_it_pays(found, seen, cost, row, expected):
    assert chosen(found, seen, cost, row_cost=row, widths=EVERY) == expected
    # A draft never exceeds the budget.
    assert chosen(found, seen, cost, row_cost=row, budget=1, widths=EVERY)[1] <= 1
    assert chosen(found, seen, cost, row_cost=row, budget=0, widths=EVERY)[1] == 0


def test_a_verification_costs_its_width():
    # The first draft token already costs three more rows, so all of them are used.
    assert chosen(9, {"began_wrong": 3}, 0.5, row_cost=0.05, widths=(1, 4, 10)) == (True, 3)


def test_extreme_counts_give_a_length_in_range():
    """All or no tokens accepted, for either method."""
    for seen in (GOOD, BAD, {"began": 1e6, "went_on": 1e6}, {"right": 1e6, "wrong": 1e6}):
        for accept in (0.0, 1.0, 0.5):
            takes, length = chosen(9, seen, 0.25, accept=accept)
            assert 0 <= length <= 9, (seen, accept, takes)


def test_a_model_that_is_known_to_draft_well_is_not_left_for_a_first_match():
    assert chosen(2, {}, 0.3)[0]
    good = (0.9, 0.95, 1.0)
    assert not chosen(2, {}, 0.3, accept=good)[0]
    # Observations of this text soon have more weight.
    assert chosen(2, {"wrong": 20}, 0.3, accept=good)[0]


def test_a_draft_costs_at_most_the_credit():
    """If all its tokens are rejected."""
    assert chosen(0, GOOD, 0.25) == (False, 3)
    assert chosen(0, GOOD, 0.25, credit=0.74) == (False, 2)
    assert chosen(0, GOOD, 0.25, credit=0.24) == (True, 0)
    assert chosen(0, GOOD, 0.25, credit=-1.0) == (True, 0)


# Several models and rows


THREE = rule_of((0.0, 0.1, 0.3), 0.05, ((0.5, 0.75), 0.75, 0.75))


def choice_of(rule, rows, seen=(), credit=1e6, lengths=20, budget=9):
    """Returns the candidates and lengths of rows with lookups of these lengths; `seen`: right and wrong by row."""
    state = state_of(3, len(rows), credit)
    for row, counts in enumerate(seen):
        for candidate, (right, wrong) in counts.items():
            state.right[row, candidate, 0], state.wrong[row, candidate, 0] = right, wrong
    length = jnp.full(len(rows), lengths)
    choice = rule.choose(state, (found_of(*rows),), length, jnp.broadcast_to(budget, length.shape))
    return choice.candidate.tolist(), choice.length.tolist(), choice.cost


FAST, DEEP = {1: (60, 0), 2: (0, 60)}, {1: (0, 60), 2: (90, 0)}


def test_one_model_runs_for_the_rows_that_gain_most_together():
    assert choice_of(THREE, [0], [FAST])[:2] == ([1], [3])
    assert choice_of(THREE, [0], [DEEP])[:2] == ([2], [6])
    # Two rows outvote one; it drafts too, as the model runs anyway.
    assert choice_of(THREE, [0, 0, 0], [FAST, FAST, DEEP])[0] == [1, 1, 1]
    assert choice_of(THREE, [0, 0, 0], [DEEP, FAST, DEEP])[0] == [2, 2, 2]
    # A row with a good match keeps it, and finished rows have no vote.
    copies = {0: (40, 0)}
    candidates, lengths, _ = choice_of(THREE, [3, 0], [copies | DEEP, FAST])
    assert (candidates, lengths[1]) == ([0, 1], 3)
    assert choice_of(THREE, [0, 0, 0], [FAST, FAST, DEEP], budget=jnp.array([0, 0, 9]))[0][2] == 2


def test_a_match_in_one_row_must_pay_for_all_rows():
    """A verification takes the width of the longest draft in every row."""
    made = rule_of((0.0, 9.0, 9.0), 0.2, ((0.5, 0.98), 0.5, 0.5))
    copies = {0: (90, 0)}
    assert choice_of(made, [9], [copies])[1] == [9]
    assert choice_of(made, [9] + 7 * [0], [copies] + 7 * [{}])[1] == 8 * [0]
    assert choice_of(made, [9] + 7 * [0], [copies] + 7 * [{}], budget=jnp.array([9] + 7 * [0]))[1][0] == 9


def test_prices_follow_the_rows_and_the_length():
    full = ((1, 1, 10.0), (11, 1, 10.5), (1, 8, 11.0), (11, 8, 40.0))
    costs = StepCosts("device", "model", "float32", 4, 0, full, 1, 4.0, 0.01)
    work = DraftCost(lookup=True), DraftCost(layers=1, shared=1), DraftCost(layers=2)
    given = (costs, work, (0, 0, 0), THREE.widths, 9, 3 * [(0.5,)])
    prices = measured_prices(*given)
    # Drafts are dearer beside those of seven other rows.
    alone = dataclasses.replace(THREE, prices=prices)
    assert choice_of(alone, [9], [{0: (9, 0)}])[1][0] >= 5
    assert max(choice_of(alone, 8 * [9], 8 * [{0: (9, 40)}])[1]) <= 1
    wide = measured_prices(*given, one_width=True)
    assert np.unique(wide.verify[0, :, 0]).size == 1


def test_matches_are_judged_by_the_text_whether_or_not_they_were_verified():
    """A match has the right tokens that the round committed; a wrong one counts only where a token was committed."""
    state = state_of(3, 4)
    found = Found(jnp.tile(jnp.arange(9), (4, 1)), jnp.array([9, 9, 2, 0]), jnp.array([9.0, 0.5, 2.0, 0.0]))
    nothing = jnp.full(4, -1)
    state = state._replace(found=(found,), choice=Choice(nothing, 0 * nothing, jnp.ones(4)))
    tokens = jnp.array([[0, 1, 2, 7], [7, 8, 9, 9], [0, 1, 2, 3], [0, 1, 2, 3]])
    tokens, count = jnp.pad(tokens, ((0, 0), (0, 6))), jnp.array([3, 4, 4, 4])
    right, wrong = THREE._evidence(state, Outcome(tokens, count, jnp.zeros(4, int), jnp.zeros(4, int)))
    assert right[:, 0].tolist() == [[1, 2], [0, 0], [1, 1], [0, 0]]
    assert wrong[:, 0].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert not right[:, 1:].any() | wrong[:, 1:].any()


def test_texts_of_wrong_drafts_lose_no_more_than_is_allowed():
    """A model and a lookup that are nearly always wrong, and are expected to be right."""
    prices = tiny.prices_of((1, 3), 2, (0.0, 0.25), 0.1, (0.99, 0.99))
    wrong = pair(Boaster(), Counting(), memory=0.5).replace(prices=prices)
    state, _ = (made := loop(wrong)).begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
    took, plain = np.zeros(3), np.zeros(3)
    while not state.done.all():
        before = state
        state, _ = made.go_on(state, 1)
        gained = np.asarray(state.length - before.length)
        took += np.where(gained > 0, state.drafter_state.rule.choice.cost, 0)
        plain += gained
        rule, left = state.drafter_state.rule, choice_rule.FIRST + choice_rule.SHARE * plain - (took - plain)
        np.testing.assert_allclose(rule.credit, left, atol=1e-4)
        votes = np.asarray(before.limit - before.length) > 1
        assert not rule.choice.length.any() or left[votes].mean() >= -1e-4
    assert (state.stats.num_drafts > 0).all()
    assert (state.stats.num_accepted_tokens < state.stats.num_drafts).all()


def texts_of_the_target() -> NGramDrafter:
    """Returns a lookup drafter whose reference contains each text of the target."""
    texts = [[*p, *tiny.greedy(p, n)] for p, n in zip(PROMPTS, BUDGETS, strict=True)]
    return NGramDrafter(joined(texts), ngram_max=8, ngram_min=4, num_draft_tokens=tiny.K)


@pytest.mark.full
def test_a_model_that_no_row_wants_does_not_run(monkeypatch):
    generous(monkeypatch)
    state = ended(loop(pair(Boaster(), Counting(), cost=0.5, memory=0.0)))
    assert state.drafter_state.own[1].tolist() == [0, 0, 0]
    assert (state.stats.num_drafts > 9).all()
    state = ended(loop(pair(Boaster(often=0), Counting(), cost=0.4)))
    assert (state.drafter_state.own[1] > 0).all()
    # Its wrong drafts do not pay, so most rounds are plain steps.
    assert (2 * state.stats.num_drafts < state.stats.num_rounds).all()


@pytest.mark.full
def test_a_last_token_that_leaves_no_room_for_a_draft():
    """The second method does not run then, but the first layers, which it shares with verification, must run."""
    second = LayerSkipDrafter(tiny.DEEP, 1, num_draft_tokens=5)
    texts = []
    for drafter in (AutoregressiveDrafter(), pair(tiny.suffix(), second, tiny.DEEP)):
        made = loop(drafter, config=tiny.DEEP)
        state, _ = made.begin(PROMPTS, (2, 2, 2), capacity=2 * tiny.CAPACITY)
        state, _ = made.go_on(state)
        assert state.done.all()
        texts.append(tiny.generated(state, PROMPTS))
    assert texts[0] == texts[1]


# Trees


class Branches(Counting):
    """Trees of 8 nodes and depth 3."""

    num_nodes, drafts_trees, verify_widths = 8, True, (1, 9)


@pytest.mark.parametrize(
    ("cost", "row", "budget", "expected"),
    [
        # 2.7 tokens or more for 1 + 3 · 0.2.
        (0.2, 0.0, 9, (False, 3)),
        # A small budget saves neither a level nor a row: less than 1.9 tokens for 1 + 3 · 0.2 or 1 + 8 · 0.1.
        (0.2, 0.0, 1, (False, 1)),
        (0.35, 0.0, 1, (True, 0)),
        (0.0, 0.1, 9, (False, 3)),
        (0.0, 0.15, 1, (True, 0)),
        (0.0, 0.15, 0, (True, 0)),
    ],
)
def test_a_tree_costs_all_its_levels_and_nodes(cost, row, budget, expected):
    rule = rule_of((0.0, cost), row, ((0.5, 0.75), 0.75), [Branches(3)], (1, 4, 9))
    choice = rule.choose(state_of(2), (found_of(0),), jnp.array([20]), jnp.array([budget]))
    assert (choice.candidate.item() != 1, choice.length.item()) == expected


@struct.dataclass
class Reader(LookupDrafter):
    """Proposes the next tokens of `script`, int32[B, N], at 5 of 10 lengths, which differ between the rows."""

    script: jax.Array
    num_draft_tokens: int = struct.field(pytree_node=False, default=4)

    def look_up(self, keys, view):
        now = (view.length + jnp.arange(len(view.length))) % 10 < 5
        places = view.length[:, None] + jnp.arange(self.num_draft_tokens)
        count = self.num_draft_tokens * now
        return Proposal(jnp.take_along_axis(self.script, places, axis=1), count), count.astype(jnp.float32)


@pytest.mark.full
@pytest.mark.representatives("likely")
@pytest.mark.parametrize("kind", ["likely", "drawn"])
def test_rows_of_a_batch_take_copies_and_trees(kind, monkeypatch):
    """In the same rounds, with an exact head: whole copies are accepted, and a path of full depth in each tree."""
    generous(monkeypatch)
    head, target, own = tiny.exact_head("eagle")
    tree = Dynamic(6, depth=3, width=2) if kind == "likely" else Drawn(Shape((-1, -1, 0, 0, 2, 3)))
    head = head.replace(num_draft_tokens=3, tree=tree)
    distribution = Greedy() if kind == "likely" else Sampling(jnp.zeros(3))

    def ran(drafter, rounds):
        weights = Weights(target, (None, own) if isinstance(drafter, ChoosingDrafter) else own)
        made = tiny.Loop(Parts(drafter, tiny.ACCEPTORS["rejection"](), distribution), weights, tiny.TARGET)
        state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
        while not state.done.all():
            before = state
            state, _ = made.go_on(state, 1)
            rounds.append((before, state))
        return state

    plain = ran(AutoregressiveDrafter(), [])
    script = jnp.pad(plain.tokens, ((0, 0), (0, 9)))
    rounds, seen, both = [], np.zeros((2, 3), int), 0
    made = pair(Reader(script), head, cost=0.02, memory=1.0)
    prices = made.prices.replace(accept=made.prices.accept.at[0].set(0.99))
    state = ran(made.replace(prices=prices), rounds)
    assert tiny.generated(state, PROMPTS) == tiny.generated(plain, PROMPTS)
    for before, after in rounds:
        budget = np.asarray(before.limit - before.length - 1)
        took_first = np.asarray(after.drafter_state.rule.choice.candidate) == 0
        accepted = np.asarray(after.stats.num_accepted_tokens - before.stats.num_accepted_tokens)
        drafts = budget > 3
        assert (accepted == np.where(took_first, 4, 3))[drafts].all()
        assert not np.asarray(after.drafter_state.rule.wrong)[drafts, 1].any()
        seen += [drafts & took_first, drafts & ~took_first]
        both += len(set(took_first[drafts])) == 2
    assert seen.min() >= 2
    assert both >= 5


# The sampling distribution


FOUR = dataclasses.replace(
    tiny.TARGET, vocab_size=4, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1
)


def drawn(distribution: Sampling) -> tiny.Loop:
    """A first drafter that is often wrong, and a second whose distribution differs from the target's; both are used."""
    small = dataclasses.replace(FOUR, num_layers=1)
    own = jax.tree.map(lambda leaf: 2.5 * leaf, tiny.params(small))
    second = DraftModelDrafter(small, num_draft_tokens=2).taking_turns()
    parts = Parts(
        pair(Boaster(2, 2, 0.9), second, FOUR, memory=0.3), tiny.ACCEPTORS["rejection"](), distribution
    )
    return tiny.Loop(parts, Weights(tiny.params(FOUR), (None, own)), FOUR)


@pytest.mark.full
def test_texts_follow_the_distribution_where_the_choice_is_close():
    """A choice that has seen the drawn draft would drop unlikely ones, and so change the distribution of the text."""
    contracts.check_sampled_distribution(drawn, rows=6_000)


@pytest.mark.parametrize(("seen", "first"), [(COPIES, True), (GOOD | {"began_wrong": 20}, False)])
def test_the_choice_is_the_same_whatever_is_drawn(seen, first):
    made = drawn(Sampling(jnp.full(2, 4.0)))
    state, _ = made.begin(((1, 3), (2,)), 9)
    counts = state_of(2, 2, **seen)
    rule = state.drafter_state.rule._replace(right=jnp.asarray(counts.right), wrong=jnp.asarray(counts.wrong))
    drafter_state = state.drafter_state._replace(rule=rule)
    keys = jax.random.split(jax.random.key(1), (200, 2))

    @jax.jit
    @jax.vmap
    def propose(keys):
        proposal, after, _ = made.parts.drafter.propose(
            keys, made.weights, drafter_state, tiny.view(state), made.parts.distribution
        )
        return after.rule.choice, proposal.count, proposal.tokens

    choice, count, tokens = jax.tree.map(np.asarray, propose(keys))
    for found in (*choice, count):
        assert (found == found[:1]).all()
    assert (choice.candidate == (0 if first else 1)).all()
    assert first or len(np.unique(tokens)) == FOUR.vocab_size


# The state of the method that is not chosen


@pytest.mark.full
@pytest.mark.representatives("layerskip")
@pytest.mark.parametrize("name", ["draft-model", "layerskip", "draft-verify", "eagle", "eagle3"])
def test_a_drafter_that_sat_out_drafts_as_well_as_before(name, monkeypatch):
    """Each row skips up to five consecutive rounds, at different times than its neighbours."""
    generous(monkeypatch)
    config, second, target, own = whole_drafts()[name]
    made = loop(pair(Boaster(9, 5), second.taking_turns(), config, memory=0.0), target, own, config)
    state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
    rounds = np.zeros((2, 3), int)
    while not state.done.all():
        before = state.stats
        state, _ = made.go_on(state, 1)
        took_first = np.asarray(state.drafter_state.rule.choice.candidate) == 0
        drafted = np.asarray(state.stats.num_draft_tokens - before.num_draft_tokens)
        accepted = np.asarray(state.stats.num_accepted_tokens - before.num_accepted_tokens)
        live = drafted > 0
        rounds[0] += live & took_first
        rounds[1] += live & ~took_first
        assert (accepted == drafted)[live & ~took_first].all()
    assert rounds.min() >= 3
    assert tiny.generated(state, PROMPTS) == tiny.generated(ended(loop(second, target, own, config)), PROMPTS)


@pytest.mark.representatives("eagle3")
@pytest.mark.parametrize("name", ["draft-model", "layerskip", "draft-verify", "eagle", "eagle3"])
def test_the_plain_program_has_the_state_of_the_whole_one(name, monkeypatch):
    """The smaller program never drafts. Both have one state, so that a text can go on with either."""
    monkeypatch.setattr(choice_rule, "FIRST", -1e6)
    config, second, target, own = whole_drafts()[name]
    whole, states = pair(NGramDrafter(num_draft_tokens=2), second.taking_turns(), config), []
    for drafter in (whole, whole.replace(plain=True)):
        made = loop(drafter, target, own, config)
        state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
        state, _ = made.go_on(state, 20)
        assert (state.drafter_state.rule.right + state.drafter_state.rule.wrong).any()
        assert not state.stats.num_drafts.any()
        states.append(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *map(_plain_keys, states))


def _plain_keys(state):
    return dataclasses.replace(state, keys=jax.random.key_data(state.keys))


@pytest.mark.representatives("ngram")
@pytest.mark.parametrize("other", ["ngram", "layerskip"])
def test_verification_runs_the_pending_token_of_every_row(other):
    """Also in the rounds of a draft that has run it through all layers, because the other rows have not."""
    (head, own), (first, _) = tiny.drafter_of("uno"), tiny.drafter_of(other)
    made = pair(first, head, cost=0.2, row_cost=0.01, accept=0.7, memory=0.8)
    state = ended(loop(made, own=own))
    assert (np.asarray(state.drafter_state.rule.used).sum(axis=0) > 0).all()
    assert tiny.generated(state, PROMPTS) == tiny.generated(ended(loop(AutoregressiveDrafter())), PROMPTS)


@pytest.mark.full
def test_a_head_reads_what_the_other_drafted():
    """Also for drafts longer than its own; hidden states that wait are absorbed in blocks, when it drafts next."""
    head, own = tiny.drafter_of("eagle", "confidence")
    first = texts_of_the_target().replace(num_draft_tokens=9)
    alone, together = [ended(loop(one, own=own)) for one in (head, pair(first, head))]
    assert (together.stats.num_accepted_tokens > alone.stats.num_accepted_tokens).all()
    assert tiny.generated(together, PROMPTS) == tiny.generated(alone, PROMPTS)
    made, state = pair(first, head), together.drafter_state
    assert (state.waiting.count > 0).any()
    weights = Weights(tiny.params(), (None, own))
    behind, waiting = made._absorbed_waiting(
        jnp.bool_(True), weights, state.own, state.waiting, together.length - 1
    )
    assert not waiting.count.any()
    np.testing.assert_allclose(behind[1].own.hidden, alone.drafter_state.own.hidden, atol=1e-5)


def test_a_stop_rule_may_end_a_draft_before_the_chosen_length():
    tokens, mine = jnp.arange(9).reshape(3, 3), jnp.array([True, True, False])
    joined, drafted = Proposal(0 * tokens - 1, jnp.array([0, 0, 2])), Proposal(tokens, jnp.array([1, 3, 3]))
    made = _with(joined, drafted, mine, jnp.array([3, 2, 1]))
    assert made.count.tolist() == [1, 2, 2]
    assert made.tokens.tolist() == [[0, 1, 2], [3, 4, 5], [-1, -1, -1]]


def test_a_masked_candidate_is_specialised():
    drafter, _ = tiny.drafter_of("choosing-asd")
    assert not drafter.static
    masked = drafter.candidates[1].replace(static=True)
    drafter = dataclasses.replace(drafter, candidates=(drafter.candidates[0], masked))
    assert drafter.static
    state = loop(drafter, config=drafter.config).begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)[0]
    plans = np.asarray(drafter.plans(state.drafter_state, jnp.ones(3, bool)))
    assert plans.shape == (3, drafter.config.num_layers, 2)
    special = drafter.specialised(LayerPlan.from_array(plans[0]))
    assert special.candidates[1].plan == LayerPlan.from_array(plans[0])
    assert special.candidates[0] is drafter.candidates[0]


def test_the_draft_model_catches_up_in_blocks():
    second = DraftModelDrafter(tiny.TARGET, num_draft_tokens=3)
    assert (second.catch_up, second.taking_turns().catch_up) == (1, 4)


def test_a_sorted_draft_with_a_cache_of_its_own_is_refused():
    with refused("method s2d with a draft model cannot take turns with another method"):
        tiny.drafter_of("s2d", "constant")[0].taking_turns()


# The method


def test_hybrid_is_a_spelling_of_auto():
    among = methods.Suffix(suffix_max=4), methods.LayerSkip(exit_layer=1)
    auto = methods.Auto(among=among, num_draft_tokens=3, explain=True)
    options = {"exit_layer": 1, "suffix_max": 4, "num_draft_tokens": 3, "explain": True}
    assert registry.make("hybrid", options) == auto
    assert methods.Hybrid(first=among[0], second=among[1], num_draft_tokens=3, explain=True) == auto
    words = "hybrid --first suffix --second layerskip --exit-layer 1 --suffix-max 4 --num-draft-tokens 3 --explain"
    assert parse_run(words) == auto
    assert methods.Hybrid(first="ngram", second=None) == methods.Auto(among=("ngram", "layerskip"))
    result = tiny.language_model().generate([5], method="hybrid", max_new_tokens=3, **options)
    assert {one.name for one in result.expected} == {"suffix", "layerskip 1"}
