"""The engine with token ids: batches, buckets, refilling, seeds and statistics."""

from __future__ import annotations

import itertools
import math

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor
from jaxspec.engine import language_model
from jaxspec.programs import buckets, compiled
from jaxspec.programs.buckets import bucket
from jaxspec.programs.compiled import Loop
from jaxspec.protocol import Weights
from jaxspec.requests.reading import RowRequest
from jaxspec.session.feeding import Feeding
from jaxspec.session.session import Session
from jaxspec.session.strategies import for_drafter
from tests import tiny

PROMPTS = ((5,), (7, 1, 7, 1, 7, 1, 7, 2))
each_method = pytest.mark.parametrize("method", tiny.METHODS)
# The methods of the ordinary tests.
FEW = ("autoregressive", "ngram", "draft-model", "s2d")


def generate(lm, prompts, method="autoregressive", **options):
    return lm.generate([list(prompt) for prompt in prompts], **tiny.options(method), **options)


def stream(lm, prompts, method, **options):
    return lm.stream([list(prompt) for prompt in prompts], **tiny.options(method), **options)


def log_probs(result):
    return [token.log_prob for token in result.token_records]


@pytest.fixture
def small_buckets(monkeypatch):
    """Batches begin in the smallest bucket instead of the one in which they end."""
    monkeypatch.setattr(buckets, "START_CAPACITY", buckets.MIN_CAPACITY)


@pytest.mark.representatives("ngram", "draft-model", "asd")
@each_method
def test_alone_in_a_batch_and_streamed(lm, method):
    """Every text equals that of the slow decoder."""
    budgets = (14, 18)
    batch = generate(lm, PROMPTS, method, max_new_tokens=budgets, ignore_eos=True)
    for prompt, budget, row in zip(PROMPTS, budgets, batch, strict=True):
        assert row.tokens == tiny.greedy(prompt, budget)
        alone = generate(lm, [prompt], method, max_new_tokens=budget, ignore_eos=True)[0]
        assert (alone.tokens, alone.finish_reason) == (row.tokens, "length")
    pieces = list(stream(lm, PROMPTS, method, max_new_tokens=budgets, ignore_eos=True))
    for index, row in enumerate(batch):
        mine = [piece for piece in pieces if piece.index == index]
        assert [token for piece in mine for token in piece.tokens] == row.tokens
        assert [piece.result is not None for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].result.tokens == row.tokens


@pytest.mark.representatives(*FEW)
@each_method
def test_end_of_text(lm, method):
    """The end token is part of the result, also within an accepted draft; with `ignore_eos` decoding continues."""
    budget = 18
    whole = [tiny.greedy(prompt, budget) for prompt in PROMPTS]
    assert any(tiny.EOS in text[:-1] for text in whole)
    for prompt, row in zip(PROMPTS, generate(lm, PROMPTS, method, max_new_tokens=budget), strict=True):
        assert row.tokens == tiny.greedy(prompt, budget, (tiny.EOS,))
        assert row.finish_reason == ("eos" if tiny.EOS in row.tokens else "length")


@pytest.mark.representatives(*FEW)
@each_method
def test_statistics(lm, method):
    """Each round commits the accepted tokens and one more."""
    for row in generate(lm, PROMPTS, method, max_new_tokens=18, ignore_eos=True):
        stats = row.statistics
        assert stats.num_tokens == len(row.tokens) == 18
        assert stats.num_tokens == 1 + stats.num_rounds + stats.num_accepted_tokens
        assert (
            sum(token.drafted for token in row.token_records)
            == stats.num_accepted_tokens
            <= stats.num_draft_tokens
        )
        assert sum(stats.acceptance_histogram) == stats.num_drafts <= stats.num_rounds
        accepted = sum(count * rounds for count, rounds in enumerate(stats.acceptance_histogram))
        assert accepted == stats.num_accepted_tokens
        assert stats.mean_acceptance_length == pytest.approx(17 / stats.num_rounds)
        if method == "autoregressive":
            assert (stats.num_rounds, stats.num_drafts, stats.draft_acceptance_rate) == (17, 0, None)
        else:
            assert stats.num_accepted_tokens > 0
            assert stats.draft_acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens
        assert stats.decode_compile_ms <= stats.decode_ms <= stats.elapsed_ms
        assert stats.decode_compile_ms <= stats.compile_ms <= stats.elapsed_ms


