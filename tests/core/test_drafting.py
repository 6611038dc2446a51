"""The drafters alone: n-gram search against a slow reference, the chain loop on tables, the draft's cache."""

from __future__ import annotations

import collections
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

from jaxspec.drafting.asd_drafter import ASDDrafter
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.drafting.chain_drafter import ChainState, draft_chain
from jaxspec.drafting.draft_model_drafter import DraftModelDrafter
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.drafting.lookup import BREAK
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.model import cache as kv
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

# N-gram: a small vocabulary gives many repetitions.

V, ROWS, SIZE = 3, 4, 20
TEXTS = np.array([0, 1, 2, 0, 1, 1, BREAK, 2, 2, 1, 0, BREAK, 1, 2, BREAK, BREAK], np.int32)
NGRAMS = {
    "usual": NGramDrafter(num_draft_tokens=4),
    "long": NGramDrafter(ngram_max=4, ngram_min=2, num_draft_tokens=3),
    "reference": NGramDrafter(jnp.asarray(TEXTS), ngram_max=5, num_draft_tokens=4),
    "reference-short": NGramDrafter(jnp.asarray(TEXTS), ngram_max=3, ngram_min=2, num_draft_tokens=2),
}


def continuations(drafter: NGramDrafter, text: list[int]) -> list[list[int]]:
    """Returns the continuations of all occurrences of the text's longest matching suffix, from left to right."""
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
    view = View(tokens, length, None, budget=jnp.full_like(length, 99))
    proposal, _, _ = NGRAMS[name].propose(keys, None, (), view, Greedy())
    return proposal


