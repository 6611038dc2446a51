"""The scheduler: each text is the one that the request has alone, whatever arrives, waits or is cancelled beside it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec import methods
from jaxspec.engine import scheduler as module
from jaxspec.engine.scheduler import Scheduler
from jaxspec.model import cache
from jaxspec.programs import buckets, memory
from jaxspec.session.session import Session
from tests import refused, tiny

SHORT = ((5,), (7, 1, 7, 1, 7, 1, 7, 2), (3, 4), (1, 2, 3), (9, 8, 7))
LONG = tuple(int(token) for token in np.random.default_rng(0).integers(1, 10, 100))
BUDGET = 14


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A host poll processes 16 positions of a long prompt."""
    monkeypatch.setattr(buckets, "POLL_CHUNKS", 1)
    monkeypatch.setattr(buckets, "MAX_CHUNK_CPU", 16)


def add(scheduler, prompt, **options):
    return scheduler.add(list(prompt), **{"max_new_tokens": BUDGET, "ignore_eos": True} | options)


def run(scheduler, steps=None):
    """Returns the pieces of some steps, or of all, each after its id."""
    pieces = []
    while not scheduler.idle and steps != 0:
        pieces += scheduler.step()
        steps = None if steps is None else steps - 1
    assert not any(isinstance(piece, Exception) for _, piece in pieces)
    return pieces


def tokens_of(pieces):
    """Returns the tokens by request. Its last piece has the result, and no other."""
    found: dict[int, list[int]] = {}
    ended = set()
    for number, piece in pieces:
        assert number == piece.index
        assert number not in ended
        found.setdefault(number, []).extend(piece.tokens)
        if piece.result is not None:
            assert piece.result.tokens == found[number]
            ended.add(number)
    return found


@pytest.mark.representatives("ngram", "draft-model", "auto")
@pytest.mark.parametrize("method", [*tiny.METHODS, "auto"])
def test_a_text_does_not_depend_on_its_neighbours(lm, method):
    """Requests arrive one by one, more than there are rows; a long prompt comes first, later another."""
    options = {"method": "auto"} if method == "auto" else tiny.options(method)
    scheduler = Scheduler(lm, max_batch=4, max_rounds=2)
    prompts, pieces, ids, running = [LONG, *SHORT, LONG[:40], *SHORT], [], [], []
    for prompt in prompts:
        ids.append(add(scheduler, prompt, **options))
        pieces += run(scheduler, steps=len(ids) % 2)
        running.append(scheduler.num_running)
    assert max(running) == 4
    assert scheduler.num_waiting > 0
    texts = tokens_of(pieces + run(scheduler))
    assert [texts[number] for number in ids] == [tiny.greedy(prompt, BUDGET) for prompt in prompts]


@pytest.mark.representatives("draft-model")
@pytest.mark.parametrize("method", ["asd", "draft-model", "eagle", "auto"])
def test_a_batch_is_narrow_again_after_a_burst(lm, method):
    """The text of the first row goes on through 1, 8, and again 1 row."""
    options = {"method": "auto"} if method == "auto" else tiny.options(method)
    scheduler, widths = Scheduler(lm, max_rounds=2), []
    first = add(scheduler, SHORT[1], max_new_tokens=60, **options)
    (group,) = scheduler._groups.values()
    pieces = run(scheduler, steps=2)
    short = [add(scheduler, prompt, max_new_tokens=4, **options) for prompt in SHORT]
    while not scheduler.idle:
        widths.append(len(group.texts.session.rows))
        blocked_ms = lm.executables.blocked_ms
        pieces += run(scheduler, steps=1)
        if len(group.texts.session.rows) < widths[-1]:  # all programs were compiled before, in the background
            assert lm.executables.blocked_ms == blocked_ms
        lm.executables.wait()
    assert (widths[0], max(widths), widths[-1]) == (1, 8, 1)
    texts = tokens_of(pieces)
    assert texts[first] == tiny.greedy(SHORT[1], 60)
    assert [texts[number] for number in short] == [tiny.greedy(prompt, 4) for prompt in SHORT]


