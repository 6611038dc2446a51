"""What a person sees: colours where they can be shown, and progress on standard error."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager
from typing import Any, TextIO

DIM, ACCEPTED = "2", "32"
# Without a terminal, at most one line in so many seconds: short work stays silent.
_PATIENCE_S = 10.0


def shows_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants colours (see no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, code: str) -> str:
    """Text in a colour or style. Each line by itself, so that a pager or a cut line leaves nothing behind."""
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


class Progress(AbstractContextManager):
    """Says on standard error what is being done: a spinner in a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._told = time.monotonic()
        self._status: Any = None

    def __call__(self, what: str) -> None:
        """What is being done from now on."""
        if not sys.stderr.isatty():
            if time.monotonic() - self._told >= _PATIENCE_S:
                self._told = time.monotonic()
                print(f"jaxspec: {what}", file=sys.stderr, flush=True)
        elif self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(what)
            self._status.start()
        else:
            self._status.update(what)

    def stop(self) -> None:
        """Takes the spinner away, before anything else is written to the terminal."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __exit__(self, *error: object) -> None:
        self.stop()
