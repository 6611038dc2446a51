"""The server under faults: a full queue, clients that go or read slowly, time limits, failures, its end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
import time

import pytest

from jaxspec.engine import exactness
from jaxspec.serving.server import engine_thread
from jaxspec.serving.server.answers import scores_of
from tests.server import FakeScheduler, application, model, with_fixtures

URL = "/v1/completions"


class Exchange:
    """One request to the application, whose client may go, and may read slowly."""

    def __init__(self, app, path=URL, **body):
        self._app, self._path = app, path
        self._body = json.dumps(body).encode()
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.status, self.data, self.whole = None, b"", False
        self._asked = False
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        method = "POST" if self._body != b"{}" else "GET"
        scope = {"type": "http", "method": method, "path": self._path, "headers": [(b"host", b"localhost")]}
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
        await self._app(scope, self._receive, self._send)

    async def _receive(self):
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.data += message.get("body", b"")
            self.whole = not message.get("more_body", False)

    async def error(self):
        await self.task
        return self.status, json.loads(self.data)["error"]


def started(scheduler=None, **options):
    """Makes a test of a coroutine that takes the application, its engine, its scheduler, and fixtures."""

    def decorated(test):
        def run(**fixtures):
            used = scheduler or FakeScheduler()
            app, engine = application(lambda: used, **options)

            async def inside():
                async with app.router.lifespan_context(app):
                    try:
                        await asyncio.wait_for(test(app, engine, used, **fixtures), 30)
                    finally:
                        used.gate.set()

            asyncio.run(inside())

        return with_fixtures(run, test, 3)

    return decorated


async def until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


@started(max_open=3)
async def test_a_full_queue_gets_429_and_has_room_again(app, engine, scheduler):
    scheduler.gate.clear()
    first = Exchange(app, prompt=["ab", "cd"], max_tokens=3)
    await until(lambda: engine.num_open == 2)
    status, error = await Exchange(app, prompt=["a", "b"], max_tokens=3).error()
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    scheduler.gate.set()
    await first.task
    assert engine.num_open == 0
    again = Exchange(app, prompt=["a", "b", "c"], max_tokens=3)
    await again.task
    assert again.status == 200


@pytest.mark.parametrize("stream", [False, True])
@started()
async def test_a_client_that_goes_frees_its_row(app, engine, scheduler, stream):
    stays = Exchange(app, prompt="ab", max_tokens=60)
    goes = Exchange(app, prompt="ab", max_tokens=400, stream=stream)
    await until(lambda: len(scheduler.rows) == 2 and (goes.data or not stream))
    scheduler.gate.clear()
    steps = scheduler.steps
    goes.gone.set()
    await goes.task
    scheduler.gate.set()
    await until(lambda: scheduler.cancelled == [1])
    # A step may be past the gate when it closes, and the next one waits at it.
    assert scheduler.cancelled_at <= steps + 2
    await stays.task
    assert json.loads(stays.data)["choices"][0]["text"] == "a" * 60
    assert engine.num_open == 0
    last = Exchange(app, prompt="ab", max_tokens=400)
    await until(lambda: scheduler.rows and engine.num_running == 1)
    last.gone.set()
    await last.task
    await until(lambda: engine.num_open == engine.num_running == 0)


@started()
async def test_a_client_that_goes_while_it_waits_is_never_started(app, engine, scheduler):
    scheduler.gate.clear()
    first = Exchange(app, prompt="ab", max_tokens=2)
    await until(lambda: scheduler.rows)
    waits = Exchange(app, prompt="ab", max_tokens=400)
    await until(lambda: engine.num_open == 2)
    waits.gone.set()
    await waits.task
    scheduler.gate.set()
    await first.task
    await until(lambda: engine.num_open == 0)
    assert scheduler.cancelled == [1]


@started()
async def test_a_slow_reader_does_not_stop_the_others(app, engine, scheduler):
    slow = Exchange(app, prompt="ab", max_tokens=50, stream=True)
    slow.reads.clear()
    quick = Exchange(app, prompt="ab", max_tokens=100, stream=True)
    await quick.task
    assert engine.num_open == 0  # the slow reader's row is free too
    assert slow.data == b""
    slow.reads.set()
    await slow.task
    assert slow.data.count(b'"text": "a"') == 50
    assert slow.data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@started(time_limit_s=0.3)
async def test_a_time_limit(app, engine, scheduler, stream):
    asked = Exchange(app, prompt="ab", max_tokens=500, stream=stream)
    await until(lambda: scheduler.rows)
    scheduler.gate.clear()
    await asked.task
    if stream:
        *_, last, done, _ = asked.data.decode().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert done == "data: [DONE]"
    else:
        assert asked.status == 504
        error = json.loads(asked.data)["error"]
    assert error["code"] == "timeout"
    scheduler.gate.set()
    await until(lambda: scheduler.cancelled == [0] and engine.num_open == 0)


@started(time_limit_s=0.3)
async def test_a_reader_that_stands_still_is_left_at_the_time_limit(app, engine, scheduler):
    scheduler.gate.clear()
    slow = Exchange(app, prompt="ab", max_tokens=5, stream=True)
    await until(lambda: slow.status)
    slow.reads.clear()
    scheduler.gate.set()
    await slow.task
    assert not slow.whole
    assert engine.num_open == 0


def test_prompts_are_scored_between_the_rounds_of_others(monkeypatch):
    """A piece has prompts of together 4 tokens, or one longer prompt."""
    monkeypatch.setattr(engine_thread, "_SCORED_TOKENS", 4)
    scheduler = FakeScheduler()
    pieces = []

    def score(prompts):
        pieces.append((scheduler.steps, [len(ids) for ids in prompts]))
        return scores_of(model(), prompts)

    @started(scheduler, score=score, max_open=64)
    async def test(app, engine, scheduler):
        runs = Exchange(app, prompt="ab", max_tokens=400)
        await until(lambda: scheduler.rows)
        scheduler.gate.clear()
        options = {"echo": True, "logprobs": 0, "max_tokens": 2}
        lengths = (2, 2, 3, 9, 1)
        asked = Exchange(app, prompt=[[3] * length for length in lengths], **options)
        await until(lambda: engine.num_open == 6)
        goes = Exchange(app, prompt=[[3] * 9] * 50, **options)
        await until(lambda: engine.num_open == 56)
        scheduler.gate.set()
        await asked.task
        await until(lambda: len(pieces) > 4)
        scheduler.gate.clear()
        goes.gone.set()
        await goes.task
        scheduler.gate.set()
        await until(lambda: engine.num_open == 1)
        assert [sizes for _, sizes in pieces[:4]] == [[2, 2], [3], [9], [1]]
        assert len(pieces) < 54
        assert len({steps for steps, _ in pieces}) == len(pieces)  # a step is between two pieces
        found = json.loads(asked.data)["choices"]
        assert [len(one["logprobs"]["tokens"]) for one in found] == list(lengths)
        runs.gone.set()

    test()


def test_texts_go_on_while_the_first_check_of_exact_runs(monkeypatch):
    """Then the request is answered, here with the refusal."""
    began, ends = threading.Event(), threading.Event()

    def refusal(*_):
        began.set()
        assert ends.wait(30)
        return "exact is not possible here; leave exact out"

    monkeypatch.setattr(exactness, "refusal", refusal)
    lm = copy.copy(model())
    vars(lm).pop("_not_exact", None)
    app, engine = application(lm=lm)

    async def test():
        async with app.router.lifespan_context(app):
            try:
                exact = Exchange(app, prompt="ab", max_tokens=3, exact=True)
                await until(began.is_set)
                other = Exchange(app, prompt="ab", max_tokens=3)
                await asyncio.wait_for(other.task, 20)
                assert other.status == 200
                assert not exact.task.done()
            finally:
                ends.set()
            status, error = await exact.error()
            assert (status, error["param"]) == (400, "exact")
            assert error["message"] == "exact is not possible here; leave exact out"
            assert engine.num_open == 0

    asyncio.run(test())


def logged(caplog):
    """The types of the logged errors."""
    return [
        record.exc_info[0] for record in caplog.records if record.name.startswith("jaxspec.serving.server")
    ]


@started()
async def test_a_failed_text_does_not_fail_the_others(app, engine, scheduler, caplog):
    scheduler.gate.clear()
    scheduler.breaks = 1
    texts = [Exchange(app, prompt="ab", max_tokens=5) for _ in range(3)]
    await until(lambda: engine.num_open == 3)
    scheduler.gate.set()
    await asyncio.gather(*(one.task for one in texts))
    assert sorted(one.status for one in texts) == [200, 200, 500]
    (failed,) = (one for one in texts if one.status == 500)
    assert "no memory" in json.loads(failed.data)["error"]["message"]
    assert engine.num_open == 0
    assert logged(caplog) == [MemoryError]


@started()
async def test_a_dead_engine_answers_500_and_is_not_healthy(app, engine, scheduler, caplog):
    running = [Exchange(app, prompt="ab", max_tokens=400, stream=one) for one in (False, True)]
    await until(lambda: len(scheduler.rows) == 2 and running[1].data)
    scheduler.fails = SystemError("broken")
    status, error = await running[0].error()
    assert (status, error["type"], error["code"]) == (500, "server_error", "engine_error")
    await running[1].task
    assert b"SystemError: broken" in running[1].data
    assert (await Exchange(app, prompt="ab", max_tokens=4).error())[0] == 500
    health = Exchange(app, "/health")
    await health.task
    assert (health.status, json.loads(health.data)["status"]) == (503, "failed")
    assert logged(caplog) == [SystemError]


def test_an_engine_that_does_not_start_is_reported():
    def make():
        raise RuntimeError("no device")

    app, _ = application(make)

    async def test():
        async with app.router.lifespan_context(app):
            status, error = await Exchange(app, prompt="ab", max_tokens=4).error()
            assert status == 500
            assert "no device" in error["message"]

    asyncio.run(test())


@started()
async def test_the_end_of_the_server_finishes_or_returns_what_runs(app, engine, scheduler):
    scheduler.gate.clear()
    short, long = (Exchange(app, prompt="ab", max_tokens=tokens) for tokens in (3, 500))
    await until(lambda: engine.num_open == 2)
    engine.drain(0.3)
    status, error = await Exchange(app, prompt="ab", max_tokens=4).error()
    assert (status, error["code"]) == (503, "shutting_down")
    scheduler.gate.set()
    await short.task
    assert short.status == 200
    scheduler.gate.clear()
    status, error = await long.error()
    assert (status, error["code"]) == (503, "shutting_down")


@pytest.mark.parametrize(("part", "logged"), [("encoded", 0), ("Answer", 1)])  # before and after it is a job
def test_errors_of_other_types_are_one_line(monkeypatch, part, logged):
    monkeypatch.setattr(f"jaxspec.serving.server.app.{part}", lambda *_: [][0])
    lines = []

    @started(report=lines.append)
    async def test(app, engine, scheduler):
        asked = Exchange(app, prompt="ab", max_tokens=3)
        with contextlib.suppress(IndexError):
            await asked.task
        assert asked.status == 500
        assert json.loads(asked.data)["error"]["message"] == "IndexError: list index out of range"
        await until(lambda: engine.num_open == 0)
        assert [line.endswith("; not complete") for line in lines] == [True] * logged

    test()