@pytest.fixture(scope="module")
def narrowing():
    """A model whose loop is compiled for 1 and 4 rows."""
    lm = tiny.language_model()
    for prompt in (LONG, SHORT[0]):
        for count in (1, 4):
            scheduler = Scheduler(lm)
            for _ in range(count):
                add(scheduler, prompt, max_new_tokens=4)
            run(scheduler)
    return lm


def narrowed(lm, budgets, arrives=()):
    """Returns the number of rows before each step; the prompts `arrives` come when only one text is left."""
    scheduler, widths, pieces = Scheduler(lm, max_rounds=1), [], []
    prompts, budgets = [SHORT[row % 5] for row in range(len(budgets))], list(budgets)
    ids = [add(scheduler, prompt, max_new_tokens=n) for prompt, n in zip(prompts, budgets, strict=True)]
    (group,) = scheduler._groups.values()
    while not scheduler.idle:
        widths.append(len(group.texts.session.rows))
        pieces += run(scheduler, steps=1)
        lm.executables.wait()
        if arrives and scheduler.num_running == 1:
            ids += [add(scheduler, prompt, max_new_tokens=4) for prompt in arrives]
            prompts, budgets, arrives = [*prompts, *arrives], [*budgets, *[4] * len(arrives)], ()
    texts = tokens_of(pieces)
    expected = [tiny.greedy(prompt, n) for prompt, n in zip(prompts, budgets, strict=True)]
    assert [texts[number] for number in ids] == expected
    return widths[1:]


def test_a_batch_keeps_the_rows_before_its_last_text(narrowing):
    """Only free rows after it are dropped, and only if half of the batch is free."""
    widths = narrowed(narrowing, (2, 16, 2, 2, 8, 2, 2, 2))
    assert set(widths) == {8, 4}
    assert widths[5] == 8


@pytest.mark.parametrize("arrives", [SHORT[:3], (LONG, LONG[1:], LONG[2:])], ids=["waiting", "being fed"])
def test_free_rows_are_kept_for_requests_that_arrive(narrowing, arrives):
    budgets = (24, *[2] * 7)
    assert set(narrowed(narrowing, budgets)) == {8, 1}
    widths = narrowed(narrowing, budgets, arrives)
    # The batch does not become narrow for the requests to make it wide again.
    assert widths == sorted(widths, reverse=True)
    assert {8, 4} <= set(widths)


def test_a_batch_narrows_only_where_its_loop_is_compiled():
    lm = tiny.language_model()
    assert set(narrowed(lm, (16, *[2] * 7))) == {8}


