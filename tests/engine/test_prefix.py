"""Kept prefixes: a text that continues from copied caches equals the same text fed from its first token."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxspec.decoding import Caches
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.host.arguments import num_bytes
from jaxspec.model import cache as kv
from jaxspec.programs import buckets, compiled
from jaxspec.programs.executables import Executables
from jaxspec.session.prefix import Owner, Prefix, PrefixStore, num_common, shared_beginning
from tests import refused, tiny

SYSTEM = [3, 5, 8, 2, 9, 4, 7, 11, 6, 3, 5, 10, 2, 8, 12, 4, 9, 9, 3, 7]
# With an own part of different lengths, one that shares less, and one that shares nothing.
PROMPTS = [
    [*SYSTEM, 12, 2],
    [*SYSTEM, 6, 6, 4, 2, 7, 8, 3],
    [*SYSTEM[:9], 1, 2],
    [5, 5, 2, 1],
    [*SYSTEM, 12, 2, 4, 5],
]
# Eight devices divide it.
SPREAD = dataclasses.replace(tiny.TARGET, vocab_size=16, num_heads=8)
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": True}
# Their mask follows the tokens that were fed, or the rows of a batch choose together.
OTHER_DRAFTS = (
    *("asd", "asd-static", "asd-shared", "asd-vocab"),
    *("choosing", "choosing-asd", "choosing-heads", "choosing-recycling", "choosing-tree", "choosing-trees"),
)
# Their states and caches are of different kinds.
REPRESENTATIVES = ("ngram", "eagle3")


EXECUTABLES = Executables()


def model(config=tiny.TARGET, prefix_cache=2**26, min_tokens=4) -> LanguageModel:
    lm = LanguageModel(
        tiny.engine_config(config), tiny.params(config), tiny.tokenizer(), prefix_cache=prefix_cache
    )
    lm.executables = EXECUTABLES
    if lm.prefixes is not None:
        lm.prefixes.min_tokens = min_tokens
    return lm


def fed_by(lm, monkeypatch) -> list[int]:
    """Returns a list that gets the number of tokens that each prefill feeds, over all rows."""
    fed, call = [], lm.executables.call

    def counting(function, *arguments, **static):
        if function in (compiled.prefill, compiled.end_prefill):
            request = arguments[2]
            start = 0 if request.start is None else np.asarray(request.start)
            fed.append(int((np.asarray(request.length) - start).sum()))
        return call(function, *arguments, **static)

    monkeypatch.setattr(lm.executables, "call", counting)
    return fed


def drafts(result):
    """Returns each token's round, whether it was drafted, and how many tokens were."""
    return [(one.round, one.drafted, one.proposed) for one in result.token_records]


def check_equal(name, results, fresh):
    for result, own in zip(results, fresh, strict=True):
        assert result.tokens == own.tokens
        for one, other in zip(result.token_records, own.token_records, strict=True):
            assert abs(one.log_prob - other.log_prob) < 2e-5
        if name not in OTHER_DRAFTS:
            assert drafts(result) == drafts(own)
            counts, expected = result.statistics, own.statistics
            assert counts.acceptance_histogram == expected.acceptance_histogram


@pytest.mark.representatives(*REPRESENTATIVES)
@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_texts_equal_those_fed_from_the_first_token(name):
    """Rows of one batch, rows that are refilled, and a second call, with the drafts of each round."""
    config = tiny.config_of(name)
    method = tiny.drafter_of(name, config=config)
    plain, lm = model(config, None), model(config)
    fresh = plain.generate(PROMPTS, method=method, max_batch=2, **OPTIONS)
    for max_batch, least in ((2, 38), (5, 80)):
        results = lm.generate(PROMPTS, method=method, max_batch=max_batch, **OPTIONS)
        check_equal(name, results, fresh)
        assert sum(result.statistics.num_reused_tokens for result in results) >= least
    assert [result.statistics.num_reused_tokens for result in results] == [21, 26, 10, 0, 23]


def test_a_shared_beginning_is_fed_once(monkeypatch):
    """Also that of a subset of the prompts, in the first batch and among requests that wait."""
    lm = model()
    fed = fed_by(lm, monkeypatch)
    lm.generate(PROMPTS, method="ngram", **OPTIONS)
    # The beginning that most tokens of two prompts share, then what more is shared by others, and the rest of each.
    # The batch has three more rows, with a token each.
    assert fed == [22, 1 + 8 + 3 + 4 + 3 + 3]
    fed.clear()
    lm.prefixes.clear()
    lm.generate(PROMPTS, method="ngram", max_batch=1, **OPTIONS)
    assert fed == [22, 8, 3, 4, 3]


