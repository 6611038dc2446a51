"""Shared parts of the tests of the server: the application on a tiny model, and a scheduler that a test controls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.methods import Method, registry
from jaxspec.requests.results import Piece, Result, Statistics
from jaxspec.requests.text import RowText, Token, row_text
from jaxspec.serving.server.answers import scores_of
from jaxspec.serving.server.app import Api, Settings
from jaxspec.serving.server.engine_thread import EngineThread
from jaxspec.serving.server.metrics import Metrics
from jaxspec.testing import language_model

TEMPLATE = "{% for one in messages %}{{ one.content }}e {% endfor %}"


@functools.cache
def model() -> LanguageModel:
    """Returns the tiny model of all servers; tests compile its programs only once."""
    return language_model(chat_template=TEMPLATE)


class FakeScheduler:
    """Generates the letters of "a", one token per step, as a test lets it.

    Attributes:
      rows: the requests that have not ended: their budget and the number of their tokens.
      cancelled: the ids that were cancelled.
      cancelled_at: the number of steps before the last cancellation.
      steps: the number of steps so far.
      gate: steps wait for it.
      fails: raised by the next step.
      breaks: the id of a request that ends with an error.
      pause_s: the time of a step.
    """

    pause_s = 0.001

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.cancelled: list[int] = []
        self.cancelled_at = 0
        self.steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.fails: BaseException | None = None
        self.breaks: int | None = None
        self._numbers = itertools.count()

    @property
    def idle(self) -> bool:
        return not self.rows

    @property
    def num_running(self) -> int:
        return len(self.rows)

    def add(self, **arguments: Any) -> int:
        number = next(self._numbers)
        self.rows[number] = [arguments["max_new_tokens"], 0]
        return number

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)
        self.cancelled_at = self.steps
        self.rows.pop(id, None)

    def step(self) -> list[tuple[int, Piece | Exception]]:
        self.gate.wait()
        time.sleep(self.pause_s)
        self.steps += 1
        if self.fails is not None:
            raise self.fails
        pieces: list[tuple[int, Piece | Exception]] = []
        for number, row in list(self.rows.items()):
            row[1] += 1
            piece = self.piece(number, *row)
            pieces.append((number, MemoryError("no memory") if number == self.breaks else piece))
            if piece.result is not None or number == self.breaks:
                del self.rows[number]
        return pieces

    def piece(self, number: int, budget: int, count: int) -> Piece:
        result = (
            Result("a" * count, [Token(2)] * count, "length", counted(count)) if count == budget else None
        )
        return Piece(number, "a", [Token(2)], counted(count), result)


def counted(count: int) -> Statistics:
    return Statistics(count, count, 0, 0, 0, (0,), 1.0, 1.0, 0.0, num_prompt_tokens=1)


class Scripted(FakeScheduler):
    """Generates given tokens, whose text ends at the stop strings of a request.

    Args:
      tokenizer: the tokenizer.
      ids: the tokens; those of several answers are chosen by the seed of a request.
    """

    pause_s = 0.0

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int] | Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._tokenizer, self._ids = tokenizer, ids
        self._answers: dict[int, Any] = {}
        self._texts: dict[int, tuple[Callable[[], RowText], RowText]] = {}

    def add(self, **arguments: Any) -> int:
        number = super().add(**arguments)
        stops = [stop] if isinstance(stop := arguments.get("stop", ()), str) else stop
        new_text = functools.partial(row_text, self._tokenizer, arguments["prompt"], stops)
        self._texts[number] = new_text, new_text()
        several = self._ids and not isinstance(self._ids[0], int)
        self._answers[number] = self._ids[arguments["seed"]] if several else self._ids
        return number

    def piece(self, number: int, budget: int, count: int) -> Piece:
        token = Token(self._answers[number][count - 1], log_prob=-float(count))
        new_text, text = self._texts[number]
        gained, _, stopped = text.push([token.id], count == budget)
        ends = stopped or count == budget
        result = Result(text.text, [token], "stop" if stopped else "length", counted(count)) if ends else None
        return Piece(number, gained, [token], counted(count), result, new_text=new_text)


def application(
    make: Callable[[], Any] | None = None,
    *,
    max_open: int = 16,
    time_limit_s: float = 60.0,
    key: str | None = None,
    allowed: Sequence[Method] | None = None,
    lm: LanguageModel | None = None,
    names: tuple[str, ...] = (),
    report: Callable[[str], None] = lambda line: None,
    score: Callable[[Any], Any] | None = None,
) -> tuple[Any, EngineThread]:
    """Returns the application on a model, by default `model`, with its own or another scheduler, and its engine."""
    lm = lm or model()
    metrics = Metrics(lm.name)
    engine = EngineThread(
        make or (lambda: Scheduler(lm)), max_open, metrics, score or functools.partial(scores_of, lm)
    )
    settings = Settings(registry.make(registry.DEFAULT, {}), key, time_limit_s, allowed, names, report)
    return Api(lm, engine, metrics, settings).app(), engine


def with_fixtures(run: Callable[..., None], test: Callable[..., Any], own: int) -> Callable[..., None]:
    """Returns `run` as the test of a coroutine; its parameters after the first `own` are fixtures."""
    signature = inspect.signature(test)
    parameters = list(signature.parameters.values())[own:]
    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def client(app: Any) -> Iterator[Any]:
    """Yields a client of the application, under a local name."""
    from starlette.testclient import TestClient

    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as made:
        yield made
