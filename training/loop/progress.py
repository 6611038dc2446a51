"""The progress of long work: `jaxspec.host.progress`, and lines with figures for a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Self

from rich.console import Console

from jaxspec.host import progress

# Without a terminal: seconds between two lines. They grow with the elapsed time.
FIRST_S, MAX_S, SHARE = 10.0, 300.0, 0.1


class Progress:
    """Shows `what N/TOTAL`, figures and the time left; a context manager.

    Args:
      console: the output of the lines.
      what: the counted unit, such as `step`.
      total: the number of units.
      done: the number of units already done.
      clock: returns seconds, monotonic.

    Attributes:
      done: the number of steps done so far.
    """

    def __init__(
        self,
        console: Console,
        what: str,
        total: int,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._what, self.total, self.done = console, what, total, done
        self._clock, self._begin = clock, clock()
        self._last_line = self._begin
        self._shown = progress.Progress()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.stop()

    def doing(self, what: str) -> None:
        """Shows the current activity, such as `compiling`."""
        self._shown(self._text(what))
        if not progress.is_shown():
            self._line(what)

    def update(self, done: int, figures: str) -> None:
        """Shows the number of finished units, and figures about them."""
        self.done = done
        if progress.is_shown():
            self._shown(self._text(figures))
        else:  # the lines below take the place of the copies of the line
            self._shown.stop()
        now = self._clock()
        wait = min(MAX_S, max(FIRST_S, SHARE * (now - self._begin)))
        if not progress.is_shown() and now - self._last_line >= wait:
            self._line(figures)

    def say(self, line: str) -> None:
        """Prints a permanent line; the next regular line comes a whole interval later."""
        self._last_line = self._clock()
        with progress.hidden():
            self._console.print(line, markup=False)

    def _line(self, text: str) -> None:
        self.say(self._text(text))

    def _text(self, text: str) -> str:
        return f"{self._what} {self.done}/{self.total}  {text}".rstrip()


class Pace:
    """The speed of the latest steps without compilation, and an estimate of the remaining time with it."""

    def __init__(self, latest: int) -> None:
        """Averages over the `latest` steps."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=latest)
        self._pause = self._compilation = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Adds a step: its number of tokens and its duration without compilation."""
        self._steps.append((tokens, seconds))

    def pause(self, seconds: float) -> None:
        """Records the duration of the latest checkpoint with its measurements."""
        self._pause = seconds

    def compiled(self, seconds: float) -> None:
        """Records the compile time of the latest program."""
        self._compilation = seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The rate over the latest steps; None before the first step."""
        seconds = sum(one for _, one in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds else None

    def seconds_left(self, steps: int, pauses: int, programs: int = 0) -> float | None:
        """Estimates the seconds for steps, checkpoints and programs to compile; None before the first step."""
        if not self._steps:
            return None
        each = sum(one for _, one in self._steps) / len(self._steps)
        return steps * each + pauses * self._pause + programs * self._compilation
