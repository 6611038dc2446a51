"""Writes the made tables of the pages: `python -m benchmarks.results`.

docs/measurements/figures.json has the newest figure of each question; docs/measurements/index.md is made from it, after
the table of `benchmarks.speeds`. The tables of speeds in README.md and docs/measurements/real_model.md are made too.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import peers, speeds
from jaxspec.console import frame
from jaxspec.host.files import read_json

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- Made by `python -m benchmarks.results` from docs/measurements/figures.json; do not edit. -->"
# Above the table of speeds, and below it.
SPEEDS = """## How fast will my model be, with what, and does it fit?

One text, greedy. Bold is measured, with random weights; the others are predictions."""
ABOUT = f"""- **Predictions** follow from {speeds.SOURCES}. A predicted step is a lower bound, which
  devices reach to .6 to .9 (by [the compiler's cycles](../scaling.md), 81 tokens a second in place of 102 for `8b` in
  int8 on a v5e); speed-ups (× plain decoding) are ratios and more accurate. Each column assumes that a draft
  token is accepted with {f"{speeds.ACCEPTED:g}".lstrip("0")}; EAGLE-3 has the {speeds.EAGLE3[0]} tokens a round, with
  {speeds.EAGLE3[1]} draft tokens, that users of vLLM report for an 8B on MT-Bench
  ([issue 26191](https://github.com/vllm-project/vllm/issues/26191)). Measure yours with `jaxspec compare`.
- **lookup** (`ngram`, `suffix`): on text that is copied. It needs nothing.
- **EAGLE-3**: a head that was trained for the model, in 16 bits; from the hub or `python -m training.heads`.
- **sorted draft** (`s2d`): a `1.2b` for `8b`, a `1b` for `70b`, trained by `python -m training.soft`.
- **early exit** (`layerskip`): after a quarter of the layers, of a model that was trained for it.
- **GB a device**: the weights and the cache of 4,096 tokens, which may take nine tenths of the memory. (JAX takes three
  quarters of a GPU's by default; set `XLA_PYTHON_CLIENT_MEM_FRACTION=.95` if a model needs more.) Where a model does
  not fit, the row has the options with which it would.
- The shapes are those of Llama 3.2 1B, Llama 3.1 8B and Llama 2 70B. `python -m benchmarks.speeds` prints the table,
  and `jaxspec profile --device-model DEVICE --shape SHAPE` the prediction of a row (`t4`, `v5e:2x4`)."""
# The pages without a figure in the index.
OTHERS = {
    "method.md": "definitions, machines, models and files, intervals",
    "history.md": "older and withdrawn figures",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """The current answer to a question; None where the record has no such condition.

    Attributes:
      id: a short name.
      question: the heading of its entry.
      answer: what the figure belongs to, or a verdict.
      value: the figure as the page writes it.
      interval: its 95 % interval.
      machine: a name of docs/measurements/method.md.
      date: the day of the measurement, YYYY-MM-DD.
      commit: the commit that was measured.
      page: the page of the entry.
      command: the command that measures it, without comments.
    """

    id: str
    question: str
    answer: str
    value: str
    interval: str | None
    machine: str | None
    date: str | None
    commit: str | None
    page: str
    command: str


def load(path: Path) -> list[Figure]:
    """Reads the figures.

    Raises:
      ValueError: a figure has missing or unknown fields, or two have the same question or id.
    """
    figures = []
    for record in read_json(path)["figures"]:
        try:
            figures.append(Figure(**record))
        except TypeError as error:
            raise ValueError(f"{path}: {record} has the wrong fields ({error})") from None
    for field in ("question", "id"):
        counts = collections.Counter(getattr(figure, field) for figure in figures)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"{path} has two current figures with the {field} {twice[0]!r}; move the older figure to history.md"
            )
    return figures


def page(figures: Sequence[Figure]) -> str:
    """Returns the index: the table of speeds, a table with a row for each figure, and the pages without a figure."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Sequence[Figure]) -> Iterator[str]:
    yield from (
        "# Measurements",
        "",
        MADE,
        "",
        SPEEDS,
        "",
        speeds.table(("1.2b", "8b", "70b")),
        "",
        ABOUT,
        "",
        "## Figures",
        "",
        "The newest figure of each question: a speed ÷ that of plain decoding, unless the answer has another measure.",
        "[Method](method.md) has the definitions and the machines. A dash: not recorded, or no interval.",
        "",
        "| question | answer | figure | 95 % interval | machine | date | page |",
        "|---|---|---|---|---|---|---|",
    )
    for figure in figures:
        link = f"[{Path(figure.page).stem}]({figure.page}#{anchor(figure.question)})"
        conditions = (figure.interval, figure.machine, figure.date)
        cells = [figure.question, figure.answer, figure.value, *(one or "–" for one in conditions), link]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from (f"- [{Path(name).stem}]({name}): {about}" for name, about in OTHERS.items())


def anchor(heading: str) -> str:
    """Returns the anchor that the site gives to a heading.

    Examples:
      >>> anchor("Which draft is the fastest for `large`?")
      'which-draft-is-the-fastest-for-large'
    """
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def tables() -> list[tuple[Path, str, str]]:
    """Returns the made tables of written pages: the page, the mark before the table, and the table."""
    readme, measurements = DOCS.parent / "README.md", DOCS / "measurements"
    stored = read_json(measurements / "peers.json")
    return [
        (readme, speeds.MADE, speeds.short()),
        (readme, peers.MADE, peers.table(stored)),
        (measurements / "real_model.md", peers.MADE, peers.table_by_kind(stored)),
    ]


@dataclasses.dataclass(frozen=True)
class Results:
    """Write docs/measurements/index.md, and the made tables within other pages."""

    def run(self) -> None:
        """Writes the pages."""
        measurements = DOCS / "measurements"
        index = page(load(measurements / "figures.json"))
        (measurements / "index.md").write_text(index, encoding="utf-8")
        for path, mark, table in tables():
            path.write_text(speeds.replaced(path.read_text("utf-8"), mark, table), encoding="utf-8")
        print(f"wrote {measurements / 'index.md'} and the tables of other pages", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return frame.run("benchmarks.results", Results, Results.run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
