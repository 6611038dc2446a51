"""The contracts that every combination of drafter, stop rule and acceptor keeps.

The ordinary tests run every drafter, rule and acceptor, most pairs of them too; the full product is slow.
"""

from __future__ import annotations

import dataclasses
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
from jaxspec.drafting.clasp import CLaSp
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.drafting.kangaroo import Kangaroo
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.drafting.s2d import S2D
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Shape
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy, Sampling
from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant, FixedGamma, ProductBelow
from jaxspec.testing import contracts
from jaxspec.testing.contracts import BUDGETS, FOUR, PROMPTS, largest_constant, propose
from tests import tiny


def parameters(combinations, ordinary):
    """The `ordinary` ones run always, the others in the slow tier."""
    slow = [pytest.mark.slow]
    return [pytest.param(one, id=str(one), marks=[] if one in ordinary else slow) for one in combinations]


COMBINATIONS = parameters(tiny.full_product(), tiny.ordinary())
# Where the acceptor has no say, one that samples will do.
SAMPLING = [
    dataclasses.replace(one, acceptor="block" if one.acceptor == "greedy" else one.acceptor)
    for one in tiny.ordinary()
]
DRAFTERS = parameters(
    [one for one in tiny.full_product() if one in SAMPLING or one.acceptor == "block"], SAMPLING
)
each = pytest.mark.parametrize("combination", COMBINATIONS)


def begin(loop: tiny.Loop, prompts=PROMPTS, budgets=BUDGETS, **options):
    return loop.begin(prompts, budgets, **options)


# 1. The loan


@pytest.mark.parametrize("combination", DRAFTERS)
def test_a_draft_only_borrows_the_cache(combination):
    contracts.check_loan(tiny.loop(combination))


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
    loop = tiny.loop(combination)
    contracts.check_log_probs(loop)
    state = jax.eval_shape(lambda: begin(loop)[0])
    proposal, _ = jax.eval_shape(lambda state: propose(loop.parts, loop.weights, state, 1), state)
    runs_a_model = getattr(loop.parts.drafter, "second", loop.parts.drafter)
    # Trees of likely tokens have parents of their own in each row.
    draws = isinstance(runs_a_model, ChainDrafter) and isinstance(proposal.parents, Shape | None)
    assert (proposal.log_probs is not None) == draws


@pytest.mark.parametrize(
    "drafter", ["draft-model", "asd", "clasp", "draft-verify", "layerskip", "s2d", "eagle"]
)
def test_a_greedy_draft_is_a_point_mass(drafter):
    """Not the softmax that it is the maximum of."""
    loop = tiny.loop(tiny.Combination(drafter, "constant", "greedy"))
    state = jax.eval_shape(lambda: begin(loop)[0])
    assert loop.parts.law == Greedy()
    proposal, _ = jax.eval_shape(lambda state: propose(loop.parts, loop.weights, state, 1), state)
    assert proposal.log_probs is None


# 4. Nothing recompiles


@each
def test_nothing_recompiles_within_a_bucket(combination):
    contracts.check_no_recompilation(tiny.loop(combination))


# 5. Parameters are arguments


@pytest.mark.parametrize("combination", DRAFTERS)
def test_parameters_are_arguments(combination):
    loop = tiny.loop(combination)
    contracts.check_params_are_arguments(loop)
    closed_over = jax.make_jaxpr(lambda tokens: loop.weights.target["embed"][tokens])(jnp.zeros((1, 4), int))
    smallest = min(leaf.size for leaf in jax.tree.leaves(loop.weights) if leaf.ndim > 1)
    assert largest_constant(closed_over) >= smallest


# 6. The text is the target's


@each
def test_greedy_text_is_that_of_the_slow_decoder(combination):
    """Ragged prompts and budgets; under a sampling law, the rows of temperature 0."""
    contracts.check_greedy_text(tiny.loop(combination))


def first_idle(weights: Any) -> Any:
    """Parameters of a target whose first layer writes nothing."""
    nothing = jax.tree.map(jnp.zeros_like, weights["layers"][0])
    return {**weights, "layers": [nothing, *weights["layers"][1:]]}