@pytest.mark.parametrize("burst", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("method", ["autoregressive", "draft-model"])
def test_requests_wait_where_a_wider_batch_does_not_fit(lm, monkeypatch, method, burst):
    """There is memory for the target's cache of 5 rows, or for those of both models of 2 (widths: 1, 4)."""
    capacity = buckets.capacity_for(1, lm.config.context_length + tiny.K, "cpu")
    free = cache.size_bytes(lm.config, 5, capacity, "float32")
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    scheduler, pieces, running, ids = Scheduler(lm, max_rounds=2), [], [], []
    for prompt in SHORT:
        ids.append(add(scheduler, prompt, **tiny.options(method)))
        pieces += [] if burst else run(scheduler, steps=1)
    while not scheduler.idle:
        running.append(scheduler.num_running)
        pieces += run(scheduler, steps=1)
    assert max(running) == {"autoregressive": 4, "draft-model": 1}[method]
    texts = tokens_of(pieces)
    assert [texts[number] for number in ids] == [tiny.greedy(prompt, BUDGET) for prompt in SHORT]


def test_requests_share_a_batch_if_their_programs_are_the_same(lm):
    scheduler = Scheduler(lm)
    drawn = {"temperature": 0.7, "top_p": 0.9}
    groups = [
        [
            *({}, {"max_new_tokens": 3}, {"seed": 5}, {"stop": "x"}, {"stop_token_ids": 0}),
            *(
                {"logprobs": True},
                {"presence_penalty": 1.0},
                {"presence_penalty": 2.0},
                {"acceptor": "greedy"},
            ),
        ],
        [{"method": "ngram"}],
        [{"method": "ngram", "num_draft_tokens": 3}],
        [drawn, drawn | {"temperature": 1.3, "seed": 4}, {"temperature": 0.7}],
        [{"temperature": 0.7, "acceptor": "rejection"}],
    ]
    ids = {}
    for group in groups:
        for options in group:
            ids[add(scheduler, SHORT[0], **{"method": "autoregressive"} | options)] = options
    sessions = [group.texts.session for group in scheduler._groups.values() if group.ids]
    assert sorted(session.num_waiting for session in sessions) == sorted(map(len, groups))
    texts = tokens_of(run(scheduler))
    assert texts.keys() == ids.keys()
    for number, options in ids.items():
        if not {"temperature", "presence_penalty"} & options.keys():
            assert texts[number] == tiny.greedy(SHORT[0], options.get("max_new_tokens", BUDGET))


@pytest.fixture
def sessions(monkeypatch):
    """Returns a function: the number of requests of each session that takes turns, without running any."""
    ran: list[Session] = []
    monkeypatch.setattr(Session, "step", lambda session, rounds: ran.append(session) or [])

    def counts(scheduler):
        ran.clear()
        while scheduler.step() or len(set(map(id, ran))) == len(ran):
            pass
        return [session.num_waiting for session in ran[:-1]]

    return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted(methods.LayerSkip):
    """Drafts with files that were fitted to texts of temperature 0.6."""

    @property
    def by_distribution(self):
        return True

    def build(self, target, resources):
        wrong = [one for one in resources.distributions if one != "temperature-0.6"]
        if wrong:
            raise ValueError(f"there are no files for {wrong[0]}")
        return super().build(target, resources)


@pytest.mark.parametrize(
    "method",
    [
        Fitted(exit_layer=1),
        methods.Auto(among=("ngram", Fitted(exit_layer=1))),
    ],
    ids=["alone", "auto"],
)
def test_no_request_gets_the_files_of_another_distribution(lm, sessions, method):
    """A request is refused after one that has files as it is before it; and one that has them joins its like."""
    scheduler = Scheduler(lm)
    for seed in (1, 2):
        add(scheduler, SHORT[0], method=method, temperature=0.6, seed=seed)
    for fresh in (scheduler, Scheduler(lm)):
        with refused("there are no files for temperature-1"):
            add(fresh, SHORT[1], method=method, temperature=1.0)
    assert sessions(scheduler) == [2]


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([{"exact": exact} for exact in (True, False, True)], [2, 1]),
        # A lossy request shares none with a lossless one, nor with one of other rules; the default is `block`.
        (
            [
                {"temperature": 1.0, "acceptor": name}
                for name in (None, "typical", "block", "typical", "rejection")
            ],
            [2, 2, 1],
        ),
        ([{}, {"ignore_eos": False}, {"min_new_tokens": 0}, {"ignore_eos": False, "min_new_tokens": 0}], [4]),
    ],
    ids=["exact", "lossy", "ends"],
)
def test_which_requests_share_a_batch(lm, sessions, monkeypatch, requests, sizes):
    monkeypatch.setattr(type(lm), "check_exact", lambda lm: None)
    scheduler = Scheduler(lm)
    for options in requests:
        add(scheduler, SHORT[0], method="ngram", **options)
    assert sessions(scheduler) == sizes


