"""The drafters by themselves: n-gram search against a slow twin, the chain loop on tables, the draft's cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.drafting.asd import ASD
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.chain import draft_chain
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.drafting.lookup import BREAK
from jaxspec.drafting.ngram import NGram
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Outcome, View, rising_widths
from jaxspec.sampling import Greedy, Sampling
from jaxspec.stopping import (
    AdaptiveGamma,
    AdaptiveLength,
    AnyOf,
    ConfidenceBelow,
    Constant,
    FixedGamma,
    Probe,
    ProductBelow,
)
from jaxspec.testing import reference
from tests import tiny

# N-gram: a small vocabulary, so that much repeats.

V, ROWS, SIZE = 3, 4, 20
TEXTS = np.array([0, 1, 2, 0, 1, 1, BREAK, 2, 2, 1, 0, BREAK, 1, 2, BREAK, BREAK], np.int32)
NGRAMS = {
    "latest": NGram(match="latest", num_draft_tokens=4),
    "earliest": NGram(match="earliest", num_draft_tokens=4),
    "longest": NGram(match="longest", num_draft_tokens=4),
    "random": NGram(match="random", num_draft_tokens=4),
    "long": NGram(ngram_max=4, ngram_min=2, num_draft_tokens=3),
    "reference": NGram(jnp.asarray(TEXTS), ngram_max=5, num_draft_tokens=4),
    "reference-longest": NGram(jnp.asarray(TEXTS), "longest", ngram_max=3, ngram_min=2, num_draft_tokens=4),
    "reference-random": NGram(jnp.asarray(TEXTS), "random", ngram_max=2, num_draft_tokens=2),
}


def continuations(drafter: NGram, text: list[int]) -> list[list[int]]:
    """What followed wherever the text's last tokens stand, from left to right; the longest run that stands."""
    searched = text if drafter.reference is None else TEXTS.tolist()
    for n in range(min(drafter.ngram_max, len(text)), drafter.ngram_min - 1, -1):
        found = []
        for end in range(n, len(searched)):
            if searched[end - n : end] == text[-n:]:
                following = searched[end : end + drafter.num_draft_tokens]
                found.append(list(itertools.takewhile(lambda token: token != BREAK, following)))
        found = [tokens for tokens in found if tokens]
        if found:
            return found
    return []


@functools.partial(jax.jit, static_argnames="name")
def _search(name: str, tokens, length, keys):
    view = View(tokens, length, None, room=jnp.full_like(length, 99))
    proposal, _, _ = NGRAMS[name].propose(keys, None, (), view, Greedy())
    return proposal


@pytest.mark.parametrize("name", NGRAMS)
@settings(max_examples=120, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=SIZE), min_size=ROWS, max_size=ROWS),
    beyond=st.integers(0, V - 1),
    seed=st.integers(0, 100),
)
def test_ngram_finds_what_the_slow_twin_finds(name, texts, beyond, seed):
    """What stands behind a row's length is not searched."""
    drafter = NGRAMS[name]
    tokens = np.full((ROWS, SIZE), beyond, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = np.array([len(text) for text in texts], np.int32)
    proposal = _search(name, tokens, length, jax.random.split(jax.random.key(seed), ROWS))
    assert proposal.log_probs is None
    for row, text in enumerate(texts):
        found = continuations(drafter, text)
        longest = [tokens for tokens in found if len(tokens) == max(map(len, found))]
        expected = {"earliest": found[:1], "latest": found[-1:], "longest": longest[-1:], "random": longest}
        count = int(proposal.count[row])
        assert np.asarray(proposal.tokens[row, :count]).tolist() in (expected[drafter.match] or [[]])
    assert proposal.tokens.min() >= 0


def test_a_random_match_may_be_any_of_the_longest():
    text = [0, 1, 0, 2, 0, 0, 0]
    tokens = np.array([text + [0] * (SIZE - len(text))] * ROWS, np.int32)
    seen = set()
    for seed in range(20):
        keys = jax.random.split(jax.random.key(seed), ROWS)
        proposal = _search("random", tokens, np.full(ROWS, len(text), np.int32), keys)
        seen |= {
            tuple(row[:count]) for row, count in zip(proposal.tokens.tolist(), proposal.count, strict=True)
        }
    longest = {len(tokens) for tokens in seen}
    assert len(longest) == 1
    assert seen == {tuple(t) for t in continuations(NGRAMS["random"], text) if len(t) in longest}


@pytest.mark.parametrize("partitionable", [True, False])
def test_a_random_match_does_not_depend_on_the_capacity(monkeypatch, partitionable):
    """Which follows the longest text of the batch."""
    text = [0, 1, 0, 2, 1, 1, 1, 0, 1, 0, 1, 2, 2, 2, 0, 1, 0]
    before = jax.config.jax_threefry_partitionable
    jax.config.update("jax_threefry_partitionable", partitionable)
    try:
        found = []
        for capacity in (32, 64):
            tokens = np.array([text + [0] * (capacity - len(text))] * ROWS, np.int32)
            keys, length = jax.random.split(jax.random.key(3), ROWS), np.full(ROWS, len(text), np.int32)
            view = View(jnp.asarray(tokens), jnp.asarray(length), None, jnp.full(ROWS, 9))
            proposal, _, _ = NGRAMS["random"].propose(keys, None, (), view, None)
            found.append((proposal.tokens.tolist(), proposal.count.tolist()))
    finally:
        jax.config.update("jax_threefry_partitionable", before)
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0][0]}) > 1


