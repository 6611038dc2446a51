"""A training run: its options, its data, its steps, and the record of these in its directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.host import files, lock, processes
from jaxspec.host.messages import counted, shown
from jaxspec.host.progress import Progress
from jaxspec.io.hf import config_json
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training import command, outputs, start
from training.data import bpe_tokenizer, packing, sizing, sources
from training.data.packing import Windows
from training.data.sources import Kinds
from training.loop import checkpoints, optimizer, state_sharding, step, training_loop
from training.losses import base
from training.option_files import chosen_earlier, plain, to_yaml
from training.reports import curves, evaluation
from training.run_options import RunOptions

RUN_FILE = "run.json"
OPTIONS_FILE = "options.yaml"
# Name of the checkpoint directory in a run directory.
CHECKPOINTS = "checkpoints"
# The entries of a record that later runs read.
_TYPES = {
    "commands": list,
    "identity": dict,
    "options": dict,
    "parameters": int,
    "documents": dict,
    "tokens": dict,
}
Options = TypeVar("Options", bound=RunOptions)


def main(
    kind: type[Options],
    train: Callable[[Options, str, Console], int],
    module: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs the command line of a training command; returns the exit status.

    Args:
      kind: the dataclass of its options.
      train: gets the options, the whole command line for the record, and where to show progress; returns the status.
      module: full name of the command's module, for `python -m`.
      arguments: default: those of the process.
    """

    def work(options: Options, console: Console) -> int:
        return train(command.joined(options), command.typed(module, arguments), console)

    return command.run_command(module, kind, work, arguments)


@contextlib.contextmanager
def opened(options: Options, module: str, typed: str, console: Console) -> Iterator[Run[Options]]:
    """Reads the data of a run and locks its directory.

    Args:
      options: its options.
      module: full name of the command's module.
      typed: the whole command line, for the record.
      console: shows the progress.

    Raises:
      ValueError: an argument does not fit.
    """
    outputs.check(options)
    with Progress("reading the data"):
        documents = sources.read_kinds(options.data, start.chat_of(options), console.print)
    with lock.exclusive(options.run_directory, console.print):
        settled, resumed = _settled(options, documents[0], console)
        yield Run(settled, module, typed, console, documents, resumed)


def _settled(options: Options, documents: Kinds, console: Console) -> tuple[Options, bool]:
    """Replaces each `auto` by a number, for a resumed run by its earlier one; returns also whether a run is resumed."""
    directory, given = options.run_directory, options.tokenizer_source
    resumed = checkpoints.has_checkpoint(directory / CHECKPOINTS)
    characters = sum(len(document.text) for part in documents.values() for document in part)
    earlier = chosen_earlier(directory / OPTIONS_FILE) if resumed else {}
    if resumed and (directory / RUN_FILE).is_file():
        earlier["places"] = read_run(directory).get("places")
    further = start.further_model(options)
    unusual = None if further is None or resumed else options.unusual(further.context)
    tokens = None if given is None else bpe_tokenizer.estimated_tokens(bpe_tokenizer.load(given), documents)
    options, chosen = options.settled(characters, earlier, further, tokens)
    if chosen:
        console.print(sizing.in_words(characters, chosen))
    if unusual:
        console.print(f"warning: {unusual}", markup=False)
    return options, resumed


