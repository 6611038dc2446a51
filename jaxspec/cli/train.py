"""The command `jaxspec train`: the commands of the package `training`, which is imported when one is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import import_module

from jaxspec.console.frame import CALLED
from jaxspec.console.parsing import without_command

_DESCRIPTION = """Trains drafts, heads, probes and models, and prepares their data.

`jaxspec train JOB --help` lists the options of a job. `python -m training.JOB` runs the same job."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Trains drafts, heads and probes; see `jaxspec train --help`."""


def train(arguments: Sequence[str]) -> int:
    """Runs the job that the first argument names, with the others; returns the exit status.

    Raises:
      SystemExit: after the help was printed.
      ValueError: there is no such job, or no package `training`.
    """
    try:
        jobs: dict[str, str] = import_module("training").JOBS
    except ModuleNotFoundError as error:
        if error.name != "training":
            raise
        raise ValueError(
            "the package training is not installed; install jaxspec from its repository"
        ) from None
    name = arguments[0] if arguments else "--help"
    if name not in jobs:
        options = {job: f"{module}:Options" for job, module in jobs.items()}
        without_command("jaxspec train", name, _DESCRIPTION, options)
    called = CALLED.set(f"jaxspec train {name}")
    try:
        status: int = import_module(jobs[name]).main(arguments[1:])
    finally:
        CALLED.reset(called)
    return status