def test_verify_widths():
    assert Autoregressive().verify_widths == (1,)
    assert NGram(num_draft_tokens=10).verify_widths == (1, 4, 8, 11)
    assert [rising_widths(k) for k in (1, 3, 4, 15, 16)] == [
        (1, 2),
        (1, 4),
        (1, 4, 5),
        (1, 4, 8, 16),
        (1, 4, 8, 16, 17),
    ]
    assert tiny.drafter_of("draft-model", "constant")[0].verify_widths == (tiny.K + 1,)
    assert tiny.drafter_of("draft-model", "any_of")[0].verify_widths == rising_widths(tiny.K)


# The chain loop, on a drafter that is a table: next logits for every text of up to K tokens.

K = 3
NUM_ROWS = 30_000
TABLE = 1.5 * np.random.default_rng(0).standard_normal((K, V**K, V)).astype(np.float32)


def table_step(code, token, i, active):
    """The carry numbers the text so far; the pending token 0 starts it."""
    code = jnp.where(i == 0, 0, code * V + token)
    return jnp.asarray(TABLE)[i, code], jnp.zeros((len(token), 1)), code


def logits_after(draft: tuple[int, ...]) -> np.ndarray:
    return TABLE[len(draft), functools.reduce(lambda code, token: code * V + token, draft, 0)]


@functools.partial(jax.jit, static_argnames="rows")
def _chain(rows: int, law, rule, rule_state, seed, room=K):
    keys = jax.random.split(jax.random.key(seed), rows)
    zeros = jnp.zeros(rows, jnp.int32)
    return draft_chain(table_step, zeros, zeros, zeros + room, K, keys, law, rule, rule_state)


@struct.dataclass
class Counting:
    """Stops at a token, and counts what it was shown."""

    at: jax.Array

    def init(self, batch_size):
        return jnp.zeros(batch_size, jnp.int32)

    def stop(self, state, signal):
        return signal.token == self.at, state + 1

    def observe(self, state, outcome):
        return state


def stops(name: str, draft: tuple[int, ...]) -> bool:
    """Whether a rule stops after these tokens."""
    probs = tiny.warp(logits_after(draft[:-1]))
    return {
        "constant": False,
        "confidence": probs[draft[-1]] < 0.4,
        "adaptive": len(draft) >= 2,
        "any_of": probs[draft[-1]] < 0.2 or len(draft) >= 2,
        "product": math.prod(tiny.warp(logits_after(draft[:i]))[draft[i]] for i in range(len(draft))) < 0.2,
        "counting": draft[-1] == 1,
    }[name]


