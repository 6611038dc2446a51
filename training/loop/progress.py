"""Where a long piece of work stands, on standard error: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

# Without a terminal: seconds between two lines. They grow with the time that the work takes.
FIRST_S, MAX_S, SHARE = 10.0, 300.0, 0.1


class Progress:
    """Shows `what N/TOTAL`, figures and the time left; a context manager.

    Args:
      console: where to; a bar if it is a terminal.
      what: is counted, such as `step`.
      total: how many there are.
      done: how many are done already.
      clock: seconds, monotonic.

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
        self._bar = RichProgress(
            TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(),
            TextColumn("{task.fields[figures]}"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=total, completed=done, figures="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """Shows what takes long now, such as `compiling`: in the bar, or else as a line."""
        self._bar.update(self._task, figures=what, refresh=True)
        if not self._console.is_terminal:
            self._line(what)

    def update(self, done: int, figures: str) -> None:
        """Shows how many are done, and figures of them."""
        self.done = done
        self._bar.update(self._task, completed=done, figures=figures)
        now = self._clock()
        wait = min(MAX_S, max(FIRST_S, SHARE * (now - self._begin)))
        if not self._console.is_terminal and now - self._last_line >= wait:
            self._line(figures)

    def say(self, line: str) -> None:
        """Prints a line that stays; the next regular line comes a whole interval later."""
        self._last_line = self._clock()
        self._console.print(line, markup=False)

    def _line(self, text: str) -> None:
        self.say(f"{self._what} {self.done}/{self.total}  {text}".rstrip())


class Pace:
    """The speed of the latest steps, and what it says of those to come.

    Steps that compile are not to be added: they say nothing of those to come.
    """

    def __init__(self, latest: int) -> None:
        """Keeps no more than the `latest` steps."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=latest)
        self._pause = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Adds a step: its tokens, and how long it took."""
        self._steps.append((tokens, seconds))

    def pause(self, seconds: float) -> None:
        """Records how long the latest checkpoint took, with what is measured there."""
        self._pause = seconds

    def forget(self) -> None:
        """Forgets all steps: those to come are different."""
        self._steps.clear()

    @property
    def tokens_per_second(self) -> float | None:
        """The rate over the latest steps; None as long as no step was added."""
        seconds = sum(one for _, one in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds else None

    def seconds_left(self, steps: int, pauses: int) -> float | None:
        """Seconds that `steps` steps and `pauses` checkpoints will take; None as long as no step was added."""
        if not self._steps:
            return None
        return steps * sum(one for _, one in self._steps) / len(self._steps) + pauses * self._pause


def duration(seconds: float) -> str:
    """Writes seconds as people say them: `12 s`, `3 min`, `2.0 h`."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def counted(number: int, one: str, many: str) -> str:
    """Writes a number with its noun: `1 kind`, `3 kinds`."""
    return f"{number:,} {one if number == 1 else many}"
