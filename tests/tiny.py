"""The parts of every method on the small models of `jaxspec.testing`."""

# All small parts that tests use are imported here.
# ruff: noqa: F401

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.costs.prices import Prices
from jaxspec.decoding import Parts
from jaxspec.drafting.asd_drafter import ASDDrafter
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.drafting.choosing_drafter import ChoosingDrafter, widths_of
from jaxspec.drafting.clasp_drafter import CLaSpDrafter
from jaxspec.drafting.draft_model_drafter import DraftModelDrafter
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.drafting.grammar_drafter import GrammarDrafter
from jaxspec.drafting.knapspec_drafter import KnapSpecDrafter, SublayerTimes
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.drafting.lookup import BREAK, LookupDrafter
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.drafting.s2d_drafter import S2DDrafter
from jaxspec.drafting.suffix_drafter import SuffixDrafter
from jaxspec.drafting.token_recycling_drafter import TokenRecyclingDrafter
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.engine.language_model import LanguageModel
from jaxspec.heads.dflash.drafter import DFlashDrafter
from jaxspec.heads.dflash.network import DFlashConfig
from jaxspec.heads.dspark.drafter import DSparkDrafter
from jaxspec.heads.dspark.network import DSparkConfig
from jaxspec.heads.eagle.drafter import EagleDrafter
from jaxspec.heads.eagle.network import EagleConfig
from jaxspec.heads.hydra.drafter import HydraDrafter
from jaxspec.heads.hydra.network import HydraConfig
from jaxspec.heads.kangaroo.drafter import KangarooDrafter
from jaxspec.heads.kangaroo.network import KangarooConfig
from jaxspec.heads.medusa.drafter import MedusaDrafter
from jaxspec.heads.medusa.network import MedusaConfig
from jaxspec.heads.uno.drafter import UnoDrafter, UnoSinglePassDrafter
from jaxspec.heads.uno.network import UnoConfig
from jaxspec.io.tokenizers.intersection import Intersection
from jaxspec.loading.drafts import fitted
from jaxspec.methods import base, registry
from jaxspec.methods.resources import LoadedModel
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig, RopeScaling, Scores
from jaxspec.model.head import HeadConfig
from jaxspec.model.lora import PARTS
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import quantise
from jaxspec.model.tree import Shape
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.protocol import Weights
from jaxspec.sampling import Distribution, Greedy, Sampling
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
from jaxspec.testing.contracts import ACCEPTORS
from jaxspec.testing.distributions import chi_square, distance, text_distribution, warp
from jaxspec.testing.loop import (
    Loop,
    committed,
    generated,
    greedy,
    log_probs,
    prefill,
    run_rounds,
    view,
)
from jaxspec.testing.models import (
    CAPACITY,
    DEEP,
    EOS,
    SMALL,
    TARGET,
    TOKENS,
    K,
    engine_config,
    language_model,
    params,
    tokenizer,
)

# Parts


def mixed_distribution() -> Sampling:
    """Returns a sampling distribution for three rows, of which the first is greedy."""
    return Sampling(jnp.array([0.0, 1.0, 0.7]))


@functools.cache
def small_model() -> LanguageModel:
    """Returns a model of one layer that drafts for `language_model` in tests of `draft-model`."""
    return language_model(SMALL, "small")


def probe(width: int = TARGET.hidden_size) -> Probe:
    """Returns a probe with a random direction."""
    direction = np.random.default_rng(1).standard_normal(width) / width**0.5
    return Probe(jnp.asarray(direction, jnp.float32), jnp.float32(0.2), jnp.float32(1e-5))


def gamma(first: float | jax.Array) -> AdaptiveGamma:
    """Returns the adaptive γ of the paper with larger steps, so that a short text changes it."""
    return AdaptiveGamma(*map(jnp.float32, (first, 0.5, 0.3, 0.5, 0.2)))


# The choices of the families that Llama does not have, in few blocks. Values by layer are repeated.
BLOCKS: dict[str, dict[str, Any]] = {
    "windows": {"sliding_windows": (2, 12, None)},
    "gemma": {
        "head_dim": 8,
        "norm_placement": "sandwich",
        "norm_offset": 0.7,
        "qk_norm": True,
        "sliding_windows": (None, 5),
        "window_rope_theta": 30.0,
        "rope_scaling": RopeScaling(
            "yarn", 64.0, original_max_position_embeddings=8, attention_factor=1.2, query_beta=0.3
        ),
        "rotary_dim": 4,
        "scores": Scores(0.4, 0.9),
        "logit_cap": 30.0,
        "embedding_multiplier": 2.5,
        "tie_embeddings": True,
        "activation": "gelu_tanh",
    },
    "olmo": {
        "head_dim": 6,
        "norm_placement": "post",
        "qk_norm": True,
        "qk_norm_over_heads": True,
        "sliding_windows": (3, None),
        "rotated": (True, False),
        "residual_multiplier": 0.6,
        "logit_multiplier": 0.5,
        "rope_scaling": RopeScaling(
            "longrope",
            3.0,
            original_max_position_embeddings=8,
            attention_factor=1.1,
            short_factors=(1.0, 1.2, 1.5),
            long_factors=(1.5, 3.0, 4.0),
        ),
    },
    "granite": {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logit_multiplier": 0.25,
        "scores": Scores(0.2),
        "tie_embeddings": True,
    },
}
BY_LAYER = ("sliding_windows", "rotated")


