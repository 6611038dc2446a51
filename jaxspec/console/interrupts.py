"""Ctrl-C at any moment: one line, whether Python imports a library, runs a command, or waits for compiled code.

Python calls a signal's handler in the main thread, and only between two of its own instructions: not while a program is
compiled, which may take minutes. A thread is told by the signal itself, and answers at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from jaxspec.console.status import INTERRUPTED

# A signal that comes so soon after another is the same: some programs send one to a process and to its group.
_SAME_S = 0.3
# How long the main thread may take until it is said that it is busy.
_BUSY_S = 1.0


class _Program:
    """What this process has said of an interrupt."""

    said = False


def at_start(program: str) -> None:
    """Has Ctrl-C end the process with one line while nothing is done yet, as during imports, and after all is done.

    Does nothing where the process ignores Ctrl-C, or somebody else handles it.

    Args:
      program: what the line begins with, such as `jaxspec`.
    """

    def end(number: int, frame: Any) -> None:
        leave_at_once(program)

    if _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def leave_at_once(program: str, status: int = INTERRUPTED) -> None:
    """Ends the process, with a line if none was written before."""
    say(f"{program}: interrupted")
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # a bar of progress may have hidden the cursor
    os._exit(status)


def is_first_line() -> bool:
    """Whether nothing was said of an interrupt yet; from now on something is."""
    first, _Program.said = not _Program.said, True
    return first


def say(line: str) -> None:
    """Writes the one line about an interrupt; later ones are left out."""
    if is_first_line():
        # Not through Python's streams: the main thread may be writing to them.
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())


class Watch:
    """In this context a thread is told of signals when they come; handlers of Python run besides, as ever.

    Args:
      first: called with the number of the first signal.
      again: called with the number of each later one.
    """

    def __init__(self, first: Callable[[int], None], again: Callable[[int], None]) -> None:
        self._first, self._again = first, again
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if _in_main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            signal.set_wakeup_fd(self._before)
            os.write(self._write, b"\0")
            self._thread.join()
            os.close(self._read)
            os.close(self._write)

    def _listen(self) -> None:
        last: float | None = None
        while number := os.read(self._read, 1)[0]:
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            now = time.monotonic()
            if last is None:
                self._first(number)
            elif now - last > _SAME_S:
                self._again(number)
            last = now


class Interruptible:
    """In this context the first Ctrl-C raises KeyboardInterrupt, and a second one ends the process at once.

    Where the main thread is too busy to raise it, the first one says so.

    Args:
      program: what lines begin with.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._raised = threading.Event()
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        _Program.said = False
        if _in_main_thread() and self._before not in (signal.SIG_IGN, signal.SIG_DFL, None):
            signal.signal(signal.SIGINT, self._raise)
            self._watch = Watch(self._first, lambda number: leave_at_once(self._program, 128 + number))
            self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            # Handlers last: until then a second Ctrl-C has somebody to answer it.
            self._watch.__exit__()
            signal.signal(signal.SIGINT, self._before)

    def _raise(self, number: int, frame: Any) -> None:
        self._raised.set()
        raise KeyboardInterrupt

    def _first(self, number: int) -> None:
        threading.Thread(target=self._wait, name="busy", daemon=True).start()

    def _wait(self) -> None:
        if not self._raised.wait(_BUSY_S):
            say(
                f"{self._program}: interrupted; it ends after what is running now, a second Ctrl-C ends it at once"
            )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _in_child() -> None:
    # Else a signal that parent and child both get would reach the parent's thread twice.
    if _in_main_thread():
        signal.set_wakeup_fd(-1)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_in_child)