@pytest.mark.representatives("usual", "long", "reference-short")
@pytest.mark.parametrize("name", NGRAMS)
@settings(max_examples=120)
@given(
    texts=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=SIZE), min_size=ROWS, max_size=ROWS),
    beyond=st.integers(0, V - 1),
    seed=st.integers(0, 100),
)
def test_ngram_finds_what_the_slow_twin_finds(name, texts, beyond, seed):
    """The tokens after a row's length are not searched."""
    drafter = NGRAMS[name]
    tokens = np.full((ROWS, SIZE), beyond, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = np.array([len(text) for text in texts], np.int32)
    proposal = _search(name, tokens, length, jax.random.split(jax.random.key(seed), ROWS))
    assert proposal.log_probs is None
    for row, text in enumerate(texts):
        *_, latest = [[], *continuations(drafter, text)]
        count = int(proposal.count[row])
        assert np.asarray(proposal.tokens[row, :count]).tolist() == latest
    assert proposal.tokens.min() >= 0


def test_verify_widths():
    assert AutoregressiveDrafter().verify_widths == (1,)
    # Grammars and suffixes draft a few tokens too.
    assert [NGramDrafter(num_draft_tokens=k).verify_widths for k in (1, 7, 10)] == [
        (1, 2),
        (1, 2, 8),
        (1, 2, 5, 11),
    ]
    assert [rising_widths(k) for k in (1, 3, 8, 9, 33)] == [
        (1, 2),
        (1, 4),
        (1, 9),
        (1, 5, 10),
        (1, 5, 17, 34),
    ]
    assert tiny.drafter_of("draft-model", "constant")[0].verify_widths == (tiny.K + 1,)
    assert tiny.drafter_of("draft-model", "any_of")[0].verify_widths == rising_widths(tiny.K)


# The chain loop with a table as its drafter: the next logits for every text of up to K tokens.

K = 3
NUM_ROWS = 30_000
TABLE = 1.5 * np.random.default_rng(0).standard_normal((K, V**K, V)).astype(np.float32)


def table_step(code, token, i, active):
    """Returns a step whose carry is the number of the text so far, which begins with the pending token 0."""
    code = jnp.where(i == 0, 0, code * V + token)
    return jnp.asarray(TABLE)[i, code], jnp.zeros((len(token), 1)), code


def logits_after(draft: tuple[int, ...]) -> np.ndarray:
    return TABLE[len(draft), functools.reduce(lambda code, token: code * V + token, draft, 0)]


@functools.partial(jax.jit, static_argnames="rows")
def _chain(rows: int, distribution, rule, rule_state, seed, budget=K):
    keys = jax.random.split(jax.random.key(seed), rows)
    zeros = jnp.zeros(rows, jnp.int32)
    return draft_chain(table_step, zeros, zeros, zeros + budget, K, keys, distribution, rule, rule_state)


@struct.dataclass
class Counting:
    """Stops at a token and counts its calls."""

    at: jax.Array

    def init(self, batch_size):
        return jnp.zeros(batch_size, jnp.int32)

    def stop(self, state, signal):
        return signal.token == self.at, state + 1

    def observe(self, state, outcome):
        return state


def stops(name: str, draft: tuple[int, ...]) -> bool:
    """Returns whether a rule stops after these tokens."""
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
    """The reported distribution of each token is the one it was drawn from, given the earlier ones."""
    rule, temperature = RULES[name], 0.7
    distribution = Sampling(jnp.full(NUM_ROWS, temperature))
    proposal, _, state = _chain(NUM_ROWS, distribution, rule, rule.init(NUM_ROWS), 0)
    drafts = [
        tuple(row[:count])
        for row, count in zip(proposal.tokens.tolist(), proposal.count.tolist(), strict=True)
    ]
    counts = collections.Counter(drafts)
    too_long = {
        draft: n for draft, n in counts.items() if any(stops(name, draft[:i]) for i in range(1, len(draft)))
    }
    too_short = {draft: n for draft, n in counts.items() if len(draft) < K and not stops(name, draft)}
    assert not too_long
    assert not too_short
    for draft in counts:
        row = drafts.index(draft)
        for i in range(len(draft)):
            probs = tiny.warp(logits_after(draft[:i]), temperature)
            np.testing.assert_allclose(jnp.exp(proposal.log_probs[row, i]), probs, atol=1e-5)
    expected: dict[tuple[int, ...], float] = {}
    whole = tiny.text_distribution(lambda prefix: tiny.warp(logits_after(prefix), temperature), K)
    for text, prob in whole.items():
        ends = [i for i in range(1, K) if stops(name, text[:i])]
        kept = text[: min(ends, default=K)]
        expected[kept] = expected.get(kept, 0.0) + prob
    assert tiny.chi_square(drafts, expected) > 1e-3
    if name == "counting":  # the rule of a stopped row sees no more tokens
        assert state.tolist() == [len(draft) for draft in drafts]


def test_a_row_drafts_no_more_than_it_has_room_for():
    """The rule of a row without budget sees no tokens."""
    rule = Counting(jnp.int32(-1))
    budget = jnp.array([0, 2, 1, 99], jnp.int32)
    proposal, _, state = _chain(4, Sampling(jnp.ones(4)), rule, rule.init(4), 0, budget)
    assert proposal.count.tolist() == state.tolist() == [0, 2, 1, K]


# The draft model's own cache: after any acceptance, its drafts equal those of a run without a cache.


@jax.jit
def _propose(drafter, weights, keys, state, view, distribution):
    proposal, state, _ = drafter.propose(keys, weights, state, view, distribution)
    return proposal, state


@jax.jit
def _observe(drafter, weights, state, outcome):
    return drafter.observe(weights, state, outcome)


@pytest.mark.representatives("draft-model-constant", "draft-window-draft-model--")
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("draft-model", "constant"),
        ("draft-exit", "confidence"),
        ("draft-window-draft-model", "-"),
        ("draft-window-pairs", "-"),
    ],
)
def test_the_draft_is_as_good_as_without_a_cache(name, rule):
    """All, none or some of the draft tokens are accepted, in any order."""
    rng = np.random.default_rng(0)
    prompts = [[1, 2, 3], [5], [7, 1, 7, 1, 7, 1]]
    loop = tiny.loop(tiny.Combination(name, rule, "block"), Sampling(jnp.ones(3)))
    drafter, weights = loop.parts.drafter, loop.weights
    start, _ = loop.begin(prompts, 20)
    state, tokens, length = start.drafter_state, np.array(start.tokens), np.array(start.length)
    patterns = [[9, 9, 9], [0, 0, 0], [9, 0, 1], [0, 9, 9], [1, 1, 9], [9, 1, 0]]
    for number, pattern in enumerate(patterns):
        view = View(jnp.asarray(tokens), jnp.asarray(length), start.cache, budget=jnp.full(3, 99))
        keys = jax.random.split(jax.random.key(number), 3)
        proposal, state = _propose(drafter, weights, keys, state, view, loop.parts.distribution)
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