@pytest.mark.full
def test_a_longer_prompt_is_fed_between_the_rounds_of_other_rows(monkeypatch):
    """A request waits while another one's prompt is fed in chunks, and then continues from it."""
    lm = model()
    long = SYSTEM * 12
    prompts = [[5, 5, 2, 1], [9, 2, 2, 1], [*long, 1, 2], [*long, 4], [*long, 2, 2, 2]]
    fresh = model(prefix_cache=None).generate(prompts, method="ngram", max_batch=2, **OPTIONS)
    fed = fed_by(lm, monkeypatch)
    results = lm.generate(prompts, method="ngram", max_batch=2, **OPTIONS)
    check_equal("ngram", results, fresh)
    assert [result.statistics.num_reused_tokens for result in results] == [0, 0, 0, 239, 239]
    assert sorted(fed) == sorted([8, 242, 2, 4])


@pytest.mark.full
@pytest.mark.representatives("eagle3")
@pytest.mark.parametrize("name", ["ngram", "draft-model", "eagle3"])
def test_a_conversation_begins_with_the_kept_system_prompt(name):
    template = "{% for one in messages %}{{ one.content }}{{ '</s>' if one.role == 'assistant' else 'd' }}{% endfor %}"
    method = tiny.drafter_of(name)
    lm = LanguageModel(tiny.engine_config(), tiny.params(), tiny.tokenizer(template), prefix_cache=2**26)
    lm.prefixes.min_tokens = 4
    options = {"max_new_tokens": 6, "ignore_eos": True}
    first = lm.chat("ab cd ab ed", method=method, **options)
    first.send("ba")
    second = lm.chat("ab cd ab ed", method=method, **options)
    answers = [second.send("cc"), second.send("ab")]
    assert all(answer.statistics.num_reused_tokens > 4 for answer in answers)
    for at, answer in enumerate(answers):
        fresh = lm.generate(messages=second.messages[: 2 + 2 * at], method="autoregressive", **options)
        assert answer.tokens == fresh.tokens


@pytest.mark.full
def test_sampled_texts_are_the_same():
    options = OPTIONS | {"method": "ngram", "temperature": 1.0, "seed": 5, "acceptor": "coupled"}
    fresh, lm = model(prefix_cache=None).generate(PROMPTS, **options), model()
    for _ in range(2):
        assert [one.tokens for one in lm.generate(PROMPTS, **options)] == [one.tokens for one in fresh]


@pytest.mark.full
@pytest.mark.representatives("ngram")
@pytest.mark.parametrize("name", ["ngram", "eagle3", "draft-model"])
def test_a_text_continues_where_its_layers_with_a_window_hold_the_window(monkeypatch, name):
    """Rings of 71 places keep all of a text of 34 tokens, and of a longer one the end."""
    monkeypatch.setattr(kv, "MOST_ROWS", 32)
    monkeypatch.setattr(kv, "SPARE", 68)
    monkeypatch.setattr(
        kv,
        "most_places",
        lambda config: tuple(w and w + 68 for w in map(config.window, range(config.num_layers))),
    )
    config = dataclasses.replace(tiny.TARGET, sliding_windows=(3, None), rms_norm_eps=1.1e-5)
    method, long = tiny.drafter_of(name, config=config), SYSTEM * 8
    lm, plain, tokens, reused = model(config), model(config, None), [], []
    for beginning, end in ((long, []), (long, [3, 5]), (long, [7, 7]), (SYSTEM, [1, 2]), (SYSTEM, [2, 2])):
        prompt = [*beginning, *(tokens if end == [3, 5] else []), *end]
        result, fresh = (one.generate(prompt, method=method, **OPTIONS) for one in (lm, plain))
        check_equal(name, [result], [fresh])
        tokens, reused = fresh.tokens, [*reused, result.statistics.num_reused_tokens]
    assert reused == [0, 171, 159, 0, 19]


def test_a_warm_model_compiles_nothing_for_the_first_texts():
    lm = model()
    lm.executables = Executables()
    lm.warm_up(batch_sizes=(1,), max_tokens=64, method="ngram", ignore_eos=True, logprobs=True)
    compiled_before = lm.executables.num_compilations
    lm.generate(PROMPTS[0], method="ngram", **OPTIONS)
    # Only the programs that take the caches of 32 and of 64 tokens from a row.
    assert lm.executables.num_compilations - compiled_before == 2
    assert len(lm.prefixes) == 1


