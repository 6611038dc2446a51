"""Signals that end a training: the step that runs is finished, and a checkpoint written."""

from __future__ import annotations

import signal
from typing import Any


class StopSignal:
    """In this context the first SIGINT or SIGTERM only sets `received` to its number; a second one acts as usual."""

    def __enter__(self) -> StopSignal:
        self.received: int | None = None
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
