"""Runs a training job with a given objective: makes the initial model, trains, exports."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console

from jaxspec.host import files
from jaxspec.io.hf import config_json
from jaxspec.io.methods import method_files
from training import export, run, start
from training.loop import training_loop
from training.reports import evaluation
from training.run_options import SCRATCH, JobOptions
from training.start import Objective, Start

Options = TypeVar("Options", bound=JobOptions)
# Makes the objective of a job from its options and initial model.
MakeObjective = Callable[[Options, Start], Objective]


def main(
    kind: type[Options],
    objective: MakeObjective[Options],
    module: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs the command line of a job: trains, then exports the best checkpoint.

    Args:
      kind: the job's dataclass of options.
      objective: makes the job's objective.
      module: full name of the job's module, for `python -m`.
      arguments: default: those of the process.

    Returns:
      the exit status: 0, also when --minutes are over; 128 plus the signal's number if a signal ended training; see
      `training.command.run_command` for errors.
    """

    def train(options: Options, typed: str, console: Console) -> int:
        options = dataclasses.replace(options, dtype=start.written_dtype(options))
        with run.opened(options, module, typed, console) as opened:
            # Nothing of the training remains on the devices when the export reads the best checkpoint.
            result, exits = _trained(opened, objective)
            if options.output is not None and result.exports:
                # Every process reads its part of the checkpoint; the first one writes.
                console.print(export.export(opened.directory, options.output, options.samples, console.print))
            opened.draw(result, "" if exits else " (acceptance is measured where there are exits)")
        return result.status

    return run.main(kind, train, module, arguments)


def _trained(
    opened: run.Run[Options], objective: MakeObjective[Options]
) -> tuple[training_loop.Result, Sequence[int]]:
    """Trains from the newest checkpoint of the run if there is one; returns also the measured exits."""
    options, directory, documents = opened.options, opened.directory, opened.documents[0]
    begun = start.start_model(options, documents, opened.resumed)
    aim = objective(options, begun)
    opened.tokenise(begun.words, begun.config)
    opened.admit(identity(options, begun, aim), begun.config)
    # Without its tokenizer, a run would fail only at its export.
    if not (opened.resumed and (directory / "tokenizer.json").is_file()):
        start.put_tokenizer(options, documents, begun.words)
    content = config_json.config_json(begun.config, "float32", aim.trained_for)
    files.write_json(directory / "config.json", content)
    kept = config_json.generation_config_json(begun.config, start.generation_defaults(options))
    files.write_json(directory / config_json.GENERATION, kept)
    result = opened.take_steps(
        aim.loss,
        begun.params,
        begun.config.vocab_size,
        None if aim.target is None else aim.target[1],
        evaluation.make_measure(begun.config, options.dtype, aim.exits, aim.judged, aim.target, aim.part),
        exits=list(aim.exits),
        places=begun.mesh.shape["data"],
    )
    return result, aim.exits


def identity(options: JobOptions, begun: Start, aim: Objective) -> dict[str, Any]:
    """Returns the properties of a job that a resumed run must keep, beside those of every run."""
    scratch = options.start == SCRATCH
    learned = scratch and options.model.tokenizer is None
    return {
        "start": SCRATCH if scratch else method_files.fingerprint(begun.config, begun.params),
        "exits": list(aim.judged),
        "freeze_embeddings": options.freeze_embeddings,
        "draft_vocab": None if aim.part is None else hashlib.sha256(aim.part.tobytes()).hexdigest()[:16],
        "distil_weight": aim.distil_weight,
        # A target affects training only through distillation; otherwise it may change.
        "target": aim.target_fingerprint if aim.distil_weight else None,
        "vocab_size": options.model.vocab_size if learned else None,
    }