def whole_drafts() -> dict[str, tuple[tiny.LlamaConfig, Any, Any, Any]]:
    """Config, drafter, target's parameters, draft's parameters: the draft computes what the target does."""
    config, weights = tiny.DEEP, tiny.params(tiny.DEEP)
    everything = LayerPlan.skipping(config.num_layers)
    off = jnp.float32(1), jnp.int32(0), jnp.int32(0)
    asd = ASD(config, *off, Constant(), tiny.K)
    verify = DraftVerify(config, everything, Constant(), tiny.K)
    rest = [jax.tree.map(jnp.zeros_like, layer) for layer in weights["layers"][1:]]
    idle = {**weights, "layers": [weights["layers"][0], *rest]}
    adapter = KangarooConfig(config.truncated(1))
    silent = jax.tree.map(jnp.zeros_like, tiny.head_params(adapter)) | {"norm": weights["norm"]}
    return {
        "draft-model": (
            tiny.TARGET,
            DraftModel(tiny.TARGET, num_draft_tokens=tiny.K),
            tiny.params(),
            tiny.params(),
        ),
        "draft-model-pairs": (
            tiny.TARGET,
            DraftModel(tiny.TARGET, num_draft_tokens=tiny.K, pairs=True),
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
        # Without the first layer, which writes nothing, it is the target.
        "clasp": (config, CLaSp(config, 1, jnp.int32(1), Constant(), tiny.K), first_idle(weights), None),
        "asd-shared": (config, asd.replace(shared_mask=True), weights, None),
        "draft-verify": (config, verify.replace(plan=everything.traced()), weights, None),
        "draft-verify-static": (config, verify, weights, None),
        # Without the weights of what it does not run, the target is its own first layer.
        "layerskip": (config, LayerSkip(config, 1, Constant(), tiny.K), idle, None),
        # An adapter that writes nothing.
        "kangaroo": (config, Kangaroo(config, adapter, 1, Constant(), tiny.K), idle, silent),
        "hydra": (tiny.TARGET, *tiny.exact_hydra()),
        **{kind: (tiny.TARGET, *tiny.exact_head(kind)) for kind in ("eagle", "eagle3")},
    }


WHOLE = [
    ("draft-model", "coupled"),
    ("draft-model-pairs", "block"),
    ("asd", "block"),
    ("clasp", "coupled"),
    ("draft-verify", "rejection"),
    ("layerskip", "greedy"),
    ("s2d", "block"),
    ("eagle", "greedy"),
    ("eagle3", "coupled"),
    ("hydra", "coupled"),
    ("kangaroo", "rejection"),
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


COUPLED = [one for one in tiny.full_product() if one.acceptor == "coupled"]


@pytest.mark.parametrize("combination", parameters(COUPLED, tiny.ordinary()))
def test_coupled_text_is_plain_decodings_by_the_seed(combination):
    contracts.check_seeded_text(tiny.loop(combination))


# Drafts over a part of the vocabulary are drawn in one place for all drafters: of those, one with a model
# of its own and one that shares the target's layers.
SAMPLED = [
    tiny.Combination("autoregressive", "-", "rejection"),
    tiny.Combination("ngram-random", "-", "block"),
    tiny.Combination("suffix", "-", "rejection"),
    tiny.Combination("token-recycling", "-", "block"),
    tiny.Combination("token-recycling-chain", "-", "rejection"),
    tiny.Combination("eagle-tree", "-", "block"),
    tiny.Combination("medusa-tree", "-", "block"),
    tiny.Combination("eagle-tree-drawn", "-", "rejection"),
    tiny.Combination("hydra-tree", "-", "rejection"),
    tiny.Combination("hybrid", "-", "block"),
    tiny.Combination("hybrid-draft-model", "-", "rejection"),
    tiny.Combination("draft-model", "any_of", "block"),
    tiny.Combination("asd", "product", "block"),
    tiny.Combination("clasp", "constant", "block"),
    tiny.Combination("draft-verify", "any_of", "rejection"),
    tiny.Combination("layerskip", "probe", "block"),
    tiny.Combination("s2d", "adaptive", "rejection"),
    tiny.Combination("s2d-target", "confidence", "block"),
    tiny.Combination("draft-model-vocab", "confidence", "rejection"),
    tiny.Combination("s2d-target-vocab", "constant", "rejection"),
    tiny.Combination("eagle", "any_of", "rejection"),
    tiny.Combination("eagle3", "constant", "block"),
    tiny.Combination("medusa", "constant", "block"),
    tiny.Combination("hydra", "confidence", "block"),
    tiny.Combination("kangaroo", "confidence", "rejection"),
    tiny.Combination("dflash", "constant", "rejection"),
    tiny.Combination("draft-model-vocab", "constant", "coupled"),
]
LAWS = parameters([one for one in tiny.full_product() if one.acceptor != "greedy"], SAMPLED)


@pytest.mark.parametrize("combination", LAWS)
def test_sampled_text_follows_the_enumerated_law(combination):
    contracts.check_sampled_law(lambda law: tiny.loop(combination, law, FOUR))


# 7. Rows are independent


@each
def test_a_row_does_not_depend_on_its_neighbours(combination):
    loop = tiny.loop(combination)
    # A shared mask is the batch's: the law stays, but what is drafted and drawn is another.
    if combination.drafter == "asd-shared" and combination.acceptor != "greedy":
        contracts.check_calls(loop)
    else:
        contracts.check_rows_are_independent(loop)


@pytest.mark.parametrize("combination", DRAFTERS)
def test_rows_take_the_places_of_others(combination):
    if combination.drafter == "asd-shared":
        combination = dataclasses.replace(combination, acceptor="greedy")
    # The whole batch has one shared mask, so that drafts depend on the rows that were there before.
    contracts.check_refill(tiny.loop(combination), statistics=combination.drafter != "asd-shared")


@pytest.mark.parametrize("rows", [PROMPTS, ((1, 3, 1), (2,))])
def test_rows_of_these_tests_draft_with_different_masks(rows):
    """And some with the same: ASD's groups are put to the test above."""
    config = tiny.DEEP if len(rows) == 3 else FOUR
    loop = tiny.loop(tiny.Combination("asd", "constant", "greedy"), config=config)
    state, _ = loop.begin(rows)
    plans = loop.parts.drafter.plans(state.drafter_state, ~state.done)
    assert len(np.unique(np.asarray(plans).reshape(len(rows), -1), axis=0)) == 2
