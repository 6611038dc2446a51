"""Turns: how functions, and ways to generate, are measured on a machine that does other things as well."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result
from jaxspec.io import processes

# Called with what is being done.
OnProgress = Callable[[str], None]
# (prompt, number of the turn) → what was generated; the turn serves as a seed where tokens are drawn.
Run = Callable[[Any, int], Result]
# What a run gives: a text, or several that were generated together.
Given = TypeVar("Given")
# Turns of one prompt that are taken again at most because something was compiled in them, or ran for the first time.
_RETAKEN = 4


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    on_turn: OnProgress = lambda turn: None,
    mesh: Mesh | None = None,
) -> dict[str, list[float]]:
    """Times functions in turns, so that all of them see the same noise.

    Args:
      functions: by name; each must return only once its work is done (`jax.block_until_ready`), and must
        have been called before if its first call compiles.
      repeats: rounds, in each of which every function runs once, in the order given.
      on_turn: called before each of them with its count, such as "turn 2 of 9".
      mesh: on which they run; the processes of one that has several are given the same times.

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
            taken[name] += processes.agreed(mesh, 1e3 * (time.perf_counter() - began))
    return taken


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios round by round: what slows a whole round down cancels."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def warm_up(
    models: Sequence[LanguageModel],
    runs: Mapping[str, Callable[[Any, int], Any]],
    prompts: Sequence[Any],
    on_progress: OnProgress = lambda what: None,
) -> None:
    """Generates once by each run after each prompt and waits until nothing compiles in the background any more.

    Method `auto` has all its programs compiled.

    Args:
      models: those that generate.
      runs: by name.
      prompts: as the runs take them.
      on_progress: called with what is being done.
    """
    with contextlib.ExitStack() as stack:
        for lm in models:
            stack.enter_context(lm.compiled_early())
        for prompt in prompts:
            for number, (name, run) in enumerate(runs.items(), 1):
                on_progress(f"compiling {name}, {number} of {len(runs)}")
                run(prompt, 0)
        for lm in models:
            lm.executables.wait()


def measure_runs(
    models: Sequence[LanguageModel],
    runs: Mapping[str, Callable[[Any, int], Given]],
    prompts: Sequence[Any],
    repeats: int,
    *,
    first_turn: int = 0,
    warm: bool = False,
    on_progress: OnProgress = lambda what: None,
) -> Iterator[dict[str, list[Given]]]:
    """Generates by several runs in turns, warm, one prompt after another; `bench.speed` says what the results mean.

    Within a turn every run generates after the same prompt, there and back: the order is reversed from turn to turn
    and from prompt to prompt. A turn in which something compiled does not count, nor does the next one, and both are
    taken again: a program's first run takes longer, and one that was compiled in the background runs there.

    Args:
      models: those that generate.
      runs: by name.
      prompts: as the runs take them.
      repeats: turns of each prompt that count. Method `auto` has all its programs in them.
      first_turn: the number of the first turn.
      warm: whether the runs have generated before; else each generates once after the first prompt, which does not
        count either.
      on_progress: called with what is being done.

    Yields:
      for each prompt, by run, what was generated, turn by turn.

    Raises:
      ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; give at least 1")
    with contextlib.ExitStack() as stack:
        for lm in models:
            stack.enter_context(lm.compiled_early())
        if not warm:
            warm_up(models, runs, prompts[:1], on_progress)
        for at, prompt in enumerate(prompts):
            taken: dict[str, list[Given]] = {name: [] for name in runs}
            where = f", prompt {at + 1} of {len(prompts)}" if len(prompts) > 1 else ""
            retaken = turn = 0
            compiled = False
            while turn < repeats:
                before = _compilations(models)
                order = list(runs.items())
                results = {}
                for name, run in order if (at + first_turn + turn) % 2 == 0 else reversed(order):
                    on_progress(f"measuring {name}{where}, turn {turn + 1} of {repeats}")
                    results[name] = run(prompt, first_turn + turn)
                for lm in models:
                    lm.executables.wait()
                ran_first, compiled = compiled, _compilations(models) > before
                if (compiled or ran_first) and retaken < _RETAKEN:
                    retaken += 1
                    continue
                for name, result in results.items():
                    taken[name].append(result)
                turn += 1
            yield taken


def _compilations(models: Sequence[LanguageModel]) -> int:
    return sum(lm.executables.num_compilations for lm in models)
