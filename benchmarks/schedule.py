"""Compares a TPU's static schedule with its compiler's estimates: `python -m benchmarks.schedule --rows 8`.

The compiler packs each fusion into bundles; a core starts one bundle per cycle. The options in `LIBTPU_INIT_ARGS` make
libtpu write the bundles to files (tested with libtpu 0.0.42). A fusion that never waits takes one cycle per bundle and
trip of its grid: bundles × trips. A core can wait for a unit or for memory; the estimate includes the wait for memory.
The benchmark needs no TPU and measures nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from jaxspec.console.environment import compile_only
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.aot.accelerators import parse_topology
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.model.config import LlamaConfig

_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")
_GRID = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_LIVE = 512  # slots of the step's cache
_LABELS = "final"  # the label of the pass that writes both files; there are dozens of passes


@dataclasses.dataclass(frozen=True)
class Options:
    """Reports the bundles, the use of units and the estimated cycles of the fusions of a model's step.

    Attributes:
      topology: one chip, as in `jaxspec compile`.
      shape: one of profile's shapes.
      layers: number of its layers.
      rows: tokens of the step.
      least: minimum of the estimated cycles of a fusion that is shown.
    """

    topology: str = "v5e:1x1"
    shape: str = "1.2b"
    layers: int = 1
    rows: int = 1
    least: int = 10_000


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Compiles a step and reads the schedule that the compiler wrote; measures nothing.

    Returns:
      The options, and `fusions`, a list of dictionaries: `name`, `scope`, `estimated` (cycles), `bundles`, `trips` (of
      its grid), `scheduled` (bundles × trips), and `use`, the share of each kind of unit's slots that the bundles fill.

    Raises:
      ValueError: an unknown shape or topology, several chips, or no schedule from the compiler; one line.
    """
    if options.shape not in SHAPES:
        raise ValueError(f"unknown shape {options.shape!r}; give one of {', '.join(SHAPES)}")
    topology = parse_topology(options.topology)
    if topology.num_devices > 1 or topology.accelerator.is_gpu:
        raise ValueError(f"topology is {options.topology!r}; give one chip of a TPU, such as v5e:1x1")
    with tempfile.TemporaryDirectory(prefix="jaxspec-") as directory:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
            f"--xla_jf_dump_llo_pass_label_regex={_LABELS}"
        )
        compile_only()
        from jaxspec.measuring.aot import hlo, programs

        on_progress(f"compiling a step of {options.rows} rows")
        place = programs.Place(programs.devices(topology), None)
        config = SHAPES[options.shape].truncated(options.layers)
        text = lowered_step(place, config, options.rows).compile().as_text()
        dumped = {file.name: file.read_text() for file in Path(directory).glob("*final_*.txt")}
    grids = {
        line.split()[0].lstrip("%"): math.prod(int(bound) for bound in re.findall(r"\d+", found[1]))
        for line in text.replace("ROOT ", "").splitlines()
        if (found := _GRID.search(line)) and line.startswith("  %")
    }
    module = hlo.parse(text)
    fusions = [
        scheduled
        for one in module.computations[module.entry]
        if (one.cycles or 0) >= options.least
        and (scheduled := _scheduled(one.name, dumped, grids.get(one.name, 1)))
        and scheduled.update(name=one.name, scope=one.scope, estimated=one.cycles) is None
    ]
    if not fusions:
        raise ValueError(
            f"the compiler wrote no schedule of a fusion of {options.least} cycles; give a smaller least"
        )
    return {**dataclasses.asdict(options), "fusions": fusions}


def lowered_step(place: Any, config: LlamaConfig, rows: int) -> Any:
    """Returns the lowered greedy step of one text in bfloat16, with this number of tokens."""
    import jax
    import jax.numpy as jnp

    from jaxspec.model import cache as kv
    from jaxspec.model import llama

    def step(params: Any, tokens: Any, start: Any, cache: Any) -> tuple[Any, Any]:
        logits, _, cache = llama.forward(config, params, tokens, start, cache)
        return jnp.argmax(logits, axis=-1), cache

    shapes = jax.eval_shape(
        lambda: (
            llama.init_params(config, jax.random.key(0), jnp.bfloat16),
            jnp.zeros((1, rows), jnp.int32),
            jnp.zeros(1, jnp.int32),
            kv.create(config, 1, max(_LIVE, rows), jnp.bfloat16),
        )
    )
    return jax.jit(step, donate_argnums=3).lower(*place.put(shapes))


def _scheduled(name: str, dumped: dict[str, str], trips: int) -> dict[str, Any] | None:
    """Returns the schedule that the compiler wrote for a fusion; None if it wrote none."""
    of_it = {file: text for file, text in dumped.items() if re.search(rf"^\d+-{re.escape(name)}-\d+-", file)}
    analysis = next((text for file, text in of_it.items() if "schedule-analysis" in file), None)
    use = next((text for file, text in of_it.items() if "utilization" in file), None)
    if analysis is None or use is None or not (found := _BUNDLES.search(analysis)):
        return None
    bundles = int(found[1])
    return {"bundles": bundles, "trips": trips, "scheduled": bundles * trips, "use": unit_use(use)}


def unit_use(text: str) -> dict[str, float]:
    """Returns the share of slots that the bundles fill, by kind of unit.

    Args:
      text: the compiler's file: the names of the units, their slots, and for each bundle a line of used slots.

    Examples:
      >>> unit_use('''== CAPACTIY:
      ... MXU, SALU
      ...     4     2
      ... == UTILIZATION:
      ... 1 0
      ... 3 1''')
      {'MXU': 0.5, 'SALU': 0.25}
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    names, slots = lines[0].split(", "), [int(number) for number in lines[1].split()]
    bundles = [[int(number) for number in line.split()] for line in lines[2:]]
    used = [sum(column) for column in zip(*bundles, strict=True)] if bundles else [0] * len(names)
    return {
        name: filled / (count * max(1, len(bundles)))
        for name, count, filled in zip(names, slots, used, strict=True)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report as JSON; returns the exit status."""
    return command.run("benchmarks.schedule", Options, measure, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
