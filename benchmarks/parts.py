"""Runs a long measurement in parts, within a time budget: each part's result is output when it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from jaxspec.console.errors import one_line
from jaxspec.host.progress import OnProgress

Record = dict[str, Any]
# No part starts when less than this share of the budget is left.
RESERVE = 0.03


class LeftOutError(Exception):
    """Raised by a part that cannot be measured, with the reason; later parts of the shape are left out too."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
      name: name of the measurement.
      shape: the model's shape; "" for the device itself.
      run: runs the measurement, given a function that shows the progress; returns the record.
      kind: parts of one kind take about the same time. Default: the name.
    """

    name: str
    shape: str
    run: Callable[[OnProgress], Record]
    kind: str = ""

    @property
    def words(self) -> Record:
        """The entries that identify the part in a report."""
        return {"part": self.name, "shape": self.shape}


class Parts:
    """Runs parts one after another until the time is up.

    A part starts only if the slowest part of its kind so far would still end in time. When the time is up, the process
    ends after the last record, also during a part, because an accelerator's compiler cannot be interrupted.

    Args:
      budget_s: seconds for everything, from `began` on.
      emit: receives each complete record; the last one lists the parts that were left out, and why.
      began: start time, from `clock`.
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
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self._budget_s, self._emit, self._began, self._clock, self._end = budget_s, emit, began, clock, end
        self._left_out: list[Record] = []
        self._lock, self._over = threading.Lock(), False

    def run(self, parts: Iterable[Part], on_progress: OnProgress) -> None:
        """Runs as many parts as there is time for. A failing part gives a record of its error; the others go on."""
        waiting = list(parts)
        slowest: dict[str, float] = {}
        impossible: dict[str, str] = {}
        alarm = threading.Timer(max(self._left(), 0.0), self._time_is_up, args=[waiting])
        alarm.daemon = True
        alarm.start()
        try:
            while waiting:
                part = waiting[0]
                kind = part.kind or part.name
                needed = max(RESERVE * self._budget_s, slowest.get(kind, 0.0))
                if part.shape in impossible:
                    self._leave_out(part, impossible[part.shape])
                elif self._left() < needed:
                    self._leave_out(part, f"{max(self._left(), 0.0):.0f} s of the budget were left")
                else:
                    began = self._clock()
                    try:
                        result = part.run(functools.partial(_told, on_progress, part))
                    except LeftOutError as reason:
                        impossible[part.shape] = str(reason)
                        self._leave_out(part, str(reason))
                    except Exception as error:
                        result = {"error": one_line(error)[:500]}
                    if part.shape not in impossible:
                        spent = self._clock() - began
                        slowest[kind] = max(spent, slowest.get(kind, 0.0))
                        self._say({**part.words, "seconds": round(spent, 1), **result})
                del waiting[0]
        finally:
            alarm.cancel()
        self._say(self._last())

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
            for number, part in enumerate(list(waiting)):
                self._leave_out(
                    part, "it was running when the time was up" if not number else "the time was up"
                )
            with contextlib.suppress(OSError):  # a closed pipe or a full disk
                self._emit(self._last())
            self._end()


def _told(on_progress: OnProgress, part: Part, what: str) -> None:
    on_progress(f"{part.shape} {part.name}: {what}".strip())