def with_block(name: str, config: LlamaConfig) -> LlamaConfig:
    """Returns the configuration with one of `BLOCKS`."""
    changes = dict(BLOCKS[name])
    for field in BY_LAYER:
        changes[field] = _in_turns(changes.get(field, ()), config.num_layers)
    return dataclasses.replace(config, **changes)


def _in_turns(values: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return tuple(itertools.islice(itertools.cycle(values), count))


# Stop rules by name, as functions of the width of the draft's hidden states.
RULES: dict[str, Callable[[int], Any]] = {
    "constant": lambda width: Constant(),
    "confidence": lambda width: ConfidenceBelow(FixedGamma(jnp.float32(0.3))),
    "adaptive": lambda width: AdaptiveLength(*map(jnp.int32, (2, 2, 1, K))),
    "any_of": lambda width: AnyOf((ConfidenceBelow(gamma(0.2)), RULES["adaptive"](width))),
    "product": lambda width: ProductBelow(gamma(0.3)),
    "probe": lambda width: ProductBelow(gamma(0.3), probe(width)),
}
REFERENCE = np.array([*range(13), BREAK, 4, 4, 9, 1, 7, 2, 2, 5, BREAK, BREAK], np.int32)


@dataclasses.dataclass(frozen=True)
class Combination:
    """The names of a drafter, a stop rule (`-` for drafters without one) and an acceptor."""

    drafter: str
    rule: str
    acceptor: str

    def __str__(self) -> str:
        return "-".join(name for name in (self.drafter, self.rule, self.acceptor) if name != "-")


@dataclasses.dataclass(frozen=True)
class Case:
    """One drafter of the conformance suite.

    Attributes:
      make: the target's config and a stop rule → the drafter and its parameters.
      methods: the names in `jaxspec.METHODS` that build this drafter; empty for a variant.
      family: the group of a drafter's variants; by default the drafter alone.
      config: the target on which it is tested.
      has_rule: whether it takes a stop rule.
    """

    make: Callable[[LlamaConfig, Any], tuple[Any, Any]]
    methods: tuple[str, ...] = ()
    family: str = ""
    config: LlamaConfig = TARGET
    has_rule: bool = True

    @property
    def rules(self) -> tuple[str, ...]:
        """The stop rules with which it is tested; `-` for none."""
        return tuple(RULES) if self.has_rule else ("-",)


def suffix(**changes: Any) -> SuffixDrafter:
    """Returns a drafter of the most frequent continuation."""
    return SuffixDrafter(min_prob=jnp.float32(0.1), factor=jnp.float32(1), num_draft_tokens=K, **changes)


def _referring(make: Callable[..., Any], family: str) -> Case:
    """Returns the case of an n-gram or suffix drafter with a reference."""

    def made(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
        tokens = np.where(config.vocab_size > REFERENCE, REFERENCE, 0)
        return make(reference=jnp.asarray(tokens)), None

    return Case(made, family=family, has_rule=False)


def _recycling(parents: tuple[int, ...], ranks: tuple[int, ...], **changes: Any) -> Case:
    """Returns the case of token recycling with the top 3 tokens after each token."""
    made = TokenRecyclingDrafter(Shape(parents, ranks), num_top_tokens=3)
    return Case(lambda config, rule: (made, None), family="token-recycling", has_rule=False, **changes)


def narrow(config: LlamaConfig, num_layers: int) -> LlamaConfig:
    """Returns a narrower model of this many layers, which have the choices of the first layers in turn."""
    by_layer = {name: _in_turns(getattr(config, name), num_layers) for name in BY_LAYER}
    return dataclasses.replace(config, num_layers=num_layers, intermediate_size=20, **by_layer)


def _draft_model(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    small = narrow(config, 1)
    return DraftModelDrafter(small, rule, K), params(small)


def _pairs(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    drafter, own = _draft_model(config, rule)
    return dataclasses.replace(drafter, pairs=True), own


def _quantised(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns the target in 4 bits as its draft, which is sometimes wrong."""
    return DraftModelDrafter(config, rule, K), quantise(config, params(config), bits=4)


def _asd(config: LlamaConfig, rule: Any, shared: bool = False) -> tuple[Any, Any]:
    # With these numbers, the tests' prompts have two different masks.
    return ASDDrafter(config, jnp.float32(0.84), jnp.int32(2), jnp.int32(0), rule, K, shared), None


def _asd_static(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    return _asd(config, rule)[0].specialised(
        LayerPlan.skipping(config.num_layers, attention=[0], mlp=[1])
    ), None


def _draft_verify(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns a drafter with a bank of two masks: that of a prompt follows the sign of a number of its vector."""
    masks = [
        LayerPlan.skipping(config.num_layers, *layers)
        for layers in (([1], [0]), ([0], [config.num_layers - 1]))
    ]
    bank = jnp.stack([mask.traced() for mask in masks])
    centres = jnp.zeros((2, config.hidden_size)).at[:, 1].set(jnp.array([1.0, -1.0]))
    return DraftVerifyDrafter(config, bank, rule, K, centres=centres), None


def _draft_verify_static(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    plan = LayerPlan.skipping(config.num_layers, [0, config.num_layers - 1], [1])
    return _draft_verify(config, rule)[0].specialised(plan), None


def _clasp(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    return CLaSpDrafter(config, 1, jnp.int32(2), rule, K), None


def _knapspec(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    # With these times, the tests' prompts have different masks and lengths.
    times = SublayerTimes(*map(jnp.float32, (3, 1, 0.3, 1)))
    num_rows = 1 + 3 * config.num_layers
    return KnapSpecDrafter(config, times, num_rows, 3, jnp.int32(2), rule=rule, num_draft_tokens=K), None


def _layerskip(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    return LayerSkipDrafter(config, 1, rule, K), None


def _thresholds(config: LlamaConfig) -> tuple[float, float]:
    """Returns thresholds with which tokens leave by every exit."""
    return (0.5, 0.5) if config.vocab_size > 4 else (0.77, 0.75)


def _s2d(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    layers = narrow(config, 3)
    return S2DDrafter(layers, (1, 2, 3), jnp.float32(_thresholds(config)), rule, K), params(layers)


def choosing(
    config: LlamaConfig,
    candidates: tuple[Any, ...],
    cost: float = 0.25,
    row_cost: float = 0.0,
    accept: Any = 0.75,
    memory: float = 0.95,
) -> ChoosingDrafter:
    """Returns a drafter that chooses among candidates; `accept`: of all models, or of each."""
    turns = tuple(one.taking_turns() for one in candidates)
    copies = [isinstance(one, LookupDrafter) for one in turns]
    costs = tuple(0.0 if copy else cost for copy in copies)
    each = iter(accept if isinstance(accept, tuple) else (accept,) * len(turns))
    known = tuple((0.5, 0.75) if copy else next(each) for copy in copies)
    longest = max(one.num_draft_tokens for one in turns)
    prices = prices_of(widths_of(turns), longest, costs, row_cost, known)
    return ChoosingDrafter(config, turns, prices, jnp.float32(memory))


def prices_of(widths: Any, longest: int, costs: Any, row_cost: float, accept: Any) -> Prices:
    """Returns prices for any batch and length, in plain steps.

    `costs`: of a draft token of each candidate; `row_cost`: of a further row; `accept`: of each candidate, for all
    positions or some.
    """
    verify, draft = 1 + row_cost * (np.array(widths) - 1), np.outer(costs, np.arange(longest + 1))
    known = [np.atleast_1d(one)[:longest] for one in accept]
    rates = np.stack([np.pad(one, (0, longest - len(one)), mode="edge") for one in known])
    times = (jnp.float32(np.stack([one, 0 * one], axis=-1)[None]) for one in (verify, draft))
    return Prices(jnp.array([1]), *times, jnp.float32(rates))


def draft_cost(lm: LanguageModel, name: str, **options: Any) -> float:
    """Returns the cost that a method declares for a draft pass, in plain steps; further rows are free."""
    method = registry.make(name, options)
    cost: Any = method.cost(lm.loaded, *lm.drafter(method))
    return base.share_of_step(cost, lm.loaded)


def _among(
    *make: Callable[[LlamaConfig, Any], tuple[Any, Any]],
    lookups: tuple[Callable[[], Any], ...],
    accept: float | tuple[float, ...] = 0.75,
    **changes: Any,
) -> Case:
    """Returns the case of lookups and models that the rows of a batch choose together; `accept`: see `choosing`."""

    def made(config: LlamaConfig, _: Any) -> tuple[Any, Any]:
        drafters, own = zip(*(one(config, Constant()) for one in make), strict=True)
        firsts = tuple(first() for first in lookups)
        # A model whose draft was wrong is followed by another one.
        numbers = {"cost": 0.2, "row_cost": 0.01, "accept": accept, "memory": 0.8}
        return choosing(config, firsts + drafters, **numbers), (*(None for _ in firsts), *own)

    return Case(made, family="choosing", has_rule=False, **changes)


def _s2d_target(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    exits, sure = (1, config.num_layers - 1), jnp.float32(_thresholds(config)[:1])
    return S2DDrafter(config, exits, sure, rule, K, sorted_target=True), None


def _head_block(config: LlamaConfig, num_layers: int = 1) -> LlamaConfig:
    """Returns the layers of a head of a small target, which have the windows of its first layers in turn."""
    windows = _in_turns(config.sliding_windows, num_layers)
    return config.plain.block(num_layers, intermediate_size=20, sliding_windows=windows)


def eagle_head(config: LlamaConfig, **changes: Any) -> EagleConfig:
    """Returns the config of an EAGLE-1 head of a small target."""
    return EagleConfig(_head_block(config), fc_bias=True, **changes)


def eagle3_head(config: LlamaConfig, num_layers: int = 1, **changes: Any) -> EagleConfig:
    """Returns the config of an EAGLE-3 head of a small target."""
    given: dict[str, Any] = {
        "aux_layers": (0, 1, config.num_layers),
        "head_size": config.vocab_size,
        **changes,
    }
    return EagleConfig(_head_block(config, num_layers), kind="eagle3", **given)


@functools.cache
def head_params(head: HeadConfig, seed: int = 5) -> llama.Params:
    """Returns random parameters of a head."""
    placed: llama.Params = jax.tree.map(jnp.asarray, reference.random_tree(head.shapes, seed))
    return placed


def _eagle(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns a head that mostly copies the embedding, as the target does, so that some drafts are accepted."""
    head = eagle_head(config)
    own = dict(head_params(head))
    handed_on = jnp.eye(config.hidden_size, 2 * config.hidden_size)
    return EagleDrafter(config, head, rule, K), own | {
        "fc": handed_on + 0.2 * own["fc"],
        "fc_bias": 0.2 * own["fc_bias"],
    }


def _eagle_vocab(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    drafter, own = _eagle(config, rule)
    few = llama.vocabulary(config, params(config), some_tokens(config.vocab_size))
    return drafter, {**own, "vocabulary": few}


LIKELY = Dynamic(num_nodes=7, depth=K, width=3)
DRAWN = Drawn(Shape((-1, -1, -1, 0, 0, 2, 3)))


def _tree(make: Callable[[LlamaConfig, Any], tuple[Any, Any]], tree: Dynamic | Drawn = LIKELY) -> Case:
    """Returns the case of a head that drafts a tree, of top tokens or of drawn ones, without a stop rule."""

    def made(config: LlamaConfig, _: Any) -> tuple[Any, Any]:
        drafter, own = make(config, Constant())
        return drafter.replace(tree=tree), own

    return Case(made, family="trees", has_rule=False)


def _eagle3(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns an EAGLE-3 head over two of every three tokens, like published heads over a part of the vocabulary."""
    ids = some_tokens(config.vocab_size)
    head = eagle3_head(config, head_size=len(ids))
    own = dict(head_params(head))
    few = Vocabulary(own.pop("head"), ids, config.vocab_size)
    return EagleDrafter(config, head, rule, K), {**own, "vocabulary": few}


def _eagle3_flags(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns an EAGLE-3 head with all options of later trainers, over the whole vocabulary."""
    head = eagle3_head(
        config, 2, aux_norm="each", residual_is_normed=True, output_is_normed=True, own_embedding=True
    )
    return EagleDrafter(config, head, rule, K), head_params(head)


def _kangaroo(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Over two of every three tokens."""
    head = KangarooConfig(config.block())
    few = llama.vocabulary(config, params(config), some_tokens(config.vocab_size))
    return KangarooDrafter(config, head, 1, rule, K), {**head_params(head), "vocabulary": few}


def _medusa(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns Medusa heads with output rows of their own, over two of every three tokens."""
    ids = some_tokens(config.vocab_size)
    head = MedusaConfig(config.hidden_size, K, head_size=len(ids), own_heads=True)
    return MedusaDrafter(config, head, rule, K), head_params(head) | {
        "vocabulary": Vocabulary(None, ids, config.vocab_size)
    }


def _hydra(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns Hydra++ heads that mostly copy the embedding of the last token, as the target does.

    Over two of every three tokens.
    """
    ids = some_tokens(config.vocab_size)
    head = HydraConfig(
        config.hidden_size, config.vocab_size, K, num_layers=3, prefix=config.plain.truncated(1)
    )
    own, target = dict(head_params(head)), params(config)
    heads = []
    for one in own["heads"]:
        first = dict(one["blocks"][0])
        wide = first["residual"].shape[1] - config.hidden_size
        handed_on = jnp.eye(config.hidden_size, first["residual"].shape[1], k=wide)
        first |= {"residual": handed_on, "linear": 0.1 * first["linear"]}
        matrix = target["embed"] if config.tie_embeddings else target["head"]
        rows = {"head": matrix[ids], "head_bias": one["head_bias"][ids]}
        heads.append({"blocks": [first, *one["blocks"][1:]], **rows})
    few = Vocabulary(None, ids, config.vocab_size)
    return HydraDrafter(config, head, rule, K), own | {"heads": heads, "vocabulary": few}


def _dflash(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns a DFlash head of two layers with Qwen3's norms, over two of every three tokens."""
    windows = _in_turns(config.sliding_windows, 2)
    layers = config.block(num_layers=2, qk_norm=True, sliding_windows=windows)
    head = DFlashConfig(layers, (1, "final"), K + 2, mask_id=3)
    few = llama.vocabulary(config, params(config), some_tokens(config.vocab_size))
    return DFlashDrafter(config, head, rule, K), {**head_params(head), "vocabulary": few}


def _dspark(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns a DSpark head whose rows predict the token after their own, over two of every three tokens."""
    base, params = _dflash(config, rule)
    of, few = base.head, params["vocabulary"]
    head = DSparkConfig(of.block, of.aux_layers, K, of.mask_id, rank=5)
    own = head_params(head)
    own |= {"markov_out": own["markov_out"][few.ids], "vocabulary": few}
    return DSparkDrafter(config, head, rule, K), own


def _dflash_windows(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns the head with a layer that has a window, which was trained in speculators."""
    drafter, own = _dflash(config, rule)
    block = dataclasses.replace(drafter.head.block, sliding_windows=(2, None))
    return drafter.replace(head=dataclasses.replace(drafter.head, block=block, anchored_windows=True)), own


def _uno(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    head = UnoConfig(config.plain, 4, 2.0, (1, config.vocab_size))
    return UnoDrafter(config, head, rule, K), head_params(head)


def _uno_single_pass(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns a drafter of two tokens, whose verification has nine rows."""
    drafter, own = _uno(config, rule)
    return UnoSinglePassDrafter(config, drafter.head, rule, 2), own


def exact_head(kind: str) -> tuple[Any, llama.Params, llama.Params]:
    """Returns a head whose predictions are exact: `(drafter, target's parameters, head's parameters)`.

    The target's layers write nothing, and its embeddings are signs, so its logits depend only on the first eight
    coordinates of the last token. The EAGLE-1 head copies the token's embedding. The EAGLE-3 head attends only to its
    own position: its queries and keys are one large constant, and RoPE separates the positions.
    """
    rng, size, width = np.random.default_rng(3), TARGET.vocab_size, TARGET.hidden_size
    signs = rng.choice([-1.0, 1.0], (size, width))
    signs[:, 0] = 1
    signs[:, 1:5] = 2 * (np.arange(size)[:, None] >> np.arange(4) & 1) - 1
    matrix = 0.6 * rng.standard_normal((size, width)) * (np.arange(width) < 8)
    target = jax.tree.map(np.zeros_like, params())
    target |= {"embed": signs, "head": matrix, "norm": np.ones(width)}
    config = eagle_head(TARGET) if kind == "eagle" else eagle3_head(TARGET, residual_is_normed=True)
    own = jax.tree.map(np.zeros_like, head_params(config))
    if kind == "eagle":
        own["fc"][:, :width] = np.eye(width)
    else:
        first = own["layers"][0]["attention"]
        first["embed_norm"][:] = 1
        first["qkv"][:, :12, 0] = 30
        for head, one in itertools.product(range(2), range(4)):
            first["qkv"][head, 12 + one, 4 * head + one] = 1
            first["out"][4 * head + one, 8 * head + one] = 1
        own["head"], own["norm"] = matrix, np.full(width, 0.5**0.5)
    made = [jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree) for tree in (target, own)]
    return EagleDrafter(TARGET, config, num_draft_tokens=K), made[0], made[1]


def exact_hydra() -> tuple[Any, llama.Params, llama.Params]:
    """Returns exact Hydra heads for the target of `exact_head`: each copies the embedding of the last token."""
    _, target, _ = exact_head("eagle")
    width = TARGET.hidden_size
    config = HydraConfig(width, TARGET.vocab_size, K)
    own = jax.tree.map(jnp.zeros_like, head_params(config))
    for number, one in enumerate(own["heads"]):
        wide = (number + 2) * width
        one["blocks"][0]["residual"] = jnp.eye(width, wide, k=wide - width)
        one["head"] = target["head"]
    return HydraDrafter(TARGET, config, num_draft_tokens=K), target, own


def some_tokens(size: int) -> jax.Array:
    """Returns two of every three tokens of a vocabulary."""
    return jnp.array([token for token in range(size) if token % 3], jnp.int32)


def over_some_tokens(make: Callable[[LlamaConfig, Any], tuple[Any, Any]], **changes: Any) -> Case:
    """Returns the case of a drafter that drafts only two of every three tokens."""

    def made(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
        drafter, own = make(config, rule)
        own = own or {}
        head = params(config) | own  # adapters have no head
        few = llama.vocabulary(drafter.config, head, some_tokens(config.vocab_size))
        return drafter, {**own, "vocabulary": few}

    return Case(made, **changes)


def with_window(make: Callable[[LlamaConfig, Any], tuple[Any, Any]], config: LlamaConfig = TARGET) -> Case:
    """Returns the case of a drafter that reads only one token at the start and the latest four."""

    def made(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
        drafter, own = make(config, rule)
        few = dataclasses.replace(drafter.config, draft_window=(1, 4))
        return dataclasses.replace(drafter, config=few), own

    return Case(made, family="draft-window", config=config, has_rule=False)


def _other_vocabulary(config: LlamaConfig, rule: Any) -> tuple[Any, Any]:
    """Returns a draft with two of every three of the target's tokens, in another order, and a likely one of its own."""
    drafter, own = _draft_model(config, rule)
    ids = np.asarray(some_tokens(config.vocab_size))
    order = np.random.default_rng(4).permutation(len(ids) + 1)
    tokens, back = np.append(ids, 0)[order], np.argsort(order).astype(np.int32)
    weights = {**own, "embed": own["embed"][tokens]}
    if "head" in own:
        weights["head"] = own["head"][tokens].at[back[-1]].multiply(2.0)
    fed = np.full(config.vocab_size, back[-1])
    fed[ids] = back[:-1]
    draft = LoadedModel(dataclasses.replace(drafter.config, vocab_size=len(tokens)), weights)
    shared = Intersection(np.stack([ids, back[:-1]], axis=1), fed)
    return drafter, fitted(draft, shared, jax.devices()[0]).params


_ngram = functools.partial(NGramDrafter, num_draft_tokens=K + 1)
INT8_CACHE = dataclasses.replace(TARGET, kv_cache_dtype="int8")
# A new drafter is one row here. The last one of a family is its usual form.
DRAFTERS: dict[str, Case] = {
    "autoregressive": Case(
        lambda config, rule: (AutoregressiveDrafter(), None), ("autoregressive",), has_rule=False
    ),
    "autoregressive-in-turns": Case(
        lambda config, rule: (AutoregressiveDrafter(K), None), family="autoregressive", has_rule=False
    ),
    "grammar": Case(lambda config, rule: (GrammarDrafter(K), None), ("grammar",), "ngram", has_rule=False),
    "ngram": Case(
        lambda config, rule: (NGramDrafter(num_draft_tokens=K), None), ("ngram",), "ngram", has_rule=False
    ),
    "ngram-reference": _referring(functools.partial(NGramDrafter, num_draft_tokens=K), "ngram"),
    "suffix": Case(lambda config, rule: (suffix(), None), ("suffix",), "suffix", has_rule=False),
    "suffix-reference": _referring(suffix, "suffix"),
    "token-recycling-chain": _recycling((-1, 0, 1), (0, 0, 0)),
    "token-recycling": _recycling((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0), methods=("token-recycling",)),
    "choosing-asd": _among(_asd, lookups=(suffix,), config=DEEP),
    "choosing-recycling": _among(_recycling((-1, -1, 0, 0), (0, 1, 0, 1)).make, lookups=(suffix,)),
    "choosing-tree": _among(_tree(_eagle).make, lookups=(suffix,)),
    "choosing-heads": _among(_eagle, _eagle3, lookups=(suffix,)),
    "choosing-trees": _among(
        _tree(_eagle_vocab, DRAWN).make, _layerskip, lookups=(_ngram,), accept=(0.9, 0.6)
    ),
    "choosing": _among(
        _layerskip, _draft_model, lookups=(_ngram, suffix), methods=("auto", "hybrid"), config=DEEP
    ),
    "draft-model-vocab": over_some_tokens(_draft_model, family="draft-model"),
    "draft-model-other-vocab": Case(_other_vocabulary, family="draft-model"),
    "draft-exit": Case(
        lambda config, rule: (
            DraftModelDrafter(config.truncated(1), rule, K),
            llama.truncate(params(config), 1),
        ),
        family="draft-model",
    ),
    "quantised": Case(_quantised, ("quantised",), "draft-model"),
    "draft-model-pairs": Case(_pairs, family="draft-model"),
    "draft-model": Case(_draft_model, ("draft-model",), "draft-model"),
    "asd-vocab": over_some_tokens(_asd, family="asd", config=DEEP),
    "asd-static": Case(_asd_static, family="asd", config=DEEP),
    "asd-shared": Case(functools.partial(_asd, shared=True), family="asd", config=DEEP),
    "asd": Case(_asd, ("asd",), "asd", DEEP),
    "clasp-vocab": over_some_tokens(_clasp, family="clasp", config=DEEP),
    "clasp": Case(_clasp, ("clasp",), "clasp", DEEP),
    "knapspec-vocab": over_some_tokens(_knapspec, family="knapspec", config=DEEP),
    "knapspec": Case(_knapspec, ("knapspec",), "knapspec", DEEP),
    "draft-verify-vocab": over_some_tokens(_draft_verify, family="draft-verify", config=DEEP),
    "draft-verify-static": Case(_draft_verify_static, family="draft-verify", config=DEEP),
    "draft-verify": Case(_draft_verify, ("draft-verify",), "draft-verify", DEEP),
    "layerskip-vocab": over_some_tokens(_layerskip, family="layerskip", config=DEEP),
    "layerskip-late": Case(
        lambda config, rule: (LayerSkipDrafter(config, config.num_layers - 1, rule, K), None),
        family="layerskip",
        config=DEEP,
    ),
    "layerskip": Case(
        _layerskip,
        ("layerskip", "adaspeed", "adaspeed-probe"),
        "layerskip",
        DEEP,
    ),
    "s2d-vocab": over_some_tokens(_s2d, family="s2d"),
    "s2d-target-vocab": over_some_tokens(_s2d_target, family="s2d", config=DEEP),
    "s2d-target": Case(_s2d_target, family="s2d", config=DEEP),
    "s2d": Case(_s2d, ("s2d",), "s2d"),
    "eagle-tree-drawn": _tree(_eagle_vocab, DRAWN),
    "medusa-tree": _tree(_medusa),
    "hydra-tree": _tree(_hydra),
    "uno-tree": _tree(_uno),
    "dflash-tree-drawn": _tree(_dflash, DRAWN),
    "dflash-tree": _tree(_dflash, Dynamic(7, K, 7)),
    "dspark-tree-drawn": _tree(_dspark, DRAWN),
    "dspark-tree": _tree(_dspark, Dynamic(7, K, 3)),
    "eagle-tree": _tree(_eagle),
    "eagle-vocab": Case(_eagle_vocab, family="heads"),
    "eagle": Case(_eagle, ("eagle",), "heads"),
    "eagle3": Case(_eagle3, ("eagle3",), "heads"),
    "eagle3-flags": Case(_eagle3_flags, family="heads"),
    "medusa": Case(_medusa, ("medusa",), "heads"),
    "hydra": Case(_hydra, ("hydra",), "heads"),
    "dflash": Case(_dflash, ("dflash",), "heads"),
    "dspark": Case(_dspark, ("dspark",), "heads"),
    "kangaroo": Case(_kangaroo, ("kangaroo",), "heads", DEEP),
    "uno-vocab": over_some_tokens(_uno, family="uno"),
    "uno-single-pass": Case(_uno_single_pass, family="uno"),
    "uno": Case(_uno, ("uno",), "uno"),
    "int8-cache-draft-model": Case(_draft_model, family="int8-cache", config=INT8_CACHE, has_rule=False),
    "int8-cache-tree": dataclasses.replace(_tree(_eagle), family="int8-cache", config=INT8_CACHE),
    "draft-window-s2d": with_window(_s2d),
    "draft-window-s2d-target": with_window(_s2d_target, DEEP),
    "draft-window-clasp": with_window(_clasp, DEEP),
    "draft-window-knapspec": with_window(_knapspec, DEEP),
    "draft-window-asd": with_window(_asd, DEEP),
    "draft-window-pairs": with_window(_pairs),
    "draft-window-draft-model": with_window(_draft_model),
    "draft-window-layerskip": with_window(_layerskip, DEEP),
    "dflash-windows": Case(_dflash_windows, family="head-window", has_rule=False),
}


def drafter_of(name: str, rule: str = "-", config: LlamaConfig = TARGET) -> tuple[Any, Any]:
    """Returns a drafter and its parameters."""
    return DRAFTERS[name].make(config, RULES["constant" if rule == "-" else rule](config.hidden_size))


def config_of(drafter: str) -> LlamaConfig:
    """Returns the config of the target with which a drafter is tested."""
    return DRAFTERS[drafter].config


def full_product() -> list[Combination]:
    """Returns every drafter with every stop rule and acceptor."""
    return [
        Combination(name, rule, acceptor)
        for name, case in DRAFTERS.items()
        for rule in case.rules
        for acceptor in ACCEPTORS
    ]


def ordinary() -> list[Combination]:
    """Returns every drafter once, with a rule and an acceptor chosen to cover the most new pairs.

    The pairs are family and rule, family and acceptor, rule and acceptor. All checks of a drafter use the same
    combination, because compilation takes longer than the checks. Among equal choices an acceptor that samples comes
    first, because some checks need sampled text.
    """
    acceptors = sorted(ACCEPTORS, key=lambda name: name == "greedy")
    chosen: list[Combination] = []
    met: set[tuple[str, str]] = set()
    for name, case in DRAFTERS.items():
        family = case.family or name
        options = {
            Combination(name, rule, acceptor): {(family, rule), (family, acceptor), (rule, acceptor)}
            for rule, acceptor in itertools.product(case.rules, acceptors)
        }
        best = max(options, key=lambda one: len(options[one] - met))
        met |= options[best]
        chosen.append(best)
    return chosen


# One family per way to draft: lookup, a tree without a model, a model with a cache, skipped sublayers, early exits in
# the cache of the target, sorted exits, and a tree of a trained head.
FAMILIES = ("ngram", "token-recycling", "draft-model", "asd", "layerskip", "s2d", "trees")


def families() -> list[Combination]:
    """Returns the last of the ordinary combinations of each of `FAMILIES`."""
    last = {DRAFTERS[one.drafter].family or one.drafter: one for one in ordinary()}
    return [last[family] for family in FAMILIES]


def usual() -> list[Combination]:
    """Returns the ordinary combinations of the drafters that a method builds, and of the families."""
    return [one for one in ordinary() if DRAFTERS[one.drafter].methods or one in families()]


# The loop


def loop(
    combination: Combination, distribution: Distribution | None = None, config: LlamaConfig | None = None
) -> Loop:
    """Returns the loop of a combination, by default with its acceptor's usual distribution and its usual model."""
    config = config or config_of(combination.drafter)
    drafter, weights = drafter_of(combination.drafter, combination.rule, config)
    if distribution is None:
        distribution = Greedy() if combination.acceptor == "greedy" else mixed_distribution()
    return Loop(
        Parts(drafter, ACCEPTORS[combination.acceptor](), distribution),
        Weights(params(config), weights),
        config,
    )


# The engine

# The arguments of `generate` by method.
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {"method": "autoregressive"},
    "ngram": {"method": "ngram", "num_draft_tokens": K},
    "suffix": {"method": "suffix", "num_draft_tokens": K},
    "token-recycling": {"method": "token-recycling", "tree": "5x3"},
    "choosing": {},
    "draft-model": {"method": "draft-model", "num_draft_tokens": K},
    "draft-exit": {
        "method": "draft-model",
        "draft_exit": 1,
        "num_draft_tokens": K,
        "stop_rule": ("confidence", "adaptive-length"),
        "gamma": 0.3,
    },
    "asd": {},
    "draft-verify": {},
    "layerskip": {},
    "s2d": {},
    "eagle": {},
}


def options(method: str) -> dict[str, Any]:
    """Returns the arguments of `LanguageModel.generate` for a name in `METHODS`."""
    if not METHODS.get(method):
        drafter, weights = drafter_of(method, "confidence", engine_config())
        return {"method": drafter if weights is None else (drafter, weights)}
    return METHODS[method] | ({"draft": small_model()} if method == "draft-model" else {})


def share_of_step(lm, runs, head: bool = False) -> float:
    """Returns the size of `runs`, and of the target's head if `head`, relative to the weights that a step reads."""
    whole = sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    if not lm.config.tie_embeddings:
        whole -= lm.params["embed"].size
    layers = sum(leaf.size for leaf in jax.tree.leaves(lm.params["layers"]))
    read = sum(leaf.size for leaf in jax.tree.leaves(runs))
    return (read + (whole - layers if head else 0)) / whole


def adapter(config: LlamaConfig, dtype: Any = jnp.float32, rank: int = 3) -> llama.Params:
    """Returns a random adapter of every matrix of the layers, for `lora.adapted`."""
    rng = np.random.default_rng(4)
    layers: list[llama.Params] = [{"attention": {}, "mlp": {}} for _ in range(config.num_layers)]
    for layer, shapes in zip(layers, llama.param_shapes(config)["layers"], strict=True):
        for sublayer, matrices in PARTS.items():
            for name, parts in matrices.items():
                *out, width = shapes[sublayer][name]
                for which, shape in (("a", (parts, rank, width)), ("b", (*out, rank))):
                    layer[sublayer][f"{name}_{which}"] = jnp.asarray(0.3 * rng.standard_normal(shape), dtype)
    return {"layers": layers}
