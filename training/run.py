"""Writes and reads the record of a run in its directory: its identity, options and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.host import files
from jaxspec.host.messages import counted, shown
from jaxspec.io.hf import config_json
from jaxspec.io.methods import method_files
from jaxspec.model.config import LlamaConfig
from training import outputs
from training.data.packing import Windows
from training.data.sources import Kinds
from training.option_files import plain, to_yaml
from training.run_options import SCRATCH, JobOptions, RunOptions
from training.start import Objective, Start

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


def identity(options: JobOptions, start: Start, aim: Objective, module: str, key: str) -> dict[str, Any]:
    """Returns the properties that a resumed run must keep; all others, such as its length, may change."""
    scratch = options.start == SCRATCH
    learned = scratch and options.model.tokenizer is None
    return {
        "job": module,
        "start": SCRATCH if scratch else method_files.fingerprint(start.config, start.params),
        "exits": list(aim.judged),
        "freeze_embeddings": options.freeze_embeddings,
        "draft_vocab": None if aim.part is None else hashlib.sha256(aim.part.tobytes()).hexdigest()[:16],
        "distil_weight": aim.distil_weight,
        # A target affects training only through distillation; otherwise it may change.
        "target": aim.target_fingerprint if aim.distil_weight else None,
        "vocab_size": options.model.vocab_size if learned else None,
        "seed": options.seed,
        "held_out": options.data.held_out,
        "data": key[:16],
    }


def admit(options: RunOptions, resumed: bool, config: LlamaConfig | None, wanted: dict[str, Any]) -> None:
    """Refuses the directories of another run, and deletes the record of a command that failed before it trained.

    Args:
      options: the run's options.
      resumed: whether the run continues from a checkpoint.
      config: config of the trained model; None if the run trains something else.
      wanted: the identity of the present run.

    Raises:
      ValueError: the run directory has a run of another model or identity (runs of earlier versions record only the
        model), or see `training.outputs.refuse_another`.
    """
    run = options.run_directory
    if resumed:
        hint = f"give the options it was started with ({run / OPTIONS_FILE}), or another --run"
        if config is not None and (run / "config.json").is_file() and config_json.read_config(run) != config:
            raise ValueError(f"{run} holds a run of another model; {hint}")
        found = read_run(run).get("identity", {}) if (run / RUN_FILE).is_file() else {}
        changed = [name for name in wanted if name in found and found[name] != wanted[name]]
        if changed:
            there, asked = (", ".join(f"`{name}` {one[name]}" for name in changed) for one in (found, wanted))
            raise ValueError(f"{run} holds a run with {there}; this command has {asked}: {hint}")
    if options.output is not None:
        outputs.refuse_another(options.output, run, wanted)
    if not resumed and files.written_here():
        (run / RUN_FILE).unlink(missing_ok=True)


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


def record(
    options: RunOptions,
    same: dict[str, Any],
    parameters: int,
    windows: dict[str, Windows],
    held_out: dict[str, Windows],
    documents: Kinds,
    typed: str,
    **more: Any,
) -> str:
    """Writes the resolved options and the record of a run into its directory.

    Args:
      options: the run's options, without `auto`.
      same: the identity of the run.
      parameters: number of trained parameters.
      windows, held_out: the packed text by task type.
      documents: the training documents by task type.
      typed: the command line; the record lists all command lines of the run.
      more: further entries of the record.

    Returns:
      one line for the user: the size of the model and of the data.
    """
    run = options.run_directory
    earlier = read_run(run, ["commands"])["commands"] if (run / RUN_FILE).is_file() else []
    tokens = {"training": _count_tokens(windows), "held_out": _count_tokens(held_out)}
    content = {
        "commands": [*(one for one in earlier if one != typed), typed],
        "identity": same,
        "options": plain(options),
        "parameters": parameters,
        "documents": {kind: len(part) for kind, part in documents.items()},
        "tokens": tokens,
        **more,
    }
    files.write_atomic(run / OPTIONS_FILE, to_yaml(options))
    files.write_atomic(run / RUN_FILE, json.dumps(content, indent=2) + "\n")
    return (
        f"{parameters:,} parameters, {sum(tokens['training'].values()):,} training and "
        f"{sum(tokens['held_out'].values()):,} held-out tokens of {counted(len(windows), 'kind')}, "
        f"run in {run}"
    )


def _count_tokens(windows: dict[str, Windows]) -> dict[str, int]:
    return {kind: int((part["segments"] > 0).sum()) for kind, part in windows.items()}
