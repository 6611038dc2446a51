"""Progress of work that takes more than a second: one line on standard error, updated in place.

Only a terminal or a notebook shows it. Elsewhere a copy is written every 30 seconds, as a line of a log.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar, cast

# Called with a description of the current step.
OnProgress = Callable[[str], None]
Function = TypeVar("Function", bound=Callable[..., Any])
# Seconds before the line is shown, and between its updates; seconds between the lines of a log.
_SECOND, _LOG_S = 1.0, 30.0


class Progress:
    """An activity on the line, from its first description to `stop`; a context manager.

    Activities may be nested: the line shows them from the outermost to the innermost.

    Args:
      what: the first description.
    """

    def __init__(self, what: str | None = None) -> None:
        self._began: tuple[float, int] | None = None
        if what is not None:
            self(what)

    def __call__(self, what: str) -> None:
        """Sets the description."""
        _LINE.set(self, what)

    def count(self, what: str, done: int, total: int, figures: str = "") -> None:
        """Describes countable work: `done` of `total`, an estimate of the time left, and figures about it."""
        now = time.monotonic()
        first_s, first = self._began = self._began or (now, done)
        left = (now - first_s) / (done - first) * (total - done) if done > first else 0.0
        ahead = f"about {duration(left)} left" if left else ""
        self("  ".join(part for part in (f"{what} {done}/{total}", figures, ahead) if part))

    def stop(self) -> None:
        """Removes the activity from the line. Call it before writing anything else to the terminal."""
        _LINE.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def shows_progress(function: Function) -> Function:
    """Shows the progress of a function with an argument `on_progress`, unless the caller gives this argument."""
    signature = inspect.signature(function)

    def given(args: Any, kwargs: Any) -> bool:
        return "on_progress" in signature.bind_partial(*args, **kwargs).arguments

    @functools.wraps(function)
    def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with Progress() as progress:
            yield from function(*args, **kwargs, on_progress=progress)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if given(args, kwargs):
            return function(*args, **kwargs)
        if inspect.isgeneratorfunction(function):
            return iterate(*args, **kwargs)
        with Progress() as progress:
            return function(*args, **kwargs, on_progress=progress)

    return cast(Function, run)


def is_shown() -> bool:
    """Whether standard error is a terminal or belongs to a notebook."""
    return "ipykernel" in sys.modules or (
        sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    )


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hides the line while another program, or a permanent line, writes to the terminal."""
    with _LINE.lock:
        _LINE.hidden += 1
        _LINE.clear()
    try:
        yield
    finally:
        with _LINE.lock:
            _LINE.hidden -= 1


def duration(seconds: float) -> str:
    """Formats seconds for people: `12 s`, `3 min`, `2.0 h`."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


class _Line:
    """The line; a thread updates it, because nothing is called while a program compiles.

    Attributes:
      lock: held while the line is written or changed.
      hidden: the number of `hidden` contexts.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.hidden = 0
        self._activities: dict[Progress, str] = {}
        self._since = 0.0
        self._ended = threading.Event()
        self._width = 0

    def set(self, activity: Progress, what: str) -> None:
        """Sets the description of an activity, which becomes the innermost if it is new."""
        with self.lock:
            if self._activities.get(activity) == what:
                return
            self._since = time.monotonic()
            begins = not self._activities
            self._activities[activity] = what
            if begins:
                self._ended = threading.Event()
                show = functools.partial(self._show, self._ended)
                threading.Thread(target=show, name="jaxspec-progress", daemon=True).start()

    def remove(self, activity: Progress) -> None:
        """Removes an activity; the line disappears with the last one."""
        with self.lock:
            if self._activities.pop(activity, None) is not None and not self._activities:
                self._ended.set()
                self.clear()

    def clear(self) -> None:
        """Overwrites the line with spaces. Notebooks know no escape for it."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _show(self, ended: threading.Event) -> None:
        logged = time.monotonic()
        while not ended.wait(_SECOND):
            with self.lock:
                if ended.is_set() or self.hidden:
                    continue
                now = time.monotonic()
                text = "jaxspec: " + ": ".join(dict.fromkeys(self._activities.values()))
                seconds = f": {now - self._since:.0f} s"
                if not is_shown():
                    if now - logged >= _LOG_S:
                        logged = now
                        self._write(f"{text}{seconds if now - self._since >= _SECOND else ''}\n")
                    continue
                # The last column stays free, because a full line would wrap.
                room = shutil.get_terminal_size().columns - len(seconds) - 1
                text = (text if len(text) <= room else text[: room - 1] + "…") + seconds
                # The cursor is left at the beginning of the line, so that other output overwrites it.
                self._write("\r" + text.ljust(self._width) + "\r")
                self._width = max(self._width, len(text))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            sys.stderr.write(text)
            sys.stderr.flush()


_LINE = _Line()
