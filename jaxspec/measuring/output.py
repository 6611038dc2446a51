"""The output of a command's report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from jaxspec.console.tables import Table


def show(report: Any, as_json: bool, parts: Callable[[Any], Iterable[str | Table]]) -> None:
    """Prints the report of a command: as one JSON object, or its lines and tables.

    Args:
      report: a JSON value.
      as_json: whether it is printed as such.
      parts: returns its lines and tables.
    """
    if as_json:
        print(json.dumps(report))
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    for part in parts(report):
        if isinstance(part, str):
            print(part)
        else:
            console.print(part)


def figure(value: float | None, digits: int) -> str:
    """Returns a number as a cell; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"
