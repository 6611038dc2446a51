"""Wall-clock times of several functions on a machine that does other things as well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    on_turn: Callable[[str], None] = lambda turn: None,
) -> dict[str, list[float]]:
    """Times functions in turns, so that all of them see the same noise.

    Args:
      functions: by name; each must return only once its work is done (`jax.block_until_ready`), and must
        have been called before if its first call compiles.
      repeats: rounds, in each of which every function runs once, in the order given.
      on_turn: called before each of them with its count, such as "turn 2 of 9".

    Returns:
      milliseconds by name; the entries of one place, in all the lists, were taken in one round.

    Raises:
      ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        on_turn(f"turn {turn + 1} of {repeats}")
        # There and back: what runs before a function leaves its mark on it.
        order = list(functions.items())
        for name, function in order if turn % 2 == 0 else reversed(order):
            began = time.perf_counter()
            function()
            taken[name].append(1e3 * (time.perf_counter() - began))
    return taken


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios round by round: what slows a whole round down cancels."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def check_budget(max_new_tokens: int) -> None:
    """Refuses texts too short to be timed: speeds are of the tokens after the first."""
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; give at least 2")
