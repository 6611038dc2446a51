"""The contracts that every combination of drafter, stop rule and acceptor keeps.

The ordinary tests run every pair of them at least once; the full product is slow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import BlockAcceptor, RejectionAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.asd import ASD
from jaxspec.drafting.chain import ChainDrafter, draft_chain
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.drafting.s2d import S2D
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import View, Weights
from jaxspec.sampling import Greedy, Sampling
from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant, FixedGamma, ProductBelow
from tests import reference, tiny

PROMPTS = ((1, 2, 3), (5,), (7, 1, 7, 1, 7, 1, 7, 2))
BUDGETS = (12, 9, 14)


def parameters(combinations, ordinary):
    """The `ordinary` ones run always, the others in the slow tier."""
    slow = [pytest.mark.slow]
    return [pytest.param(one, id=str(one), marks=[] if one in ordinary else slow) for one in combinations]


COMBINATIONS = parameters(tiny.full_product(), tiny.pairwise())
# Where the acceptor has no say, one will do.
DRAFTERS = parameters([one for one in tiny.full_product() if one.acceptor == "block"], tiny.every_drafter())
each = pytest.mark.parametrize("combination", COMBINATIONS)


def begin(loop: tiny.Loop, prompts=PROMPTS, budgets=BUDGETS, **options):
    return loop.begin(prompts, budgets, **options)


# 1. The loan


@functools.partial(jax.jit, static_argnames="draws")
def propose(drafter, weights, state, law, draws: int):
    """The proposals and caches of many draws from one state, [draws, B, ...]."""
    view = View(state.tokens, state.length, state.cache, room=jnp.full_like(state.length, 99))
    keys = jax.random.split(jax.random.key(9), (draws, len(state.length)))

    def once(keys):
        proposal, _, cache = drafter.propose(keys, weights, state.drafter_state, view, law)
        return proposal, cache

    return jax.vmap(once)(keys)


DRAWS = 1500


@pytest.mark.parametrize("combination", DRAFTERS)
def test_a_draft_only_borrows_the_cache(combination):
    """`propose` leaves what the target's cache has committed as it was, to the bit."""
    loop = tiny.loop(combination)
    state, _ = begin(loop)
    _, caches = propose(loop.parts.drafter, loop.weights, state, loop.parts.law, DRAWS)
    for row, length in enumerate(np.asarray(state.length)):
        lent = tiny.committed(state.cache, row, length - 1)
        back = tiny.committed(jax.tree.map(lambda leaf: leaf[-1], caches), row, length - 1)
        assert all(array.any() for array in lent)
        for before, after in zip(lent, back, strict=True):
            np.testing.assert_array_equal(before, after)


# 2. Stopping time: a drafter and a target that are tables, so that the law of the text is known exactly.

V, K, TEXT, ROWS = 3, 2, 3, 60_000
rng = np.random.default_rng(5)
DRAFT_TABLE = 1.5 * rng.standard_normal((K, V**K, V)).astype(np.float32)
TARGET_TABLE = 1.5 * rng.standard_normal((TEXT, V**TEXT, V)).astype(np.float32)


def lengths() -> AdaptiveLength:
    return AdaptiveLength(jnp.arange(ROWS) % 3, 1, 1)


TABLE_RULES = {
    **tiny.RULES,
    "confidence": lambda width: ConfidenceBelow(FixedGamma(jnp.float32(0.5))),
    "adaptive": lambda width: lengths(),
    "any_of": lambda width: AnyOf((ConfidenceBelow(FixedGamma(jnp.float32(0.3))), lengths())),
    "product": lambda width: ProductBelow(tiny.gamma(0.4)),
    "probe": lambda width: ConfidenceBelow(tiny.gamma(jnp.arange(ROWS) % 2, K), tiny.probe(width)),
}


def code_of(texts: jax.Array) -> jax.Array:
    """The number of each text, int32[B] for texts [B, T]."""
    code = jnp.zeros(len(texts), jnp.int32)
    for column in range(texts.shape[1]):
        code = code * V + texts[:, column]
    return code


def draft_step(code, token, i, active):
    code = jnp.where(i == 0, 0, code * V + token)
    logits = jnp.asarray(DRAFT_TABLE)[i, code]
    return logits, logits, code