@pytest.mark.representatives(*(f"{polls}-{method}" for polls in (1, 3, 64) for method in FEW))
@each_method
@pytest.mark.parametrize("polls", [1, 3, 64])
def test_each_token_knows_its_round(lm, monkeypatch, method, polls):
    """For any polling interval, a round is the accepted drafts and one more token; the last round may be cut."""
    monkeypatch.setattr(language_model, "QUIET_ROUNDS", polls)
    for row in generate(lm, PROMPTS, method, max_new_tokens=18):
        first, *rest = row.token_records
        assert first[:4] == (row.tokens[0], False, 0, 0)
        rounds = [list(group) for _, group in itertools.groupby(rest, key=lambda token: token.round)]
        assert [group[0].round for group in rounds] == list(range(1, row.statistics.num_rounds + 1))
        for number, group in enumerate(rounds, 1):
            *drafts, last = (token.drafted for token in group)
            assert all(drafts)
            assert not last or number == len(rounds)
            assert len({token.proposed for token in group}) == 1
        accepted = [sum(token.drafted for token in group) for group in rounds if group[0].proposed]
        for size, count in enumerate(row.statistics.acceptance_histogram):
            assert accepted.count(size) == count


@pytest.mark.parametrize("streams", [False, True])
def test_the_first_text_counts_what_compiles_before_its_first_token(streams):
    lm = tiny.language_model()
    options = {"max_new_tokens": 4, "ignore_eos": True}
    found = list(lm.stream([3, 4], **options))[-1] if streams else lm.generate([3, 4], **options)
    stats = found.statistics
    assert stats.compile_ms > 0
    assert stats.decode_compile_ms == 0
    assert stats.tokens_per_second == 3e3 / stats.decode_ms
    again = lm.generate([3, 4], max_new_tokens=4, ignore_eos=True)
    assert again.statistics.compile_ms == 0


def test_a_single_token(lm):
    row = generate(lm, PROMPTS[:1], max_new_tokens=1)[0]
    assert row.tokens == tiny.greedy(PROMPTS[0], 1)
    assert (row.statistics.mean_acceptance_length, row.statistics.tokens_per_second) == (None, None)


@pytest.mark.representatives("ngram")
@pytest.mark.parametrize("method", ["ngram", "draft-exit", "s2d"])
def test_a_text_grows_through_the_buckets(lm, small_buckets, method):
    found = generate(lm, PROMPTS[:1], method, max_new_tokens=80, ignore_eos=True, logprobs=True)[0]
    assert found.tokens == tiny.greedy(PROMPTS[0], 80)
    np.testing.assert_allclose(log_probs(found), tiny.log_probs(PROMPTS[0], found.tokens), atol=2e-4)
    assert found.statistics.num_tokens == 80


@pytest.mark.representatives("autoregressive")
@pytest.mark.parametrize("method", ["autoregressive", "draft-exit", "s2d"])
def test_finished_rows_make_room(lm, method):
    """With more prompts than rows, every text equals that of its prompt alone, in the order of the prompts."""
    prompts, budgets = [*PROMPTS, (1, 2, 3), (4,), (9, 9)], [3, 16, 1, 12, 7]
    rows = generate(lm, prompts, method, max_new_tokens=budgets, ignore_eos=True, max_batch=2)
    counts = ("num_rounds", "num_drafts", "num_draft_tokens", "acceptance_histogram")
    for prompt, budget, row in zip(prompts, budgets, rows, strict=True):
        assert row.tokens == tiny.greedy(prompt, budget)
        alone = generate(lm, [prompt], method, max_new_tokens=budget, ignore_eos=True)[0].statistics
        for name in counts:
            assert getattr(row.statistics, name) == getattr(alone, name), name


