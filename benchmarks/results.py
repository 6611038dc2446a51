"""Writes the made tables of README.md and of docs/measurements: `python -m benchmarks.results`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import peers, speeds
from jaxspec.console import frame
from jaxspec.host.files import read_json

DOCS = Path(__file__).parents[1] / "docs"


def tables() -> list[tuple[Path, str, str]]:
    """Returns the made tables of written pages: the page, the mark before the table, and the table."""
    readme, measurements = DOCS.parent / "README.md", DOCS / "measurements"
    stored = read_json(measurements / "peers.json")
    return [
        (readme, peers.MADE, peers.table(stored)),
        (measurements / "index.md", speeds.MADE, speeds.table(("1.2b", "8b", "70b"))),
        (measurements / "real_model.md", peers.MADE, peers.table_of_ratios(stored)),
    ]


@dataclasses.dataclass(frozen=True)
class Results:
    """Write the made tables of README.md and of docs/measurements."""

    def run(self) -> None:
        """Writes the tables."""
        for path, mark, table in tables():
            path.write_text(speeds.replaced(path.read_text("utf-8"), mark, table), encoding="utf-8")
            print(f"wrote a table of {path}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return frame.run_command("benchmarks.results", Results, Results.run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
