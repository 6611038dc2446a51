"""Real weights: stories260K, and llama2xs of the same tokenizer as its draft, on openings of stories."""

from __future__ import annotations

import functools

import pytest

import jaxspec
from jaxspec.testing import reference
from tests.data import MODELS, SMOLLM2

TARGET, DRAFT = MODELS / "stories260K", MODELS / "llama2xs"
OPENINGS = [
    "Once upon a time, there was a little girl named Lily.",
    "One day, a dog found a big red ball in the park.",
    "Tom and Ben were best friends.",
    "The old bear lived in a cave near the river.",
]
BUDGET = 200
pytestmark = pytest.mark.skipif(not DRAFT.is_dir(), reason="the shared data is not here")


@functools.cache
def target() -> jaxspec.LanguageModel:
    return jaxspec.load(TARGET)


@functools.cache
def plain() -> list[list[int]]:
    rows = target().generate(OPENINGS, max_new_tokens=BUDGET, ignore_eos=True)
    return [row.tokens for row in rows]


@pytest.mark.full
def test_plain_decoding_is_the_slow_decoder():
    lm = target()
    for opening, tokens in zip(OPENINGS, plain(), strict=True):
        prompt = lm.encode(opening)
        logits = reference.forward(lm.config, lm.params, [*prompt, *tokens])
        assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == tokens


@pytest.mark.slow
@pytest.mark.representatives("draft-model")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "ngram"},
        {"method": "draft-model", "draft": str(DRAFT), "num_draft_tokens": 4},
        {
            "method": "draft-model",
            "draft_exit": 3,
            "num_draft_tokens": 6,
            "stop_rule": ("confidence", "adaptive-length"),
        },
    ],
    ids=["ngram", "draft-model", "draft-exit"],
)
def test_every_method_writes_the_same_stories(options):
    rows = target().generate(OPENINGS, max_new_tokens=BUDGET, ignore_eos=True, **options)
    assert [row.tokens for row in rows] == plain()
    assert all(row.statistics.num_accepted_tokens > 0 for row in rows)


@pytest.mark.full
def test_a_draft_of_another_family():
    """SmolLM2, whose byte-level tokens are those of SentencePiece with other signs for a space and other ids."""
    lm = target()
    rows = lm.generate(
        OPENINGS[:2],
        max_new_tokens=24,
        ignore_eos=True,
        method="draft-model",
        draft=SMOLLM2 / "SmolLM2-135M-Instruct.Q4_1.gguf",
        num_draft_tokens=3,
    )
    assert [row.tokens for row in rows] == [tokens[:24] for tokens in plain()[:2]]
    assert sum(row.statistics.num_accepted_tokens for row in rows) > 0