def test_without_turns_the_group_with_the_most_requests_runs(lm):
    scheduler = Scheduler(lm, turns=False)
    alone = add(scheduler, SHORT[0], method="ngram")
    many = {add(scheduler, prompt, method="autoregressive") for prompt in SHORT[1:3]}
    pieces = run(scheduler, steps=1)
    assert {number for number, _ in pieces} == many
    pieces += run(scheduler)
    assert alone in tokens_of(pieces)


def test_without_turns_a_long_prompt_is_fed_as_a_whole(lm):
    steps = {}
    for turns in (True, False):
        scheduler = Scheduler(lm, max_batch=2, turns=turns)
        add(scheduler, SHORT[1], method="autoregressive", max_new_tokens=90)
        run(scheduler, steps=1)
        long, steps[turns] = add(scheduler, LONG, method="autoregressive"), 1
        while all(number != long for number, _ in run(scheduler, steps=1)):
            steps[turns] += 1
    assert steps == {True: 7, False: 1}


def test_seeds_and_copies(lm):
    """A request with a seed draws as it does alone; its copies draw as those of `n`."""
    options = {"temperature": 1.0, "method": "ngram", "max_new_tokens": BUDGET, "ignore_eos": True}
    scheduler = Scheduler(lm)
    ids = [scheduler.add("ab", stream=copy, seed=3, **options) for copy in range(3)]
    other = scheduler.add("cd", seed=4, **options)
    texts = tokens_of(run(scheduler))
    assert [texts[number] for number in ids] == [
        one.tokens for one in lm.generate("ab", n=3, seed=3, **options)
    ]
    assert texts[other] == lm.generate("cd", seed=4, **options).tokens
    assert len({tuple(texts[number]) for number in ids}) == 3


def test_a_seed_gives_one_text_where_drafts_depend_on_the_other_rows(lm):
    """Also for two requests with the same seed, whose draws one batch would reveal to each other."""
    drafter, _ = tiny.drafter_of("asd-shared", "confidence", lm.config)
    scheduler = Scheduler(lm)
    options = {"temperature": 1.0, "method": drafter}
    seeds, prompts = (3, 4, 3), (SHORT[0], SHORT[1], SHORT[0])
    ids = [add(scheduler, prompt, seed=seed, **options) for prompt, seed in zip(prompts, seeds, strict=True)]
    texts = tokens_of(run(scheduler))
    for number, prompt, seed in zip(ids, prompts, seeds, strict=True):
        alone = lm.generate(list(prompt), seed=seed, max_new_tokens=BUDGET, ignore_eos=True, **options)
        assert texts[number] == alone.tokens


@pytest.mark.full
@pytest.mark.representatives("coupled", "block")
@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 2), ({"temperature": 1.0}, 2), ({"temperature": 1.0, "acceptor": "block"}, 1)],
    ids=["greedy", "coupled", "block"],
)
def test_texts_of_auto_share_a_batch_unless_its_choices_influence_them(lm, options, rows):
    scheduler = Scheduler(lm)
    for prompt in SHORT[:2]:
        add(scheduler, prompt, method="auto", **options)
    run(scheduler, steps=1)
    assert (scheduler.num_running, scheduler.num_waiting) == (rows, 2 - rows)
    run(scheduler)


def test_a_cancelled_request_frees_its_row(lm):
    """Requests that run, whose prompt is being fed, and that wait."""
    scheduler = Scheduler(lm, max_batch=2, max_rounds=1)
    first = add(scheduler, SHORT[0])
    run(scheduler, steps=1)
    fed = add(scheduler, LONG)
    run(scheduler, steps=2)
    waiting, last = add(scheduler, SHORT[1]), add(scheduler, SHORT[2])
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    for number in (fed, waiting):
        scheduler.cancel(number)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    pieces = scheduler.step()
    assert last in {number for number, _ in pieces}  # it has the row of `fed`
    replaced = add(scheduler, LONG[:40])
    scheduler.cancel(first)
    scheduler.cancel(first)
    texts = tokens_of([one for one in pieces if one[0] == last] + run(scheduler))
    assert texts.keys() == {last, replaced}
    assert texts[replaced] == tiny.greedy(LONG[:40], BUDGET)
    only = add(scheduler, SHORT[0])
    scheduler.step()
    scheduler.cancel(only)
    assert scheduler.idle
    assert scheduler.step() == []
    assert all(group.texts.session.capacity == 0 for group in scheduler._groups.values())


