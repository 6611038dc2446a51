"""Small models, the parts of every method, and the loop compiled without the engine around it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec import decoding
from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor, RejectionAcceptor
from jaxspec.decoding import DecodeState, Emitted, Parts, Request
from jaxspec.drafting.asd import ASD
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.drafting.draft_model import DraftModel
from jaxspec.drafting.draft_verify import DraftVerify
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.drafting.ngram import BREAK, NGram
from jaxspec.drafting.s2d import S2D
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.tokenizer import Tokenizer
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import View, Weights
from jaxspec.sampling import Greedy, Law, Sampling
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
from tests import reference

TARGET = LlamaConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=512,
)
# A draft of the same vocabulary.
SMALL = dataclasses.replace(TARGET, num_layers=1, intermediate_size=20)
# What drafts for itself.
DEEP = dataclasses.replace(TARGET, num_layers=3)
K = 3
CAPACITY = 32


@functools.cache
def params(config: LlamaConfig = TARGET, seed: int = 5) -> llama.Params:
    """Random parameters on the device; what a seed's models share makes their drafts agree now and then."""
    drawn = reference.random_params(config, seed)
    shared = np.random.default_rng(seed).standard_normal((2, config.vocab_size, config.hidden_size))
    drawn["embed"], drawn["head"] = shared.astype(np.float32) * np.float32([[[1.0]], [[0.6]]])
    return jax.tree.map(jnp.asarray, drawn)


# Parts


def probe(width: int = TARGET.hidden_size) -> Probe:
    """In a random direction."""
    direction = np.random.default_rng(1).standard_normal(width) / width**0.5
    return Probe(jnp.asarray(direction, jnp.float32), jnp.float32(0.2), jnp.float32(1e-5))


def gamma(first: float | jax.Array, most: int | None = None) -> AdaptiveGamma:
    """The paper's rule, or that of its code; faster, so that a short text moves it."""
    numbers = map(jnp.float32, (first, 0.5, 0.3, 0.5, 0.2))
    return AdaptiveGamma(*numbers, most=None if most is None else jnp.int32(most))


# By the width of the draft's hidden states.
RULES: dict[str, Callable[[int], Any]] = {
    "constant": lambda width: Constant(),
    "confidence": lambda width: ConfidenceBelow(FixedGamma(jnp.float32(0.3))),
    "adaptive": lambda width: AdaptiveLength(*map(jnp.int32, (2, 2, 1, K))),
    "any_of": lambda width: AnyOf((ConfidenceBelow(gamma(0.2)), RULES["adaptive"](width))),
    "product": lambda width: ProductBelow(gamma(0.3)),
    "probe": lambda width: ProductBelow(gamma(0.3, K), probe(width)),
}
ACCEPTORS = {"greedy": GreedyAcceptor, "rejection": RejectionAcceptor, "block": BlockAcceptor}
REFERENCE = np.array([*range(13), BREAK, 4, 4, 9, 1, 7, 2, 2, 5, BREAK, BREAK], np.int32)


@dataclasses.dataclass(frozen=True)
class Combination:
    """Names of a drafter, a stop rule (`-` for drafters without) and an acceptor."""

    drafter: str
    rule: str
    acceptor: str

    def __str__(self) -> str:
        return "-".join(name for name in (self.drafter, self.rule, self.acceptor) if name != "-")


