"""A replay counts what the engine counts: on the same texts, under the same rules."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers import replay
from benchmarks.papers.oracle import Oracle
from jaxspec.drafting.draft_model_drafter import DraftModel
from jaxspec.drafting.layerskip_drafter import LayerSkip
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import llama
from jaxspec.stopping import (
    AdaptiveGamma,
    AdaptiveLength,
    ConfidenceBelow,
    Constant,
    DraftProbability,
    FixedGamma,
    Probe,
    ProductBelow,
)
from jaxspec.testing.models import DEEP, EOS, SMALL, engine_config, params, tokenizer

K, NEW = 5, 40
ENDS = (EOS, 5)
PROMPTS = ([2, 3, 4], [5, 6, 2, 4, 3], [7], [11, 2, 9, 1])
PROBE = Probe(jnp.linspace(-1.0, 1.5, DEEP.hidden_size), jnp.float32(0.3), jnp.float32(DEEP.rms_norm_eps))
RULES = {
    "constant": lambda estimates: Constant(),
    "confidence": lambda estimates: ConfidenceBelow(AdaptiveGamma(0.6, epsilon=0.3), estimates[0]),
    "product": lambda estimates: ProductBelow(AdaptiveGamma(0.3, epsilon=0.3), estimates[0]),
    "fixed": lambda estimates: ProductBelow(FixedGamma(0.4), estimates[0]),
    "probe": lambda estimates: ProductBelow(AdaptiveGamma(0.4, epsilon=0.3), estimates[1]),
    "length": lambda estimates: AdaptiveLength(2, maximum=K),
}


@pytest.fixture(scope="module")
def lm():
    # Two tokens end a text, so that some of the texts end before their budget.
    config = dataclasses.replace(engine_config(DEEP), eos_token_ids=ENDS)
    return LanguageModel(config, params(DEEP), tokenizer())


def recorded(lm, draft):
    estimates = (DraftProbability(), PROBE)
    options = {"method": "autoregressive", "max_new_tokens": NEW, "ignore_eos": True}
    texts = [lm.generate([prompt], **options)[0].tokens for prompt in PROMPTS]
    return [
        replay.record(lm, prompt, text, draft, estimates, K)
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]


@pytest.fixture(scope="module")
def exits(lm):
    return recorded(lm, (lm.config.truncated(1), llama.truncate(lm.params, 1)))


@pytest.mark.full
@pytest.mark.representatives("length-3", "probe-5")
@pytest.mark.parametrize(
    ("name", "length"),
    [*((rule, 3) for rule in RULES), ("constant", 1), ("length", 1), ("product", K), ("probe", K)],
)
def test_counts_are_those_of_the_engine(lm, exits, name, length):
    drafter = LayerSkip(lm.config, 1, RULES[name]((DraftProbability(), PROBE)), length)
    rule = RULES[name]((replay.Recorded(0), replay.Recorded(1)))
    wrong = 0
    for prompt, record in zip(PROMPTS, exits, strict=True):
        result = lm.generate([prompt], method=(drafter, None), max_new_tokens=NEW)[0]
        counts = replay.replay(record, rule, length)
        statistics = result.statistics
        assert counts.tokens == statistics.num_tokens - 1
        assert counts.rounds.sum() == statistics.num_rounds
        assert counts.drafted[0] == statistics.num_draft_tokens
        assert counts.accepted[0] == statistics.num_accepted_tokens
        assert (counts.gamma is None) == (result.gamma is None)
        if result.gamma is not None:
            np.testing.assert_allclose(np.clip(counts.gamma[0], 0, 1), result.gamma, atol=1e-6)
        wrong += statistics.num_draft_tokens - statistics.num_accepted_tokens
    assert wrong > 5


@pytest.mark.full
def test_a_draft_model_is_replayed_alike(lm):
    draft = (engine_config(SMALL), params(SMALL))
    rule = ProductBelow(AdaptiveGamma(0.3, epsilon=0.3))
    drafter = DraftModel(draft[0], rule, K)
    for prompt, record in zip(PROMPTS, recorded(lm, draft), strict=True):
        result = lm.generate([prompt], method=(drafter, draft[1]), max_new_tokens=NEW)[0]
        counts = replay.replay(record, ProductBelow(AdaptiveGamma(0.3, epsilon=0.3), replay.Recorded()), K)
        assert counts.drafted[0] == result.statistics.num_draft_tokens
        assert counts.accepted[0] == result.statistics.num_accepted_tokens


def test_texts_end_at_their_end_of_text_token(lm, exits):
    ends = [int(record.end) for record in exits]
    assert min(ends) < NEW
    for prompt, end in zip(PROMPTS, ends, strict=True):
        tokens = lm.generate([prompt], method="autoregressive", max_new_tokens=NEW)[0].tokens
        assert len(tokens) == end
        assert tokens[-1] in ENDS or end == NEW


def test_many_thresholds_are_replayed_at_once(exits):
    gammas = jnp.array([0.1, 0.3, 0.9])
    together = replay.replay(exits[0], ProductBelow(AdaptiveGamma(gammas), replay.Recorded()), K, 3)
    for row, gamma in enumerate(gammas):
        alone = replay.replay(exits[0], ProductBelow(AdaptiveGamma(gamma), replay.Recorded()), K)
        assert together.rounds[row].tolist() == alone.rounds[0].tolist()
    assert len({tuple(row) for row in together.rounds.tolist()}) > 1


def test_no_draft_of_the_oracle_goes_on_after_a_wrong_token(exits):
    for record in exits:
        oracle = replay.replay(record, Oracle(record.right), K)
        constant = replay.replay(record, Constant(), K)
        assert oracle.accepted[0] == constant.accepted[0] or oracle.drafted[0] < constant.drafted[0]
        longer = oracle.rounds[0] @ np.arange(K + 1) - oracle.accepted[0]
        assert longer <= oracle.rounds[0, 1]
