"""The frame of all training commands: options from YAML files and the command line, progress on standard error."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console

from jaxspec.console import distributed, frame
from jaxspec.loading.loading import devices_of
from jaxspec.programs import jax_settings
from training.option_files import parse
from training.run_options import RunOptions

Options = TypeVar("Options")
AnyOptions = TypeVar("AnyOptions", bound=RunOptions)


def run_command(
    module: str,
    options: type[Options],
    work: Callable[[Options, Console], int | None],
    arguments: Sequence[str] | None = None,
    read: frame.Read = parse,
) -> int:
    """Runs a command `python -m module`; see `jaxspec.console.frame.run_command`, also for the exit status.

    Args:
      module: its full name.
      options: the dataclass of its options.
      work: gets the options and where to show progress; returns the exit status, or None for 0.
      arguments: by default those of the process.
      read: how the options are read.
    """
    jax_settings.keep_needed()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return frame.run_command(module, options, lambda given: work(given, console), arguments, read)


def typed(module: str, arguments: Sequence[str] | None) -> str:
    """Returns the whole command line as it was typed, for the record of a run."""
    called = (frame.CALLED.get() or f"python -m {module}").split()
    return shlex.join([*called, *(sys.argv[1:] if arguments is None else arguments)])


def joined(options: AnyOptions) -> AnyOptions:
    """Joins the other processes, if any; returns the options without the process options, as a run records them.

    Raises:
      ValueError: see `jaxspec.console.distributed.join`; or there is no device.
    """
    distributed.join(options.processes, options.mesh or "all devices", options)
    devices_of(None)
    return dataclasses.replace(options, processes=distributed.ProcessOptions())
