"""The loop with a scripted drafter: committed tokens, counts and frozen rows, round by round."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec import decoding
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.decoding import Parts, Request
from jaxspec.protocol import Acceptance, Acceptor, Drafter, Proposal, Weights
from jaxspec.sampling import Greedy
from tests import tiny

V, K, CAPACITY = tiny.TARGET.vocab_size, tiny.K, tiny.CAPACITY
PROMPTS = ((1, 2, 3), (5,), (7, 1, 7, 1, 7, 1, 7, 2))
LONGEST = 16
WIDTHS = (1, 2, K + 1)


@struct.dataclass
class Scripted(Drafter):
    """Proposes the tokens of a script, int32[B, N], and `count` of them in a round, int32[B]."""

    script: jax.Array
    count: jax.Array

    @property
    def num_draft_tokens(self):
        return K

    @property
    def verify_widths(self):
        return WIDTHS

    def propose(self, keys, params, state, view, distribution):
        columns = jnp.minimum(view.length[:, None] + jnp.arange(K), self.script.shape[1] - 1)
        return Proposal(jnp.take_along_axis(self.script, columns, axis=1), self.count), state, view.cache


@struct.dataclass
class OtherScripted(Scripted):
    """A second class with the same fields."""


def test_methods_of_other_classes_have_other_structures():
    """Otherwise JAX would sometimes run the program of one class for the other."""
    numbers = jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32)
    one, other = (Parts(kind(*numbers), GreedyAcceptor(), Greedy()) for kind in (Scripted, OtherScripted))
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.structure(one) == jax.tree.structure(jax.tree.map(jnp.copy, one))
    assert jax.tree.structure(dataclasses.replace(one, drafter=other.drafter)) == jax.tree.structure(other)
    within = (Parts(part, GreedyAcceptor(), Greedy()) for part in ((one.drafter,), (other.drafter,)))
    assert len({jax.tree.structure(parts) for parts in within}) == 2


@functools.cache
def truth(row: int) -> list[int]:
    """Returns a prompt and its greedy text, longer than any test needs."""
    return [*PROMPTS[row], *tiny.greedy(PROMPTS[row], LONGEST + K + 2)]


def scripted(wrong=(), count=(K, K, K), prompts=range(3)) -> tiny.Loop:
    """Returns a drafter of the true text with wrong tokens at the positions `wrong`."""
    script = np.zeros((len(prompts), CAPACITY), np.int32)
    for row, prompt in enumerate(prompts):
        script[row, : len(truth(prompt))] = truth(prompt)
    script[:, list(wrong)] = (script[:, list(wrong)] + 1) % V
    drafter = Scripted(jnp.asarray(script), jnp.array(count[: len(prompts)], jnp.int32))
    return tiny.Loop(Parts(drafter, GreedyAcceptor(), Greedy()), Weights(tiny.params()))


@dataclasses.dataclass
class Counts:
    """The expected counts of one row."""

    tokens: list[int]
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = dataclasses.field(default_factory=lambda: [0] * (K + 1))


def simulated(row: int, wrong, count: int, budget: int, eos) -> Counts:
    """Simulates the same rounds, one token at a time."""
    text, start = truth(row), len(PROMPTS[row])
    counts = Counts([text[start]])
    while len(counts.tokens) < budget and counts.tokens[-1] not in eos:
        at = start + len(counts.tokens)
        drafted = min(count, budget - len(counts.tokens) - 1)
        accepted = 0
        counts.num_rounds += 1
        for position in range(at, at + drafted):
            if position in wrong or counts.tokens[-1] in eos:
                break
            counts.tokens.append(text[position])
            accepted += 1
        if counts.tokens[-1] in eos:
            drafted = accepted  # drafts after the end were never verified
        else:
            counts.tokens.append(text[start + len(counts.tokens)])
        counts.num_drafts += drafted > 0
        counts.num_draft_tokens += drafted
        counts.num_accepted_tokens += accepted
        counts.acceptance_histogram[accepted] += drafted > 0
    return counts


@settings(max_examples=60)
@given(
    wrong=st.frozensets(st.integers(0, CAPACITY - 1), max_size=12),
    count=st.tuples(*[st.integers(0, K)] * 3),
    budgets=st.tuples(*[st.integers(1, LONGEST)] * 3),
    eos=st.frozensets(st.integers(0, V - 1), max_size=2),
)
@example(frozenset(), (K, K, K), (1, 2, K), frozenset())
@example(frozenset(), (K, K, K), (K + 1, K + 2, K + 3), frozenset())
@example(frozenset(), (0, 0, 0), (3, 3, 3), frozenset())
@example(frozenset(), (K, K, K), (LONGEST, LONGEST, LONGEST), frozenset({3, 9}))
@example(frozenset(), (K, K, 1), (LONGEST, LONGEST, LONGEST), frozenset({8, 1}))
def test_what_is_committed_and_counted(wrong, count, budgets, eos):
    """For any right and wrong drafts, and any position of the end of text or of the budget."""
    loop = scripted(wrong, count)
    state, first = loop.begin(PROMPTS, budgets, eos=sorted(eos), log_probs=True)
    state, emitted = loop.go_on(state, log_probs=True)
    assert state.done.all()
    for row in range(3):
        expected = simulated(row, wrong, count[row], budgets[row], eos)
        found = tiny.generated(state, PROMPTS)[row]
        assert found == expected.tokens
        size = int(emitted.count[row])
        assert [int(first.tokens[row, 0]), *emitted.tokens[row, :size].tolist()] == found
        for name in ("num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert getattr(state.stats, name)[row] == getattr(expected, name), name
        assert state.stats.acceptance_histogram[row].tolist() == expected.acceptance_histogram
        assert emitted.drafted[row, :size].sum() == expected.num_accepted_tokens
        reported = [float(first.log_probs[row, 0, 0]), *emitted.log_probs[row, :size, 0].tolist()]
        np.testing.assert_allclose(reported, distributions_of(row)[: len(found)], atol=1e-4)


@functools.cache
def distributions_of(row: int) -> np.ndarray:
    return tiny.log_probs(PROMPTS[row], truth(row)[len(PROMPTS[row]) :])


def rounds_of(loop: tiny.Loop, state, rounds: int, **options):
    return loop.go_on(state, rounds, log_probs=True, **options)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_chunks_add_up(step):
    """Tokens, counts and state do not depend on the division of rounds into calls."""
    loop = scripted(wrong={5, 9, 10, 14}, count=(K, 2, 1))
    begun, _ = loop.begin(PROMPTS, (LONGEST, 9, 12), log_probs=True)
    whole, everything = rounds_of(loop, begun, 99)
    state, pieces = begun, [[], [], []]
    for _ in range(40):
        before = state.length
        state, emitted = rounds_of(loop, state, step)
        assert (emitted.count == state.length - before).all()
        assert (emitted.count <= step * (K + 1)).all()
        for row in range(3):
            pieces[row] += emitted.tokens[row, : int(emitted.count[row])].tolist()
    assert pieces == [row[:n].tolist() for row, n in zip(everything.tokens, everything.count, strict=True)]
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(plain(one), plain(other))


def plain(leaf: jax.Array) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def test_a_finished_row_is_frozen():
    """Tokens, length, counts and the committed cache do not change while the neighbours continue."""
    loop = scripted()
    state, _ = loop.begin(PROMPTS, (3, LONGEST, LONGEST), log_probs=True)
    state, _ = rounds_of(loop, state, 1)
    assert state.done.tolist() == [True, False, False]
    after, emitted = rounds_of(loop, state, 99)
    assert after.done.all()
    assert emitted.count[0] == 0
    length = int(state.length[0])
    assert after.length[0] == length == len(PROMPTS[0]) + 3
    np.testing.assert_array_equal(after.tokens[0], state.tokens[0])
    for before, now in zip(jax.tree.leaves(state.stats), jax.tree.leaves(after.stats), strict=True):
        np.testing.assert_array_equal(before[0], now[0])
    kept = tiny.committed(state.cache, 0, length - 1), tiny.committed(after.cache, 0, length - 1)
    for before, now in zip(*kept, strict=True):
        np.testing.assert_array_equal(before, now)


def test_a_halted_row_ends_before_the_next_round():
    loop = scripted()
    state, _ = loop.begin(PROMPTS, LONGEST, log_probs=True)
    state, emitted = rounds_of(loop, state, 99, halt=[False, True, False])
    assert emitted.count.tolist() == [LONGEST - 1, 0, LONGEST - 1]
    assert state.done.all()


def test_a_round_runs_only_if_it_fits():
    """The condition is exactly length + K + 1 ≤ capacity in every row; after `grow` the loop continues."""
    loop = scripted(count=(0, 0, 0))
    state, _ = loop.begin(PROMPTS, 99, log_probs=True)
    state, _ = loop.go_on(state, log_probs=True)
    assert not state.done.any()
    assert int(state.length.max()) + K == CAPACITY
    again, emitted = rounds_of(loop, state, 99)
    assert emitted.count.tolist() == [0, 0, 0]
    assert again.stats.num_rounds.tolist() == state.stats.num_rounds.tolist()
    larger = decoding.grow(state, 2 * CAPACITY)
    assert (larger.capacity, larger.cache.capacity) == (2 * CAPACITY, 2 * CAPACITY)
    larger, emitted = loop.go_on(larger, 6, log_probs=True)
    assert emitted.count.tolist() == [6, 6, 6]
    for row, found in enumerate(tiny.generated(larger, PROMPTS)):
        assert found == tiny.greedy(PROMPTS[row], len(found))
        expected = tiny.log_probs(PROMPTS[row], found)[-6:]
        np.testing.assert_allclose(emitted.log_probs[row, :6, 0], expected, atol=1e-4)


def test_prompt_and_budget_may_fill_the_capacity():
    """Up to the last round that fits: a prompt of one token, and one with a budget of one token."""
    budget = CAPACITY - K - 1
    text = tiny.greedy(PROMPTS[1], budget)
    rows = [PROMPTS[1], [*PROMPTS[1], *text[:-2]], PROMPTS[0]]
    loop = scripted(count=(0, 0, 0))
    state, _ = loop.begin(rows, [budget, 1, 1], log_probs=True)
    state, _ = loop.go_on(state, log_probs=True)
    assert state.done.all()
    assert tiny.generated(state, rows) == [text, text[-2:-1], tiny.greedy(PROMPTS[0], 1)]


def test_a_chunk_reports_no_more_than_its_window():
    loop = scripted()
    state, _ = loop.begin(PROMPTS, LONGEST)
    small = jax.jit(decoding.run_rounds, static_argnames=("config", "window"))
    pieces, halt = [], jnp.zeros(3, bool)
    while not state.done.all():
        state, emitted = small(
            loop.config, loop.weights, loop.parts, state, jnp.int32(99), halt, window=K + 2
        )
        assert 0 < emitted.count.max() <= K + 2
        pieces += emitted.tokens[1, : int(emitted.count[1])].tolist()
    assert pieces == tiny.greedy(PROMPTS[1], LONGEST)[1:]


@struct.dataclass
class TellingWidth(Acceptor):
    """Accepts nothing and returns the number of rows of its logits."""

    def accept(self, keys, proposal, logits, distribution):
        return Acceptance(jnp.zeros_like(proposal.count), jnp.full_like(proposal.count, logits.shape[1]))


@pytest.mark.parametrize("count", [(0, 0, 0), (0, 1, 0), (K, 0, 0), (K, 1, 0)])
def test_a_round_is_as_wide_as_its_longest_live_draft(count):
    """One row without a draft. Drafts of finished rows and drafts beyond the budget do not count."""
    loop = scripted(count=count)
    loop = dataclasses.replace(loop, parts=loop.parts.replace(acceptor=TellingWidth()))
    budgets = (3, 9, 9)
    state, _ = loop.begin(PROMPTS, budgets)
    state, _ = loop.go_on(state)
    for row, found in enumerate(tiny.generated(state, PROMPTS)):
        for made, width in enumerate(found[1:], start=1):
            drafted = [min(c, b - made - 1) for c, b in zip(count, budgets, strict=True) if b > made]
            assert width == min(w for w in WIDTHS if w > max(drafted)), (row, made)


def test_insert_into_a_running_batch():
    """The new row's text equals that of the row alone; the other rows do not change."""
    loop, alone = scripted(wrong={6, 13}, prompts=[0, 2, 2]), scripted(wrong={6, 13}, prompts=[1])
    rows = [PROMPTS[0], PROMPTS[2], PROMPTS[2]]
    state, _ = loop.begin(rows, (2, LONGEST, 6), log_probs=True)
    state, _ = rounds_of(loop, state, 1)
    assert state.done.tolist() == [True, False, False]
    single, _ = alone.begin([PROMPTS[1]], 11, seeds=[5], log_probs=True)
    state = jax.jit(decoding.insert)(state, jnp.int32(0), single)
    state, emitted = rounds_of(loop, state, 99)
    found = tiny.generated(state, [PROMPTS[1], *rows[1:]])
    for row, prompt in enumerate([PROMPTS[1], *rows[1:]]):
        count = int(emitted.count[row])
        expected = tiny.log_probs(prompt, found[row])[-count:] if count else []
        np.testing.assert_allclose(emitted.log_probs[row, :count, 0], expected, atol=1e-4)
    assert found == [
        tiny.greedy(PROMPTS[1], 11),
        tiny.greedy(PROMPTS[2], LONGEST),
        tiny.greedy(PROMPTS[2], 6),
    ]
    single, _ = rounds_of(alone, single, 99)
    assert tiny.generated(single, [PROMPTS[1]]) == found[:1]


