"""Self-speculation with useful drafts: a small model, trained here on a language of a few words."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.drafting.asd_drafter import ASDDrafter
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.numerics import rms_norm
from jaxspec.model.plan import LayerPlan
from jaxspec.stopping import AdaptiveGamma, FixedGamma, Probe, ProductBelow

CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=48,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_position_embeddings=256,
)
# An early exit that predicts most letters correctly, but many words wrongly.
EXIT, SPACE = 1, 7
# Prompt and text are not longer than the training texts.
LENGTH, BUDGET = 56, 32
WORDS = np.random.default_rng(3).integers(0, SPACE, (16, 4))
# Unlike in other tests, most of the time is computation, not compilation.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})


def texts(rows: int, length: int, seed: int) -> np.ndarray:
    """Returns texts of four-letter words with spaces; two consecutive words usually determine the next."""
    rng = np.random.default_rng(seed)
    size = length // 5 + 2
    chosen = rng.integers(0, len(WORDS), (rows, size))
    for column in range(2, size):
        usual = (5 * chosen[:, column - 1] + 3 * chosen[:, column - 2] + 1) % len(WORDS)
        chosen[:, column] = np.where(rng.random(rows) < 0.9, usual, chosen[:, column])
    letters = np.concatenate([WORDS[chosen], np.full((rows, size, 1), SPACE)], axis=2)
    return letters.reshape(rows, -1)[:, :length].astype(np.int32)


def exits(params, tokens, keep=(1.0,) * CONFIG.num_layers):
    """Returns the residual stream after each layer, [L, B, T, D]; `keep` scales the output of each layer."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, seen = llama.embed(CONFIG, params, tokens), []
    for layer, weights in enumerate(params["layers"]):
        ran = llama.run_block(
            CONFIG, CONFIG.layer_type(0), weights, hidden, positions, jnp.zeros_like(tokens)
        )
        hidden = hidden + keep[layer] * (ran - hidden)
        seen.append(hidden)
    return jnp.stack(seen)


@pytest.fixture(scope="session")
def standin() -> LanguageModel:
    """A model trained like LayerSkip's: with exits after every layer and random layer dropout."""
    steps = 220
    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, steps))
    share = jnp.array([0.2, 0.4, 0.4, 1.0])[:, None, None]

    def loss(params, tokens, key):
        kept = jax.random.bernoulli(key, jnp.array([1.0, 0.9, 0.8, 0.8]))
        logits = llama.logits(CONFIG, params, exits(params, tokens[:, :-1], kept))
        return jnp.mean(share * optax.softmax_cross_entropy_with_integer_labels(logits, tokens[None, :, 1:]))

    @jit
    def train(params, data):
        def step(carry, batch):
            params, state = carry
            gradient = jax.grad(loss)(params, *batch)
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(1), steps)
        (params, _), _ = jax.lax.scan(step, (params, optimiser.init(params)), (data, keys))
        return params

    data = texts(steps * 12, LENGTH, seed=0).reshape(steps, 12, LENGTH)
    params = train(llama.init_params(CONFIG, jax.random.key(0)), jnp.asarray(data))
    return LanguageModel(CONFIG, params, name="stand-in")


def generate(standin, drafter) -> list[Any]:
    """Returns results for prompts of different lengths, two at a time."""
    prompts = [text[: 24 - 11 * (row % 2)].tolist() for row, text in enumerate(texts(12, 24, seed=9))]
    return [
        result
        for at in range(0, len(prompts), 2)
        for result in standin.generate(prompts[at : at + 2], method=drafter, max_new_tokens=BUDGET)
    ]


@pytest.fixture(scope="module")
def plain(standin) -> list[list[int]]:
    """The texts of plain decoding, mostly words."""
    rows = generate(standin, "autoregressive")
    known = {tuple(word) for word in WORDS.tolist()}
    words = [
        tuple(map(int, word))
        for row in rows
        for word in "".join(map(str, row.tokens)).split(str(SPACE))[1:-1]
    ]
    assert np.mean([word in known for word in words]) > 0.75
    return [row.tokens for row in rows]


def drafted(standin, drafter, plain) -> tuple[float, float, float]:
    """Checks that a method's texts equal plain decoding's; returns acceptance rate, drafts and tokens per round."""
    rows = generate(standin, drafter)
    assert [row.tokens for row in rows] == plain
    drafts, accepted, rounds = (
        sum(getattr(row.statistics, name) for row in rows)
        for name in ("num_draft_tokens", "num_accepted_tokens", "num_rounds")
    )
    return accepted / drafts, drafts / rounds, accepted / rounds + 1