@jax.jit
def one_round(acceptor, rule, seed):
    """Draft by the chain loop, accept, then go on by the target: texts of TEXT tokens."""
    law = Sampling(jnp.ones(ROWS))
    keys = jax.vmap(lambda key: jax.random.split(key, 4))(jax.random.split(jax.random.key(seed), ROWS))
    zeros = jnp.zeros(ROWS, jnp.int32)
    proposal, _, _ = draft_chain(
        draft_step, zeros, zeros, zeros + K, K, keys[:, 0], law, rule, rule.init(ROWS)
    )
    logits = jnp.stack([target_logits(proposal.tokens[:, :i]) for i in range(K + 1)], axis=1)
    decided = acceptor.accept(keys[:, 1], proposal, logits, law)
    at = jnp.arange(TEXT)[None]
    texts = jnp.where(at < decided.count[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, TEXT - K))), 0)
    texts = jnp.where(at == decided.count[:, None], decided.token[:, None], texts)
    for column in range(1, TEXT):
        drawn, _ = law.draw(keys[:, 1 + column], target_logits(texts[:, :column]))
        texts = jnp.where((at == column) & (column > decided.count[:, None]), drawn[:, None], texts)
    return texts, proposal.count


def target_logits(prefix: jax.Array) -> jax.Array:
    return jnp.asarray(TARGET_TABLE)[prefix.shape[1], code_of(prefix)]


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
@pytest.mark.parametrize("rule", TABLE_RULES)
def test_stop_rules_do_not_bias_the_text(rule, acceptor):
    texts, counts = one_round(acceptor, TABLE_RULES[rule](V), 3)
    expected = tiny.text_law(
        lambda prefix: tiny.warp(TARGET_TABLE[len(prefix), int(code_of(jnp.array([prefix], int))[0])]), TEXT
    )
    assert tiny.chi_square(list(map(tuple, texts.tolist())), expected) > 1e-3
    assert rule == "constant" or 0 < (counts < K).mean() < 1


# 3. What a drafter says its law is


@pytest.mark.parametrize("combination", DRAFTERS)
def test_log_probs_are_the_law_the_draft_was_drawn_from(combination):
    """For every row, place and token: how often it came, against the sum of its probabilities."""
    loop = tiny.loop(combination)
    state, _ = begin(loop)
    proposal, _ = propose(loop.parts.drafter, loop.weights, state, loop.parts.law, DRAWS)
    if proposal.log_probs is None:
        assert not isinstance(loop.parts.drafter, ChainDrafter)
        return
    probs = np.exp(np.asarray(proposal.log_probs, np.float64))
    for row, place in itertools.product(range(3), range(tiny.K)):
        there = np.asarray(proposal.count)[:, row] > place
        if place == 0:
            assert there.all()
        q = probs[there, row, place]
        np.testing.assert_allclose(q.sum(axis=-1), 1, atol=1e-5)
        drawn = np.eye(q.shape[1])[np.asarray(proposal.tokens)[there, row, place]]
        assert (drawn[q == 0] == 0).all()
        spread = np.sqrt((q * (1 - q)).sum(axis=0)) + 1
        assert np.abs((drawn - q).sum(axis=0) / spread).max() < 4.5


@pytest.mark.parametrize("drafter", ["draft-model", "asd", "draft-verify", "layerskip", "s2d"])
def test_a_greedy_draft_is_a_point_mass(drafter):
    """Not the softmax that it is the maximum of."""
    loop = tiny.loop(tiny.Combination(drafter, "constant", "greedy"))
    state = jax.eval_shape(lambda: begin(loop)[0])
    made = loop.parts.drafter
    proposal, _ = jax.eval_shape(lambda state: propose(made, loop.weights, state, Greedy(), 1), state)
    assert proposal.log_probs is None


# 4. Nothing recompiles


@each
def test_nothing_recompiles_within_a_bucket(combination):
    """Another prompt, length, budget, seed, temperature, γ, α, m, n, mask, end, rounds, halted row."""
    loop = tiny.loop(combination)
    state, _ = begin(loop)
    loop.go_on(state)
    sizes = tiny.prefill._cache_size(), tiny.chunk._cache_size()
    parts = jax.tree.map(changed, loop.parts)
    other = dataclasses.replace(loop, parts=parts)
    prompts = ((4, 4, 9, 1, 12, 0, 3, 3, 3, 2, 1), (2, 1), (11,))
    state, _ = begin(other, prompts, (3, 20, 8), seeds=(8, 8, 1000), eos=(3, 4))
    state, _ = other.go_on(state, rounds=2, halt=[False, False, True])
    other.go_on(state, rounds=50)
    assert (tiny.prefill._cache_size(), tiny.chunk._cache_size()) == sizes


