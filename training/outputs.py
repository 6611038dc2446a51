"""Checks the outputs of a training run, so that it overwrites no model that it has not written itself.

A run first writes a mark into its output directory, before any other file. The mark also identifies an unfinished
export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.console.output import check_directory
from jaxspec.host import files
from jaxspec.io import model_files
from jaxspec.loading.loading import find_model
from training.run_options import SCRATCH, RunOptions

MARK = "training_run.json"


def check(options: RunOptions) -> None:
    """Refuses an output or run directory with a model that no run has written, before any data is read.

    Raises:
      ValueError: `output` or `run` cannot be a directory, is or contains the directory of a model in the options, or
        contains a model without the mark of a run.
    """
    output, run = options.output, options.run_directory
    sources = _sources(options)
    for option, directory in (("run", run), ("output", output)):
        if directory is None:
            continue
        check_directory(directory, option)
        for name, source in sources.items():
            _refuse_source(directory, option, name, source.resolve())
    # Only weights show a model, because every run directory has a configuration and a tokenizer.
    if found := model_files.held(run, weights_only=True):
        raise ValueError(_refusal(run, "run", found, "which is no part of a run"))
    if output is None:
        return
    found = _held(output, run)
    if found is not None and not (output / MARK).is_file():
        raise ValueError(_refusal(output, "output", found, "which this run did not write"))


def _sources(options: RunOptions) -> dict[str, Path]:
    """Returns the directories and files of the models that a run starts from or learns from, by option."""
    given = {name: getattr(options, name, None) for name in ("start", "target")}
    found = {name: find_model(one) for name, one in given.items() if one not in (None, SCRATCH)}
    words = getattr(getattr(options, "model", None), "tokenizer", None)
    return found if words is None else found | {"tokenizer": words}


def refuse_another(directory: Path, run: Path, identity: Mapping[str, Any]) -> None:
    """Refuses a directory with a model of another run.

    Args:
      directory: the output.
      run: the run directory.
      identity: the identity of the new run, see `training.run.Run.admit`.

    Raises:
      ValueError: the directory is the run directory, or contains a model without the mark of this run.
    """
    found = _held(directory, run)
    if found is not None and _marked(directory) != _digest(identity):
        raise ValueError(_refusal(directory, "output", found, "which another run wrote"))


def claim(directory: Path, run: Path, identity: Mapping[str, Any]) -> None:
    """Marks a directory as the output of a run, before any other file is written there.

    Raises:
      ValueError: as for `refuse_another`.
    """
    refuse_another(directory, run, identity)
    if files.written_here():
        directory.mkdir(parents=True, exist_ok=True)
        files.remove_abandoned(directory)
        files.write_json(directory / MARK, {"run": _digest(identity)})


def check_beside(output: Path, source: Path) -> None:
    """Refuses an output for measurements of a model if it contains another model, to which they would not apply.

    Args:
      output: the directory.
      source: the model's directory or file.

    Raises:
      ValueError: `output` cannot be a directory, or contains another model.
    """
    check_directory(output)
    home = source.resolve()
    found = model_files.held(output)
    if found is not None and output.resolve() not in (home, home.parent):
        raise ValueError(_refusal(output, "output", found, "which is not the one that was given"))


def check_file(output: Path, written: Sequence[Path], log: Path, data: Sequence[str]) -> None:
    """Refuses to overwrite a file that this command did not write; such a file has no log.

    Args:
      output: the requested file.
      written: all files that the command writes.
      log: the command's log.
      data: the files that the command reads.

    Raises:
      ValueError: one of the files exists without the log, or is among the data.
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
    """Returns the name of a file that shows that the output contains a model; None without one."""
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
    """Returns the identity digest in a directory's mark; None if there is no readable mark."""
    try:
        return files.read_json(directory / MARK).get("run")
    except (OSError, ValueError):
        return None
