"""What every training job does around its loss: read and pack the data, run the loop, export."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax.numpy as jnp
from rich.console import Console

from jaxspec.io import files, hf_config, lock, processes
from jaxspec.io.extras import require
from jaxspec.model import llama
from jaxspec.model.llama import Params
from training import command, export, outputs, run, start
from training.data import packing, sizing, sources
from training.data.sources import Kinds
from training.loop import checkpoints, growth, loop, optimizer, sharding, step
from training.losses import base
from training.options import SCRATCH, JobOptions, RunOptions
from training.parsing import chosen_earlier, parse
from training.reports import curves, evaluation
from training.start import Objective, Start

Options = TypeVar("Options", bound=JobOptions)
AnyOptions = TypeVar("AnyOptions", bound=RunOptions)
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
        options = command.joined(parse(kind, given, prog), module)
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
    outputs.check(options)
    documents = sources.read_kinds(options.data, start.chat_of(options), console.print)
    directory = options.run_directory
    with lock.exclusive(directory, console.print):
        result, aim = _run_loop(options, objective, documents, module, typed, console)
        if options.output is not None:
            # Every process takes part in reading the checkpoint; the first one writes.
            best, best_loss = export.export(directory, options.output, options.samples, console.print)
            console.print(f"wrote step {best}, held-out loss {best_loss:.4f}, to {options.output}")
        if options.plot and processes.is_first():
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
    options, resumed = settle(options, documents[0], console)
    begun = start.start_model(options, documents[0], resumed)
    aim = objective(options, begun)
    if aim.target is not None:
        config, params = aim.target
        aim = aim._replace(target=(config, sharding.place_state(sharding.make_mesh(options.mesh), params)))
    marks = start.document_marks(begun.config, start.given_tokenizer(options))
    key = sources.data_key(options.data, documents, begun.words, marks)
    same = run.identity(options, begun, aim, module, key)
    if resumed:
        run.refuse_another(directory, begun.config, same)
    if options.output is not None:
        outputs.refuse_another(options.output, directory, same)
    if not resumed:
        run.forget(directory)
    # A run whose tokenizer somebody took away would fail only once it is through.
    if not (resumed and (directory / "tokenizer.json").is_file()):
        start.put_tokenizer(options, documents[0], begun.words)
    windows, held_out = sources.packed(options.data, directory, documents, begun.words, marks, key)
    extra = {"jaxspec": aim.extra} if aim.extra else {}
    files.write_json(directory / "config.json", hf_config.config_json(begun.config, "float32") | extra)
    parameters, exits = llama.num_params(begun.config), list(aim.exits)
    console.print(run.record(options, same, parameters, windows, held_out, documents[0], typed, exits=exits))
    trained = take_steps(
        options,
        aim.loss,
        begun.params,
        begun.config.vocab_size,
        None if aim.target is None else aim.target[1],
        evaluation.make_measure(begun.config, aim.exits, aim.judged, aim.target, aim.part),
        (windows, held_out),
        console,
        options.held,
        options.model.stages if options.start == SCRATCH else None,
    )
    return trained, aim


def settle(options: AnyOptions, documents: Kinds, console: Console) -> tuple[AnyOptions, bool]:
    """Replaces each `auto` by a number, that of the run where it goes on; returns also whether it does."""
    directory = options.run_directory
    resumed = checkpoints.has_checkpoint(directory / run.CHECKPOINTS)
    characters = sum(len(document.text) for part in documents.values() for document in part)
    earlier = chosen_earlier(directory / run.OPTIONS_FILE) if resumed else {}
    options, chosen = options.settled(characters, earlier)
    if chosen:
        console.print(sizing.in_words(characters, chosen))
    return options, resumed


def take_steps(
    options: RunOptions,
    loss: base.Loss,
    params: Params,
    vocab_size: int,
    target: Params | None,
    measure: evaluation.MeasureKinds,
    windows: tuple[dict[str, packing.Windows], dict[str, packing.Windows]],
    console: Console,
    held: Sequence[str] = (),
    stages: growth.Stages | None = None,
) -> loop.Result:
    """Runs the loop in the run directory, from its newest checkpoint if there is one.

    Args:
      options: of the run, without `auto`.
      loss: to be minimised.
      params: float32 ones to begin with.
      vocab_size: of the text's tokens.
      target: parameters of another model that the loss is given; None for none.
      measure: what is measured at each checkpoint.
      windows: packed text by kind: to learn from, and held out.
      console: where progress is shown.
      held: names of parameters that are not trained.
      stages: how the depth grows; None where it does not.
    """
    training, held_out = windows
    transform = optimizer.make_optimizer(options.optimizer, options.loop.steps, held)
    loss = base.in_dtype(base.holding(loss, held), jnp.dtype(options.compute_dtype))
    mesh = sharding.make_mesh(options.mesh)
    step_fn = step.make_step(loss, transform, options.seed)
    given = None if target is None else sharding.place_state(mesh, target)
    judged = {
        kind: packing.fixed_batches(part, options.data.batch, options.data.held_out_rows)
        for kind, part in held_out.items()
    }
    weights = options.data.weights
    batches = packing.batches(
        training, weights, options.data.batch, options.optimizer.accumulate, options.seed
    )
    saved, directory = options.run_directory / run.CHECKPOINTS, options.run_directory
    with checkpoints.Checkpoints(saved, options.loop.keep) as kept:
        result = loop.Loop(
            options.loop,
            directory,
            kept,
            lambda state, batch: step_fn(state, batch, given),
            batches,
            vocab_size,
            lambda state: measure(state.params, judged, weights),
            console,
            stages,
            mesh,
        ).run(step.init_state(params, transform))
    if result.reason != "steps":
        ended = "interrupted" if result.signal is not None else "out of the time given by --minutes"
        console.print(f"{ended} after step {int(result.state.step)}; the same command goes on from there")
    return result
