"""The contracts of every combination of drafter, stop rule and acceptor.

The ordinary tests run one drafter of each family. The full tests run the texts of one drafter of each method and of the
variants whose code differs most, and the other contracts of one drafter of each class. The rest is slow: the other
drafters, and the product with every rule and acceptor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decoding
from jaxspec.acceptance import BlockAcceptor, RejectionAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.asd_drafter import ASDDrafter
from jaxspec.drafting.chain_drafter import ChainDrafter, draft_chain
from jaxspec.drafting.choosing_drafter import ChoosingDrafter
from jaxspec.drafting.clasp_drafter import CLaSpDrafter
from jaxspec.drafting.draft_model_drafter import DraftModelDrafter
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.drafting.s2d_drafter import S2DDrafter
from jaxspec.drafting.tree_drafter import Dynamic
from jaxspec.heads.kangaroo.drafter import KangarooDrafter
from jaxspec.heads.kangaroo.network import KangarooConfig
from jaxspec.model import cache as kv
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy, Sampling
from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant, FixedGamma, ProductBelow
from jaxspec.testing import contracts
from jaxspec.testing.contracts import BUDGETS, FOUR, PROMPTS, largest_constant, propose
from tests import refused, tiny


def parameters(combinations, every, representatives):
    """Rows of a test: the `representatives` are ordinary, the others of `every` full, and the rest slow."""

    def marks(one):
        return [] if one in representatives else [pytest.mark.full] if one in every else [pytest.mark.slow]

    return [pytest.param(one, id=str(one), marks=marks(one)) for one in combinations]


def with_sampling(combinations):
    """The same with an acceptor that samples in place of the greedy one, for checks in which it is not used."""
    return [
        dataclasses.replace(one, acceptor="block" if one.acceptor == "greedy" else one.acceptor)
        for one in combinations
    ]


# Their drafts have another form than those of the methods: a choice among trees that are drawn, a tree of one pass
# with a cache, a pass without a draft of its own, a part of the vocabulary, another vocabulary, a mask for all rows, an
# int8 cache of the target and of the draft, drafts that read a part of a text.
VARIANTS = (
    "choosing-trees",
    "dflash-tree",
    "uno-single-pass",
    "draft-model-vocab",
    "draft-model-other-vocab",
    "asd-shared",
    "s2d-target",
    "int8-cache-draft-model",
    "int8-cache-tree",
    "draft-window-asd",
    "draft-window-draft-model",
    "draft-window-layerskip",
    "dflash-windows",
)
FORMS = [*tiny.usual(), *(one for one in tiny.ordinary() if one.drafter in VARIANTS)]
# Their drafters are those of `eagle3` and `draft-model`; plain decoding has no drafts.
ALIKE = ("eagle", "quantised", "autoregressive")
CLASSES = [one for one in tiny.usual() if one.drafter not in ALIKE]
COMBINATIONS = parameters(tiny.full_product(), FORMS, tiny.families())
USUAL = parameters(tiny.full_product(), CLASSES, tiny.families())
SAMPLING = with_sampling(tiny.ordinary())
DRAFTERS = parameters(
    [one for one in tiny.full_product() if one in SAMPLING or one.acceptor == "block"],
    with_sampling(CLASSES),
    with_sampling(tiny.families()),
)


def begin(loop: tiny.Loop, prompts=PROMPTS, budgets=BUDGETS, **options):
    return loop.begin(prompts, budgets, **options)


# 1. The borrowed cache


@pytest.mark.parametrize("combination", DRAFTERS)
def test_a_draft_only_borrows_the_cache(combination):
    contracts.check_loan(tiny.loop(combination))


# 2. Stopping time: drafter and target are tables, so that the distribution of the text is known exactly.

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
    "probe": lambda width: ConfidenceBelow(tiny.gamma(jnp.arange(ROWS) % 2), tiny.probe(width)),
}


def code_of(texts: jax.Array) -> jax.Array:
    """Returns the number of each text, int32[B] for texts [B, T]."""
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
    """Drafts by the chain loop, accepts, and continues with the target; returns texts of TEXT tokens."""
    distribution = Sampling(jnp.ones(ROWS))
    keys = jax.vmap(lambda key: jax.random.split(key, 4))(jax.random.split(jax.random.key(seed), ROWS))
    zeros = jnp.zeros(ROWS, jnp.int32)
    proposal, _, _ = draft_chain(
        draft_step, zeros, zeros, zeros + K, K, keys[:, 0], distribution, rule, rule.init(ROWS)
    )
    logits = jnp.stack([target_logits(proposal.tokens[:, :i]) for i in range(K + 1)], axis=1)
    decided = acceptor.accept(keys[:, 1], proposal, logits, distribution)
    at = jnp.arange(TEXT)[None]
    texts = jnp.where(at < decided.count[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, TEXT - K))), 0)
    texts = jnp.where(at == decided.count[:, None], decided.token[:, None], texts)
    for column in range(1, TEXT):
        drawn, _ = distribution.draw(keys[:, 1 + column], target_logits(texts[:, :column]))
        texts = jnp.where((at == column) & (column > decided.count[:, None]), drawn[:, None], texts)
    return texts, proposal.count


def target_logits(prefix: jax.Array) -> jax.Array:
    return jnp.asarray(TARGET_TABLE)[prefix.shape[1], code_of(prefix)]


@pytest.mark.parametrize("acceptor", [RejectionAcceptor(), BlockAcceptor()], ids=["rejection", "block"])
@pytest.mark.parametrize("rule", TABLE_RULES)
def test_stop_rules_do_not_bias_the_text(rule, acceptor):
    texts, counts = one_round(acceptor, TABLE_RULES[rule](V), 3)
    expected = tiny.text_distribution(
        lambda prefix: tiny.warp(TARGET_TABLE[len(prefix), int(code_of(jnp.array([prefix], int))[0])]), TEXT
    )
    assert tiny.chi_square(list(map(tuple, texts.tolist())), expected) > 1e-3
    assert rule == "constant" or 0 < (counts < K).mean() < 1


# 3. The distribution that a drafter reports


@pytest.mark.parametrize("combination", DRAFTERS)
def test_log_probs_are_the_distribution_the_draft_was_drawn_from(combination):
    loop = tiny.loop(combination)
    contracts.check_log_probs(loop)
    state = jax.eval_shape(lambda: begin(loop)[0])
    proposal, _ = jax.eval_shape(lambda state: propose(loop.parts, loop.weights, state, 1), state)
    drafter = loop.parts.drafter
    # Trees of the most probable tokens have no draws.
    draws = [
        isinstance(one, ChainDrafter) and not isinstance(getattr(one, "tree", None), Dynamic)
        for one in (drafter.candidates if isinstance(drafter, ChoosingDrafter) else [drafter])
    ]
    assert (proposal.log_probs is not None) == any(draws)


@pytest.mark.parametrize(
    "drafter", ["draft-model", "asd", "clasp", "knapspec", "draft-verify", "layerskip", "s2d", "eagle"]
)
def test_a_greedy_draft_is_a_point_mass(drafter):
    """The reported distribution is not the softmax of the logits."""
    loop = tiny.loop(tiny.Combination(drafter, "constant", "greedy"))
    state = jax.eval_shape(lambda: begin(loop)[0])
    assert loop.parts.distribution == Greedy()
    proposal, _ = jax.eval_shape(lambda state: propose(loop.parts, loop.weights, state, 1), state)
    assert proposal.log_probs is None


# 4. Nothing recompiles


@pytest.mark.parametrize("combination", USUAL)
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


@pytest.mark.parametrize("combination", DRAFTERS)
def test_empty_caches_have_the_shapes_of_full_ones(combination):
    contracts.check_begin(tiny.loop(combination))


# 6. The text is the target's


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_greedy_text_is_that_of_the_slow_decoder(combination):
    """Prompts and budgets have different lengths. Under sampling, the rows of temperature 0 are compared."""
    contracts.check_greedy_text(tiny.loop(combination))


def first_idle(weights: Any) -> Any:
    """Returns parameters of a target whose first layer writes nothing."""
    nothing = jax.tree.map(jnp.zeros_like, weights["layers"][0])
    return {**weights, "layers": [nothing, *weights["layers"][1:]]}


def whole_drafts() -> dict[str, tuple[tiny.LlamaConfig, Any, Any, Any]]:
    """Yields config, drafter, target's and draft's parameters; the draft computes the same as the target."""
    config, weights = tiny.DEEP, tiny.params(tiny.DEEP)
    everything = LayerPlan.skipping(config.num_layers)
    off = jnp.float32(1), jnp.int32(0), jnp.int32(0)
    asd = ASDDrafter(config, *off, Constant(), tiny.K)
    verify = DraftVerifyDrafter(config, everything, Constant(), tiny.K)
    rest = [jax.tree.map(jnp.zeros_like, layer) for layer in weights["layers"][1:]]
    idle = {**weights, "layers": [weights["layers"][0], *rest]}
    adapter = KangarooConfig(config.truncated(1))
    silent = jax.tree.map(jnp.zeros_like, tiny.head_params(adapter)) | {"norm": weights["norm"]}
    return {
        "draft-model": (
            tiny.TARGET,
            DraftModelDrafter(tiny.TARGET, num_draft_tokens=tiny.K),
            tiny.params(),
            tiny.params(),
        ),
        "draft-model-pairs": (
            tiny.TARGET,
            DraftModelDrafter(tiny.TARGET, num_draft_tokens=tiny.K, pairs=True),
            tiny.params(),
            tiny.params(),
        ),
        # It never uses an earlier exit than the last.
        "s2d": (
            tiny.TARGET,
            S2DDrafter(tiny.TARGET, (1, 2), jnp.float32([1.1]), Constant(), tiny.K),
            tiny.params(),
            tiny.params(),
        ),
        "asd": (config, asd, weights, None),
        # Without the first layer, which writes nothing, it equals the target.
        "clasp": (
            config,
            CLaSpDrafter(config, 1, jnp.int32(1), Constant(), tiny.K),
            first_idle(weights),
            None,
        ),
        "asd-shared": (config, asd.replace(shared_mask=True), weights, None),
        "draft-verify": (config, verify.replace(plan=everything.traced()), weights, None),
        "draft-verify-static": (config, verify, weights, None),
        # With zero weights in all other layers, the target equals its own first layer.
        "layerskip": (config, LayerSkipDrafter(config, 1, Constant(), tiny.K), idle, None),
        # An adapter that writes nothing.
        "kangaroo": (config, KangarooDrafter(config, adapter, 1, Constant(), tiny.K), idle, silent),
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


def marks_of(pair):
    """Four of `WHOLE` are ordinary, the others full."""
    if pair in [
        ("draft-model", "coupled"),
        ("draft-verify", "rejection"),
        ("eagle", "greedy"),
        ("s2d", "block"),
    ]:
        return []
    return [pytest.mark.full] if pair in WHOLE else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("drafter", "acceptor"),
    [pytest.param(*pair, marks=marks_of(pair)) for pair in itertools.product(whole_drafts(), tiny.ACCEPTORS)],
)
def test_a_draft_that_is_the_target_is_accepted_whole(drafter, acceptor):
    config, made, target, own = whole_drafts()[drafter]
    distribution = Greedy() if acceptor == "greedy" else Sampling(jnp.array([0.0, 1.0, 0.7]))
    loop = tiny.Loop(Parts(made, tiny.ACCEPTORS[acceptor](), distribution), Weights(target, own), config)
    state, _ = begin(loop, budgets=(13, 9, 17))
    state, _ = loop.go_on(state)
    assert state.done.all()
    assert state.stats.num_accepted_tokens.tolist() == state.stats.num_draft_tokens.tolist()
    assert state.stats.num_rounds.tolist() == [3, 2, 4]


COUPLED = [one for one in tiny.full_product() if one.acceptor == "coupled"]
# Its texts use the tree and the exit, so an error of a tree in the layers before the exit shows.
TREE_BESIDE_AN_EXIT = tiny.Combination("choosing-trees", "-", "coupled")


@pytest.mark.parametrize("combination", parameters(COUPLED, FORMS, [*tiny.families(), TREE_BESIDE_AN_EXIT]))
def test_coupled_text_is_plain_decodings_by_the_seed(combination):
    contracts.check_seeded_text(tiny.loop(combination))


# All drafters use the same code for drafts over a part of the vocabulary, so two are tested: one with its own model
# and one that shares the target's layers.
SAMPLED = [
    tiny.Combination("autoregressive", "-", "rejection"),
    tiny.Combination("ngram", "-", "block"),
    tiny.Combination("suffix", "-", "rejection"),
    tiny.Combination("token-recycling", "-", "block"),
    tiny.Combination("token-recycling-chain", "-", "rejection"),
    tiny.Combination("eagle-tree", "-", "block"),
    tiny.Combination("medusa-tree", "-", "block"),
    tiny.Combination("eagle-tree-drawn", "-", "rejection"),
    tiny.Combination("hydra-tree", "-", "rejection"),
    tiny.Combination("dflash-tree", "-", "block"),
    tiny.Combination("dflash-tree-drawn", "-", "rejection"),
    tiny.Combination("choosing-recycling", "-", "rejection"),
    tiny.Combination("choosing-tree", "-", "block"),
    tiny.Combination("choosing", "-", "rejection"),
    tiny.Combination("choosing-heads", "-", "block"),
    tiny.Combination("choosing-trees", "-", "rejection"),
    tiny.Combination("draft-model", "any_of", "block"),
    tiny.Combination("asd", "product", "block"),
    tiny.Combination("clasp", "constant", "block"),
    tiny.Combination("knapspec", "constant", "rejection"),
    tiny.Combination("draft-verify", "any_of", "rejection"),
    tiny.Combination("layerskip", "probe", "block"),
    tiny.Combination("s2d", "adaptive", "rejection"),
    tiny.Combination("s2d-target", "confidence", "block"),
    tiny.Combination("draft-model-vocab", "confidence", "rejection"),
    tiny.Combination("draft-model-other-vocab", "adaptive", "block"),
    tiny.Combination("s2d-target-vocab", "constant", "rejection"),
    tiny.Combination("eagle", "any_of", "rejection"),
    tiny.Combination("eagle3", "constant", "block"),
    tiny.Combination("medusa", "constant", "block"),
    tiny.Combination("hydra", "confidence", "block"),
    tiny.Combination("kangaroo", "confidence", "rejection"),
    tiny.Combination("dflash", "constant", "rejection"),
    tiny.Combination("dspark", "confidence", "rejection"),
    tiny.Combination("uno", "confidence", "block"),
    tiny.Combination("uno-single-pass", "constant", "rejection"),
    tiny.Combination("draft-model-vocab", "constant", "coupled"),
]
# One that matches text, one of each kind of tree, one with a model of its own, one whose model has another vocabulary,
# and one with the target's layers.
ORDINARY = (
    "ngram",
    "eagle-tree-drawn",
    "medusa-tree",
    "draft-model",
    "draft-model-other-vocab",
    "layerskip",
    "eagle",
)
# Choices, a tree without a model, and drafts in blocks. Of the other drafters, the distribution of the drafts is tested
# above, and the acceptors are tested with any distribution.
FULL = ("token-recycling", "choosing", "dflash", "dflash-tree-drawn")
DISTRIBUTIONS = parameters(
    [one for one in tiny.full_product() if one.acceptor != "greedy"],
    [one for one in SAMPLED if one.drafter in (*FULL, *VARIANTS[:3])],
    [one for one in SAMPLED if one.drafter in ORDINARY],
)


@pytest.mark.parametrize("combination", DISTRIBUTIONS)
def test_sampled_text_follows_the_enumerated_distribution(combination):
    contracts.check_sampled_distribution(lambda distribution: tiny.loop(combination, distribution, FOUR))


# 7. Rows are independent


@pytest.mark.parametrize("combination", USUAL)
def test_a_row_does_not_depend_on_its_neighbours(combination):
    loop = tiny.loop(combination)
    # A shared mask or choice depends on the batch: the distribution is the same, but drafts and draws differ.
    if loop.parts.drafter.mixes_rows and combination.acceptor not in ("greedy", "coupled"):
        contracts.check_calls(loop)
    else:
        contracts.check_rows_are_independent(loop)


@pytest.mark.parametrize("combination", DRAFTERS)
def test_rows_take_the_places_of_others(combination):
    # If drafts depend on the other rows, they depend on those that were there before.
    mixes = tiny.loop(combination).parts.drafter.mixes_rows
    if mixes:
        combination = dataclasses.replace(combination, acceptor="greedy")
    contracts.check_refill(tiny.loop(combination), statistics=not mixes)


@pytest.mark.full
@pytest.mark.representatives(
    *(f"windows-{name}" for name in ("draft-model", "layerskip", "eagle-tree")),
    *("gemma-layerskip", "gemma-asd", "olmo-eagle-tree", "olmo-s2d", "granite-draft-model"),
)
@pytest.mark.parametrize("drafter", tiny.DRAFTERS)
@pytest.mark.parametrize("block", tiny.BLOCKS)
def test_every_drafter_on_every_block(monkeypatch, block, drafter):
    """The texts go several times round the rings, which are as small as possible; one ring begins as a whole cache."""
    rule = "constant" if tiny.DRAFTERS[drafter].has_rule else "-"
    # The norm makes it another config than that of tests with the usual rings, whose programs have other shapes.
    config = dataclasses.replace(tiny.with_block(block, tiny.config_of(drafter)), rms_norm_eps=1.1e-5)
    loop = tiny.loop(tiny.Combination(drafter, rule, "greedy"), config=config)
    spare = max(8, loop.parts.drafter.reach)  # a chunk of a prompt has 8 tokens
    monkeypatch.setattr(kv, "MOST_ROWS", spare)
    monkeypatch.setattr(kv, "SPARE", spare)
    monkeypatch.setattr(
        kv,
        "most_places",
        lambda config: tuple(w and w + spare for w in map(config.window, range(config.num_layers))),
    )
    contracts.check_loan(loop)
    contracts.check_greedy_text(loop)
    contracts.check_refill(loop, statistics=not loop.parts.drafter.mixes_rows)


@pytest.mark.parametrize(("windows", "fits"), [((3, None), False), ((), True)])
def test_a_draft_longer_than_a_ring_allows_is_refused(windows, fits):
    """Also before the cache is a ring, so that no text fails at its growth."""
    config = dataclasses.replace(tiny.TARGET, sliding_windows=windows)
    loop = tiny.loop(tiny.Combination("ngram", "-", "greedy"), config=config)
    drafter = dataclasses.replace(loop.parts.drafter, num_draft_tokens=kv.MOST_ROWS)
    loop = dataclasses.replace(loop, parts=dataclasses.replace(loop.parts, drafter=drafter))
    state = jax.eval_shape(lambda: loop.begin([[1]], capacity=512)[0])
    line = "a pass writes 257 tokens of a text, and a layer with a sliding window takes 256 at most; draft fewer tokens"
    with contextlib.nullcontext() if fits else refused(line):
        jax.eval_shape(
            lambda state: decoding.run_rounds(
                config, loop.weights, loop.parts, state, jnp.int32(1), state.done, window=300
            ),
            state,
        )


@pytest.mark.parametrize("rows", [PROMPTS, ((1, 3, 1), (2,))])
def test_rows_of_these_tests_draft_with_different_masks(rows):
    """Some rows have equal masks, so the tests above also run ASD's groups."""
    config = tiny.DEEP if len(rows) == 3 else FOUR
    loop = tiny.loop(tiny.Combination("asd", "constant", "greedy"), config=config)
    state, _ = loop.begin(rows)
    plans = loop.parts.drafter.plans(state.drafter_state, ~state.done)
    assert len(np.unique(np.asarray(plans).reshape(len(rows), -1), axis=0)) == 2
