"""What all training commands are run in: one line for each error, and exit statuses that a shell can act on."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console

from jaxspec.console import distributed, interrupts
from jaxspec.console.environment import quieten
from jaxspec.console.errors import in_options, one_line, option_names
from jaxspec.console.status import FAILED, INTERRUPTED, WRONG
from jaxspec.engine import jax_settings
from jaxspec.engine.loading import NoDevice, devices_of
from jaxspec.io.extras import MissingExtra
from jaxspec.io.files import is_full
from training.options import RunOptions
from training.parsing import WrongOptions

AnyOptions = TypeVar("AnyOptions", bound=RunOptions)

# Work gets the arguments, the name of the program for its help, and where to speak; it returns the exit status.
Work = Callable[[list[str], str, Console], int]


def run(module: str, options: type, work: Work, arguments: Sequence[str] | None = None) -> int:
    """Runs a command `python -m module`.

    Args:
      module: its full name.
      options: the dataclass of its options; errors that name its fields are said in the names of options.
      work: what it does.
      arguments: by default those of the process.

    Returns:
      the exit status: that of `work`; 2 where the options are wrong; 1 where the work failed, reported in one line
      on standard error (`JAXSPEC_DEBUG=1` shows the traceback); 130 after Ctrl-C.
    """
    quieten()
    jax_settings.keep_needed()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    names = option_names(options)

    def failed(error: str, status: int) -> int:
        # Translated before anything stands in front: a parameter of one word is known by being the first.
        distributed.complain(f"{module}: error: {in_options(error, names)}")
        return status

    status = _status(lambda: work(given, f"python -m {module}", console), module, console, failed)
    distributed.leave(status)
    return status


def joined(options: AnyOptions, module: str) -> AnyOptions:
    """Joins the other processes, if there are any; returns the options as a run records them, without these.

    Raises:
      ValueError: as for `jaxspec.console.distributed.join`, or there is no device.
    """
    distributed.join(options.processes, options.mesh or "all devices", module, options)
    devices_of(None)
    return dataclasses.replace(options, processes=distributed.ProcessOptions())


def _status(work: Callable[[], int], module: str, console: Console, failed: Callable[[str, int], int]) -> int:
    try:
        with interrupts.Interruptible(module):
            return work()
    except KeyboardInterrupt:
        if interrupts.is_first_line():
            console.print(f"{module}: interrupted", markup=False)
        return INTERRUPTED
    except (WrongOptions, NoDevice) as error:
        return failed(str(error), WRONG)
    except Exception as error:
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        # A device out of memory, a bug: the message needs its type to be understood.
        kind = "" if isinstance(error, (ValueError, OSError, MissingExtra)) else f"{type(error).__name__}: "
        said = f"{distributed.lost(error)}{kind}{one_line(error)}"
        if isinstance(error, OSError) and is_full(error):
            said += "; make room and give the same command again"
        return failed(said, FAILED)
