"""`warm_up` compiles what later calls need: few programs, which texts of other lengths share."""

from __future__ import annotations

import pytest

from jaxspec.engine.scheduler import Scheduler
from jaxspec.programs import buckets
from tests import refused, tiny

LONG = [3, 4, 5] * 12


def test_later_calls_compile_nothing():
    lm = tiny.language_model()
    lm.warm_up(batch_sizes=(1, 2), max_tokens=200, method="ngram")
    assert lm.executables.num_compilations == 4
    for batch in ([[3, 4, 5]], [LONG], [[3, 4, 5], LONG]):
        for new in (3, 30, 120):
            lm.generate(batch, method="ngram", max_new_tokens=new)
    assert lm.executables.num_compilations == 4
    lm.generate([3, 4, 5], method="autoregressive", max_new_tokens=3)  # another method has other programs
    assert lm.executables.num_compilations == 6


@pytest.mark.full
def test_a_text_may_grow_and_auto_has_its_program():
    lm = tiny.language_model()
    lm.warm_up(
        max_tokens=1000 if lm.config.max_position_embeddings >= 1000 else 100, method="auto", among="ngram"
    )
    compiled = lm.executables.num_compilations
    result = lm.generate([3, 4, 5], max_new_tokens=50, method="auto", among="ngram")
    assert "being compiled" not in result.drafted_by
    assert lm.executables.num_compilations == compiled


@pytest.mark.parametrize(
    "method", [pytest.param("ngram", marks=pytest.mark.full), pytest.param("auto", marks=pytest.mark.slow)]
)
def test_after_the_scheduler_is_warm_no_request_compiles(monkeypatch, method):
    """Whatever its options, its length and the requests beside it."""
    monkeypatch.setattr(buckets, "START_CAPACITY", buckets.MIN_CAPACITY)
    monkeypatch.setattr(buckets, "POLL_CHUNKS", 1)  # longer prompts are fed in chunks
    lm = tiny.language_model()
    scheduler = Scheduler(lm, max_batch=4)
    scheduler.warm_up(method=method)
    compiled, context = lm.executables.num_compilations, lm.config.context_length
    assert context >= 3 * buckets.MIN_CAPACITY
    kinds = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"logprobs": True, "top_logprobs": 2 * (method == "ngram"), "min_p": 0.1},
    ]
    for number, length in enumerate([1, 2, 40, context - 9, 3, 1, 70, 5, 30, 2, 9, 33]):
        options = {"seed": number, "stop_token_ids": [4] * (number % 2), **kinds[number % len(kinds)]}
        scheduler.add([3 + number % 5] * length, method=method, max_new_tokens=5 + number % 3, **options)
        for _ in range(number % 4):
            scheduler.step()
    scheduler.add([5], method=method, max_new_tokens=context - 1, ignore_eos=True)
    while not scheduler.idle:
        assert not [one for _, one in scheduler.step() if isinstance(one, Exception)]
    assert lm.executables.num_compilations == compiled


def test_after_a_conversation_is_warm_no_turn_compiles():
    lm = tiny.language_model(chat_template="{% for one in messages %}{{ one.content }}e {% endfor %}")
    conversation = lm.chat(method="ngram", max_new_tokens=8)
    conversation.warm_up()
    compiled = lm.executables.num_compilations
    for text in ("ab", "cd", "ab cd"):
        conversation.send(text)
    assert conversation.statistics[-1].num_reused_tokens > 0
    assert lm.executables.num_compilations == compiled


@pytest.mark.parametrize(
    ("given", "words"), [({"max_tokens": 1}, "max_tokens is 1"), ({"batch_sizes": (0,)}, "has 0")]
)
def test_wrong_numbers_are_refused(given, words):
    with refused(words):
        tiny.language_model().warm_up(**given)
