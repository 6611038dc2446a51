"""Where the seconds of a process went: one table at the end of a command, with `JAXSPEC_DEBUG=1`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator

_BEGAN = time.perf_counter()


@dataclasses.dataclass
class _Row:
    """The time of one stage: seconds without those of stages within it, and how often it ran."""

    seconds: float = 0.0
    count: int = 0


@dataclasses.dataclass
class _Open:
    """A stage that runs: its begin, and the seconds of the stages within it that have ended."""

    began: float
    within: float = 0.0


_LOCK = threading.Lock()
# By name and whether the stage ran beside the main thread.
_ROWS: dict[tuple[str, bool], _Row] = {}
_open = threading.local()


def wanted() -> bool:
    """Whether `JAXSPEC_DEBUG` asks for the table."""
    return bool(os.environ.get("JAXSPEC_DEBUG"))


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Counts the time of this context as that of a stage, without the stages within it."""
    stack: list[_Open] = vars(_open).setdefault("stack", [])
    stack.append(one := _Open(time.perf_counter()))
    try:
        yield
    finally:
        stack.pop()
        took = time.perf_counter() - one.began
        if stack:
            stack[-1].within += took
        beside = threading.current_thread() is not threading.main_thread()
        with _LOCK:
            row = _ROWS.setdefault((name, beside), _Row())
            row.seconds += took - one.within
            row.count += 1


def table() -> str:
    """Returns the stages in the order in which they first ended, the rest, and the stages beside the main thread.

    Seconds are those of the clock. Stages beside the main thread overlap the others.
    """
    whole = time.perf_counter() - _BEGAN
    with _LOCK:
        rows = [(name, beside, row.seconds, row.count) for (name, beside), row in _ROWS.items()]
    rest = whole - sum(seconds for _, beside, seconds, _ in rows if not beside)
    main = [(name, seconds, count) for name, beside, seconds, count in rows if not beside]
    lines = [*main, ("everything else", rest, 1), ("in all", whole, 1)]
    lines += [(f"beside: {name}", seconds, count) for name, beside, seconds, count in rows if beside]
    width = max(len(name) for name, *_ in lines)
    said = [
        f"{name:<{width}} {seconds:8.2f} s{f'  {count} times' if count > 1 else ''}"
        for name, seconds, count in lines
    ]
    times = os.times()
    return "\n".join([*said, f"{'CPU':<{width}} {times.user:8.2f} s, and {times.system:.2f} s in the system"])