def drafter_of(name: str, rule: str = "-", config: LlamaConfig = TARGET) -> tuple[Any, Any]:
    """A drafter and its parameters."""
    if name == "autoregressive":
        return Autoregressive(), None
    if name == "ngram-reference":
        tokens = np.where(config.vocab_size > REFERENCE, REFERENCE, 0)
        return NGram(jnp.asarray(tokens), num_draft_tokens=K), None
    if name.startswith("ngram"):
        return NGram(match=name.partition("-")[2] or "latest", num_draft_tokens=K), None
    made: Any = RULES["constant" if rule == "-" else rule](config.hidden_size)
    depth = config.num_layers
    if name.startswith("asd"):
        # These numbers give the prompts of the tests two masks.
        asd = ASD(config, jnp.float32(0.84), jnp.int32(2), jnp.int32(0), made, K, name == "asd-shared")
        plan = LayerPlan.skipping(depth, attention=[0], mlp=[1])
        return (asd.specialised(plan) if name == "asd-static" else asd), None
    if name.startswith("draft-verify"):
        verify = DraftVerify(config, LayerPlan.skipping(depth, [1], [0]).traced(), made, K)
        plan = LayerPlan.skipping(depth, [0, depth - 1], [1])
        return (verify.specialised(plan) if name == "draft-verify-static" else verify), None
    if name.startswith("layerskip"):
        return LayerSkip(config, depth - 1 if name == "layerskip-late" else 1, made, K), None
    # So that tokens leave by every exit.
    sure = (0.5, 0.5) if config.vocab_size > 4 else (0.77, 0.75)
    if name == "s2d-target":
        return S2D(config, (1, depth - 1), jnp.float32(sure[:1]), made, K, sorted_target=True), None
    if name == "s2d":
        layers = dataclasses.replace(config, num_layers=3, intermediate_size=20)
        return S2D(layers, (1, 2, 3), jnp.float32(sure), made, K), params(layers)
    if name == "draft-exit":
        return DraftModel(config.truncated(1), made, K), llama.truncate(params(config), 1)
    small = dataclasses.replace(config, num_layers=1, intermediate_size=20)
    return DraftModel(small, made, K), params(small)


PLAIN = ("autoregressive", "ngram", "ngram-earliest", "ngram-longest", "ngram-random", "ngram-reference")
# Drafters with a stop rule: each method's variants, of which the last is the usual one.
CHAINS = (
    ("draft-exit", "draft-model"),
    ("asd-static", "asd-shared", "asd"),
    ("draft-verify-static", "draft-verify"),
    ("layerskip-late", "layerskip"),
    ("s2d-target", "s2d"),
)


def config_of(drafter: str) -> LlamaConfig:
    """The target on which a drafter is tested."""
    return DEEP if drafter.startswith(("asd", "draft-verify", "layerskip", "s2d-target")) else TARGET


def with_rules() -> list[tuple[str, str]]:
    """Every drafter with every stop rule."""
    drafters = [(name, "-") for name in PLAIN]
    return drafters + list(itertools.product(itertools.chain(*CHAINS), RULES))


def full_product() -> list[Combination]:
    """Every drafter with every stop rule and acceptor."""
    return [Combination(*drafter, acceptor) for drafter in with_rules() for acceptor in ACCEPTORS]


