"""Shared parts of the tests of the server: the application on a tiny model, and a scheduler that a test controls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Event, Scheduler
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.methods import Method, registry
from jaxspec.serving.server.answers import scores_of
from jaxspec.serving.server.app import Api, Settings
from jaxspec.serving.server.engine_thread import EngineThread
from jaxspec.serving.server.metrics import Metrics
from jaxspec.testing import language_model
from jaxspec.texts.results import Piece, Result, Statistics
from jaxspec.texts.text import RowText, Token, row_text

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
    """

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

    def step(self) -> list[Event]:
        self.gate.wait()
        time.sleep(0.001)
        self.steps += 1
        if self.fails is not None:
            raise self.fails
        events = []
        for number, row in list(self.rows.items()):
            row[1] += 1
            statistics = Statistics(row[1], row[1], 0, 0, 0, (0,), 1.0, 1.0, 0.0, num_prompt_tokens=1)
            token, result = Token(2), None
            if row[0] == row[1]:
                result = Result("a" * row[1], [token] * row[1], "length", statistics)
                del self.rows[number]
            events.append(Event(number, Piece(number, "a", [token], statistics, result)))
            if number == self.breaks:
                self.rows.pop(number, None)
                events[-1] = Event(number, None, MemoryError("no memory"))
        return events


class Scripted(FakeScheduler):
    """Generates given tokens, whose text ends at the stop strings of a request.

    Args:
      tokenizer: the tokenizer.
      ids: the tokens; those of several answers are chosen by the seed of a request.
    """

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

    def step(self) -> list[Event]:
        self.gate.wait()
        events = []
        for number, row in list(self.rows.items()):
            token = Token(self._answers[number][row[1]], log_prob=-1.0 - row[1])
            row[1] += 1
            new_text, text = self._texts[number]
            gained, _, stopped = text.push([token.id], row[1] == row[0])
            statistics = Statistics(row[1], row[1], 0, 0, 0, (0,), 1.0, 1.0, 0.0, num_prompt_tokens=1)
            result = None
            if stopped or row[1] == row[0]:
                result = Result(text.text, [token], "stop" if stopped else "length", statistics)
                del self.rows[number]
            piece = Piece(number, gained, [token], statistics, result, new_text=new_text)
            events.append(Event(number, piece))
        return events


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


@contextlib.contextmanager
def client(app: Any) -> Iterator[Any]:
    """Yields a client of the application, under a local name."""
    from starlette.testclient import TestClient

    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as made:
        yield made