@dataclasses.dataclass
class Run(Generic[Options]):
    """A training run, alone in its directory.

    Attributes:
      options: without `auto`.
      module: full name of the command's module.
      typed: the whole command line; the record lists all command lines of the run.
      console: shows the progress.
      documents: the training and the held-out documents by task type.
      resumed: whether the run continues from a checkpoint.
      words: the tokenizer, see `tokenise`.
      marks: the token that begins every document, and those that end texts.
      identity: the properties that a resumed run must keep, see `admit`; all others, such as its length, may change.
    """

    options: Options
    module: str
    typed: str
    console: Console
    documents: tuple[Kinds, Kinds]
    resumed: bool
    words: Tokenizer = dataclasses.field(init=False, repr=False)
    marks: bpe_tokenizer.Marks = dataclasses.field(init=False, repr=False)
    identity: dict[str, Any] = dataclasses.field(init=False, repr=False)

    @property
    def directory(self) -> Path:
        """The directory of the run's own files."""
        return self.options.run_directory

    def tokenise(self, words: Tokenizer, config: LlamaConfig) -> None:
        """Sets the tokenizer; `config` has the tokens that begin and end texts."""
        self.words, self.marks = words, start.document_marks(config, self.options.tokenizer_source)

    @functools.cached_property
    def _key(self) -> str:
        return sources.data_key(self.options.data, self.documents, self.words, self.marks)

    @functools.cached_property
    def windows(self) -> tuple[dict[str, Windows], dict[str, Windows]]:
        """The packed training and held-out text by task type, which the directory keeps."""
        given = self.documents, self.words, self.marks, self._key
        with Progress("encoding the data"):
            return sources.packed(self.options.data, self.directory, *given)

    def admit(self, own: dict[str, Any], config: LlamaConfig | None = None) -> None:
        """Refuses the directories of another run, and deletes the record of a command that failed before it trained.

        Args:
          own: the job's part of the identity.
          config: config of the trained model; None if the run trains something else.

        Raises:
          ValueError: the run directory has a run of another model or identity (runs of earlier versions record only
            the model), or see `training.outputs.refuse_another`.
        """
        run, options = self.directory, self.options
        data = {"seed": options.seed, "held_out": options.data.held_out, "data": self._key[:16]}
        self.identity = wanted = {"job": self.module, **own, **data}
        if self.resumed:
            hint = f"give the options it was started with ({run / OPTIONS_FILE}), or another --run"
            if (
                config is not None
                and (run / "config.json").is_file()
                and config_json.read_config(run) != config
            ):
                raise ValueError(f"{run} holds a run of another model; {hint}")
            found = read_run(run).get("identity", {}) if (run / RUN_FILE).is_file() else {}
            changed = [name for name in wanted if name in found and found[name] != wanted[name]]
            if changed:
                there, asked = (
                    ", ".join(f"`{name}` {one[name]}" for name in changed) for one in (found, wanted)
                )
                raise ValueError(f"{run} holds a run with {there}; this command has {asked}: {hint}")
        if options.output is not None:
            outputs.refuse_another(options.output, run, wanted)
        if not self.resumed and files.written_here():
            (run / RUN_FILE).unlink(missing_ok=True)

    def _record(self, parameters: int, **more: Any) -> None:
        """Writes the options and the record into the directory, and shows the sizes of the model and of the data."""
        run = self.directory
        earlier = read_run(run, ["commands"])["commands"] if (run / RUN_FILE).is_file() else []
        training, held_out = (
            {kind: int((one["segments"] > 0).sum()) for kind, one in part.items()} for part in self.windows
        )
        content = {
            "commands": [*(one for one in earlier if one != self.typed), self.typed],
            "identity": self.identity,
            "options": plain(self.options),
            "parameters": parameters,
            "documents": {kind: len(part) for kind, part in self.documents[0].items()},
            "tokens": {"training": training, "held_out": held_out},
            **more,
        }
        files.write_atomic(run / OPTIONS_FILE, to_yaml(self.options))
        files.write_atomic(run / RUN_FILE, json.dumps(content, indent=2) + "\n")
        self.console.print(
            f"{parameters:,} parameters, {sum(training.values()):,} training and "
            f"{sum(held_out.values()):,} held-out tokens of {counted(len(training), 'kind')}, run in {run}"
        )

    def take_steps(
        self,
        loss: base.Loss,
        params: Params,
        vocab_size: int,
        target: Params | None,
        measure: evaluation.MeasureKinds,
        **more: Any,
    ) -> training_loop.Result:
        """Writes the record, and runs the loop from the newest checkpoint if there is one.

        Args:
          loss: the loss to minimise.
          params: initial parameters, donated if they have the dtype of the options.
          vocab_size: number of tokens in the vocabulary.
          target: parameters of another model on the mesh, passed to the loss; None for none.
          measure: the measurement at each checkpoint.
          more: further entries of the record.
        """
        self._record(sum(leaf.size for leaf in jax.tree.leaves(params)), **more)
        options, data = self.options, self.options.data
        training, held_out = self.windows
        params = jax.tree.map(lambda leaf: leaf.astype(options.weights), params)
        transform = optimizer.make_optimizer(options.optimizer, options.loop.steps, options.held)
        loss = base.in_dtype(base.holding(loss, options.held), jnp.dtype(options.compute_dtype))
        mesh = state_sharding.make_mesh(options.mesh)
        step_fn = step.make_step(loss, transform, options.seed)
        judged = {
            kind: [
                state_sharding.place_batch(mesh, batch, rows_axis=0, strict=False)
                for batch in packing.fixed_batches(part, data.batch, data.held_out_rows)
            ]
            for kind, part in held_out.items()
        }
        with checkpoints.Checkpoints(self.directory / CHECKPOINTS, options.loop.keep) as kept:
            result = training_loop.Loop(
                options.loop,
                self.directory,
                kept,
                lambda params: step.init_state(params, transform),
                lambda state, batch: step_fn(state, batch, target),
                packing.batches(
                    training, data.weights, data.batch, options.optimizer.accumulate, options.seed
                ),
                vocab_size,
                lambda state: measure(state.params, judged, data.weights),
                self.console,
                mesh,
            ).run(params)
        if result.reason != "steps":
            ended = "interrupted" if result.signal is not None else "out of the time given by --minutes"
            written = (
                ""
                if result.saved_s is None
                else f" (checkpoint written {result.saved_s:.1f} s after the signal)"
            )
            self.console.print(
                f"{ended} after step {result.step}; the same command goes on from there{written}"
            )
        return result

    def draw(self, result: training_loop.Result, remark: str = "") -> None:
        """Draws the curves of a run that has ended, if the options ask for them."""
        if self.options.plot and result.exports and processes.is_first():
            self.console.print(f"drew {', '.join(map(str, curves.draw(self.directory)))}{remark}")


def read_run(run: Path, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the record of a run from its directory: commands, options, data.

    Args:
      run: the run directory.
      needs: the entries that must exist; the record of an earlier version may lack some.

    Raises:
      ValueError: the record is missing or damaged.
    """
    file = run / RUN_FILE
    if not file.is_file():
        raise ValueError(f"no {RUN_FILE} in {run}; give the run directory of a training command")
    record = files.read_json(file)
    for name in (*needs, *(_TYPES.keys() & record.keys())):
        if not isinstance(record.get(name), _TYPES[name]):
            raise ValueError(
                f"{file} is damaged: its {name} is {shown(record.get(name))}, expected {_TYPES[name].__name__}; delete "
                "it and resume the run, which writes it again"
            )
    return record
