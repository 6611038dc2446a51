"""Runs a training job with a given objective: reads and packs the data, runs the loop, exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.host import files, lock, processes
from jaxspec.host.progress import Progress
from jaxspec.io.hf import config_json
from jaxspec.model import llama
from jaxspec.model.llama import Params
from training import command, export, outputs, run, start
from training.data import bpe_tokenizer, packing, sizing, sources
from training.data.sources import Kinds
from training.loop import checkpoints, optimizer, state_sharding, step, training_loop
from training.losses import base
from training.option_files import chosen_earlier
from training.reports import curves, evaluation
from training.run_options import JobOptions, RunOptions
from training.start import Objective, Start

Options = TypeVar("Options", bound=JobOptions)
AnyOptions = TypeVar("AnyOptions", bound=RunOptions)
# Makes the objective of a job from its options and initial model.
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
      objective: makes the job's objective.
      module: full name of the job's module, for `python -m`.
      arguments: default: those of the process.

    Returns:
      the exit status, see `train` and `training.command.run`.
    """

    def work(options: Options, console: Console) -> int:
        typed = command.typed(module, arguments)
        return train(command.joined(options), objective, module, typed, console)

    return command.run(module, kind, work, arguments)


def train(
    options: Options, objective: MakeObjective[Options], module: str, typed: str, console: Console
) -> int:
    """Trains, then exports the best checkpoint.

    Args:
      options: the job's options.
      objective: makes the job's objective.
      module: full name of the job's module.
      typed: the whole command line, for the record.
      console: shows the progress.

    Returns:
      the exit status: 0, also when --minutes are over; 128 plus the signal's number if a signal ended it.

    Raises:
      ValueError: an argument does not fit.
    """
    outputs.check(options)
    with Progress("reading the data"):
        documents = sources.read_kinds(options.data, start.chat_of(options), console.print)
    directory = options.run_directory
    with lock.exclusive(directory, console.print):
        # Nothing of the training remains on the devices when the export reads the best checkpoint.
        result, exits = _run_loop(options, objective, documents, module, typed, console)
        if options.output is not None and result.exports:
            # Every process reads its part of the checkpoint; the first one writes.
            console.print(export.export(directory, options.output, options.samples, console.print))
        draw(options, result, console, "" if exits else " (acceptance is measured where there are exits)")
    return 0 if result.signal is None else 128 + result.signal


def draw(options: RunOptions, result: training_loop.Result, console: Console, remark: str = "") -> None:
    """Draws the curves of a run that has ended, if the options ask for them."""
    if options.plot and result.exports and processes.is_first():
        console.print(f"drew {', '.join(map(str, curves.draw(options.run_directory)))}{remark}")


def _run_loop(
    options: Options,
    objective: MakeObjective[Options],
    documents: tuple[Kinds, Kinds],
    module: str,
    typed: str,
    console: Console,
) -> tuple[training_loop.Result, list[int]]:
    """Trains in the run directory, from its newest checkpoint if there is one; returns also the measured exits."""
    directory = options.run_directory
    given = start.given_tokenizer(options)
    tokenizer = None if given is None else bpe_tokenizer.load(given)
    options, resumed = settle(options, documents[0], tokenizer, console)
    options = dataclasses.replace(options, dtype=start.written_dtype(options))
    begun = start.start_model(options, documents[0], resumed)
    aim = objective(options, begun)
    marks = start.document_marks(begun.config, start.given_tokenizer(options))
    key = sources.data_key(options.data, documents, begun.words, marks)
    same = run.identity(options, begun, aim, module, key)
    run.admit(options, resumed, begun.config, same)
    # Without its tokenizer, a run would fail only at its export.
    with Progress("encoding the data"):
        if not (resumed and (directory / "tokenizer.json").is_file()):
            start.put_tokenizer(options, documents[0], begun.words)
        windows, held_out = sources.packed(options.data, directory, documents, begun.words, marks, key)
    content = config_json.config_json(begun.config, "float32", aim.trained_for)
    files.write_json(directory / "config.json", content)
    kept = config_json.generation_config_json(begun.config, start.generation_defaults(options))
    files.write_json(directory / config_json.GENERATION, kept)
    parameters, exits = llama.num_params(begun.config), list(aim.exits)
    more = {"exits": exits, "places": begun.mesh.shape["data"]}
    console.print(run.record(options, same, parameters, windows, held_out, documents[0], typed, **more))
    trained = take_steps(
        options,
        aim.loss,
        begun.params,
        begun.config.vocab_size,
        None if aim.target is None else aim.target[1],
        evaluation.make_measure(begun.config, options.dtype, aim.exits, aim.judged, aim.target, aim.part),
        (windows, held_out),
        console,
        options.held,
    )
    return trained, exits