def changed(leaf: jax.Array) -> jax.Array:
    return jnp.roll(leaf, 1) if leaf.dtype == bool else jnp.asarray(leaf * 0.9, leaf.dtype)


# 5. Parameters are arguments


@pytest.mark.parametrize("combination", DRAFTERS)
def test_parameters_are_arguments(combination):
    """The largest constant of the whole program is smaller than the smallest matrix."""
    loop = tiny.loop(combination)
    state, _ = begin(loop)
    arguments = (loop.weights, loop.parts, state, jnp.int32(1), jnp.zeros(3, bool))
    traced = tiny.chunk.trace(loop.config, *arguments, window=tiny.CAPACITY)
    smallest = min(leaf.size for leaf in jax.tree.leaves(loop.weights) if leaf.ndim > 1)
    assert largest_constant(traced.jaxpr) < smallest
    closed_over = jax.make_jaxpr(lambda tokens: loop.weights.target["embed"][tokens])(state.tokens)
    assert largest_constant(closed_over) >= smallest


def largest_constant(closed: jax.extend.core.ClosedJaxpr) -> int:
    """The most elements that any constant has, in it and in what it calls."""
    sizes = [np.size(const) for const in closed.consts]
    for equation in closed.jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(value):
                sizes.append(largest_constant(value))
    return max(sizes, default=0)


def is_jaxpr(value: object) -> bool:
    return hasattr(value, "consts") and hasattr(value, "jaxpr")


# 6. The text is the target's


@each
def test_greedy_text_is_that_of_the_slow_decoder(combination):
    """Ragged prompts and budgets; under a sampling law, the rows of temperature 0."""
    loop = tiny.loop(combination)
    found = loop.texts(PROMPTS, BUDGETS)
    greedy_rows = range(3) if combination.acceptor == "greedy" else [0]
    for row in greedy_rows:
        assert found[row] == tiny.greedy(PROMPTS[row], BUDGETS[row], config=loop.config)
    ends = tuple(tiny.greedy(PROMPTS[0], 12, config=loop.config)[4:6])
    state, _ = begin(loop, eos=ends)
    state, _ = loop.go_on(state)
    for row in greedy_rows:
        expected = tiny.greedy(PROMPTS[row], BUDGETS[row], ends, loop.config)
        assert tiny.generated(state, PROMPTS)[row] == expected


def whole_drafts() -> dict[str, tuple[tiny.LlamaConfig, Any, Any, Any]]:
    """Config, drafter, target's parameters, draft's parameters: the draft computes what the target does."""
    config, weights = tiny.DEEP, tiny.params(tiny.DEEP)
    everything = LayerPlan.skipping(config.num_layers)
    off = jnp.float32(1), jnp.int32(0), jnp.int32(0)
    asd = ASD(config, *off, Constant(), tiny.K)
    verify = DraftVerify(config, everything, Constant(), tiny.K)
    rest = [jax.tree.map(jnp.zeros_like, layer) for layer in weights["layers"][1:]]
    idle = {**weights, "layers": [weights["layers"][0], *rest]}
    return {
        "draft-model": (
            tiny.TARGET,
            DraftModel(tiny.TARGET, num_draft_tokens=tiny.K),
            tiny.params(),
            tiny.params(),
        ),
        # It never leaves before the last exit.
        "s2d": (
            tiny.TARGET,
            S2D(tiny.TARGET, (1, 2), jnp.float32([1.1]), Constant(), tiny.K),
            tiny.params(),
            tiny.params(),
        ),
        "asd": (config, asd, weights, None),
        "asd-shared": (config, asd.replace(shared_mask=True), weights, None),
        "draft-verify": (config, verify.replace(plan=everything.traced()), weights, None),
        "draft-verify-static": (config, verify, weights, None),
        # Without the weights of what it does not run, the target is its own first layer.
        "layerskip": (config, LayerSkip(config, 1, Constant(), tiny.K), idle, None),
    }


WHOLE = [
    ("draft-model", "block"),
    ("asd", "block"),
    ("draft-verify", "rejection"),
    ("layerskip", "greedy"),
    ("s2d", "block"),
]


