"""What a person sees: colours where they can be shown, and progress on standard error."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import Any, Self, TextIO

DIM, ACCEPTED = "2", "32"
# C0 except tab and newline, DEL, C1, and the characters that embed, override or isolate the direction of a text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Without a terminal, seconds from one line to the next: short work stays silent.
_PATIENCE_S = 10.0


def shows_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants colours (see no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str, stream: TextIO) -> str:
    """Returns a model's text for a stream: a terminal gets control characters as escapes such as \\x1b.

    They could move the cursor, change the title or reverse the order of the text. Newlines and tabs remain, and a
    stream that is not a terminal gets the text unchanged.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text) if stream.isatty() else text


def painted(text: str, code: str) -> str:
    """Text in a colour or style. Each line by itself, so that a pager or a cut line leaves nothing behind."""
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def tell(line: str) -> None:
    """Writes a line from a command to standard error."""
    print(f"jaxspec: {line}", file=sys.stderr, flush=True)


class _Lines:
    """What is being done, where no spinner can say so: in lines, each `_PATIENCE_S` after the one before at the
    earliest, and for work that goes on silently just then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._what: str | None = None
        self._timer: threading.Timer | None = None

    def __call__(self, what: str) -> None:
        """What is being done from now on: said at once if it is time, else when it is, unless it is over by then."""
        with self._lock:
            self._what = what
            if self._timer is None:
                wait = max(0.0, self._last + _PATIENCE_S - time.monotonic())
                if wait == 0:
                    self._say()
                else:
                    self._timer = threading.Timer(min(wait, threading.TIMEOUT_MAX), self._due)
                    self._timer.daemon = True
                    self._timer.start()

    def _due(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer = None
                self._say()

    def _say(self) -> None:
        self._last = time.monotonic()
        tell(str(self._what))

    def stop(self) -> None:
        """Says nothing more of what was being done."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


class Progress:
    """Says on standard error what is being done: a spinner in a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._status: Any = None

    def __call__(self, what: str) -> None:
        """What is being done from now on."""
        if not sys.stderr.isatty():
            self._lines(what)
        elif self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(what)
            self._status.start()
        else:
            self._status.update(what)

    def stop(self) -> None:
        """Takes the spinner away, before anything else is written to the terminal."""
        self._lines.stop()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
