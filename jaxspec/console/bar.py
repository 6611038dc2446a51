"""Progress through something that can be counted, with the best so far, on standard error."""

from __future__ import annotations

import sys
from typing import Any

from jaxspec.console.terminal import Progress


class Bar(Progress):
    """As `Progress`, and a bar in a terminal once there is something to count."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._task: Any = None

    def count(self, what: str, done: int, total: int, best: str) -> None:
        """Says how many are done of how many, and what the best is."""
        if not sys.stderr.isatty():
            self(f"{what}: {done} of {total}, best {best}")
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self.stop()
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("best {task.fields[best]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total, best=best)
        self._bar.update(self._task, description=what, completed=done, total=total, best=best)

    def stop(self) -> None:
        """Takes away what is shown."""
        super().stop()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