@pytest.mark.parametrize(
    "name", ["s2d-target", "clasp", "knapspec", "asd", "layerskip", "s2d", "pairs", "draft-model"]
)
def test_a_draft_reads_the_slots_of_its_window_only(name):
    """Committed keys outside of the window become NaN: no draft changes. One inside: nothing is drafted."""
    loop = tiny.loop(tiny.Combination(f"draft-window-{name}", "-", "greedy"))
    drafter, (sinks, last) = loop.parts.drafter, loop.parts.drafter.config.draft_window
    chooses = name in ("clasp", "knapspec")
    if chooses:  # a choice of layers reads all slots
        drafter = drafter.replace(refresh=jnp.int32(100))
    state, _ = loop.begin(([1, 2, 3, 4, 5, 6, 7, 8], [7, 1, 7, 1, 7, 1, 7, 1, 7, 2]), 8)
    own = state.drafter_state
    if chooses:
        own = own._replace(own=own.own._replace(rounds=own.own.rounds + 1))
    view = tiny.view(state)

    def poisoned(caches, first, end):
        """Returns the caches with NaN in slots first … end[b] − 1 of each row."""

        def of(cache):
            if not isinstance(cache, kv.KVCache):
                return cache
            rows = jnp.arange(2).repeat(cache.layers[0][0].shape[0] // 2)[:, None, None]
            slot = jnp.arange(cache.capacity)[:, None]
            bad = (slot >= first) & (slot < end[rows])
            return cache.replace(
                layers=[(jnp.where(bad, jnp.nan, layer[0]), layer[1]) for layer in cache.layers]
            )

        return jax.tree.map(of, caches, is_leaf=lambda node: isinstance(node, kv.KVCache))

    def proposed(first, end):
        cache, mine = poisoned((view.cache, own), first, end)
        keys = jax.random.split(jax.random.key(0), 2)
        given = loop.weights, keys, mine, dataclasses.replace(view, cache=cache), Greedy()
        return _propose(drafter, *given)[0]

    expected, near = proposed(0, jnp.zeros(2, int)), 1 + (name == "pairs")
    found = proposed(sinks, view.start - last + 2 - near)
    assert expected.count.tolist() == [tiny.K, tiny.K]
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.count.tolist() == expected.count.tolist()
    assert not proposed(sinks, view.start - last + 2).count.any()


def test_records_are_values():
    """The structure of a part is static and compared by value; its numbers are leaves."""
    one, other = (dataclasses.replace(NGramDrafter(), num_draft_tokens=k) for k in (10, 10))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(other))
    assert jax.tree.structure(one) != jax.tree.structure(NGramDrafter(num_draft_tokens=9))
    config, all_run, skipping = tiny.DEEP, LayerPlan.skipping(3), LayerPlan.skipping(3, mlp=[1])
    numbers = {
        ConfidenceBelow(FixedGamma(0.5)): 1,
        ProductBelow(FixedGamma(0.5), Probe(0.1, 0.2, 0.3)): 4,
        AdaptiveGamma(): 5,
        ASDDrafter(config, rule=Constant()): 3,
        DraftVerifyDrafter(config, all_run, Constant()): 0,
        DraftVerifyDrafter(config, 0.5, Constant()): 1,
        LayerSkipDrafter(config, 1, ProductBelow(FixedGamma(0.5))): 1,
    }
    for part, count in numbers.items():
        assert len(jax.tree.leaves(part)) == count, part
    plans = [
        jax.tree.structure(DraftVerifyDrafter(config, plan, Constant()))
        for plan in (all_run, all_run, skipping)
    ]
    assert plans[0] == plans[1] != plans[2]


def test_a_draft_model_counts_the_tokens_that_its_cache_holds():
    """A count that is too small costs passes: the texts stay the same, because the cache catches up.

    The last row has finished. If it were behind, each later round would feed the draft model once more for it.
    """
    drafter = DraftModelDrafter(tiny.TARGET, num_draft_tokens=4)
    state = ChainState(drafter.rule.init(5), (None, jnp.full(5, 5)))
    drafted, accepted = jnp.array([0, 4, 4, 4, 0]), jnp.array([0, 0, 2, 4, 0])
    outcome = Outcome(jnp.zeros((5, 5), jnp.int32), jnp.array([1, 1, 3, 5, 0]), drafted, accepted)
    _, held = drafter.observe(None, state, outcome).own
    assert held.tolist() == [5, 6, 8, 9, 5]


def test_a_greedy_chain_is_a_point_mass():
    proposal, _, _ = _chain(2, Greedy(), Constant(), (), 0)
    assert proposal.log_probs is None
    text: tuple[int, ...] = ()
    while len(text) < K:
        text += (int(np.argmax(logits_after(text))),)
    assert proposal.tokens.tolist() == [list(text)] * 2