@pytest.mark.parametrize(
    ("drafter", "acceptor"),
    [
        pytest.param(*pair, marks=[] if pair in WHOLE else [pytest.mark.slow])
        for pair in itertools.product(whole_drafts(), tiny.ACCEPTORS)
    ],
)
def test_a_draft_that_is_the_target_is_accepted_whole(drafter, acceptor):
    config, made, target, own = whole_drafts()[drafter]
    law = Greedy() if acceptor == "greedy" else Sampling(jnp.array([0.0, 1.0, 0.7]))
    loop = tiny.Loop(Parts(made, tiny.ACCEPTORS[acceptor](), law), Weights(target, own), config)
    state, _ = begin(loop, budgets=(13, 9, 17))
    state, _ = loop.go_on(state)
    assert state.done.all()
    assert state.stats.num_accepted_tokens.tolist() == state.stats.num_draft_tokens.tolist()
    assert state.stats.num_rounds.tolist() == [3, 2, 4]


FOUR = dataclasses.replace(
    tiny.TARGET, vocab_size=4, hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1
)
SAMPLED = [
    tiny.Combination("autoregressive", "-", "rejection"),
    tiny.Combination("ngram-random", "-", "block"),
    tiny.Combination("draft-model", "any_of", "block"),
    tiny.Combination("asd", "product", "block"),
    tiny.Combination("draft-verify", "any_of", "rejection"),
    tiny.Combination("layerskip", "probe", "block"),
    tiny.Combination("s2d", "adaptive", "rejection"),
    tiny.Combination("s2d-target", "confidence", "block"),
]
LAWS = parameters([one for one in tiny.full_product() if one.acceptor != "greedy"], SAMPLED)


@pytest.mark.parametrize("combination", LAWS)
def test_sampled_text_follows_the_enumerated_law(combination):
    """The whole loop over many rows, end of text included, against every text there is after two prompts."""
    prompts, many, budget, eos = ((1, 3, 1), (2,)), 8_000, 4, (2,)
    rows = [prompts[row % 3 == 2] for row in range(3 * many // 2)]
    numbers = {"temperature": 1.5, "top_p": 0.95}
    law = Sampling(jnp.full(len(rows), numbers["temperature"]), top_p=jnp.full(len(rows), numbers["top_p"]))
    texts = tiny.loop(combination, law, FOUR).texts(rows, budget, eos=eos, capacity=16)
    for prompt in prompts:

        def next_probs(prefix: tuple[int, ...], prompt=prompt) -> np.ndarray:
            return tiny.warp(reference.forward(FOUR, tiny.params(FOUR), [*prompt, *prefix])[-1], **numbers)

        expected = tiny.text_law(next_probs, budget, eos)
        assert len(expected) > 30
        found = [tuple(text) for text, row in zip(texts, rows, strict=True) if row == prompt]
        assert tiny.chi_square(found, expected) > 1e-3


# 7. Rows are independent


@each
def test_a_row_does_not_depend_on_its_neighbours(combination):
    """The same key gives the same tokens beside other prompts, budgets and seeds, and after other rounds."""
    loop = tiny.loop(combination)
    one = loop.texts(PROMPTS, BUDGETS, seeds=(3, 4, 5))
    other = loop.texts(((2, 2), PROMPTS[1], (6,)), (3, BUDGETS[1], 5), seeds=(11, 4, 12))
    # A shared mask is the batch's: the law stays, but what is drafted and drawn is another.
    if combination.drafter != "asd-shared" or combination.acceptor == "greedy":
        assert one[1] == other[1]
    state, _ = begin(loop, seeds=(3, 4, 5))
    while not state.done.all():
        state, _ = loop.go_on(state, 2)
    assert tiny.generated(state, PROMPTS) == one


@pytest.mark.parametrize("rows", [PROMPTS, ((1, 3, 1), (2,))])
def test_rows_of_these_tests_draft_with_different_masks(rows):
    """And some with the same: ASD's groups are put to the test above."""
    config = tiny.DEEP if len(rows) == 3 else FOUR
    loop = tiny.loop(tiny.Combination("asd", "constant", "greedy"), config=config)
    state, _ = loop.begin(rows)
    plans = loop.parts.drafter.plans(state.drafter_state, ~state.done)
    assert len(np.unique(np.asarray(plans).reshape(len(rows), -1), axis=0)) == 2