@pytest.mark.parametrize("max_batch", [1, 2])
def test_room_for_a_longer_prompt(lm, small_buckets, max_batch):
    """A prompt that does not fit the bucket its row ran in, with and without a neighbour."""
    longer = tuple(tiny.greedy(PROMPTS[0], 40))
    prompts, budgets = [PROMPTS[0], PROMPTS[1], longer], [3, 20, 4]
    rows = generate(lm, prompts, max_new_tokens=budgets, ignore_eos=True, max_batch=max_batch)
    for prompt, budget, row in zip(prompts, budgets, rows, strict=True):
        assert row.tokens == tiny.greedy(prompt, budget)


# Long prompts after another text

LONG = tuple(int(token) for token in np.random.default_rng(0).integers(1, 10, 100))


def steps_of(lm, requests, method="autoregressive", rounds=1, **options):
    """Returns the tokens of each host poll by request."""
    drafter, weights = tiny.drafter_of(method, "constant", lm.config)
    loop = Loop(lm.executables, lm.config)
    strategy = for_drafter(loop, drafter)
    session = Session(loop, Weights(lm.params, weights), strategy, GreedyAcceptor(), requests, **options)
    steps = []
    while not session.done:
        gained = [(update.index, [token.id for token in update.tokens]) for update in session.step(rounds)]
        steps.append(dict(gained))
    return steps


def joined(steps, index):
    return [token for step in steps for token in step.get(index, [])]


@pytest.fixture
def small_chunks(monkeypatch):
    """A host poll processes 16 positions of a long prompt."""
    monkeypatch.setattr(buckets, "POLL_CHUNKS", 1)
    monkeypatch.setattr(buckets, "MAX_CHUNK_CPU", 16)


@pytest.mark.representatives("draft-model")
@pytest.mark.parametrize("method", ["autoregressive", "draft-model", "asd", "s2d", "eagle3"])
def test_neighbours_go_on_while_a_long_prompt_is_fed(lm, small_chunks, method):
    requests = [RowRequest(PROMPTS[0], 1), RowRequest(PROMPTS[1], 60), RowRequest(LONG, 8)]
    steps = steps_of(lm, requests, method, max_batch=2)
    first = next(at for at, step in enumerate(steps) if 2 in step)
    # 100 tokens are 7 chunks; the last one gives the first token.
    assert [len(step.get(1, [])) > 0 for step in steps[:first]] == [True] * 7
    for index, request in enumerate(requests):
        assert joined(steps, index) == tiny.greedy(request.prompt, request.max_new_tokens)


@pytest.mark.parametrize(
    ("platform", "budgets", "sizes"),
    [
        ("gpu", [9, 17, 25, 33] * 3, [2, 2, 2, 2]),
        ("cpu", [9, 17, 25, 33] * 3, [1] * 8),  # each prompt has its own call
        ("gpu", [9, 57, 57, 57, 9, 9, 9], [1, 1, 1]),  # waits no longer than 16 rounds
    ],
)
def test_free_rows_of_a_large_batch_wait_for_others(monkeypatch, platform, budgets, sizes):
    """On an accelerator a prefill serves several rows."""
    monkeypatch.setattr(Loop, "platform", platform)
    monkeypatch.setattr("jaxspec.session.session.REFILL_FRACTION", 2)
    monkeypatch.setattr("jaxspec.session.session.REFILL_ROUNDS", 17)
    found, ended, insert = [], {}, Session._insert

    def spy(self, rows, others, emitted):
        found.append(len(rows))
        return insert(self, rows, others, emitted)

    monkeypatch.setattr(Session, "_insert", spy)
    prompts = [PROMPTS[1]] * len(budgets)
    for piece in stream(
        tiny.language_model(), prompts, "autoregressive", max_new_tokens=budgets, max_batch=4
    ):
        if piece.result is not None:
            ended[piece.index] = piece.result.tokens
    assert ended == {index: tiny.greedy(PROMPTS[1], budget) for index, budget in enumerate(budgets)}
    assert found == sizes