@pytest.mark.full
@pytest.mark.representatives("eagle3")
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_requests_of_a_scheduler(name, monkeypatch):
    """They arrive at once, and those that share a long beginning wait until it is fed."""
    monkeypatch.setattr(buckets, "POLL_CHUNKS", 1)
    method, long = tiny.drafter_of(name), SYSTEM * 5
    prompts = [*PROMPTS, [*long, 1], [*long, 2, 2], [*long, 3]]
    fresh = model(prefix_cache=None).generate(prompts, method=method, **OPTIONS)
    lm = model()
    scheduler, results = Scheduler(lm, max_batch=8), {}
    fed = fed_by(lm, monkeypatch)
    numbers = [scheduler.add(prompt, method=method, **OPTIONS) for prompt in prompts]
    while not scheduler.idle:
        results |= {number: piece.result for number, piece in scheduler.step() if piece.result is not None}
    check_equal(name, [results[number] for number in numbers], fresh)
    assert sum(fed) < 22 + 8 + 11 + 4 + 4 + 101 + 3 + 2 + 20  # not more than 20 tokens twice


# The store


def prefix(tokens, owner=None) -> Prefix:
    cache = kv.create(tiny.TARGET, 1, 32, np.float32)
    return Prefix(np.array(tokens), Caches(cache), owner=owner)


def find(store: PrefixStore, prompt, owner=None):
    found, start = store.find(prompt, tiny.drafter_of("ngram")[0], owner, tiny.TARGET)
    return (None if found is None else found.tokens.tolist()), start


def test_the_least_recently_used_prefix_is_dropped():
    size = prefix([1]).num_bytes
    store = PrefixStore(2 * size, min_tokens=2)
    texts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]]
    for text in texts[:2]:
        store.add(prefix(text))
    assert find(store, [1, 2, 3, 9]) == (texts[0], 2)
    store.add(prefix(texts[2]))
    assert (len(store), store.num_bytes) == (2, 2 * size)
    assert find(store, [5, 6, 7, 8]) == (None, 0)
    assert find(store, texts[0]) == (texts[0], 3)
    assert find(store, [1, 2, 5]) == (None, 0)  # one token can be spared, fewer than two
    assert not store.wants([*range(9)], None, 3 * size)
    assert store.wants([6, 6, 6], None, size)
    assert not store.wants([6, 6], None, size)  # of a text of two tokens one is in the caches
    store.add(prefix([*texts[0], 5, 6]))  # in place of its beginning
    assert find(store, texts[2]) == (texts[2], 3)
    assert find(store, texts[0]) == ([*texts[0], 5, 6], 3)
    store.clear()
    assert len(store) == 0


def test_caches_that_a_call_has_used_up_are_of_no_use():
    held = prefix([1, 2, 3, 4])
    assert held.start([1, 2, 3, 9], tiny.drafter_of("ngram")[0], tiny.TARGET) == 2
    jax.tree.leaves(held.caches)[0].delete()
    assert held.start([1, 2, 3, 9], tiny.drafter_of("ngram")[0], tiny.TARGET) == 0


def test_caches_of_a_drafter_belong_to_equal_drafters():
    drafter, params = tiny.drafter_of("draft-model")
    owner = Owner.of_drafter(drafter, params)
    assert owner == Owner.of_drafter(drafter, dict(params))
    assert owner != Owner.of_drafter(drafter, tiny.drafter_of("draft-exit")[1])
    assert owner != Owner.of_drafter(tiny.drafter_of("draft-model", "confidence")[0], params)
    assert Owner.of_drafter(*tiny.drafter_of("ngram")) is None


def test_common_beginnings():
    for first, second in itertools.product([[], [1], [1, 2, 3], [1, 4]], repeat=2):
        expected = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        )
        assert num_common(first, second) == expected
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 9, 9, 9], [4]]
    assert shared_beginning(prompts, [0, 0, 0, 0], 2) == (1, 4)
    assert shared_beginning(prompts, [2, 3, 3, 0], 2) is None
    assert shared_beginning(prompts[:1], [0], 1) is None


def test_a_size_is_a_number_or_has_a_unit():
    given = (7, "7", "512MB", "1.5 GiB")
    assert [num_bytes("prefix_cache", size) for size in given] == [7, 7, 512_000_000, 3 * 2**29]


@pytest.mark.parametrize("given", ["512XB", -1, 1.5, "MB", True])
def test_a_wrong_size_is_refused(given):
    with refused(r"prefix_cache is .*; give a number of bytes, such as 2\*\*29 or 512MB"):
        model(prefix_cache=given)


def test_more_bytes_than_there_is_memory_are_refused():
    with refused(r"prefix_cache is 1048576.00 GiB, .* free; give fewer bytes"):
        model(prefix_cache=2**50)
