"""The thread that owns the scheduler, and the jobs that the event loop gives it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from jaxspec.engine.scheduler import Scheduler
from jaxspec.requests.results import Piece, Result, Score
from jaxspec.serving.server.refusals import Refused

_LOG = logging.getLogger(__name__)
# How long the event loop waits for the thread at the end: it may be compiling.
_JOIN_S = 5.0
# The most tokens of prompts that are scored between two steps, unless one prompt has more.
_SCORED_TOKENS = 512
# New pieces of a job, each after its row.
Pieces: TypeAlias = list[tuple[int, Piece]]


class Observer(Protocol):
    """Counts what happens to jobs; called in the event loop."""

    def took(self, job: Job, pieces: Pieces) -> None:
        """Takes new pieces."""

    def left(self, job: Job) -> None:
        """Takes the end of a job, whole or not."""


class Timing:
    """The times of one text, by `time.perf_counter`, and its latest piece.

    Attributes:
      first: the time of its first tokens; None before.
      last: the time of its last tokens.
      piece: its latest piece; None before the first.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.piece: Piece | None = None

    @property
    def result(self) -> Result | None:
        """The complete result; None before the end."""
        return None if self.piece is None else self.piece.result

    def take(self, piece: Piece, now: float) -> None:
        """Takes a new piece."""
        self.piece = piece
        if piece.token_records:
            self.first = now if self.first is None else self.first
            self.last = now


