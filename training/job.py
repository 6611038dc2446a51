"""What every training job does around its loss: read and pack the data, run the loop, export."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
from rich.console import Console

from jaxspec.io.extras import require
from training import command, export, run, start
from training.data import packing, sizing, sources
from training.data.sources import Kinds
from training.loop import checkpoints, lock, loop, optimizer, sharding, step
from training.losses import base
from training.options import SCRATCH, JobOptions
from training.parsing import chosen_earlier, parse
from training.reports import curves, evaluation
from training.start import Objective, Start

Options = TypeVar("Options", bound=JobOptions)
# What sets a job apart: its objective, given its options and the model it begins with.
MakeObjective = Callable[[Options, Start], Objective]


def main(
    kind: type[Options],
    objective: MakeObjective[Options],
    module: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs the command line of a job.

    Args:
      kind: the job's dataclass of options.
      objective: makes what the job minimises and measures.
      module: the job's full name, as `python -m` wants it.
      arguments: by default those of the process.

    Returns:
      the exit status, see `train` and `training.command.run`.
    """

    def work(given: list[str], prog: str, console: Console) -> int:
        options = parse(kind, given, prog)
        return train(options, objective, module, shlex.join([*prog.split(), *given]), console)

    return command.run(module, kind, work, arguments)


def train(
    options: Options, objective: MakeObjective[Options], module: str, typed: str, console: Console
) -> int:
    """Trains, then exports the best checkpoint.

    Args:
      options: of the job.
      objective: makes what the job minimises and measures.
      module: the job's full name.
      typed: the whole command line, for the record.
      console: where progress is shown.

    Returns:
      the exit status: 0 also where the time that was asked for is over; 128 and the signal's number where a
      signal ended it.

    Raises:
      ValueError: something given does not fit; the message says what to do.
      MissingExtra: curves are to be drawn, and matplotlib is not installed.
    """
    if options.plot:
        require("plot", "matplotlib")
    documents = sources.read_kinds(options.data, start.chat_of(options), console.print)
    directory = options.run_directory
    with lock.exclusive(directory, console.print):
        result, aim = _run_loop(options, objective, documents, module, typed, console)
        if result.reason != "steps":
            ended = "interrupted" if result.signal is not None else "out of the time given by --minutes"
            console.print(f"{ended} after step {int(result.state.step)}; the same command goes on from there")
        if options.output is not None:
            best, best_loss = export.export(directory, options.output, options.samples, console.print)
            console.print(f"wrote step {best}, held-out loss {best_loss:.4f}, to {options.output}")
        if options.plot:
            drawn = curves.draw(directory)
            why = "" if aim.exits else " (acceptance is measured where there are exits)"
            console.print("drew " + ", ".join(map(str, drawn)) + why)
    return 0 if result.signal is None else 128 + result.signal


def _run_loop(
    options: Options,
    objective: MakeObjective[Options],
    documents: tuple[Kinds, Kinds],
    module: str,
    typed: str,
    console: Console,
) -> tuple[loop.Result, Objective]:
    """Prepares the run directory and trains in it, from its newest checkpoint if there is one."""
    directory = options.run_directory
    saved = directory / "checkpoints"
    resumed = checkpoints.has_checkpoint(saved)
    characters = sum(len(document.text) for part in documents[0].values() for document in part)
    options, chosen = options.settled(
        characters, chosen_earlier(directory / run.OPTIONS_FILE) if resumed else {}
    )
    if chosen:
        console.print(sizing.in_words(characters, chosen))
    begun = start.start_model(options, documents[0], resumed)
    aim = objective(options, begun)
    marks = start.document_marks(begun.config, start.given_tokenizer(options))
    key = sources.data_key(options.data, documents, begun.words, marks)
    same = run.identity(options, begun, aim, module, key)
    if resumed:
        run.refuse_another(directory, begun.config, same)
    else:  # whatever is there is of a command that failed before it had trained
        (directory / run.RUN_FILE).unlink(missing_ok=True)
        start.put_tokenizer(options, documents[0], begun.words)
    windows, held_out = sources.packed(options.data, directory, documents, begun.words, marks, key)
    console.print(run.record(options, begun.config, aim, same, windows, held_out, documents[0], typed))

    transform = optimizer.make_optimizer(options.optimizer, options.loop.steps, options.held)
    loss = base.in_dtype(base.holding(aim.loss, options.held), jnp.dtype(options.compute_dtype))
    mesh = sharding.make_mesh()
    step_fn = step.make_step(loss, transform, options.seed)
    target = None if aim.target is None else sharding.place_state(mesh, aim.target[1])
    measure = evaluation.make_measure(begun.config, aim.exits, aim.judged, aim.target, aim.part)
    judged = {
        kind: packing.fixed_batches(part, options.data.batch, options.data.held_out_rows)
        for kind, part in held_out.items()
    }
    weights = options.data.weights
    batches = packing.batches(
        windows, weights, options.data.batch, options.optimizer.accumulate, options.seed
    )
    with checkpoints.Checkpoints(saved, options.loop.keep) as kept:
        trained = loop.Loop(
            options.loop,
            directory,
            kept,
            lambda state, batch: step_fn(state, batch, target),
            batches,
            lambda state: measure(state.params, judged, weights),
            console,
            options.model.stages if options.start == SCRATCH else None,
            mesh,
        ).run(step.init_state(begun.params, transform))
    return trained, aim
