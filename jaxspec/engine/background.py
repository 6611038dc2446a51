"""Work in the background that a process leaves undone when it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

_Queue = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
# The threads that have not ended, those of workers that nobody holds any more among them.
_threads: dict[threading.Thread, _Queue] = {}
_leaving = threading.Event()
# How long a thread that has nothing to do takes to end, at most, and between two looks at one that has, seconds.
_POLL = 0.1


class Worker:
    """A thread that does one piece of work after another.

    When the process ends, what has not begun is dropped, which a `ThreadPoolExecutor` would do first. One piece that
    has begun is waited for, up to its next `go_on`: a thread that comes back from XLA while the interpreter is torn
    down ends the process by SIGABRT, and nothing interrupts XLA. After Ctrl-C the process ends at once.

    Args:
      name: of the thread.
      begin: what the thread does first.

    Examples:
      >>> Worker("adder").submit(sum, [1, 2]).result()
      3
    """

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        self._work: _Queue = queue.SimpleQueue()
        thread = threading.Thread(target=_loop, args=(self._work, begin), name=name, daemon=True)
        _threads[thread] = self._work
        thread.start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Returns the future of `function(*args)`."""
        future: Future[Any] = Future()
        self._work.put((future, function, args))
        return future


def go_on() -> None:
    """Gives work in the background up between two of its parts, where the process is about to end.

    Raises:
      CancelledError: it is, and this is a worker's thread.

    Examples:
      >>> go_on()
    """
    if _leaving.is_set() and threading.current_thread() in _threads:
        raise CancelledError


def _loop(work: _Queue, begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    while (piece := work.get()) is not None:
        future, function, args = piece
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:  # the future's reader has it
                future.set_exception(error)
        # Else the last piece of work would keep what it holds until the next one comes.
        del piece, future, function, args
    _threads.pop(threading.current_thread(), None)


def _drop(work: _Queue) -> None:
    """Takes out what has not begun, and lets the thread end."""
    with contextlib.suppress(queue.Empty):
        while True:
            dropped = work.get_nowait()
            if dropped is not None:
                dropped[0].cancel()
    work.put(None)


@atexit.register
def _leave() -> None:
    """Ends all threads: before JAX ends, as this is registered later."""
    threads, interrupted = dict(_threads), False
    try:
        _leaving.set()
        for work in threads.values():
            _drop(work)
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        interrupted = isinstance(last, KeyboardInterrupt) and not hasattr(sys, "ps1")
        for thread in threads:
            thread.join(_POLL)
            # In between a signal that came to another thread is looked at.
            while not interrupted and thread in _threads:
                thread.join(_POLL)
    except KeyboardInterrupt:
        interrupted = True
    # Python takes a thread for ended once Ctrl-C came while it was joined.
    if interrupted and _threads:
        _end_by_interrupt()


def _end_by_interrupt() -> None:
    """Ends the process as Python ends it after Ctrl-C, but for its tear-down."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)
