"""What each benchmark's command line is: options are read, measured with progress, and the report printed as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxspec.bench.timing import OnProgress
from jaxspec.console.errors import Guard, option_names
from jaxspec.console.parsing import parse_as
from jaxspec.console.terminal import Progress

Options = TypeVar("Options")
Report = dict[str, Any]


def run(
    module: str,
    options: type[Options],
    measure: Callable[[Options, OnProgress], Report],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs the command line of a benchmark.

    Args:
      module: its full name, as `python -m` wants it.
      options: the dataclass of its options.
      measure: what it does, given the options and where to say what goes on.
      argv: by default the arguments of the process.

    Returns:
      the exit status, see `jaxspec.console.errors.Guard`.
    """

    def work() -> int:
        given = parse_as(options, f"python -m {module}", sys.argv[1:] if argv is None else argv)
        with Progress() as progress:
            report = measure(given, progress)
        print(json.dumps(report, indent=2))
        return 0

    return Guard("jaxspec", option_names(options))(work)
