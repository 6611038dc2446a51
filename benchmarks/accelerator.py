"""Measures decoding on an accelerator in minutes: `python -m benchmarks.accelerator` prints a line of JSON per part.

The most important parts come first: floor, rows and prefill of each shape, then masks, methods and trees. They run on
random weights, made on the device, while there is time. The last line lists the parts that were left out, and why.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cases import CASES
from benchmarks.dialed import Dial
from benchmarks.parts import LeftOutError, Part, Parts, Record
from benchmarks.stages import FORMS, Stages
from jaxspec.cli.options import Placement
from jaxspec.console import frame
from jaxspec.console.output import writable
from jaxspec.host.files import write_atomic
from jaxspec.host.progress import OnProgress, Progress
from jaxspec.loading.loading import resolve_placement
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.bench.suite_options import check_budget, check_count
from jaxspec.programs.memory import Texts, check_fits

# Numbers of rows of a step; they include those of every measured verification.
ROWS = (1, 8, 4, 2, 16, 32, 64)
# Rates at which the draft agrees with the model.
RATES = (0.8, 0.6, 0.9)
# Slots of the largest cache of a measurement.
CAPACITY = 512


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures an accelerator's decoding speed, part by part, on random weights of named shapes.

    Attributes:
      shapes: shapes of `profile`, separated by commas, the most important first.
      methods: methods, separated by commas. Default: all.
      rows: largest number of rows of a step.
      budget: seconds for everything. A part is not started if it would not end in time, and is stopped at the end.
      max_new_tokens: new tokens per generation.
      repeats: interleaved repetitions.
      output: also write the records to this file, after each part.
    """

    shapes: str = "7b,1b"
    methods: str | None = None
    rows: int = 64
    budget: float = 525.0
    max_new_tokens: int = 96
    repeats: int = 5
    output: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    placement: Placement = Placement()  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("rows", "repeats"):
            check_count(name, getattr(self, name))
        check_budget(self.max_new_tokens)
        if not self.budget > 0:
            raise ValueError(f"budget is {self.budget}; give seconds above 0")

    def named(self, given: str, known: Sequence[str], what: str) -> list[str]:
        """Splits a list with commas into names.

        Raises:
          ValueError: a name is unknown.
        """
        names = [name.strip() for name in given.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown {what} {unknown[0]!r}; give some of {', '.join(known)}")
        return names


def plan(options: Options) -> list[Part]:
    """Returns the parts of a measurement, in order.

    Only one model is on the device at a time. The first part of a shape creates it.

    Raises:
      ValueError: an unknown shape, method, device or dtype.
    """
    shapes = options.named(options.shapes, list(SHAPES), "shape")
    all_methods = [*CASES, *FORMS]
    methods = (
        all_methods if options.methods is None else options.named(options.methods, all_methods, "method")
    )
    rows = [count for count in ROWS if count <= options.rows]
    place, dtype = resolve_placement(options.placement.dtype, options.placement.device)
    held = _Held(options, place, dtype)

    def part(name: str, shape: str, measure: Callable[..., Record], *given: Any, kind: str = "") -> Part:
        def run(on_progress: OnProgress) -> Record:
            stages = held.stages(shape, on_progress)
            return {"dtype": np.dtype(dtype).name, **measure(stages, *given, on_progress)}

        return Part(name, shape, run, kind and f"{shape} {kind}")

    parts = [Part("device", "", functools.partial(device_record, place))]
    for shape in shapes:
        parts += [part("floor", shape, Stages.floor), part("prefill", shape, Stages.prefill)]
        parts += [part(f"rows {count}", shape, Stages.rows, count, kind="rows") for count in rows[1:]]
    # Begin with the last shape: it is still on the device.
    for shape in reversed(shapes):
        if any(name in ("draft-verify", "draft-verify static", "asd") for name in methods):
            parts.append(part("masks", shape, Stages.masks))
        for name in methods:
            measure = Stages.form if name in FORMS else Stages.method
            parts.append(part(name, shape, measure, name, RATES, kind="method"))
    return parts


class _Held:
    """Holds the one model that is on the device."""

    def __init__(self, options: Options, device: jax.Device, dtype: np.dtype) -> None:
        self._options, self._device, self._dtype = options, device, dtype
        self._name = ""
        self._stages: Stages | None = None
        # The measured costs are kept when the model is replaced.
        self._costs: dict[str, dict[str, float]] = {}

    def stages(self, shape: str, on_progress: OnProgress) -> Stages:
        """Returns the measurements of a shape; creates its weights in place of those of another.

        Raises:
          LeftOutError: the weights do not fit the device.
        """
        if self._stages is None or self._name != shape:
            self._stages = None
            gc.collect()
            config = SHAPES[shape]
            untied = dataclasses.replace(config, tie_embeddings=False)
            try:
                check_fits(Texts(untied, self._dtype, 1, self._device), CAPACITY)
            except ValueError as error:
                raise LeftOutError(str(error)) from None
            on_progress("making the weights")
            dial = Dial(shape, config, self._dtype, self._device, self._options.max_new_tokens)
            costs = self._costs.setdefault(shape, {})
            self._stages = Stages(dial, costs, self._options.repeats, self._options.max_new_tokens)
            self._name = shape
        return self._stages


def device_record(device: jax.Device, on_progress: OnProgress) -> Record:
    """Describes the device and measures its memory bandwidth."""
    from benchmarks.stages import bandwidth, published_figures

    stats = device.memory_stats() or {}
    figures = published_figures(device)
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "memory_bytes": stats.get("bytes_limit"),
        "published_bandwidth": figures and figures.bandwidth,
        "published_flops": figures and figures.flops,
        "published_at": figures and figures.source,
        "measured_bandwidth": bandwidth(device),
    }


def measure(options: Options, emit: Callable[[Record], None], on_progress: OnProgress, began: float) -> None:
    """Measures as many parts as there is time for; `emit` receives each record."""
    records: list[Record] = []
    output = None if options.output is None else writable(options.output, "output")

    def taken(record: Record) -> None:
        records.append(record)
        if output is not None:
            write_atomic(Path(output), json.dumps(records, indent=1) + "\n")
        emit(record)

    Parts(options.budget, taken, began=began).run(plan(options), on_progress)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the records as lines of JSON; returns the exit status."""
    began = time.monotonic()

    def work(given: Options) -> None:
        with Progress() as progress:
            measure(given, lambda record: print(json.dumps(record), flush=True), progress, began)

    return frame.run("benchmarks.accelerator", Options, work, argv)


if __name__ == "__main__":
    sys.exit(main())