def settle(
    options: AnyOptions, documents: Kinds, tokenizer: Tokenizer | None, console: Console
) -> tuple[AnyOptions, bool]:
    """Replaces each `auto` by a number, for a resumed run by its earlier one; returns also whether a run is resumed.

    Args:
      options: the run's options.
      documents: the training documents.
      tokenizer: their tokenizer; None if it is learned from them.
      console: shows the numbers.
    """
    directory = options.run_directory
    resumed = checkpoints.has_checkpoint(directory / run.CHECKPOINTS)
    characters = sum(len(document.text) for part in documents.values() for document in part)
    earlier = chosen_earlier(directory / run.OPTIONS_FILE) if resumed else {}
    if resumed and (directory / run.RUN_FILE).is_file():
        earlier["places"] = run.read_run(directory).get("places")
    further = start.further_model(options)
    unusual = None if further is None or resumed else options.unusual(further.context)
    tokens = None if tokenizer is None else bpe_tokenizer.estimated_tokens(tokenizer, documents)
    options, chosen = options.settled(characters, earlier, further, tokens)
    if chosen:
        console.print(sizing.in_words(characters, chosen))
    if unusual:
        console.print(f"warning: {unusual}", markup=False)
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
) -> training_loop.Result:
    """Runs the loop in the run directory, from its newest checkpoint if there is one.

    Args:
      options: the run's options, without `auto`.
      loss: the loss to minimise.
      params: initial parameters, donated if they have the dtype of the options.
      vocab_size: number of tokens in the vocabulary.
      target: parameters of another model on the mesh, passed to the loss; None for none.
      measure: the measurement at each checkpoint.
      windows: packed training and held-out text, by task type.
      console: shows the progress.
      held: names of parameters that are not trained.
    """
    training, held_out = windows
    params = jax.tree.map(lambda leaf: leaf.astype(options.weights), params)
    transform = optimizer.make_optimizer(options.optimizer, options.loop.steps, held)
    loss = base.in_dtype(base.holding(loss, held), jnp.dtype(options.compute_dtype))
    mesh = state_sharding.make_mesh(options.mesh)
    step_fn = step.make_step(loss, transform, options.seed)
    judged = {
        kind: [
            state_sharding.place_batch(mesh, batch, rows_axis=0, strict=False)
            for batch in packing.fixed_batches(part, options.data.batch, options.data.held_out_rows)
        ]
        for kind, part in held_out.items()
    }
    weights = options.data.weights
    batches = packing.batches(
        training, weights, options.data.batch, options.optimizer.accumulate, options.seed
    )
    saved, directory = options.run_directory / run.CHECKPOINTS, options.run_directory
    with checkpoints.Checkpoints(saved, options.loop.keep) as kept:
        result = training_loop.Loop(
            options.loop,
            directory,
            kept,
            lambda params: step.init_state(params, transform),
            lambda state, batch: step_fn(state, batch, target),
            batches,
            vocab_size,
            lambda state: measure(state.params, judged, weights),
            console,
            mesh,
        ).run(params)
    if result.reason != "steps":
        ended = "interrupted" if result.signal is not None else "out of the time given by --minutes"
        written = (
            "" if result.saved_s is None else f" (checkpoint written {result.saved_s:.1f} s after the signal)"
        )
        console.print(f"{ended} after step {result.step}; the same command goes on from there{written}")
    return result