def test_how_a_prompt_is_cut_does_not_matter():
    """The result is the same to the bit for any number of chunks per call."""
    loop = tiny.loop(tiny.Combination("asd", "constant", "greedy"))
    prompts = [list(range(1, 12)) * 2, [5]]
    tokens = np.zeros((2, 24), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    length = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    request = Request(jnp.asarray(tokens), length, length + 4, jnp.full((2, 1), -1, jnp.int32), keys)
    feed = jax.jit(functools.partial(decoding.feed, loop.config, chunk_size=4))
    end = jax.jit(functools.partial(decoding.end_prefill, loop.config, chunk_size=4))
    ends = []
    for cuts in ((0, 6), (0, 1, 6), (0, 2, 3, 4, 5, 6)):
        fed = decoding.start_prefill(loop.config, loop.weights, request)
        for first, stop in itertools.pairwise(cuts):
            fed = feed(loop.weights, request, fed, jnp.int32(first), jnp.int32(stop))
        ends.append(end(loop.weights, loop.parts, request, fed))
    for state, emitted in ends[1:]:
        parts = (
            (state.cache, state.drafter_state, emitted),
            (ends[0][0].cache, ends[0][0].drafter_state, ends[0][1]),
        )
        assert all(map(np.array_equal, *map(jax.tree.leaves, parts)))
    _, whole = tiny.prefill(loop.config, loop.weights, loop.parts, request, chunk_size=4)
    assert whole.tokens.tolist() == ends[0][1].tokens.tolist()
    assert [int(token) for token in whole.tokens[:, 0]] == [
        tiny.greedy(prompt, 1, config=loop.config)[0] for prompt in prompts
    ]
