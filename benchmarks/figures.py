"""The newest figure of each question in docs/measurements.

docs/measurements/figures.json has the figures.
`python -m benchmarks.results` writes docs/measurements/index.md from it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxspec.host.files import read_json

MADE = "<!-- Made by `python -m benchmarks.results` from docs/measurements/figures.json; do not edit. -->"
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
    """Returns the index: a table with a row for each figure, and the pages without a figure."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Sequence[Figure]) -> Iterator[str]:
    yield from (
        "# Measurements",
        "",
        MADE,
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
