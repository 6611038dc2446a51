"""Scores equal the log-probabilities of the cache-free reference."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxspec import Score
from jaxspec.engine.language_model import LanguageModel
from jaxspec.testing import reference
from tests import refused, tiny

# Continuations that cross chunks of 32 and buckets, next to short ones.
SIZES = ((1, 1), (3, 2), (40, 5), (30, 40), (2, 70))


def texts():
    rng = np.random.default_rng(3)
    draw = lambda size: rng.integers(0, tiny.TARGET.vocab_size, size).tolist()  # noqa: E731
    return [draw(before) for before, _ in SIZES], [draw(after) for _, after in SIZES]


def expected(lm: LanguageModel, context, continuation) -> tuple[np.ndarray, ...]:
    tokens = [*context, *continuation]
    logits = reference.forward(lm.config, reference.as_float64(lm.params), tokens)[len(context) - 1 : -1]
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    which = np.arange(len(continuation))
    return log_probs[which, continuation], logits.argmax(axis=-1), log_probs.max(axis=-1)


def test_scores_equal_the_reference(lm):
    contexts, continuations = texts()
    before = lm.executables.num_compilations
    found = lm.score(contexts, continuations, max_batch=2)
    assert lm.executables.num_compilations - before == 2  # capacities of 32 and 128
    for score, context, continuation in zip(found, contexts, continuations, strict=True):
        log_probs, top_tokens, top_log_probs = expected(lm, context, continuation)
        assert score.tokens == continuation
        np.testing.assert_allclose(score.log_probs, log_probs, rtol=0, atol=2e-5)
        assert score.top_tokens == top_tokens.tolist()
        np.testing.assert_allclose(score.top_log_probs, top_log_probs, rtol=0, atol=2e-5)
        assert score.greedy == (top_tokens == continuation).tolist()
        assert score.log_prob == pytest.approx(log_probs.sum(), abs=1e-4)
    assert lm.score(contexts[3], continuations[3]).log_probs == pytest.approx(found[3].log_probs, abs=1e-5)


def test_a_greedy_text_is_greedy(lm):
    context = lm.encode("ab cd")
    result = lm.generate(context, max_new_tokens=40, logprobs=True, ignore_eos=True, method="ngram")
    score = lm.score(context, result.tokens)
    assert isinstance(score, Score)
    assert score.is_greedy
    records = [record.log_prob for record in result.token_records]
    np.testing.assert_allclose(score.log_probs, records, rtol=0, atol=2e-5)
    assert not lm.score(context, [*result.tokens[:-1], (result.tokens[-1] + 1) % 13]).is_greedy


def test_texts_are_cut_where_the_context_ends(lm):
    whole, context = lm.encode("ab cd ab"), lm.encode("ab ")
    assert lm.score("ab ", "cd ab").tokens == whole[len(context) :]
    assert [one.tokens for one in lm.score(["ab "], ["cd ab"])] == [whole[len(context) :]]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("a", "b"),
        ("ab", " cd"),
        ("ab ", "cd"),
        ("abe", " ab"),
        ("abe ", "ab"),
        ("cdc", "d"),
        ("ab c", "d ab"),
        ("b", "a"),
    ],
)
def test_each_character_of_a_continuation_is_scored_or_it_is_refused(lm, context, continuation):
    """A border inside a token of the whole text would leave the token's log-probability out."""
    whole, own = lm.encode(context + continuation), lm.encode(context)
    if whole[: len(own)] == own:
        score = lm.score(context, continuation)
        assert lm.tokenizer.decode(score.tokens) == continuation
        assert score.log_prob == pytest.approx(lm.score(own, whole[len(own) :]).log_prob, abs=1e-5)
    else:
        message = (
            f"contexts[0] ends inside a token of the whole text, between {context!r} and {continuation!r};"
        )
        with refused(re.escape(message)):
            lm.score(context, continuation)
        with refused(r"contexts\[1\] ends inside a token"):
            lm.score(["cd", context], ["ab", continuation])


def test_the_last_token_of_a_full_context_is_scored(lm):
    longest = lm.config.context_length
    score = lm.score([1] * longest, [2])
    assert len(score.log_probs) == 1
    with refused(f"have {longest + 2} tokens, the model's context is {longest}"):
        lm.score([1] * longest, [2, 3])


@pytest.mark.parametrize(
    ("contexts", "continuations", "message"),
    [
        (["ab", "cd"], ["ab"], "contexts has 2 texts and continuations 1"),
        ("ab", ["cd"], "contexts has 1 texts and continuations 1"),
        ([], [], "prompts is empty"),
        ([[1]], ["ab"], "give both as texts or both as token ids"),
        ([[1]], [[]], "has 1 tokens, 1 with its continuation"),
        ([[1]], [[99]], "token id 99 of"),
        ([[{"role": "user", "content": "ab"}]], [[1]], "is messages; give texts or token ids"),
    ],
)
def test_wrong_arguments_are_refused(lm, contexts, continuations, message):
    with refused(message):
        lm.score(contexts, continuations)
