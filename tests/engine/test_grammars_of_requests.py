"""Grammars of requests: each text is the one that the request has alone, and no grammar compiles a program."""

from __future__ import annotations

import pytest

from jaxspec.engine.scheduler import Scheduler
from jaxspec.grammar.table import TokenTable
from tests import refused, tiny
from tests.random_grammars import allowed, table

PROMPTS = ([1, 2, 3], [5], [7, 1, 7, 1, 7, 1, 7, 2], [4, 4])
OPTIONS = {"max_new_tokens": 12, "method": "ngram"}


@pytest.fixture(scope="module")
def lm():
    return tiny.language_model()


def check(one: TokenTable | None, result, eos=(tiny.EOS,), budget=12) -> None:
    """Checks that a text follows its grammar up to its end, and the reason of the end."""
    if one is None:
        return
    tokens = result.tokens
    ended = bool(tokens) and tokens[-1] in eos
    for place, token in enumerate(tokens):
        found = allowed(one, tokens[:place], eos, 13)
        assert found is not None, "the text goes on where its grammar allows nothing but the end"
        assert found[token], f"token {place} is forbidden"
    ended = ended or allowed(one, tokens, eos, 13) is None
    assert result.finish_reason == ("eos" if ended else "length")
    assert ended or len(tokens) == budget


def test_rows_have_grammars_of_their_own_and_the_second_ones_compile_nothing(lm):
    tables = [table(seed) for seed in range(7)]
    first = [tables[0], None, tables[1], tables[2]]
    results = lm.generate(PROMPTS, grammar=first, **OPTIONS)
    for one, result in zip(first, results, strict=True):
        check(one, result)
    assert results[1].tokens == tiny.greedy(PROMPTS[1], 12, (tiny.EOS,))
    compiled = lm.executables.num_compilations
    second = tables[3:7]
    for one, result in zip(second, lm.generate(PROMPTS, grammar=second, **OPTIONS), strict=True):
        check(one, result)
    assert lm.executables.num_compilations == compiled


@pytest.mark.full
def test_a_scheduled_text_is_that_of_the_request_alone(lm):
    tables = [table(11), None, table(12), table(13)]
    alone = [
        lm.generate(prompt, grammar=one, temperature=temperature, seed=5, **OPTIONS)
        for prompt, one in zip(PROMPTS, tables, strict=True)
        for temperature in (0.0, 1.0)
    ]
    scheduler, found = Scheduler(lm, max_batch=2), {}
    waiting = [
        dict(prompt=prompt, grammar=one, temperature=temperature, seed=5, **OPTIONS)
        for prompt, one in zip(PROMPTS, tables, strict=True)
        for temperature in (0.0, 1.0)
    ]
    numbers = [scheduler.add(**one) for one in waiting[:3]]
    while not scheduler.idle or len(numbers) < len(waiting):
        if len(numbers) < len(waiting):  # the others join while the first ones run
            numbers.append(scheduler.add(**waiting[len(numbers)]))
        for number, piece in scheduler.step():
            if piece.result is not None:
                found[number] = piece.result
    assert [found[number].tokens for number in numbers] == [one.tokens for one in alone]
    assert [found[number].finish_reason for number in numbers] == [one.finish_reason for one in alone]


@pytest.mark.full
def test_streams_and_exact_texts_and_texts_without_end_tokens(lm):
    one = table(14)
    result = lm.generate(PROMPTS[0], grammar=one, **OPTIONS)
    *_, last = lm.stream(PROMPTS[0], grammar=one, **OPTIONS)
    assert last.result.tokens == result.tokens
    assert lm.generate(PROMPTS[0], grammar=one, exact=True, **OPTIONS).tokens == result.tokens
    check(one, lm.generate(PROMPTS[0], grammar=one, ignore_eos=True, **OPTIONS), eos=())
    # The reported log-probabilities are the model's own.
    scored = lm.generate(PROMPTS[0], grammar=one, logprobs=True, **OPTIONS)
    own = lm.score(PROMPTS[0], scored.tokens).log_probs
    assert [record.log_prob for record in scored.token_records] == pytest.approx(own, abs=1e-4)


@pytest.mark.full
def test_a_turn_of_a_conversation_begins_its_grammar(lm):
    one, other = table(15), table(16)
    chat = tiny.language_model(chat_template="{% for m in messages %}{{ m.content }}d{% endfor %}")
    talk = chat.chat(max_new_tokens=8, method="ngram")
    for text, its in (("ab", one), ("cab ed", other), ("ab", None)):
        messages = [*talk.messages, {"role": "user", "content": text}]
        talk.set(grammar=its)
        answer = talk.send(text)
        assert answer.tokens == chat.generate(messages=messages, grammar=its, max_new_tokens=8).tokens
        check(its, answer, budget=8)


def test_what_is_no_grammar_is_refused(lm):
    with refused(r"give a jaxspec.grammar.Grammar or its table"):
        lm.generate(PROMPTS[0], grammar="[a-z]+", **OPTIONS)
