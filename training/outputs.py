"""Where a training writes: never over a model that it has not written itself.

A directory that a run exports to says so in a file of its own, which is written before all others: an export that was
killed is known by it too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.console.output import check_directory
from jaxspec.engine.loading import find_model
from jaxspec.io import files, model_files
from training.options import SCRATCH, RunOptions

MARK = "training_run.json"


def check(options: RunOptions) -> None:
    """Refuses places that hold a model which no run has written, before anything is read.

    Raises:
      ValueError: `output` or `run` cannot be a directory, is or contains that of a model which the options name, or
        holds a model without the mark of a run.
    """
    output, run = options.output, options.run_directory
    sources = _sources(options)
    for option, directory in (("run", run), ("output", output)):
        if directory is None:
            continue
        check_directory(directory, option)
        for name, source in sources.items():
            _refuse_source(directory, option, name, source.resolve())
    # A run directory has a configuration and a tokenizer of its own.
    if found := model_files.held(run, weights_only=True):
        raise ValueError(_refusal(run, "run", found, "which is no part of a run"))
    if output is None:
        return
    found = _held(output, run)
    if found is not None and not (output / MARK).is_file():
        raise ValueError(_refusal(output, "output", found, "which this run did not write"))


def _sources(options: RunOptions) -> dict[str, Path]:
    """The directories and files of the models that a run begins with or learns from, by the name of their option."""
    given = {name: getattr(options, name, None) for name in ("start", "target")}
    found = {name: find_model(one) for name, one in given.items() if one not in (None, SCRATCH)}
    words = getattr(getattr(options, "model", None), "tokenizer", None)
    return found if words is None else found | {"tokenizer": words}


def refuse_another(directory: Path, run: Path, identity: Mapping[str, Any]) -> None:
    """Refuses a directory whose model another run has written.

    Args:
      directory: the output.
      run: the run directory.
      identity: of the run that is to write there, see `training.run.identity`.

    Raises:
      ValueError: the directory is the run directory, or holds a model and not the mark of this run.
    """
    found = _held(directory, run)
    if found is not None and _marked(directory) != _digest(identity):
        raise ValueError(_refusal(directory, "output", found, "which another run wrote"))


def claim(directory: Path, run: Path, identity: Mapping[str, Any]) -> None:
    """Marks a directory as the output of a run, before anything else is written there.

    Raises:
      ValueError: as `refuse_another`.
    """
    refuse_another(directory, run, identity)
    if files.written_here():
        directory.mkdir(parents=True, exist_ok=True)
        files.remove_abandoned(directory)
        files.write_json(directory / MARK, {"run": _digest(identity)})


def check_beside(output: Path, source: Path) -> None:
    """Refuses a directory for numbers of a model that holds another model, which would take them for its own.

    Args:
      output: the directory.
      source: the model's directory or file.

    Raises:
      ValueError: `output` cannot be a directory, or holds another model.
    """
    check_directory(output)
    home = source.resolve()
    found = model_files.held(output)
    if found is not None and output.resolve() not in (home, home.parent):
        raise ValueError(_refusal(output, "output", found, "which is not the one that was given"))


def check_file(output: Path, written: Sequence[Path], log: Path, data: Sequence[str]) -> None:
    """Refuses a file to write that exists and that this command did not write: its log is not beside it.

    Args:
      output: the file that was asked for.
      written: all files that are written.
      log: of the command.
      data: what is read.

    Raises:
      ValueError: one of the files exists without the log, or is read.
    """
    check_directory(output.parent)
    for path in written:
        if any(Path(one).exists() and path.exists() and path.samefile(one) for one in data):
            raise ValueError(f"{path} is among the data, and would be overwritten; give another `output`")
        if path.exists() and not log.is_file():
            raise ValueError(
                f"{path} exists, and was not written by this command ({log.name} is missing); move it away or give "
                "another `output`"
            )


def _held(output: Path, run: Path) -> str | None:
    """The file by which an output holds a model."""
    if output.resolve() == run.resolve():
        raise ValueError(f"`output` {output} is the run directory; give a directory of its own")
    return model_files.held(output)


def _refuse_source(directory: Path, option: str, name: str, source: Path) -> None:
    place, home = directory.resolve(), source.parent if source.is_file() else source
    if home.is_relative_to(place):
        verb = "is" if home == place else "contains"
        raise ValueError(f"`{option}` {directory} {verb} the directory of `{name}`; give another directory")


def _refusal(directory: Path, option: str, found: str, whose: str) -> str:
    return (
        f"`{option}` {directory} holds a model ({found}), {whose}; move it away, or give another `{option}`"
    )


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _marked(directory: Path) -> str | None:
    """The run that has marked a directory; None where none has, or nobody can tell."""
    try:
        return files.read_json(directory / MARK).get("run")
    except (OSError, ValueError):
        return None
