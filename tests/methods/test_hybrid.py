"""The hybrid drafter: its choice of a method, and the state of the other method."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec import methods
from jaxspec.choosing.beliefs import Expectation
from jaxspec.cli.methods import parse_run
from jaxspec.decoding import Parts
from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.drafting.draft_model_drafter import DraftModel
from jaxspec.drafting.hybrid_drafter import Counts, Hybrid
from jaxspec.drafting.layerskip_drafter import LayerSkip
from jaxspec.drafting.lookup import LookupDrafter, joined
from jaxspec.drafting.ngram_drafter import NGram
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.methods import registry
from jaxspec.methods.resources import Resources
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Shape
from jaxspec.protocol import Drafter, Proposal, Weights
from jaxspec.sampling import Greedy, Sampling
from jaxspec.testing import contracts
from tests import tiny
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


def hybrid(first, second, config=tiny.TARGET, cost=0.25, memory=0.95) -> Hybrid:
    return Hybrid(config, first, second, jnp.float32(cost), memory=jnp.float32(memory))


def loop(drafter, target=None, own=None, config=tiny.TARGET) -> tiny.Loop:
    target = tiny.params(config) if target is None else target
    return tiny.Loop(Parts(drafter, tiny.ACCEPTORS["greedy"](), Greedy()), Weights(target, own), config)


def ended(made: tiny.Loop):
    state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
    while not state.done.all():
        state, _ = made.go_on(state)
    return state


# The choice


COPIES = {"began": 20, "went_on": 60}
GOOD, BAD = {"right": 60}, {"wrong": 60}


def chosen(found, seen, cost, *, budget=9, **fields):
    """Returns whether the first method is chosen, and the length; the second drafts at most 3 tokens."""
    counts = dataclasses.replace(Counts.none(1), **{n: jnp.array([float(v)]) for n, v in seen.items()})
    drafter = hybrid(
        tiny.suffix().replace(num_draft_tokens=9), DraftModel(tiny.TARGET, num_draft_tokens=3), cost=cost
    ).replace(**fields)
    takes, length = drafter.choose(counts, jnp.array([found]), jnp.array([float(found)]), jnp.array([budget]))
    return takes.item(), length.item()


@pytest.mark.parametrize(
    ("found", "seen", "cost", "takes"),
    [
        (3, {}, 0.5, True),
        # Without observations, little more than one token of a match is expected to be right.
        (3, {}, 0.05, False),
        (9, {}, 0.1, True),
        (0, {}, 0.25, False),
        # All drafts of the second method are accepted: 4 tokens for 1.75.
        (1, GOOD, 0.25, False),
        (2, GOOD | COPIES, 0.25, True),
        (2, GOOD | COPIES, 0.05, False),
        # A text with long repetitions.
        (9, GOOD | COPIES, 0.0, True),
        # The first token of a lookup is seldom right.
        (3, {"began_wrong": 20}, 0.25, False),
        # No draft of the second method is accepted: a plain step is better, if drafts cost something.
        (0, BAD, 0.25, True),
        (0, BAD, 0.0, False),
    ],
)
def test_what_promises_more_for_its_cost_is_taken(found, seen, cost, takes):
    assert chosen(found, seen, cost)[0] == takes


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
def test_a_draft_is_as_long_as_it_pays(found, seen, cost, row, expected, monkeypatch):
    monkeypatch.setattr(Hybrid, "verify_widths", tuple(range(1, 11)))
    assert chosen(found, seen, cost, row_cost=row) == expected
    # A draft never exceeds the budget.
    assert chosen(found, seen, cost, row_cost=row, budget=1)[1] <= 1
    assert chosen(found, seen, cost, row_cost=row, budget=0)[1] == 0


def test_a_verification_costs_its_width(monkeypatch):
    monkeypatch.setattr(Hybrid, "verify_widths", (1, 4, 10))
    # The first draft token already costs three more rows, so all of them are used.
    assert chosen(9, {"began_wrong": 1}, 0.5, row_cost=0.05) == (True, 3)


def test_an_uncommon_promise_is_no_number_out_of_range():
    """Extreme counts: all or no tokens accepted, for either method."""
    for seen in (GOOD, BAD, {"began": 1e6, "went_on": 1e6}, {"right": 1e6, "wrong": 1e6}):
        for accept in (0.0, 1.0, 0.5):
            takes, length = chosen(9, seen, 0.25, accept=jnp.float32(accept))
            assert 0 <= length <= 9, (seen, accept, takes)


def test_a_second_that_is_known_to_draft_well_is_not_left_for_a_first_find():
    assert chosen(2, {}, 0.3)[0]
    good = jnp.array([0.9, 0.95, 1.0])
    assert not chosen(2, {}, 0.3, accept=good)[0]
    # Observations of this text soon have more weight.
    assert chosen(2, {"wrong": 20}, 0.3, accept=good)[0]


def texts_of_the_target() -> NGram:
    """Returns a lookup drafter whose reference contains each text of the target."""
    texts = [[*p, *tiny.greedy(p, n)] for p, n in zip(PROMPTS, BUDGETS, strict=True)]
    return NGram(joined(texts), ngram_max=8, ngram_min=4, num_draft_tokens=tiny.K)


def poor_draft() -> tuple[DraftModel, dict]:
    drafter, own = tiny.drafter_of("draft-model", "constant")
    return drafter.taking_turns(), own


@pytest.mark.full
def test_a_good_first_and_a_poor_second():
    """After a match of four tokens, only the first method drafts in this text."""
    second, own = poor_draft()
    alone, together = loop(texts_of_the_target()), loop(hybrid(texts_of_the_target(), second), own=own)
    expected, found = ended(alone), ended(together)
    assert tiny.generated(found, PROMPTS) == tiny.generated(expected, PROMPTS)
    assert (found.stats.num_rounds <= expected.stats.num_rounds).all()
    second_alone = ended(loop(second, own=own))
    # The last row's text repeats itself, so every draft is right.
    assert (2 * found.stats.num_rounds <= second_alone.stats.num_rounds)[:2].all()


@pytest.mark.full
def test_a_boasting_first_and_a_good_second():
    """A method whose drafts are never accepted is no longer chosen."""
    whole = DraftModel(tiny.TARGET, num_draft_tokens=tiny.K).taking_turns()
    alone = ended(loop(whole, own=tiny.params()))
    together = ended(loop(hybrid(Boaster(), whole, cost=0.3), own=tiny.params()))
    assert tiny.generated(together, PROMPTS) == tiny.generated(alone, PROMPTS)
    tries = together.stats.num_rounds - alone.stats.num_rounds
    assert (tries > 0).all()
    assert (tries < alone.stats.num_rounds).all(), (tries, alone.stats.num_rounds)


@pytest.mark.full
def test_a_second_that_no_row_wants_does_not_run():
    state = ended(loop(hybrid(Boaster(), Counting(), cost=0.5, memory=0.0)))
    assert state.drafter_state.second.tolist() == [0, 0, 0]
    assert (state.stats.num_drafts > 9).all()
    state = ended(loop(hybrid(Boaster(often=0), Counting(), cost=0.4)))
    assert (state.drafter_state.second > 0).all()
    # Its wrong drafts do not pay, so most rounds are plain steps.
    assert (2 * state.stats.num_drafts < state.stats.num_rounds).all()


@pytest.mark.full
def test_a_last_token_that_leaves_no_room_for_a_draft():
    """The second method does not run then, but the first layers, which it shares with verification, must run."""
    second = LayerSkip(tiny.DEEP, 1, num_draft_tokens=5)
    texts = []
    for drafter in (Autoregressive(), hybrid(tiny.suffix(), second, tiny.DEEP)):
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
    drafter = hybrid(tiny.suffix().replace(num_draft_tokens=9), Branches(3), cost=cost)
    none = jnp.zeros(1, jnp.int32)
    takes, length = drafter.replace(row_cost=row).choose(Counts.none(1), none, 0.0 * none, none + budget)
    assert (takes.item(), length.item()) == expected


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


@pytest.mark.parametrize("kind", ["likely", "drawn"])
def test_rows_of_a_batch_take_copies_and_trees(kind):
    """In the same rounds, with an exact head: whole copies are accepted, and a path of full depth in each tree."""
    head, target, own = tiny.exact_head("eagle")
    tree = Dynamic(6, depth=3, width=2) if kind == "likely" else Drawn(Shape((-1, -1, 0, 0, 2, 3)))
    head = head.replace(num_draft_tokens=3, tree=tree)
    distribution = Greedy() if kind == "likely" else Sampling(jnp.zeros(3))

    def ran(drafter, rounds):
        made = tiny.Loop(
            Parts(drafter, tiny.ACCEPTORS["rejection"](), distribution), Weights(target, own), tiny.TARGET
        )
        state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
        while not state.done.all():
            before = state
            state, _ = made.go_on(state, 1)
            rounds.append((before, state))
        return state

    plain = ran(Autoregressive(), [])
    script = jnp.pad(plain.tokens, ((0, 0), (0, 9)))
    rounds, seen, both = [], np.zeros((2, 3), int), 0
    state = ran(hybrid(Reader(script), head, cost=0.4, memory=1.0), rounds)
    assert tiny.generated(state, PROMPTS) == tiny.generated(plain, PROMPTS)
    for before, after in rounds:
        budget = np.asarray(before.limit - before.length - 1)
        took_first = np.asarray(after.drafter_state.took_first)
        accepted = np.asarray(after.stats.num_accepted_tokens - before.stats.num_accepted_tokens)
        drafts = budget > 3
        assert (accepted == np.where(took_first, 4, 3))[drafts].all()
        assert not np.asarray(after.drafter_state.counts.wrong)[drafts].any()
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
    second = DraftModel(small, num_draft_tokens=2).taking_turns()
    parts = Parts(
        hybrid(Boaster(2, 2, 0.9), second, FOUR, memory=0.3), tiny.ACCEPTORS["rejection"](), distribution
    )
    return tiny.Loop(parts, Weights(tiny.params(FOUR), own), FOUR)


@pytest.mark.full
def test_texts_follow_the_distribution_where_the_choice_is_close():
    """A choice that has seen the drawn draft would drop unlikely ones, and so change the distribution of the text."""
    contracts.check_sampled_distribution(drawn, rows=6_000)


@pytest.mark.parametrize(("seen", "first"), [(COPIES, True), (GOOD | {"began_wrong": 20}, False)])
def test_the_choice_is_the_same_whatever_is_drawn(seen, first):
    made = drawn(Sampling(jnp.full(2, 4.0)))
    state, _ = made.begin(((1, 3), (2,)), 9)
    counts = dataclasses.replace(Counts.none(2), **{name: jnp.full(2, float(n)) for name, n in seen.items()})
    drafter_state = state.drafter_state._replace(counts=counts)
    keys = jax.random.split(jax.random.key(1), (200, 2))

    @jax.jit
    @jax.vmap
    def propose(keys):
        proposal, after, _ = made.parts.drafter.propose(
            keys, made.weights, drafter_state, tiny.view(state), made.parts.distribution
        )
        return after.took_first, after.promised, proposal.count, proposal.tokens

    took_first, promised, count, tokens = map(np.asarray, propose(keys))
    for found in (took_first, promised, count):
        assert (found == found[:1]).all()
    assert (took_first == first).all()
    assert first or len(np.unique(tokens)) == FOUR.vocab_size


# The state of the method that is not chosen


@pytest.mark.full
@pytest.mark.representatives("layerskip")
@pytest.mark.parametrize("name", ["draft-model", "layerskip", "draft-verify"])
def test_a_drafter_that_sat_out_drafts_as_well_as_before(name):
    """Each row skips up to five consecutive rounds, at different times than its neighbours."""
    config, second, target, own = whole_drafts()[name]
    made = loop(hybrid(Boaster(9, 5), second.taking_turns(), config, memory=0.0), target, own, config)
    state, _ = made.begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)
    rounds = np.zeros((2, 3), int)
    while not state.done.all():
        before = state.stats
        state, _ = made.go_on(state, 1)
        took_first = np.asarray(state.drafter_state.took_first)
        drafted = np.asarray(state.stats.num_draft_tokens - before.num_draft_tokens)
        accepted = np.asarray(state.stats.num_accepted_tokens - before.num_accepted_tokens)
        live = drafted > 0
        rounds[0] += live & took_first
        rounds[1] += live & ~took_first
        assert (accepted == drafted)[live & ~took_first].all()
    assert rounds.min() >= 3
    assert tiny.generated(state, PROMPTS) == tiny.generated(ended(loop(second, target, own, config)), PROMPTS)


@pytest.mark.full
def test_a_head_reads_what_the_other_drafted():
    """Also for drafts longer than its own: the result equals that of the head alone."""
    head, own = tiny.drafter_of("eagle", "confidence")
    first = texts_of_the_target().replace(num_draft_tokens=9)
    state, together = [ended(loop(one, own=own)) for one in (head, hybrid(first, head))]
    assert (together.stats.num_accepted_tokens > state.stats.num_accepted_tokens).all()
    assert tiny.generated(together, PROMPTS) == tiny.generated(state, PROMPTS)
    alone, beside = state.drafter_state.own, together.drafter_state.second.own
    np.testing.assert_allclose(beside.hidden, alone.hidden, atol=1e-5)


def test_a_masked_second_is_specialised():
    drafter, _ = tiny.drafter_of("hybrid-asd", "constant")
    assert not drafter.static
    assert dataclasses.replace(drafter, second=drafter.second.replace(static=True)).static
    state = loop(drafter, config=drafter.config).begin(PROMPTS, BUDGETS, capacity=2 * tiny.CAPACITY)[0]
    plans = np.asarray(drafter.plans(state.drafter_state, jnp.ones(3, bool)))
    assert plans.shape == (3, drafter.config.num_layers, 2)
    special = drafter.specialised(LayerPlan.of(plans[0]))
    assert special.second.plan == LayerPlan.of(plans[0])
    assert special.first is drafter.first


def test_the_draft_model_catches_up_in_blocks():
    second = DraftModel(tiny.TARGET, num_draft_tokens=3)
    assert (second.catch_up, second.taking_turns().catch_up) == (1, 4)


def test_a_sorted_draft_with_a_cache_of_its_own_is_refused():
    with pytest.raises(
        ValueError, match="method s2d with a draft model cannot take turns with another method"
    ):
        tiny.drafter_of("s2d", "constant")[0].taking_turns()


# The method


def test_both_methods_take_their_options():
    made = registry.make("hybrid", {"first": "ngram", "exit_layer": 1, "ngram_max": 4, "draft_cost": 0.2})
    first, second = methods.NGram(ngram_max=4), methods.LayerSkip(exit_layer=1)
    assert made == methods.Hybrid(first=first, second=second, draft_cost=0.2)
    assert methods.Hybrid(first="ngram").first == methods.NGram()
    words = "hybrid --first suffix --second draft-model --draft-exit 1 --suffix-max 4 --num-draft-tokens 3"
    assert parse_run(words) == methods.Hybrid(
        first=methods.Suffix(suffix_max=4, num_draft_tokens=3),
        second=methods.DraftModel(draft_exit=1, num_draft_tokens=3),
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"first": "guess"}, "unknown method 'guess'; the methods are"),
        ({"second": "hybrid"}, "second is 'hybrid'; give a method that drafts and is not a hybrid"),
        ({"second": "autoregressive"}, "second is 'autoregressive'; give a method that drafts"),
        ({"first": 3}, "first is 3; give a text"),
        ({"draft_cost": -1}, "draft_cost is -1.0; give a number from 0 on"),
        ({"draft_exit": 1}, "method hybrid has no option `draft_exit`; it is an option of draft-model"),
        (
            {"second": "asd", "exit_layer": 1},
            "method hybrid has no option `exit_layer`; it is an option of adaspeed",
        ),
        ({"second": methods.Hybrid()}, "second is 'hybrid'; give a method that drafts and is not a hybrid"),
        ({"second": methods.Autoregressive()}, "second is 'autoregressive'; give a method that drafts"),
        ({"gamma": 0.5}, "method layerskip with stop_rule=constant has no option `gamma`"),
        ({"exit_layr": 1}, "unknown option exit_layr; perhaps you meant exit_layer"),
    ],
)
def test_wrong_options_are_one_line(options, line):
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        registry.make("hybrid", options)
    assert "\n" not in str(caught.value)


def test_what_is_known_of_the_second_counts_before_it_has_drafted(monkeypatch):
    made, _ = tiny.language_model().drafter("hybrid", exit_layer=1)
    assert made.accept.tolist() == [0.75] * made.second.num_draft_tokens
    known = Expectation((0.8, 0.5), 9.0)
    monkeypatch.setattr(methods.LayerSkip, "expectation", lambda *_: known)
    made, _ = tiny.language_model().drafter("hybrid", exit_layer=1, num_draft_tokens=3)
    np.testing.assert_allclose(made.accept, [0.8, 0.5, 0.5], rtol=1e-6)


def test_it_is_expected_to_draft_as_long_as_it_pays(monkeypatch):
    lm, made = tiny.language_model(), methods.Hybrid(second=methods.LayerSkip(exit_layer=1), draft_cost=0.05)
    resources = Resources(load_draft=lambda model: model.loaded, encode=list)
    expected = {}
    for accept in (0.3, 0.6, 0.999):
        monkeypatch.setattr(
            methods.LayerSkip, "expectation", lambda *_, known=accept: Expectation((known,), 9.0)
        )
        one = expected[accept] = made.expectation(lm.loaded, resources)
        assert one.strength == 9
        assert one.accept == (*[accept] * (len(one.accept) - 1), 0.0)
        assert one.draft == (*[1.0] * (len(one.accept) - 1), 0.0)
    # 1.3 ÷ 1.17 > 1.39 ÷ 1.34; 1.96 ÷ 1.34 > 1.6 ÷ 1.17 and 2.18 ÷ 1.51
    assert [len(one.accept) - 1 for one in expected.values()] == [1, 2, 17]
    monkeypatch.setattr(methods.LayerSkip, "expectation", lambda *_: None)
    assert made.expectation(lm.loaded, resources) is None


@pytest.mark.full
def test_what_it_is_made_of():
    lm = tiny.language_model()
    made, own = lm.drafter("hybrid", exit_layer=1, num_draft_tokens=3)
    assert own is None
    assert made.first == lm.drafter("suffix", num_draft_tokens=3)[0]
    assert made.second == lm.drafter("layerskip", exit_layer=1, num_draft_tokens=3)[0]
    # The draft reads one of two layers and the head, relative to the weights that a step reads.
    assert float(made.draft_cost) == pytest.approx(tiny.share_of_step(lm, lm.params["layers"][:1], head=True))
    assert made.verify_widths == (1, 4)
    made, own = lm.drafter("hybrid", first="ngram", second="draft-model", draft=tiny.small_model())
    runs = own["layers"], own.get("head", own["embed"])
    assert float(made.draft_cost) == pytest.approx(tiny.share_of_step(lm, runs))
    assert (made.num_draft_tokens, made.verify_widths, made.second.catch_up) == (10, (1, 4, 6, 8, 11), 6)
    every = lm.drafter("hybrid", second="asd", every=2, keep_last=0)[0]
    assert float(every.draft_cost) == pytest.approx(
        tiny.share_of_step(lm, lm.params["layers"][:1], head=True)
    )
    assert float(lm.drafter("hybrid", second="ngram")[0].draft_cost) == 0
    with pytest.raises(
        ValueError, match="first is layerskip, which drafts with a model; give suffix or ngram"
    ):
        lm.drafter("hybrid", first="layerskip", second="ngram", exit_layer=1)