def pairwise() -> list[Combination]:
    """Every pair of method, rule and acceptor at least once; each method's variants take turns."""
    chosen = []
    for turn, acceptor in enumerate(ACCEPTORS):
        chosen.append(Combination("autoregressive", "-", acceptor))
        chosen.append(Combination(("ngram", "ngram-reference", "ngram-random")[turn], "-", acceptor))
    acceptors = list(ACCEPTORS)
    for method, variants in enumerate(CHAINS):
        for number, rule in enumerate(RULES):
            variant = variants[-1 - (number + number // 3) % len(variants)]
            chosen.append(Combination(variant, rule, acceptors[(method + number) % 3]))
    return chosen


def every_drafter() -> list[Combination]:
    """Every drafter and every rule at least once, with one acceptor."""
    chosen = [("autoregressive", "-"), ("ngram-random", "-")]
    chosen += zip(itertools.chain(*CHAINS), itertools.cycle(RULES), strict=False)
    return [Combination(*drafter, "block") for drafter in chosen]


# The loop

prefill = jax.jit(decoding.prefill, static_argnames=("config", "piece", "merged", "log_probs"))
# Not donated: tests look at a state before and after.
chunk = jax.jit(decoding.chunk, static_argnames=("config", "window", "log_probs"))


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A method on a model, one row a prompt."""

    parts: Parts
    weights: Weights
    config: LlamaConfig = TARGET

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        budgets: int | Sequence[int] = 12,
        *,
        eos: Collection[int] = (),
        seeds: Sequence[int] | None = None,
        capacity: int = CAPACITY,
        log_probs: bool = False,
    ) -> tuple[DecodeState, Emitted]:
        """Prefills the prompts."""
        batch = len(prompts)
        tokens, eos_ids = np.zeros((batch, capacity), np.int32), np.full((batch, 2), -1, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            eos_ids[row, : len(eos)] = list(eos)
        length = np.array([len(prompt) for prompt in prompts], np.int32)
        keys = jax.vmap(jax.random.key)(jnp.arange(batch) if seeds is None else jnp.asarray(seeds))
        limit = np.asarray(length + np.asarray(budgets), np.int32)
        request = Request(*map(jnp.asarray, (tokens, length, limit, eos_ids)), keys)
        return prefill(self.config, self.weights, self.parts, request, piece=8, log_probs=log_probs)

    def go_on(
        self,
        state: DecodeState,
        rounds: int = 99,
        halt: Sequence[bool] | None = None,
        log_probs: bool = False,
    ) -> tuple[DecodeState, Emitted]:
        """One chunk."""
        stop = jnp.zeros(len(state.length), bool) if halt is None else jnp.asarray(halt)
        return chunk(
            self.config, self.weights, self.parts, state, jnp.int32(rounds), stop,
            window=CAPACITY, log_probs=log_probs,
        )  # fmt: skip

    def texts(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[list[int]]:
        """What each row generates."""
        state, _ = self.begin(prompts, *args, **options)
        state, _ = self.go_on(state)
        assert state.done.all(), "the rows did not fit the capacity"
        return generated(state, prompts)


def loop(combination: Combination, law: Law | None = None, config: LlamaConfig | None = None) -> Loop:
    """The loop of a combination: under its acceptor's usual law and on its usual model if none is given."""
    config = config or config_of(combination.drafter)
    drafter, weights = drafter_of(combination.drafter, combination.rule, config)
    if law is None:
        law = Greedy() if combination.acceptor == "greedy" else mixed_law()
    return Loop(
        Parts(drafter, ACCEPTORS[combination.acceptor](), law), Weights(params(config), weights), config
    )


def view(state: DecodeState) -> View:
    """What a round shows the drafter."""
    room = jnp.where(state.done, 0, state.limit - state.length - 1)
    return View(state.tokens, state.length, state.cache, room)


def mixed_law() -> Sampling:
    """For three rows, of which the first is greedy."""
    return Sampling(jnp.array([0.0, 1.0, 0.7]))


def generated(state: DecodeState, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens after each prompt."""
    rows = zip(np.asarray(state.tokens), np.asarray(state.length), prompts, strict=True)
    return [row[len(prompt) : length].tolist() for row, length, prompt in rows]


def greedy(
    prompt: Sequence[int], budget: int, eos: Collection[int] = (), config: LlamaConfig = TARGET
) -> list[int]:
    """What plain greedy decoding of the target must give."""
    return list(_greedy(config, tuple(prompt), budget, tuple(eos)))


@functools.cache
def _greedy(config: LlamaConfig, prompt: tuple[int, ...], budget: int, eos: tuple[int, ...]) -> list[int]:
    return reference.greedy(config, params(config), prompt, budget, eos)


def log_probs(prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """Of each token of a text after a prompt, under the target's raw law, by the slow decoder."""
    logits = reference.forward(TARGET, params(), [*prompt, *text])[len(prompt) - 1 : -1]
    laws = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return laws[range(len(text)), text]


def committed(cache: KVCache, row: int, length: int) -> list[np.ndarray]:
    """A copy of what a cache holds of a row's first `length` positions, whatever its layout."""
    arrays = [np.asarray(array) for array in jax.tree.leaves(cache.layers)]
    return [a.reshape(len(cache.rope_length), -1, *a.shape[-2:])[row, :, :length] for a in arrays]


# The engine

EOS = 10
TOKENS = ["<s>", " ", "a", "b", "c", "d", "e", "e ", "ba", "cd", "</s>", "ab", "ab "]
MERGES = [("a", "b"), ("b", "a"), ("c", "d"), ("e", " "), ("ab", " ")]
# What `generate` is told, by method.
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {"method": "autoregressive"},
    "ngram": {"method": "ngram", "num_draft_tokens": K},
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
}


def engine_config(config: LlamaConfig = TARGET) -> LlamaConfig:
    """As `language_model` has it."""
    return dataclasses.replace(config, eos_token_ids=(EOS,))


def language_model(config: LlamaConfig = TARGET, name: str = "tiny", **changes: Any) -> LanguageModel:
    """The model of `params(TARGET)` with a tokenizer of letters and pairs of letters."""
    config = dataclasses.replace(engine_config(config), **changes)
    weights = params(TARGET) if config.num_layers == TARGET.num_layers else params(SMALL)
    return LanguageModel(config, weights, tokenizer(), name=name)


@functools.cache
def tokenizer() -> Tokenizer:
    """Merges letters into pairs, so that a text does not tell where its tokens end."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE({token: index for index, token in enumerate(TOKENS)}, MERGES))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def options(method: str) -> dict[str, Any]:
    """What `LanguageModel.generate` is told for a name in `METHODS`."""
    if method.startswith(("asd", "draft-verify", "layerskip", "s2d")):
        drafter, weights = drafter_of(method, "confidence", engine_config())
        return {"method": drafter if weights is None else (drafter, weights)}
    return METHODS[method] | ({"draft": small_model()} if method == "draft-model" else {})


@functools.cache
def small_model() -> LanguageModel:
    """The draft of `draft-model`."""
    return language_model(SMALL, "small")


# Laws


def warp(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities [V] of one row's logits [V] after temperature, top-k, top-p and min-p, step by step."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    probs = _normalised(np.exp((logits - logits.max()) / temperature))
    if top_k > 0:
        probs = _normalised(np.where(probs >= np.sort(probs)[::-1][min(top_k, len(probs)) - 1], probs, 0))
    if top_p < 1:
        kept, mass = np.zeros(len(probs), bool), 0.0
        for token in np.argsort(-probs, kind="stable"):
            if mass < top_p:
                kept[token] = True
            mass += probs[token]
        probs = _normalised(np.where(kept, probs, 0))
    return _normalised(np.where(probs >= min_p * probs.max(), probs, 0))


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def text_law(
    next_probs: Callable[[tuple[int, ...]], np.ndarray], length: int, eos: Collection[int] = ()
) -> dict[tuple[int, ...], float]:
    """The probability of every text of `length` tokens, or ended by one of `eos` before."""

    def texts(prefix: tuple[int, ...], mass: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(prefix) == length or (prefix and prefix[-1] in eos):
            yield prefix, mass
            return
        for token, prob in enumerate(next_probs(prefix)):
            if prob > 0:
                yield from texts((*prefix, token), mass * prob)

    return dict(texts((), 1.0))


def distance(law: dict[Any, float], other: dict[Any, float]) -> float:
    """Total variation."""
    return sum(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in {*law, *other}) / 2


def chi_square(samples: Sequence[Any], law: dict[Any, float]) -> float:
    """The p-value of samples under a law, rare outcomes taken together."""
    counts: dict[Any, int] = {}
    for sample in samples:
        counts[sample] = counts.get(sample, 0) + 1
    assert set(counts) <= set(law), "an impossible outcome"
    cells = sorted((len(samples) * prob, counts.get(text, 0)) for text, prob in law.items())
    pooled = [[0.0, 0]]
    for expected, count in cells:
        if pooled[-1][0] >= 8:
            pooled.append([0.0, 0])
        pooled[-1][0] += expected
        pooled[-1][1] += count
    statistic = sum((count - expected) ** 2 / expected for expected, count in pooled)
    return float(stats.chi2.sf(statistic, max(len(pooled) - 1, 1)))


# Each method's drafter and stop rule among those above: what the conformance suite tries of it.
OF_METHOD = {
    "adaspeed": ("layerskip", "product"),
    "adaspeed-probe": ("layerskip", "probe"),
    "asd": ("asd", "adaptive"),
    "autoregressive": ("autoregressive", "-"),
    "draft-model": ("draft-model", "constant"),
    "draft-verify": ("draft-verify", "adaptive"),
    "layerskip": ("layerskip", "constant"),
    "ngram": ("ngram", "-"),
    "s2d": ("s2d", "adaptive"),
}
