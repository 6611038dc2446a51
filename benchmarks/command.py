"""The command line of the benchmarks: reads options, measures with progress, and prints the report as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxspec.console import frame
from jaxspec.console.status import INTERRUPTED
from jaxspec.host.progress import OnProgress, Progress

Options = TypeVar("Options")
Report = dict[str, Any]


def run(
    module: str,
    options: type[Options],
    measure: Callable[[Options, OnProgress], Report],
    argv: Sequence[str] | None = None,
    show: Callable[[Report], None] = lambda report: None,
) -> int:
    """Runs the command line of a benchmark.

    Args:
      module: full name of the module, for `python -m`.
      options: the dataclass of its options.
      measure: the measurement, given the options and a function that shows the progress.
      argv: default: the arguments of the process.
      show: prints the report as tables, to standard error.

    Returns:
      the exit status, see `jaxspec.console.frame.run`; that of an interrupted process if the report's entry
      `interrupted` is true.
    """

    def work(given: Options) -> int:
        with Progress() as progress:
            report = measure(given, progress)
        show(report)
        print(json.dumps(report, indent=2))
        return INTERRUPTED if report.get("interrupted") else 0

    return frame.run(module, options, work, argv)
