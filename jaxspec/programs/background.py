"""Background threads that do not delay the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

_Queue = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
# All running threads, including those of workers that have been garbage-collected.
_threads: dict[threading.Thread, _Queue] = {}
_leaving = threading.Event()
# Seconds: the longest time an idle thread takes to end, and the interval between two checks of a busy one.
_POLL = 0.1
# Seconds of waiting at the end of the process before a line says why.
_SILENT = 5.0


class Worker:
    """A thread that runs tasks one after another.

    When the process ends, tasks that have not started are dropped; a `ThreadPoolExecutor` would run them first. A task
    that has started runs until its next `go_on`, because XLA cannot be interrupted, and a thread that returns from it
    during interpreter shutdown aborts the process (SIGABRT). After Ctrl-C the process ends at once.

    Args:
      name: the thread's name.

    Examples:
      >>> Worker("adder").submit(sum, [1, 2]).result()
      3
    """

    def __init__(self, name: str) -> None:
        self._work: _Queue = queue.SimpleQueue()
        thread = threading.Thread(target=_loop, args=(self._work,), name=name, daemon=True)
        _threads[thread] = self._work
        thread.start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Returns the future of `function(*args)`."""
        future: Future[Any] = Future()
        self._work.put((future, function, args))
        return future


def go_on() -> None:
    """Ends a background task between two of its steps if the process is about to end.

    Raises:
      CancelledError: the process is about to end, and the caller runs in a worker's thread.

    Examples:
      >>> go_on()
    """
    if _leaving.is_set() and threading.current_thread() in _threads:
        raise CancelledError


def _loop(work: _Queue) -> None:
    while (piece := work.get()) is not None and not _leaving.is_set():
        future, function, args = piece
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:  # raised again where the result is read
                future.set_exception(error)
        # Without this, the objects of the last task stay alive until the next one arrives.
        del piece, future, function, args
    _threads.pop(threading.current_thread(), None)


@atexit.register
def _leave() -> None:
    """Ends all threads. It runs before JAX's exit handler, because it is registered later."""
    threads, interrupted = dict(_threads), False
    try:
        _leaving.set()
        for work in threads.values():
            work.put(None)
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        interrupted = isinstance(last, KeyboardInterrupt) and not hasattr(sys, "ps1")
        silent_until = time.monotonic() + _SILENT
        for thread in threads:
            thread.join(_POLL)
            # Short joins, so that Python can handle a signal that another thread received.
            while not interrupted and thread in _threads:
                thread.join(_POLL)
                if time.monotonic() > silent_until:
                    silent_until = math.inf
                    print(
                        "jaxspec: the process ends after a compilation; Ctrl-C ends it now", file=sys.stderr
                    )
    except KeyboardInterrupt:
        interrupted = True
    # After Ctrl-C during a join, Python treats the thread as ended, so `_threads` is checked.
    if interrupted and _threads:
        _end_by_interrupt()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)  # a child has none of these threads


def _end_by_interrupt() -> None:
    """Ends the process as Python does after Ctrl-C, but without interpreter shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a pipe without a reader
            stream.flush()
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)
