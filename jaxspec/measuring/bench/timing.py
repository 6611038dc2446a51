"""Measures functions and generation runs in alternating turns, so that noise of the machine affects all equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host import processes
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.measuring.bench.suite_options import check_count
from jaxspec.requests.results import Result

# (prompt, number of the turn) → the generated text; the number of the turn is the seed when sampling.
Run = Callable[[Any, int], Result]
# The result of a run: a text, or the texts of a batch.
Given = TypeVar("Given")
# Maximum number of turns per prompt that are repeated because a program was compiled or ran for the first time.
_RETAKEN = 4


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    on_turn: OnProgress = lambda turn: None,
    mesh: Mesh | None = None,
) -> dict[str, list[float]]:
    """Times functions in turns, so that all of them have the same noise.

    Args:
      functions: by name; each must return only after its work is done (`jax.block_until_ready`), and must have been
        called before if its first call compiles.
      repeats: number of turns; every function runs once per turn.
      on_turn: called before each turn with its number, such as "turn 2 of 9".
      mesh: the mesh of the functions; all its processes return the same times.

    Returns:
      Milliseconds by name; entry i of every list is from turn i.

    Raises:
      ValueError: `repeats` is below 1.
    """
    check_count("repeats", repeats)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        on_turn(f"turn {turn + 1} of {repeats}")
        # The order alternates, because a function's time depends on the function before it.
        order = list(functions.items())
        for name, function in order if turn % 2 == 0 else reversed(order):
            began = time.perf_counter()
            function()
            taken[name] += processes.agreed(mesh, 1e3 * (time.perf_counter() - began))
    return taken


def warm_up(
    models: Sequence[LanguageModel],
    runs: Mapping[str, Callable[[Any, int], Given]],
    prompts: Sequence[Any],
    on_progress: OnProgress = lambda step: None,
) -> dict[str, Given]:
    """Generates by each run after each prompt, waits for background compilation and generates once more.

    For method `auto`, all its programs are compiled. The last generation, after the first prompt, is the first run of
    the programs that were compiled in the background, which takes longer.

    Args:
      models: the models of the runs.
      runs: by name.
      prompts: arguments of the runs.
      on_progress: called with a description of the current step.

    Returns:
      the last text of each run.
    """
    texts = {}
    for prompt in [*prompts, *prompts[:1]]:
        for number, (name, run) in enumerate(runs.items(), 1):
            on_progress(f"compiling {name}, {number} of {len(runs)}")
            texts[name] = run(prompt, 0)
        on_progress("finishing the warm-up")
        for lm in models:
            lm.executables.wait()
    return texts


@shows_progress
def measure_runs(
    models: Sequence[LanguageModel],
    runs: Mapping[str, Callable[[Any, int], Given]],
    prompts: Sequence[Any],
    repeats: int,
    *,
    first_turn: int = 0,
    warm: bool = False,
    on_progress: OnProgress = lambda step: None,
) -> Iterator[dict[str, list[Given]]]:
    """Generates by several runs in turns, one prompt after another; `bench.speed` defines the figures of the results.

    In each turn, every run generates after the same prompt. The order of the runs alternates between turns and between
    prompts. A turn with a compilation and the turn after it are repeated, because the first run of a program takes
    longer, and a program that was compiled in the background runs first in the turn after.

    Args:
      models: the models of the runs.
      runs: by name.
      prompts: arguments of the runs.
      repeats: number of counted turns per prompt. Method `auto` has all its programs in them.
      first_turn: the number of the first turn.
      warm: whether the runs have generated before; otherwise each generates once after the first prompt, uncounted.
      on_progress: called with a description of the current step.

    Yields:
      For each prompt, the results of each run, turn by turn.

    Raises:
      ValueError: `repeats` is below 1.
    """
    check_count("repeats", repeats)
    if not warm:
        warm_up(models, runs, prompts[:1], on_progress)
    for at, prompt in enumerate(prompts):
        taken: dict[str, list[Given]] = {name: [] for name in runs}
        where = f", prompt {at + 1} of {len(prompts)}" if len(prompts) > 1 else ""
        retaken, turn, compiled = 0, 0, False
        while turn < repeats:
            before = _compilations(models)
            results = {}
            for name in [*runs][:: 1 if (at + first_turn + turn) % 2 == 0 else -1]:
                on_progress(f"measuring {name}{where}, turn {turn + 1} of {repeats}")
                results[name] = runs[name](prompt, first_turn + turn)
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
