"""Writes the made tables of README.md and of docs: `python -m benchmarks.results`."""

from __future__ import annotations

from pathlib import Path

from benchmarks import peers, skips, speeds
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
        (DOCS / "results" / "skips.md", skips.MADE, skips.table(read_json(DOCS / "results" / "skips.json"))),
    ]


def main() -> None:
    """Writes the tables."""
    for path, mark, table in tables():
        path.write_text(speeds.replaced(path.read_text("utf-8"), mark, table), encoding="utf-8")
        print(f"wrote a table of {path}")


if __name__ == "__main__":
    main()
