"""What a run directory says of its run: which one it is, from which options, on which data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.io import files, hf_config, method_files
from jaxspec.io.messages import shown
from jaxspec.model.config import LlamaConfig
from training.data.packing import Windows
from training.data.sources import Kinds
from training.loop.progress import counted
from training.options import SCRATCH, JobOptions, RunOptions
from training.parsing import plain, to_yaml
from training.start import Objective, Start

RUN_FILE = "run.json"
OPTIONS_FILE = "options.yaml"
# Where a run keeps its checkpoints, in its directory.
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
    """Lists what must be the same where a run is resumed, for run.json; all else, as its length, may change."""
    scratch = options.start == SCRATCH
    learned = scratch and options.model.tokenizer is None
    # A target that only measures may be another one; one that is learned from makes another run.
    teacher = aim.target if aim.distil_weight else None
    return {
        "job": module,
        "start": SCRATCH if scratch else method_files.fingerprint(start.config, start.params),
        "exits": list(aim.judged),
        "freeze_embeddings": options.freeze_embeddings,
        "draft_vocab": None if aim.part is None else hashlib.sha256(aim.part.tobytes()).hexdigest()[:16],
        "distil_weight": aim.distil_weight,
        "target": None if teacher is None else method_files.fingerprint(*teacher),
        "vocab_size": options.model.vocab_size if learned else None,
        "seed": options.seed,
        "held_out": options.data.held_out,
        "data": key[:16],
    }


def refuse_another(run: Path, config: LlamaConfig | None, wanted: dict[str, Any]) -> None:
    """Refuses to go on from the checkpoint of another run.

    Args:
      run: the run directory.
      config: of the model that is trained; None for what is no model.
      wanted: the identity of the run that was asked for.

    Raises:
      ValueError: the directory's run has another model or identity; runs of earlier versions record only the model.
    """
    hint = f"give the options it was started with ({run / OPTIONS_FILE}), or another --run"
    if config is not None and (run / "config.json").is_file() and hf_config.read_config(run) != config:
        raise ValueError(f"{run} holds a run of another model; {hint}")
    found = read_run(run).get("identity", {}) if (run / RUN_FILE).is_file() else {}
    changed = [name for name in wanted if name in found and found[name] != wanted[name]]
    if changed:
        there, asked = (", ".join(f"`{name}` {one[name]}" for name in changed) for one in (found, wanted))
        raise ValueError(f"{run} holds a run with {there}; asked for is {asked}: {hint}")


def read_run(run: Path, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the record that a training command leaves in its run directory: commands, options, data.

    Args:
      run: the run directory.
      needs: the entries that must exist; the record of an earlier version may lack some.

    Raises:
      ValueError: there is no record, or it is damaged; the line names the file.
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


def forget(run: Path) -> None:
    """Forgets what a command has recorded that failed before it had trained."""
    if files.written_here():
        (run / RUN_FILE).unlink(missing_ok=True)


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
    """Writes what the run is into its directory: the resolved options, and the record.

    Args:
      options: of the run, without `auto`.
      same: its identity.
      parameters: how many numbers are trained.
      windows, held_out: the packed text by kind.
      documents: the training documents by kind.
      typed: the command line; the record lists all that the run was started and resumed with.
      more: entries of the record.

    Returns:
      one line for the user: how large the model and the data are.
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
        f"{sum(tokens['held_out'].values()):,} held-out tokens of {counted(len(windows), 'kind', 'kinds')}, "
        f"run in {run}"
    )


def _count_tokens(windows: dict[str, Windows]) -> dict[str, int]:
    return {kind: int((part["segments"] > 0).sum()) for kind, part in windows.items()}
