"""Draws a run's curves as SVG: `python -m training.plots --run DIR`, also during the run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from training import command
from training.option_files import parse_plain
from training.reports import curves


@dataclasses.dataclass(frozen=True)
class Options:
    """Draws a run's loss and acceptance by step.

    Attributes:
      run: the run directory of a training command, finished or in progress.
    """

    run: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""

    def work(options: Options, console: Console) -> None:
        console.print("wrote " + ", ".join(map(str, curves.draw(options.run))))

    return command.run_command("training.plots", Options, work, arguments, parse_plain)


if __name__ == "__main__":
    sys.exit(main())