RULES = {
    "constant": Constant(),
    "confidence": ConfidenceBelow(FixedGamma(0.4)),
    "adaptive": AdaptiveLength(2, 1, 1),
    "any_of": AnyOf((ConfidenceBelow(FixedGamma(0.2)), AdaptiveLength(2, 1, 1))),
    "product": ProductBelow(FixedGamma(0.2)),
    "counting": Counting(jnp.int32(1)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_chain_keeps_the_token_that_stops_it(name):
    """And its law is the one each token was drawn from, given those before."""
    rule, temperature = RULES[name], 0.7
    law = Sampling(jnp.full(NUM_ROWS, temperature))
    proposal, _, state = _chain(NUM_ROWS, law, rule, rule.init(NUM_ROWS), 0)
    drafts = [
        tuple(row[:count])
        for row, count in zip(proposal.tokens.tolist(), proposal.count.tolist(), strict=True)
    ]
    for draft in set(drafts):
        assert not any(stops(name, draft[:i]) for i in range(1, len(draft)))
        assert len(draft) == K or stops(name, draft)
        row = drafts.index(draft)
        for i in range(len(draft)):
            probs = tiny.warp(logits_after(draft[:i]), temperature)
            np.testing.assert_allclose(jnp.exp(proposal.log_probs[row, i]), probs, atol=1e-5)
    expected: dict[tuple[int, ...], float] = {}
    whole = tiny.text_law(lambda prefix: tiny.warp(logits_after(prefix), temperature), K)
    for text, prob in whole.items():
        ends = [i for i in range(1, K) if stops(name, text[:i])]
        kept = text[: min(ends, default=K)]
        expected[kept] = expected.get(kept, 0.0) + prob
    assert tiny.chi_square(drafts, expected) > 1e-3
    if name == "counting":  # a row that has stopped shows its rule nothing more
        assert state.tolist() == [len(draft) for draft in drafts]


def test_a_row_drafts_no_more_than_it_has_room_for():
    """A row without room shows its rule nothing."""
    rule = Counting(jnp.int32(-1))
    room = jnp.array([0, 2, 1, 99], jnp.int32)
    proposal, _, state = _chain(4, Sampling(jnp.ones(4)), rule, rule.init(4), 0, room)
    assert proposal.count.tolist() == state.tolist() == [0, 2, 1, K]


def test_a_greedy_chain_is_a_point_mass():
    proposal, _, _ = _chain(2, Greedy(), Constant(), (), 0)
    assert proposal.log_probs is None
    text: tuple[int, ...] = ()
    while len(text) < K:
        text += (int(np.argmax(logits_after(text))),)
    assert proposal.tokens.tolist() == [list(text)] * 2


# The draft model's own cache: whatever was accepted, it drafts as a run without a cache does.


@jax.jit
def _propose(drafter, weights, keys, state, view, law):
    proposal, state, _ = drafter.propose(keys, weights, state, view, law)
    return proposal, state


@jax.jit
def _observe(drafter, weights, state, outcome):
    return drafter.observe(weights, state, outcome)


@pytest.mark.parametrize(("name", "rule"), [("draft-model", "constant"), ("draft-exit", "confidence")])
def test_the_draft_is_as_good_as_without_a_cache(name, rule):
    """Rows in which all, none or some of the draft is accepted, in any order."""
    rng = np.random.default_rng(0)
    prompts = [[1, 2, 3], [5], [7, 1, 7, 1, 7, 1]]
    loop = tiny.loop(tiny.Combination(name, rule, "block"), Sampling(jnp.ones(3)))
    drafter, weights = loop.parts.drafter, loop.weights
    start, _ = loop.begin(prompts, 20)
    state, tokens, length = start.drafter_state, np.array(start.tokens), np.array(start.length)
    patterns = [[9, 9, 9], [0, 0, 0], [9, 0, 1], [0, 9, 9], [1, 1, 9], [9, 1, 0]]
    for number, pattern in enumerate(patterns):
        view = View(jnp.asarray(tokens), jnp.asarray(length), start.cache, room=jnp.full(3, 99))
        keys = jax.random.split(jax.random.key(number), 3)
        proposal, state = _propose(drafter, weights, keys, state, view, loop.parts.law)
        counts = np.asarray(proposal.count)
        for row in range(3):
            text = [*tokens[row, : length[row]], *np.asarray(proposal.tokens[row, : counts[row]])]
            logits = reference.forward(drafter.config, weights.drafter, text)[length[row] - 1 :]
            for i in range(counts[row]):
                probs = np.exp(proposal.log_probs[row, i])
                np.testing.assert_allclose(probs, tiny.warp(logits[i]), atol=1e-4)
        accepted = np.minimum(pattern, counts)
        committed = np.zeros((3, tiny.K + 1), np.int32)
        for row in range(3):
            new = [*np.asarray(proposal.tokens[row, : accepted[row]]), rng.integers(tiny.TARGET.vocab_size)]
            committed[row, : len(new)] = new
            tokens[row, length[row] : length[row] + len(new)] = new
        length = length + accepted + 1
        outcome = Outcome(*map(jnp.asarray, (committed, accepted + 1, counts, accepted)))
        state = _observe(drafter, weights, state, outcome)
    assert length.max() <= tiny.CAPACITY


def test_records_are_values():
    """The structure of a part is static and equal by value; its numbers are leaves."""
    one, other = (dataclasses.replace(NGram(), num_draft_tokens=k) for k in (10, 10))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(other))
    assert jax.tree.structure(one) != jax.tree.structure(NGram(num_draft_tokens=9))
    config, all_run, skipping = tiny.DEEP, LayerPlan.skipping(3), LayerPlan.skipping(3, mlp=[1])
    numbers = {
        ConfidenceBelow(FixedGamma(0.5)): 1,
        ProductBelow(FixedGamma(0.5), Probe(0.1, 0.2, 0.3)): 4,
        AdaptiveGamma(): 5,
        AdaptiveGamma(full_length=4): 6,
        ASD(config, rule=Constant()): 3,
        DraftVerify(config, all_run, Constant()): 0,
        DraftVerify(config, 0.5, Constant()): 1,
        LayerSkip(config, 1, ProductBelow(FixedGamma(0.5))): 1,
    }
    for part, count in numbers.items():
        assert len(jax.tree.leaves(part)) == count, part
    plans = [
        jax.tree.structure(DraftVerify(config, plan, Constant())) for plan in (all_run, all_run, skipping)
    ]
    assert plans[0] == plans[1] != plans[2]
