"""Handles Ctrl-C at any moment with one line: during imports, in a command, or while compiled code runs.

Python calls a signal handler in the main thread, and only between two bytecode instructions: not during a compilation,
which may take minutes. Here the signal wakes a thread, which responds at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from jaxspec.console.status import INTERRUPTED
from jaxspec.host.files import written_here

# A second signal within this time counts as the same one: some programs signal a process and also its group.
_SAME_S = 0.3
# How long the main thread may take before a line reports that it is busy.
_BUSY_S = 1.0


class _Program:
    """The state of this process.

    Attributes:
      said: whether it has already written its line about an interrupt.
      at_sigterm: the line with which SIGTERM ends it; None if SIGTERM has its usual effect.
    """

    said = False
    at_sigterm: str | None = None


def at_start(program: str) -> None:
    """Makes Ctrl-C end the process with one line before the command begins, as during imports, and after it has ended.

    Does nothing if the process ignores Ctrl-C, or another handler is installed.

    Args:
      program: the beginning of the line, such as `jaxspec`.
    """

    def end(number: int, frame: Any) -> None:
        leave_at_once(program)

    if _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def leave_at_once(program: str, status: int = INTERRUPTED) -> None:
    """Ends the process, after a line if none was written before."""
    say(f"{program}: interrupted")
    os._exit(status)


def signal_name(number: int) -> str:
    """Returns the name by which users know a signal, such as Ctrl-C."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def is_first_line() -> bool:
    """Returns True at the first call in this process: the caller then writes the line about the interrupt."""
    first, _Program.said = not _Program.said, True
    return first


def say(line: str) -> None:
    """Writes a line about an interrupt, unless one was written before, or another process writes for this one."""
    if is_first_line() and written_here():
        # Python's streams cannot be used here: the main thread may be writing to them.
        with contextlib.suppress(OSError):
            clear = "\r\x1b[K" if os.isatty(2) else ""  # progress may be shown
            os.write(2, f"{clear}{line}\n".encode())


@contextlib.contextmanager
def ends_at_sigterm(line: str) -> Iterator[None]:
    """In this context within `Interruptible`, SIGTERM ends the process at once, after a line; also a compilation.

    Only for work that may be killed at any moment. A process that ignores SIGTERM still does.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not _in_main_thread() or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # `Interruptible` reacts to it
    _Program.at_sigterm = line
    try:
        yield
    finally:
        _Program.at_sigterm = None
        signal.signal(signal.SIGTERM, before)


class Watch:
    """In this context a thread reacts to signals when they arrive; Python's signal handlers run as usual too.

    Args:
      first: called with the number of the first signal.
      again: called with the number of each later one.
    """

    def __init__(self, first: Callable[[int], None], again: Callable[[int], None]) -> None:
        self._first, self._again = first, again
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        # Windows wakes only sockets; there a signal is handled between two bytecode instructions, as usual in Python.
        if _in_main_thread() and sys.platform != "win32":
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

    If the main thread is too busy to raise it, the first one prints a line.

    Args:
      program: the beginning of the lines.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._raised = threading.Event()
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        _Program.said = False
        self._takes = _in_main_thread() and self._before not in (signal.SIG_IGN, signal.SIG_DFL, None)
        if self._takes:
            signal.signal(signal.SIGINT, self._raise)
        if _in_main_thread():  # also for SIGTERM, where Ctrl-C is ignored, as in the background of a shell
            self._watch = Watch(self._first, lambda number: leave_at_once(self._program, 128 + number))
            self._watch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            # The handler is restored last, so that a second Ctrl-C is handled until then.
            self._watch.__exit__()
        if self._takes:
            signal.signal(signal.SIGINT, self._before)

    def _raise(self, number: int, frame: Any) -> None:
        self._raised.set()
        raise KeyboardInterrupt

    def _first(self, number: int) -> None:
        if number == signal.SIGTERM and _Program.at_sigterm is not None:
            say(_Program.at_sigterm)
            os._exit(128 + number)
        threading.Thread(target=self._wait, args=(signal_name(number),), name="busy", daemon=True).start()

    def _wait(self, name: str) -> None:
        if not self._raised.wait(_BUSY_S):
            say(f"{self._program}: interrupted; it ends after what runs now, a second {name} ends it at once")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _in_child() -> None:
    # Otherwise a signal that parent and child both receive would reach the parent's thread twice.
    if _in_main_thread():
        signal.set_wakeup_fd(-1)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_in_child)
