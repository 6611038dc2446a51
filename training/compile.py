"""Compiles a training job for an accelerator that is not there: `python -m training.compile --topology h100`.

The programs are the same as in training, lowered from shapes: the job reads no data and creates no weights. The job is
sorted fine-tuning by the options, or that of a recipe, a YAML file of any training command.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jaxspec.console.environment import compile_only
from jaxspec.measuring.aot.accelerators import mesh_axes, parse_topology
from jaxspec.measuring.aot.compiled_rounds import COLLECTIVES
from jaxspec.measuring.aot.programs import Place, devices, part_bytes
from jaxspec.measuring.aot.report import Program, build
from training import command, compile_jobs
from training.compile_jobs import Options
from training.loop import state_sharding
from training.option_files import parse_plain


def measure(options: Options) -> dict[str, Any]:
    """Compiles the programs of a job.

    Returns:
      `model`, `target`, `topology`, `mesh`, `exits`, `window`, `batch`, `accumulate`, `compute`, `weights`,
      `target_weights`, `algorithm`, `moments`, `remat` (True, False or a policy): the options, or those of the recipe.
      `parameters`: number of trained parameters.
      `phases`: bytes on a chip by phase: `loading` (parameters), `init` (the optimiser state is made), `step`,
      `evaluation`, `export` (the largest of reading the best checkpoint and of drawing samples). Each includes all that
      is held meanwhile, temporaries and programs; None if the compiler refuses. Heads have no
      `evaluation` and `export`.
      `most`: the phase that needs most; the first that the compiler refuses, if any.
      `fits`: whether each phase fits the memory of a chip.
      `refusal`: the compiler's error message for `most`; None if all phases compile.
      The others are those of a step. `state_bytes_per_device`: parameters and optimiser state, without padding.
      `argument_bytes_per_device`: state and batch, with padding if the compiler reports it.
      `temporary_bytes_per_device`: temporaries of the step; None if the compiler refuses.
      `collectives`: exchanges between chips per step, by operation, see `exchanges`; None if it refuses.
      `target_bytes_per_device`: weights of the target, or None.
      `flops`: operations of a step on one chip, counted by the compiler; None if it refuses.
      `roofline_tokens_per_second`: tokens read per second if all chips did the operations of a step (recomputed ones
      included) at their published bfloat16 peak.
      `compile_seconds`, `compile_processor_seconds`: wall-clock and CPU time of tracing and compilation.

    Raises:
      ValueError: an option does not fit.
      MissingExtra: the compiler is not installed; the extra is `aot` for TPUs, `aot-cuda` for GPUs.
    """
    options, given = compile_jobs.with_recipe(options)
    compile_jobs.check(options)
    topology = parse_topology(options.topology)
    axes = mesh_axes(options.mesh or f"data={topology.num_devices},model=1", topology.num_devices)
    for name in ("window", "batch", "accumulate"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; give at least 1")
    if options.batch % axes["data"]:
        raise ValueError(
            f"batch is {options.batch}, and its rows are divided over {axes['data']} places along data; give a "
            f"multiple of {axes['data']}"
        )
    compile_only()
    place = Place.of(devices(topology), axes)
    mesh = place.mesh or Mesh(np.array(place.devices).reshape(1, 1), state_sharding.AXES)
    found = compile_jobs.trained(options, given, mesh)
    lowering, held = compile_jobs.programs(options, given, found, mesh)
    built = {phase: build(lower) for phase, lower in lowering.items() if phase in options.phases}
    flops = compile_jobs.step_flops(lowering["operations"](), options.accumulate)
    phases: dict[str, int | None] = {"loading": held["loading"]}
    phases |= {phase: _bytes(program, held.get(phase, 0)) for phase, program in built.items()}
    if phases.get("export") is not None:
        phases["export"] = max(phases["export"] or 0, held["best"])
    needs = {phase: math.inf if size is None else size for phase, size in phases.items()}
    most = max(needs, key=needs.__getitem__)
    stepped, state = built.get("step", Program(0.0)), held["state"]
    arguments = stepped.argument_bytes
    return {
        "model": options.shape,
        "target": options.target,
        "topology": options.topology,
        "mesh": axes,
        "exits": list(found.exits),
        "window": options.window,
        "batch": options.batch,
        "accumulate": options.accumulate,
        "compute": options.compute,
        "weights": options.weights,
        "target_weights": options.target_weights,
        "algorithm": options.algorithm,
        "moments": options.moments,
        "remat": options.remat_policy or options.remat,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(found.params)),
        "phases": phases,
        "most": most,
        "fits": needs[most] <= topology.accelerator.memory_bytes,
        "refusal": built[most].refusal if most in built else None,
        "state_bytes_per_device": state,
        "argument_bytes_per_device": state + held["batch"] if arguments is None else arguments,
        "temporary_bytes_per_device": stepped.temporary_bytes,
        "collectives": exchanges(stepped.text) if stepped.text else None,
        "target_bytes_per_device": None if found.target is None else part_bytes(found.target),
        "flops": stepped.flops,
        "roofline_tokens_per_second": options.window
        * options.batch
        * options.accumulate
        * topology.num_devices
        * topology.accelerator.flops
        / flops,
        "compile_seconds": sum(program.seconds for program in built.values()),
        "compile_processor_seconds": sum(program.processor_seconds for program in built.values()),
    }


def _bytes(program: Program, held: int) -> int | None:
    """Returns the memory of a program and of `held` bytes beside it; None if the compiler refuses it."""
    if program.argument_bytes is None or program.temporary_bytes is None:
        return None
    return held + program.argument_bytes + program.temporary_bytes + program.other_bytes


def exchanges(text: str) -> dict[str, int]:
    """Counts the collective operations of a program, from its optimised HLO.

    To overlap an exchange with computation, a TPU's compiler spreads it over several fusions. These share one channel,
    and count once.

    Examples:
      >>> exchanges('''
      ...   %a = f32[8]{0} all-gather(%x), channel_id=3, dimensions={0}
      ...   %b = f32[8]{0} all-gather(%y), channel_id=3, dimensions={0}
      ...   %c = (f32[8]{0}, f32[]) all-reduce(%a, %b), channel_id=4, to_apply=%add
      ... ''')
      {'all-reduce': 1, 'all-gather': 1}
    """
    kinds = "|".join(COLLECTIVES)
    found = set(re.findall(rf" ({kinds})(?:-start)?\(.*?channel_id=(\d+)", text))
    counts = {kind: sum(kind == one for one, _ in found) for kind in COLLECTIVES}
    return {kind: count for kind, count in counts.items() if count}


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report as a table."""
    axes = " × ".join(f"{name} {size}" for name, size in report["mesh"].items())
    table = Table(
        "",
        "",
        title=f"training of {report['model']}, exits {report['exits']}, {report['batch']} rows of {report['window']} "
        f"tokens, {report['topology']} ({axes})",
        show_header=False,
    )
    table.columns[1].justify = "right"
    table.add_row("parameters", f"{report['parameters']:,}")
    table.add_row("fits the memory of a chip", "yes" if report["fits"] else "no")
    for phase, size in report["phases"].items():
        most = ", the most" if phase == report["most"] else ""
        table.add_row(f"{phase}, a chip{most}", "refused" if size is None else f"{size / 1e9:,.2f} GB")
    if report["refusal"] is not None:
        table.add_row("compiler error", report["refusal"])
    for name in ("state", "target", "argument", "temporary"):
        size = report[f"{name}_bytes_per_device"]
        table.add_row(
            f"{name} bytes of a step, a chip", "unknown" if size is None else f"{size / 1e9:,.2f} GB"
        )
    for kind, count in (report["collectives"] or {}).items():
        table.add_row(f"{kind} in a step", f"{count:,}")
    table.add_row("tokens/s at the peak of all chips", f"{report['roofline_tokens_per_second']:,.0f}")
    table.add_row("tracing and compiling", f"{report['compile_seconds']:.1f} s")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        del console
        report = measure(options)
        if options.json:
            print(json.dumps(report))
        else:
            show(report, Console())

    return command.run("training.compile", Options, work, arguments, parse_plain)


if __name__ == "__main__":
    sys.exit(main())
