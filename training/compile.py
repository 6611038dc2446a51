"""What an accelerator's compiler makes of a training step, without one: `python -m training.compile --topology h100`.

The step is the one that training runs, lowered from shapes alone: no data is read, and no weight is made.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jaxspec.bench.profile import SHAPES
from jaxspec.console.environment import compile_only
from jaxspec.deviceless.accelerators import mesh_axes, parse_topology
from jaxspec.deviceless.programs import Place, devices, part_bytes
from jaxspec.deviceless.report import build
from jaxspec.deviceless.rounds import COLLECTIVES
from jaxspec.io.messages import shown
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.sampling import seed_key
from training import command
from training.loop import optimizer, sharding, step
from training.losses import base
from training.losses.exits import soft_loss
from training.parsing import parse_plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles a step of sorted fine-tuning (SoFT) for TPUs or GPUs that need not be there, and says what came out.

    The draft has the layers of the shape up to its last exit. One exit is the ordinary next-token loss.

    Attributes:
      topology: kind and number of chips: v5e:4x4, v6e:2x4, v5p:2x2x1, h100:8 and so on, as in `jaxspec compile`.
      shape: of the model whose first layers are trained: 1b, 1.2b, 7b, 8b and so on, as in `jaxspec compile`.
      exits: how many layers each exit runs, rising. Default: the whole model.
      mesh: how the chips are arranged, such as data=8,model=2. Default, as in training: all of them along data.
      window: tokens per row.
      batch: rows of the step.
      compute: of the products; parameters and what the optimiser keeps are float32.
      algorithm: of the optimiser.
      remat: compute layers again in the backward pass: less memory, about a third more time.
      json: print one JSON object and nothing else.
    """

    topology: str
    shape: str
    exits: tuple[int, ...] = ()
    mesh: str | None = None
    window: int = 1024
    batch: int = 16
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    algorithm: Literal["adamw", "muon"] = "adamw"
    remat: bool = False
    json: bool = False


def measure(options: Options) -> dict[str, Any]:
    """Compiles the step.

    Returns:
      `model`, `topology`, `mesh`, `exits`, `window`, `batch`, `compute`, `algorithm`, `remat`: what was compiled.
      `parameters`: of the draft.
      `fits`: whether state, batch, temporaries and the program fit the memory of a chip.
      `refusal`: what the compiler says where they do not; None where it compiles.
      `state_bytes_per_device`: of parameters and optimiser, as they lie.
      `argument_bytes_per_device`: of the state and the batch; of what the compiler says, so with padding.
      `temporary_bytes_per_device`: of all that lives within the step only; None where the compiler refuses.
      `collectives`: exchanges between chips in a step by kind, see `exchanges`; None likewise.
      `flops`: of a step on one chip as the compiler counts them; None likewise.
      `compile_seconds`, `compile_processor_seconds`: to trace and compile it, by the clock and of all cores.

    Raises:
      ValueError: an option does not fit; one line.
      MissingExtra: the compiler is not installed; of TPUs it is the extra `aot`, of GPUs `aot-cuda`.
    """
    topology = parse_topology(options.topology)
    axes = mesh_axes(options.mesh or f"data={topology.num_devices},model=1", topology.num_devices)
    config, exits = _draft(options)
    for name in ("window", "batch"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; give at least 1")
    if options.batch % axes["data"]:
        raise ValueError(
            f"batch is {options.batch}, and its rows are divided over {axes['data']} places along data; give a "
            f"multiple of {axes['data']}"
        )
    compile_only()
    place = Place.of(devices(topology), axes)
    mesh = place.mesh or Mesh(np.array(place.devices).reshape(1, 1), sharding.AXES)
    transform = optimizer.make_optimizer(optimizer.OptimizerOptions(options.algorithm), 1000)
    loss = base.in_dtype(soft_loss(config, exits, options.remat), jnp.dtype(options.compute))

    def begin() -> step.TrainState:
        return step.init_state(llama.init_params(config, seed_key(0), jnp.float32), transform)

    state = sharding.placed_shapes(mesh, jax.eval_shape(begin))
    batch = sharding.batch_shapes(mesh, options.batch, options.window)
    step_fn: Any = step.make_step(loss, transform, 0)
    program = build(lambda: step_fn.lower(state, batch, None))
    arguments, temporaries = program.argument_bytes, program.temporary_bytes
    fits = False
    if arguments is not None and temporaries is not None:
        fits = arguments + temporaries + program.other_bytes <= topology.accelerator.memory_bytes
    return {
        "model": options.shape,
        "topology": options.topology,
        "mesh": axes,
        "exits": list(exits),
        "window": options.window,
        "batch": options.batch,
        "compute": options.compute,
        "algorithm": options.algorithm,
        "remat": options.remat,
        "parameters": llama.num_params(config),
        "fits": fits,
        "refusal": program.refusal,
        "state_bytes_per_device": part_bytes(state),
        "argument_bytes_per_device": part_bytes((state, batch)) if arguments is None else arguments,
        "temporary_bytes_per_device": temporaries,
        "collectives": exchanges(program.text) if program.text else None,
        "flops": program.flops,
        "compile_seconds": program.seconds,
        "compile_processor_seconds": program.processor_seconds,
    }


def exchanges(text: str) -> dict[str, int]:
    """Counts the exchanges between chips of a program by kind, from its optimised HLO.

    A TPU's compiler spreads one exchange over several fusions, so that it goes on beside the products: the parts have
    one channel, and count once. Each is of one or of several arrays.

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


def _draft(options: Options) -> tuple[LlamaConfig, tuple[int, ...]]:
    """The shape that is trained, and its exits."""
    if options.shape not in SHAPES:
        raise ValueError(f"unknown shape {shown(options.shape)}; give one of {', '.join(SHAPES)}")
    whole = SHAPES[options.shape]
    exits = options.exits or (whole.num_layers,)
    if sorted(set(exits)) != list(exits) or not 1 <= exits[0] <= exits[-1] <= whole.num_layers:
        raise ValueError(
            f"exits is {exits}, and {options.shape} has {whole.num_layers} layers; give numbers of layers from 1 to "
            f"{whole.num_layers}, rising, such as --exits 6 9 12"
        )
    return whole.truncated(exits[-1]), exits


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report as a table."""
    axes = " × ".join(f"{name} {size}" for name, size in report["mesh"].items())
    table = Table(
        "",
        "",
        title=f"a step of {report['model']}, exits {report['exits']}, {report['batch']} rows of {report['window']} "
        f"tokens, {report['topology']} ({axes})",
        show_header=False,
    )
    table.columns[1].justify = "right"
    table.add_row("parameters", f"{report['parameters']:,}")
    table.add_row("fits the memory of a chip", "yes" if report["fits"] else "no")
    if report["refusal"] is not None:
        table.add_row("the compiler says", report["refusal"])
    for name in ("state", "argument", "temporary"):
        size = report[f"{name}_bytes_per_device"]
        table.add_row(f"{name} bytes, a chip", "unknown" if size is None else f"{size / 1e9:,.2f} GB")
    for kind, count in (report["collectives"] or {}).items():
        table.add_row(f"{kind} in a step", f"{count:,}")
    table.add_row("tracing and compiling", f"{report['compile_seconds']:.1f} s")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(given: list[str], prog: str, console: Console) -> int:
        del console
        options = parse_plain(Options, given, prog)
        report = measure(options)
        if options.json:
            print(json.dumps(report))
        else:
            show(report, Console())
        return 0

    return command.run("training.compile", Options, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