@pytest.mark.full
def test_a_long_prompt_waits_for_nobody(lm, small_chunks):
    """Alone in the batch its chunks run without interruption; the batch may grow, and other texts may change."""
    requests = [
        RowRequest(PROMPTS[0], 1),
        RowRequest(LONG, 4),
        RowRequest(PROMPTS[1], 3),
        RowRequest(LONG[:90], 5),
        RowRequest(PROMPTS[0], 40),
        RowRequest(LONG[:70], 6, temperature=0.0),
    ]
    for max_batch in (1, 2, 3):
        steps = steps_of(lm, requests, max_batch=max_batch)
        for index, request in enumerate(requests):
            assert joined(steps, index) == tiny.greedy(request.prompt, request.max_new_tokens)


def test_a_batch_grows_while_a_prompt_is_fed(lm, small_chunks, small_buckets, monkeypatch):
    """The processed part has the old capacity of the batch; its rows need the new one."""
    monkeypatch.setattr(buckets, "MAX_CHUNK_CPU", 8)
    requests = [RowRequest(PROMPTS[0], 1), RowRequest(PROMPTS[1], 40), RowRequest(LONG[:28], 20)]
    capacities = []
    insert = Session._insert

    def spy(self, rows, others, emitted):
        capacities.append((others.capacity, self.capacity))
        return insert(self, rows, others, emitted)

    monkeypatch.setattr(Session, "_insert", spy)
    steps = steps_of(lm, requests, max_batch=2, rounds=30)
    assert any(before < now for before, now in capacities)
    for index, request in enumerate(requests):
        assert joined(steps, index) == tiny.greedy(request.prompt, request.max_new_tokens)


def test_rows_that_end_together_are_refilled_in_one_call(lm, monkeypatch):
    """On an accelerator. Three of four rows are refilled; the fourth is a stand-in without a request."""
    monkeypatch.setattr(Loop, "platform", "gpu")
    shapes, call = [], lm.executables.call

    def spy(function, *args, **static):
        if function is compiled.prefill:
            shapes.append(args[2].tokens.shape[0])
        return call(function, *args, **static)

    monkeypatch.setattr(lm.executables, "call", spy)
    requests = [RowRequest(PROMPTS[0], 1)] * 3 + [RowRequest(PROMPTS[1], 30)]
    requests += [RowRequest(prompt, 9) for prompt in ((1, 2, 3), (4,), (9, 9))]
    steps = steps_of(lm, requests, max_batch=4)
    assert shapes == [4, 4]
    for index, request in enumerate(requests):
        assert joined(steps, index) == tiny.greedy(request.prompt, request.max_new_tokens)


@pytest.mark.representatives("ngram", "draft-model", "s2d")
@each_method
def test_log_probs_are_the_targets(lm, method):
    """Those of each token and of the likeliest ones, whatever the sampling; rows report as many as they ask for."""
    options = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 0.7, "top_k": 3}
    row = generate(lm, PROMPTS[:1], method, top_logprobs=5, repetition_penalty=1.2, **options)[0]
    np.testing.assert_allclose(log_probs(row), tiny.log_probs(PROMPTS[0], row.tokens), atol=1e-4)
    for place, token in enumerate(row.token_records):
        text = [*row.tokens[:place], 0]
        every = np.array(
            [tiny.log_probs(PROMPTS[0], [*text[:-1], other])[-1] for other in range(tiny.TARGET.vocab_size)]
        )
        assert len(token.top) == 5
        for id, number in token.top:
            assert number == pytest.approx(every[id], abs=1e-4)
        np.testing.assert_allclose([number for _, number in token.top], np.sort(every)[:-6:-1], atol=1e-4)


# Randomness


