"""Runs a long measurement in parts, within a time budget: each part's result is output when it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxspec.console.errors import one_line
from jaxspec.host.progress import OnProgress

Record = dict[str, Any]
# No part starts when less than this share of the budget is left.
RESERVE = 0.03
# The entries of a record whose part runs again when the measurement continues.
AGAIN = ("error", "unfinished")


class LeftOutError(Exception):
    """Raised by a part that this device cannot measure, with the reason."""


class UnfinishedError(Exception):
    """Raised by a part that continues when the measurement does, with its state."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
      name: name of the measurement.
      model: the model or the shape; "" for the device itself.
      run: runs the measurement, given a function that shows the progress; returns the record.
      kind: parts of one kind take about the same time. Default: the name.
      resumable: whether the part continues where it was cut off, so that it may start with little time left.
      needs: the name of the part of this model that must be done before.
    """

    name: str
    model: str
    run: Callable[[OnProgress], Record]
    kind: str = ""
    resumable: bool = False
    needs: str = ""

    @property
    def words(self) -> Record:
        """The entries that identify the part in a report."""
        return {"part": self.name, "model": self.model}


class Parts:
    """Runs parts one after another until the time is up, and continues an earlier measurement.

    A part starts only if the slowest part of its kind so far would still end in time. When the time is up, the process
    ends after the last record, also during a part, because an accelerator's compiler cannot be interrupted. Parts that
    are done are skipped; those that failed or were cut off come again after all others.

    Args:
      budget_s: seconds for everything, from `began` on.
      emit: receives the record of each part; the last record lists the parts that were left out, and why.
      began: start time, from `clock`.
      earlier: the records of parts of the measurement that continues.
      clock: returns seconds.
      end: ends the process.

    Examples:
      >>> records = []
      >>> parts = Parts(60.0, records.append, began=time.monotonic())
      >>> parts.run([Part("sum", "tiny", lambda progress: {"sum": 1 + 1})], lambda what: None)
      >>> records[0]["sum"], records[-1]["left_out"]
      (2, [])
    """

    def __init__(
        self,
        budget_s: float,
        emit: Callable[[Record], None],
        *,
        began: float,
        earlier: Sequence[Record] = (),
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self._budget_s, self._emit, self._began, self._clock, self._end = budget_s, emit, began, clock, end
        self._found = {(record["part"], record["model"]): record for record in earlier}
        self._left_out: list[Record] = []
        self._lock, self._over, self._part_began = threading.Lock(), False, began

    def run(self, parts: Iterable[Part], on_progress: OnProgress) -> None:
        """Runs as many parts as there is time for. A failing part gives a record of its error; the others go on."""
        waiting, slowest = self._waiting(list(parts))
        alarm = threading.Timer(max(self._left(), 0.0), self._time_is_up, args=[waiting])
        alarm.daemon = True
        alarm.start()
        try:
            while waiting:
                part, result = waiting[0], None
                kind = part.kind or part.name
                needed = max(RESERVE * self._budget_s, 0.0 if part.resumable else slowest.get(kind, 0.0))
                self._part_began = self._clock()
                if part.needs and not self._is_done(part.needs, part.model):
                    self._leave_out(part, f"it needs the part {part.needs}, which is not done")
                elif self._left() < needed:
                    self._leave_out(
                        part, f"it takes about {needed:.0f} s, and {max(self._left(), 0.0):.0f} s were left"
                    )
                else:
                    try:
                        result = part.run(functools.partial(_told, on_progress, part))
                    except LeftOutError as reason:
                        self._leave_out(part, str(reason))
                    except UnfinishedError as state:
                        result = {"unfinished": str(state)}
                    except Exception as error:
                        result = {"error": one_line(error)[:500]}
                if result is not None:
                    slowest[kind] = max(self._clock() - self._part_began, slowest.get(kind, 0.0))
                    self._say(self._record(part, result))
                del waiting[0]
        finally:
            alarm.cancel()
        self._say(self._last())

    def _waiting(self, parts: list[Part]) -> tuple[list[Part], dict[str, float]]:
        """Returns the parts that are not done, in the order in which they run, and the longest time of each kind."""
        fresh: list[Part] = []
        again: list[Part] = []
        slowest: dict[str, float] = {}
        for part in parts:
            found = self._found.get((part.name, part.model))
            if found is not None:
                kind = part.kind or part.name
                slowest[kind] = max(found["seconds"], slowest.get(kind, 0.0))
            if not self._is_done(part.name, part.model):
                after = any((part.needs, part.model) == (one.name, one.model) for one in again)
                (fresh if found is None and not after else again).append(part)
        return fresh + again, slowest

    def _is_done(self, name: str, model: str) -> bool:
        found = self._found.get((name, model))
        return found is not None and not any(entry in found for entry in AGAIN)

    def _record(self, part: Part, result: Record) -> Record:
        record = part.words | {"seconds": round(self._clock() - self._part_began, 1)} | result | part.words
        self._found[part.name, part.model] = record
        return record

    def _left(self) -> float:
        return self._budget_s - (self._clock() - self._began)

    def _leave_out(self, part: Part, reason: str) -> None:
        self._left_out.append({**part.words, "reason": reason})

    def _last(self) -> Record:
        return {"left_out": self._left_out, "seconds": round(self._clock() - self._began, 1)}

    def _say(self, record: Record) -> None:
        with self._lock:
            if not self._over:
                self._emit(record)

    def _time_is_up(self, waiting: list[Part]) -> None:
        with self._lock:
            self._over = True
            with contextlib.suppress(OSError):  # a closed pipe or a full disk
                for number, part in enumerate(list(waiting)):
                    if number:
                        self._leave_out(part, "the time was up")
                    else:
                        self._emit(self._record(part, {"unfinished": "it was running when the time was up"}))
                self._emit(self._last())
            self._end()


def _told(on_progress: OnProgress, part: Part, what: str) -> None:
    on_progress(f"{part.model} {part.name}: {what}".strip())
