"""Handles signals that end a training after the current step and a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from jaxspec.console import interrupts


class StopSignal:
    """A context in which the first SIGINT or SIGTERM sets `received` to its number, and a second ends the process.

    Args:
      program: the beginning of the line that a second signal prints.
      say: called from another thread with the number of the first signal, as soon as it arrives, because a step or
        compilation may take long.

    Attributes:
      received: the number of the first signal; None if none came.
      at: the time at which it came, `time.monotonic` in seconds.
    """

    def __init__(self, program: str = "training", say: Callable[[int], None] = lambda number: None) -> None:
        self.received: int | None = None
        self.at: float | None = None
        self._program, self._say = program, say

    def __enter__(self) -> StopSignal:
        # Watch and StopSignal refer to each other only in the context. Otherwise the arrays to which `say` leads, such
        # as a target's parameters, would stay on the devices until Python collects the cycle.
        self._watch = interrupts.Watch(
            self._first, lambda number: interrupts.leave_at_once(self._program, 128 + number)
        )
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._receive)
        self._watch.__enter__()
        return self

    def _first(self, number: int) -> None:
        self.at = time.monotonic()
        self._say(number)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = self.received or number

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__()
        del self._watch
        for number, handler in self._before.items():
            signal.signal(number, handler)