class Job:
    """The texts of one HTTP request. It belongs to the event loop; the engine thread reads `rows` and `to_score`.

    Args:
      rows: the arguments of `Scheduler.add`, for each text; there may be none.
      to_score: prompts whose tokens get log-probabilities.

    Attributes:
      arrived: the time at which it was submitted, by `time.perf_counter`.
      timings: the times of each text.
      scores: the scores of `to_score`, complete once the scheduler has accepted the job.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], to_score: Sequence[Sequence[int]] = ()) -> None:
        self.rows, self.to_score = rows, to_score
        self.scores: list[Score] = []
        self.arrived = time.perf_counter()
        self.timings = [Timing() for _ in rows]
        # Without a limit: a text is small, and the engine thread must not wait for a slow reader.
        self._pieces: asyncio.Queue[Pieces | Exception] = asyncio.Queue()

    @property
    def ended(self) -> bool:
        """Whether each text has its result."""
        return all(timing.result is not None for timing in self.timings)

    def put(self, pieces: Pieces | Exception) -> None:
        """Gives new pieces, or the error that ends the job, to the reader."""
        self._pieces.put_nowait(pieces)

    async def pieces(self) -> AsyncIterator[Pieces]:
        """Yields [] when the scheduler has accepted the job, then new pieces, up to the results of all texts.

        Raises:
          ValueError, OSError: the scheduler has refused the job.
          Refused: the server cannot finish it.
        """
        missing = len(self.rows)
        pieces: Pieces | Exception | None = None
        while missing or pieces is None:
            pieces = await self._pieces.get()
            if isinstance(pieces, Exception):
                raise pieces
            missing -= sum(piece.result is not None for _, piece in pieces)
            yield pieces


class EngineThread:
    """Runs a scheduler in a thread of its own, for the jobs of an event loop.

    Args:
      make: makes the scheduler, in the thread; compilation ahead of requests belongs here.
      max_open: the maximum number of texts that wait or run.
      observer: counts what happens; None for nothing.
      score: returns the scores of prompts; None if no job has any to score.
      on_ready: called in the thread when the scheduler is made.

    Attributes:
      num_open: the number of texts that wait or run.
      num_running: the number of texts with a row, after the last step or command.
      is_ready: whether the scheduler is made.
      error: the error that ended the thread; None while it works.
    """

    def __init__(
        self,
        make: Callable[[], Scheduler],
        max_open: int,
        observer: Observer | None = None,
        score: Callable[[Sequence[Sequence[int]]], Sequence[Score]] | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._make, self.max_open, self._observer, self._score = make, max_open, observer, score
        self._on_ready = on_ready
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of num_open and error
        self.num_open = self.num_running = 0
        self.is_ready = self._closing = False
        self.error: BaseException | None = None
        self._jobs: set[Job] = set()  # of the event loop
        self._rows: dict[int, tuple[Job, int]] = {}  # of the thread: job and row of each request
        self._ids: dict[Job, list[int]] = {}  # of the thread
        self._unscored: deque[Job] = deque()  # of the thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # In the event loop

    @property
    def num_jobs(self) -> int:
        """The number of jobs that have not ended."""
        return len(self._jobs)

    def start(self) -> None:
        """Starts the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, rows: Sequence[Mapping[str, Any]], to_score: Sequence[Sequence[int]] = ()) -> Job:
        """Gives a job to the thread; the caller calls `leave` in the end.

        Raises:
          Refused: the queue is full, the thread has ended, or the server is shutting down.
        """
        job = Job(rows, to_score)
        with self._lock:
            if self.error is not None:
                raise _dead(self.error)
            if self._closing:
                raise Refused(503, "the server is shutting down", code="shutting_down")
            if self.num_open + len(rows) > self.max_open:
                raise Refused(
                    429,
                    f"{self.num_open} texts are running or waiting, and {self.max_open} are possible; try again later",
                    code="queue_full",
                )
            self.num_open += len(rows)
            self._commands.put(functools.partial(self._add, job))
        self._jobs.add(job)
        return job

    def leave(self, job: Job) -> None:
        """Ends a job: the rows of texts that are not complete become free before the next step."""
        if job in self._jobs:
            self._jobs.remove(job)
            if not job.ended:
                self._commands.put(functools.partial(self._drop, job))
            if self._observer is not None:
                self._observer.left(job)

    def drain(self, seconds: float) -> None:
        """Accepts no more jobs; those that have not ended after some seconds get an error."""
        self._closing = True
        self._loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        for job in self._jobs:
            said = "the server is shutting down; the text is not complete"
            job.put(Refused(503, said, code="shutting_down"))

    async def stop(self) -> None:
        """Ends the thread after its current step."""
        self._closing = True
        self._commands.put(None)
        await self._loop.run_in_executor(None, self._thread.join, _JOIN_S)

    def _arrive(self, news: Mapping[Job, Pieces | Exception]) -> None:
        now = time.perf_counter()
        for job, new in news.items():
            if job not in self._jobs:
                continue
            if not isinstance(new, Exception):
                for row, piece in new:
                    job.timings[row].take(piece, now)
                if self._observer is not None:
                    self._observer.took(job, new)
            elif isinstance(new, (ValueError, OSError)):
                self._jobs.remove(job)  # the scheduler has refused it: nobody has aborted it
            job.put(new)

    # In the thread

    def _run(self) -> None:
        try:
            self._scheduler = self._make()
            self.is_ready = True
            self._on_ready()
            while self._obey():
                self._score_some()
                if not self._scheduler.idle:
                    self._tell(self._scheduler.step())
                self.num_running = self._scheduler.num_running
        except BaseException as error:  # also a panic of a library: requests must not wait for ever
            self._die(error)

    def _obey(self) -> bool:
        """Takes the commands; waits for one if there is nothing to run. Returns whether to continue."""
        while True:
            try:
                command = self._commands.get(block=self._scheduler.idle and not self._unscored)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self.num_running = self._scheduler.num_running  # the command may have freed the last row

    def _add(self, job: Job) -> None:
        self._ids[job] = []
        if job.to_score:
            self._unscored.append(job)
        else:
            self._begin(job)

    def _score_some(self) -> None:
        """Scores some prompts of the first job that waits for it, so that the rounds of others continue soon."""
        if not self._unscored:
            return
        job = self._unscored[0]
        if job in self._ids:  # else its client has gone
            left = job.to_score[len(job.scores) :]
            count = sum(size <= _SCORED_TOKENS for size in itertools.accumulate(map(len, left)))
            assert self._score is not None
            try:
                job.scores += self._score(left[: max(count, 1)])
            except Exception as error:
                self._drop(job)
                self._post({job: error})
        if job not in self._ids or len(job.scores) == len(job.to_score):
            self._unscored.popleft()
            self._begin(job)

    def _begin(self, job: Job) -> None:
        ids = self._ids.get(job)
        if ids is None:  # it has ended
            return
        try:
            for row, arguments in enumerate(job.rows):
                ids.append(self._scheduler.add(**arguments))
                self._rows[ids[-1]] = job, row
        except Exception as error:
            self._drop(job)
            self._post({job: error})
        else:
            if not job.rows:
                self._close(job)
            self._post({job: []})

    def _drop(self, job: Job) -> None:
        for id in self._ids.get(job, []):
            if id in self._rows:
                self._scheduler.cancel(id)
                del self._rows[id]
        self._close(job)

    def _close(self, job: Job) -> None:
        if self._ids.pop(job, None) is not None:
            with self._lock:
                self.num_open -= len(job.rows)

    def _tell(self, pieces: Sequence[tuple[int, Piece | Exception]]) -> None:
        news: dict[Job, Pieces | Exception] = {}
        # One error ends all requests of a group.
        for failed in {id(one): one for _, one in pieces if isinstance(one, Exception)}.values():
            _LOG.error("generation failed", exc_info=failed)
        for number, piece in pieces:
            if number not in self._rows:  # a row of a job that an error of this step has ended
                continue
            job, row = self._rows[number]
            if isinstance(piece, Exception):
                self._drop(job)
                news[job] = Refused(500, f"generation failed: {_said(piece)}", code="engine_error")
                continue
            new = news.setdefault(job, [])
            assert isinstance(new, list)
            new.append((row, piece))
            if piece.result is not None:
                del self._rows[number]
                if not any(id in self._rows for id in self._ids[job]):
                    self._close(job)
        self._post(news)

    def _post(self, news: Mapping[Job, Pieces | Exception]) -> None:
        if news:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._arrive, news)

    def _die(self, error: BaseException) -> None:
        _LOG.error("the engine has ended", exc_info=error)
        with self._lock:
            self.error = error
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._report, error)

    def _report(self, error: BaseException) -> None:
        for job in self._jobs:
            job.put(_dead(error))


def _dead(error: BaseException) -> Refused:
    said = f"the engine has ended: {_said(error)}; start the server again"
    return Refused(500, said, code="engine_error")


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