PLAN = LayerPlan.skipping(4, attention=[2], mlp=[1])
DRAFTERS = {
    "asd": ASDDrafter(CONFIG, 0.95, 3, 1, num_draft_tokens=3),
    "draft-verify": DraftVerifyDrafter(CONFIG, PLAN.traced(), num_draft_tokens=3),
    "adaspeed": LayerSkipDrafter(CONFIG, 2, ProductBelow(AdaptiveGamma(0.5)), 3),
}


@pytest.mark.full
@pytest.mark.representatives("asd", "adaspeed")
@pytest.mark.parametrize("method", DRAFTERS)
def test_most_of_what_is_drafted_stands(standin, plain, method):
    rate, _, length = drafted(standin, DRAFTERS[method], plain)
    assert rate > 0.55
    assert length > 1.7


@pytest.fixture(scope="module")
def fitted(standin) -> tuple[np.ndarray, float]:
    """Returns v and b of a probe for agreement of the exit with the whole model, by logistic regression."""
    states, agrees = exit_states(standin, seed=21)

    def loss(probe):
        return jnp.mean(optax.sigmoid_binary_cross_entropy(states @ probe[0] + probe[1], agrees))

    @jit
    def fit(probe):
        optimiser = optax.adam(0.05)

        def step(carry, _):
            probe, state = carry
            updates, state = optimiser.update(jax.grad(loss)(probe), state)
            return (optax.apply_updates(probe, updates), state), None

        return jax.lax.scan(step, (probe, optimiser.init(probe)), length=300)[0][0]

    v, b = fit((jnp.zeros(CONFIG.hidden_size), jnp.zeros(())))
    return np.asarray(v), float(b)


def exit_states(standin, seed: int) -> tuple[jax.Array, jax.Array]:
    """Returns the exit's normalised states [N, D] in texts, and whether the exit agrees with the last layer."""
    hidden = jax.jit(exits)(standin.params, jnp.asarray(texts(32, 40, seed)))
    best = jnp.argmax(llama.logits(CONFIG, standin.params, hidden), axis=-1)
    states = rms_norm(hidden[EXIT - 1], standin.params["norm"], CONFIG.rms_norm_eps)
    return states.reshape(-1, CONFIG.hidden_size), (best[EXIT - 1] == best[-1]).reshape(-1)


@pytest.mark.full
def test_a_probe_knows_better_than_chance(standin, fitted):
    """On held-out texts it is better than the base rate, and ranks correctly."""
    states, agrees = map(np.asarray, exit_states(standin, seed=22))
    scores = states @ fitted[0] + fitted[1]
    base = agrees.mean()
    assert 0.4 < base < 0.95
    likelihood = np.log1p(np.exp(np.where(agrees, -scores, scores))).mean()
    assert likelihood < 0.95 * -(base * np.log(base) + (1 - base) * np.log(1 - base))
    in_order = (scores[agrees][:, None] > scores[~agrees][None]).mean()
    assert in_order > 0.65


@pytest.mark.full
def test_a_probe_stops_drafts_that_would_fail(standin, plain, fitted):
    """AdaSPEED with a probe drafts more than a constant length of two, and a larger share is accepted."""
    v, b = fitted

    def with_probe(gamma: float, direction: jax.Array, bias: float) -> tuple[float, float, float]:
        probe = Probe(direction, jnp.float32(bias), jnp.float32(CONFIG.rms_norm_eps))
        return drafted(
            standin,
            LayerSkipDrafter(CONFIG, EXIT, ProductBelow(FixedGamma(jnp.float32(gamma)), probe), 5),
            plain,
        )

    direction = jnp.asarray(v) * standin.params["norm"]
    fitted_rate, fitted_drafts, length = with_probe(0.6, direction, b)
    blind_rate, blind_drafts, _ = with_probe(0.6, jnp.zeros_like(direction), 0.85)  # 0.7, twice below γ
    never_rate, never_drafts, _ = with_probe(0.0, direction, b)
    assert blind_drafts <= 2 < never_drafts
    assert fitted_drafts > blind_drafts
    assert fitted_rate > blind_rate
    assert fitted_rate > never_rate + 0.05
    assert length > 2
