"""Measures the costs of a model's steps on this device by rows, layers, live length and batch (`StepCosts`).

Dynamic speculation needs this table before the first text, so a few points are measured within seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax

from jaxspec.costs.rounds import StepCosts
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host import processes
from jaxspec.host.files import written_here
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.host.user_cache import keep
from jaxspec.io.methods import cost_files
from jaxspec.measuring.bench.steps import LIVE, LookupSteps, Steps, SubmodelSteps
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import local
from jaxspec.protocol import Weights

# (rows per text, batch) of the steps of the whole model; the most rows represent a prefill.
POINTS = ((1, 1), (2, 1), (8, 1), (9, 1), (33, 1), (1, 4), (5, 4))
# (live tokens, cache slots) of most steps, and of the step that measures the cost of live tokens.
SHORT, LONG = (LIVE + 1, 128), (1000, 1024)
# Total time of all timings in seconds, within the range of turns.
_TIMING_S, _TURNS = 6.0, (3, 9)
# Duration of one timing, long enough to hide the overhead of the call, and the maximum number of its steps.
_CALL_MS, _MOST_STEPS = 8.0, 16


@shows_progress
def step_costs(lm: LanguageModel, *, on_progress: OnProgress = lambda step: None) -> StepCosts:
    """Measures the costs of steps in turns; most of the time is spent on compilation.

    Args:
      lm: the model.
      on_progress: called with a description of the current step.

    Returns:
      The table; each time is a median.
    """
    num_layers = lm.config.num_layers
    every, cut_layers = LayerPlan.skipping(num_layers), num_layers // 4
    rest = range(cut_layers, num_layers)
    timed: dict[str, SubmodelSteps] = {}
    with jax.default_device(local(lm.device)):
        for rows, batch in POINTS:
            timed[f"{rows} rows of {batch}"] = SubmodelSteps(
                lm, every, rows, live=max(SHORT[0], rows), capacity=SHORT[1], batch_size=batch
            )
        timed["cut"] = SubmodelSteps(
            lm, LayerPlan.skipping(num_layers, rest, rest), live=SHORT[0], capacity=SHORT[1]
        )
        timed["long"] = SubmodelSteps(lm, every, live=LONG[0], capacity=LONG[1])
        rounds = {
            "loop": Steps(lm, Weights(lm.params), AutoregressiveDrafter(), SHORT[1]),
            "lookup": LookupSteps(lm, live=SHORT[1], capacity=2 * SHORT[1]),
        }
        once = {name: functools.partial(steps, 1) for name, steps in timed.items()}
        _compile(lm, [*once.values(), *rounds.values()], on_progress)
        counts = {name: one.rounds for name, one in rounds.items()}
        took = sum(_ms(lm, rounds[name]) for name in rounds)
        for name, run in once.items():
            one_ms = _ms(lm, run)
            counts[name] = min(max(2, round(_CALL_MS / one_ms)), _MOST_STEPS)
            took += counts[name] * one_ms
        turns = min(max(_TURNS[0], int(1e3 * _TIMING_S / took)), _TURNS[1])
        functions: dict[str, Callable[[], Any]] = {
            name: functools.partial(steps, counts[name]) for name, steps in timed.items()
        }
        taken = interleaved(
            functions | rounds, turns, lambda turn: on_progress(f"timing steps, {turn}"), lm.mesh
        )

    def each(name: str) -> list[float]:
        return [ms / counts[name] for ms in taken[name]]

    plain = each("1 rows of 1")
    ms = {name: statistics.median(each(name)) for name in counts}
    # Differences within a turn cancel a slow turn; negative values are noise.
    longer, looping = (
        max(statistics.median(b - a for a, b in zip(plain, each(name), strict=True)), 0.0)
        for name in ("long", "loop")
    )
    prefill_rows = max(rows for rows, batch in POINTS if batch == 1)
    return StepCosts(
        device=lm.device_kind,
        model=lm.name,
        dtype=lm.precision,
        num_layers=num_layers,
        live=SHORT[0],
        full_ms=tuple((rows, batch, ms[f"{rows} rows of {batch}"]) for rows, batch in POINTS),
        cut_layers=cut_layers,
        cut_ms=ms["cut"],
        live_token_ms=longer / (LONG[0] - SHORT[0]),
        loop_ms=looping,
        lookup_ms=ms["lookup"],
        absorb_ms=ms[f"{prefill_rows} rows of 1"] / prefill_rows,
    )


@shows_progress
def remembered_step_costs(
    lm: LanguageModel, *, fresh: bool = False, on_progress: OnProgress = lambda step: None
) -> tuple[StepCosts, bool]:
    """Reads the costs for this device, shape and dtype from the user's cache; measures and saves them if missing.

    Args:
      lm: the model; the values of its weights are not used.
      fresh: whether to measure even if the cache has the costs.
      on_progress: called with a description of the current step.

    Returns:
      The costs, and whether they were measured now. All processes use the file of the first one.
    """
    key = cost_files.key(lm.device_kind, lm.device.platform, lm.config, lm.precision)
    found = None if fresh or not written_here() else cost_files.read_step_costs(key)
    if processes.spans_processes(lm.mesh):
        given = json.loads(processes.of_first(json.dumps(found and dataclasses.asdict(found))))
        found = None if given is None else cost_files.parse(given, "process 0")
    if found is not None:
        return dataclasses.replace(found, model=lm.name), False
    costs = step_costs(lm, on_progress=on_progress)
    if written_here():
        keep("costs", key, dataclasses.asdict(costs))
    return costs, True


def _compile(lm: LanguageModel, runs: Sequence[Callable[[], Any]], on_progress: OnProgress) -> None:
    """Runs each function once to compile it, several at a time.

    On a mesh they run one at a time, because all devices must execute collectives in the same order.
    """
    threads = 1 if lm.mesh is not None else min(4, os.cpu_count() or 1)

    def first(run: Callable[[], Any]) -> None:
        with jax.default_device(local(lm.device)):  # the default device is local to a thread
            run()

    on_progress(f"compiling steps, 0 of {len(runs)}")
    with ThreadPoolExecutor(threads) as pool:
        for number, done in enumerate(as_completed([pool.submit(first, run) for run in runs]), 1):
            done.result()
            on_progress(f"compiling steps, {number} of {len(runs)}")


def _ms(lm: LanguageModel, run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return processes.agreed(lm.mesh, 1e3 * (time.perf_counter() - began))[0]