def test_nothing_is_kept_of_ended_requests(lm, monkeypatch):
    """After each wave the caches are freed; groups that nobody uses are forgotten."""
    monkeypatch.setattr(module, "IDLE_GROUPS", 2)
    scheduler = Scheduler(lm, max_batch=2)
    held = []
    for wave in range(8):
        own = {"logprobs": wave % 2 == 0, "acceptor": "greedy" if wave % 4 > 1 else None}
        for prompt in SHORT[:3]:
            add(scheduler, prompt, method="autoregressive", max_new_tokens=2, **own)
        run(scheduler)
        assert scheduler.idle
        assert not scheduler.num_running
        assert len(scheduler._groups) <= 2
        for group in scheduler._groups.values():
            assert not group.ids
            assert not group.texts._rows
            assert group.texts.session.capacity == 0
        held.append(sum(array.nbytes for array in jax.live_arrays()))
    assert held[-1] <= held[3]


def test_stops_and_statistics(lm):
    scheduler = Scheduler(lm, max_batch=1)
    whole = lm.generate("ab", max_new_tokens=6)
    stopped = scheduler.add("ab", max_new_tokens=6, stop=" ad")
    waited = scheduler.add("ab", max_new_tokens=6)
    results = {number: piece.result for number, piece in run(scheduler) if piece.result is not None}
    assert (results[stopped].text, results[stopped].finish_reason) == (whole.text.split(" ad")[0], "stop")
    assert results[waited].text == whole.text
    first, second = (results[number].statistics for number in (stopped, waited))
    assert first.decode_ms <= second.queue_ms <= second.elapsed_ms - second.decode_ms


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"n": 2}, "a request has no option n; add each text with its own `stream`"),
        ({"max_batch": 2}, "no option max_batch"),
        ({"stream": -1}, "stream is -1"),
        ({"prompt": ["ab", "cd"]}, "got 2 prompts; add them one by one"),
        ({"max_new_tokens": 10**6}, "exceed the model's context"),
        ({"method": "medusa"}, "medusa"),
    ],
)
def test_a_bad_request_is_refused_at_once(lm, given, message):
    scheduler = Scheduler(lm)
    with refused(message, (ValueError, FileNotFoundError)):
        scheduler.add(**{"prompt": "ab"} | given)
    assert scheduler.idle
    with refused("max_batch is 0"):
        Scheduler(lm, max_batch=0)


def test_an_error_ends_the_requests_of_its_group_only(lm, monkeypatch):
    scheduler = Scheduler(lm)
    wrong = [add(scheduler, prompt, method="ngram") for prompt in SHORT[:2]]
    right = add(scheduler, SHORT[2], method="autoregressive")
    before = Session.step

    def step(session, rounds):
        if session.strategy.name == "ngram":
            raise MemoryError("no memory")
        return before(session, rounds)

    monkeypatch.setattr(Session, "step", step)
    pieces = scheduler.step()
    assert [(number, repr(error)) for number, error in pieces] == [
        (number, "MemoryError('no memory')") for number in wrong
    ]
    assert tokens_of(run(scheduler))[right] == tiny.greedy(SHORT[2], BUDGET)
    monkeypatch.undo()
    again = add(scheduler, SHORT[0], method="ngram")
    assert tokens_of(run(scheduler))[again] == tiny.greedy(SHORT[0], BUDGET)
