"""Signals that end a training: the step that runs is finished, and a checkpoint written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from jaxspec.console import interrupts


class StopSignal:
    """In this context the first SIGINT or SIGTERM only sets `received` to its number; a second one ends the process.

    Args:
      program: the beginning of the line that a second signal prints.
      say: is called from another thread as soon as the first signal arrives, because a step or compilation may take
        long.
    """

    def __init__(self, program: str = "training", say: Callable[[], None] = lambda: None) -> None:
        self.received: int | None = None
        self._watch = interrupts.Watch(
            lambda number: say(), lambda number: interrupts.leave_at_once(program, 128 + number)
        )

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._receive)
        self._watch.__enter__()
        return self

    def _receive(self, number: int, frame: Any) -> None:
        self.received = self.received or number

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__()
        for number, handler in self._before.items():
            signal.signal(number, handler)