def session_of(lm, requests, **options) -> dict[int, list[int]]:
    """Returns the texts by stream."""
    drafter, weights = tiny.drafter_of("draft-exit", "any_of")
    loop = Loop(lm.executables, lm.config)
    strategy = for_drafter(loop, drafter)
    session = Session(loop, Weights(lm.params, weights), strategy, BlockAcceptor(), requests, **options)
    texts: dict[int, list[int]] = {request.stream: [] for request in requests}
    while not session.done:
        for update in session.step(3):
            texts[requests[update.index].stream] += [token.id for token in update.tokens]
    return texts


@pytest.mark.full
def test_order_and_neighbours_do_not_matter(lm):
    """The draws of a stream do not depend on its row or its neighbours; temperatures are per row."""
    first = RowRequest(PROMPTS[0], 12, temperature=1.0, seed=7, stream=0)
    second = RowRequest(PROMPTS[1], 16, temperature=0.0, seed=7, stream=1)
    third = RowRequest(PROMPTS[1], 9, temperature=1.5, seed=7, stream=2)
    one = session_of(lm, [first, second, third], max_batch=2)
    other = session_of(lm, [third, first, second], max_batch=2)
    assert one == other
    assert one[1] == tiny.greedy(PROMPTS[1], 16)
    assert [len(one[stream]) for stream in range(3)] == [12, 16, 9]


def test_numbers_per_row(lm):
    """Rows of one batch have their own temperature and filters; top-k of 1 is greedy."""
    rows = generate(
        lm, [PROMPTS[0]] * 2, max_new_tokens=12, ignore_eos=True, temperature=[0.0, 1.0], top_k=[0, 1]
    )
    assert [row.tokens for row in rows] == [tiny.greedy(PROMPTS[0], 12)] * 2


# Compilation


@pytest.mark.representatives("autoregressive", "ngram", "draft-model", "asd")
@each_method
def test_nothing_recompiles_within_a_bucket(lm, method):
    """Checked by the engine's count and by JAX's own events."""
    generate(lm, PROMPTS, method, max_new_tokens=8)
    generate(lm, PROMPTS, method, max_new_tokens=8, temperature=0.5)
    jax.random.fold_in(jax.random.key(3), 1)
    count, events = lm.executables.num_compilations, []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        generate(lm, ((1, 2, 3, 4, 5), (3,)), method, max_new_tokens=[15, 2], seed=4)
        generate(
            lm, ((9,), (3, 3)), method, max_new_tokens=[1, 20], seed=5, temperature=[0.0, 1.3], stop="ab"
        )
        list(stream(lm, ((9,), (3, 3)), method, max_new_tokens=3, ignore_eos=True))
        assert lm.executables.num_compilations == count
        assert not events
        jax.jit(lambda x: x + math.pi)(jnp.zeros(17))
        assert events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_what_is_compiled_is_not_traced_again(monkeypatch):
    """The loop is compiled during the first prefill from its result's shapes; a later prefill has its own shapes."""
    prepared = []
    prepare = Feeding.prepare
    monkeypatch.setattr(Feeding, "prepare", lambda self, call: prepared.append(call) or prepare(self, call))
    lm = tiny.language_model()
    for _ in range(2):
        generate(lm, PROMPTS, "ngram", max_new_tokens=4)
        assert len(prepared) == 1


def test_buckets_are_powers_of_two():
    assert [bucket(size) for size in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
    assert bucket(3, 2) == 4


@pytest.mark.representatives("1-s2d", "20-draft-model")
@each_method
@pytest.mark.parametrize("budget", [1, 20])
def test_a_text_that_has_begun_goes_on(lm, method, budget):
    """The loop is compiled once, before the first token is returned."""
    fresh = tiny.language_model()
    pieces = stream(fresh, PROMPTS, method, max_new_tokens=budget, ignore_eos=True)
    next(pieces)
    fresh.executables.wait()
    before, blocked = fresh.executables.num_compilations, fresh.executables.blocked_ms
    assert before == (1 if budget == 1 else 2)
    list(pieces)
    assert (fresh.executables.num_compilations, fresh.executables.blocked_ms) == (before, blocked)
