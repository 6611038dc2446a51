"""The results of a paper's measurement: tables with the paper's figure and ours in every cell, and judged claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "jaxspec.paper/1"
# The costs of counts at which a pass costs the bytes of the weights that it reads, for any number of rows.
FREE = "free rows"
# By row and setting: the tokens, rounds and draft passes of each text.
Counts = Mapping[str, Sequence[Sequence[Any]]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure.

    Attributes:
      paper: the figure printed in the paper; None if it has none.
      ours: the measured figure; None if it was not measured, or is not defined.
      interval: 95 % interval of ours; None if there is none, as for a single prompt.
    """

    paper: float | None = None
    ours: float | None = None
    interval: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
      name: name of the measurement.
      cells: by column; a column without an entry is empty.
    """

    name: str
    cells: Mapping[str, Cell]


@dataclasses.dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
      title: title with the paper's number and the unit of the figures, such as "Table 3: …, × plain decoding".
      columns: headings.
      rows: see `Row`.
      notes: sentences needed to read the figures: the paper's model, baselines that do not apply.
      digits: decimal places of our figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    digits: int = 2

    def cell(self, row: str, column: str) -> Cell:
        """Returns the cell of a row and column; an empty one if there is none.

        Examples:
          >>> Table("t", ("a",), (Row("x", {"a": Cell(ours=1.5)}),)).cell("x", "a").ours
          1.5
        """
        found = (one.cells.get(column) for one in self.rows if one.name == row)
        return next(found, None) or Cell()


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of the paper, judged.

    Attributes:
      says: the claim.
      holds: whether it holds here; None if that cannot be decided.
      because: the figures that decide, or the reason that they do not.
      costs: heading of the costs at which it was judged, see `counted.Column`; "" for measured times.
      figure: the figure that decides, with the paper's; None if there are several or none.
      alike: the geometric mean of this figure over the kinds of work, which then weigh alike; None if it has none.
    """

    says: str
    holds: bool | None
    because: str
    costs: str = ""
    figure: Cell | None = None
    alike: Cell | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """All tables of a paper on one model.

    Attributes:
      paper: title and identification.
      model, device, dtype: the measured model, its device and dtype.
      fitness: names of the checks that the model fails, from the fitness report beside it; None without a report.
      prompts: numbers of tuning and reporting prompts, the largest of any table.
      amount: `max_new_tokens`, `repeats` and `seed` of the measurement.
      tables, claims: see `Table` and `Claim`.
      runs: the user's methods beside the paper's own, as words.
      sorted_target: name of the sorted target; None without one.
      counts: of the first table of counts, see `counted.Counted.raw`; empty for times.
      more: further words of the command.
      format: format of the JSON of `dataclasses.asdict`.
    """

    paper: str
    model: str
    device: str
    dtype: str
    fitness: tuple[str, ...] | None
    prompts: Mapping[str, int]
    amount: Mapping[str, int]
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    runs: tuple[str, ...] = ()
    sorted_target: str | None = None
    counts: Counts = dataclasses.field(default_factory=dict)
    more: tuple[str, ...] = ()
    format: str = FORMAT


def more_than(says: str, what: str, ratio: Cell, bound: float = 1.0) -> Claim:
    """Judges a claim by the interval of a ratio: true above the bound, false below it, undecided across it.

    Args:
      says: the claim.
      what: the ratio in words, such as "asd ÷ draft-verify".
      ratio: the measured ratio.
      bound: the value that it should exceed.

    Examples:
      >>> more_than("A is faster.", "A ÷ plain", Cell(ours=1.2, interval=(1.1, 1.3))).holds
      True
      >>> more_than("A is faster.", "A ÷ plain", Cell(ours=1.0, interval=(0.9, 1.1))).because
      'A ÷ plain is 1.00 (0.90–1.10), and its interval contains 1.00'
    """
    if ratio.ours is None:
        return Claim(says, None, f"{what} was not measured")
    found = f"{what} is {shown(ratio)}"
    holds: bool | None = None
    rest = "of one prompt, which has no interval"
    if ratio.interval is not None:
        low, high = ratio.interval
        holds = None if low <= bound <= high else low > bound
        rest = {
            None: f"and its interval contains {bound:.2f}",
            True: f"above {bound:.2f}",
            False: f"below {bound:.2f}",
        }[holds]
    return Claim(says, holds, f"{found}, {rest}", figure=ratio)


def all_hold(says: str, parts: Sequence[Claim]) -> Claim:
    """Joins claims: true if all are, false if one is.

    Examples:
      >>> all_hold("Both.", [Claim("a", True, "1 > 0"), Claim("b", None, "unknown")]).because
      '1 > 0; unknown'
    """
    found = [part.holds for part in parts]
    holds = False if False in found else None if None in found else True
    return Claim(says, holds, "; ".join(part.because for part in parts))


def shown(cell: Cell, digits: int = 2) -> str:
    """Formats our figure with its interval.

    Examples:
      >>> shown(Cell(1.55, 1.21, (1.1, 1.33))), shown(Cell(ours=-0.2, interval=(-0.3, 0.1))), shown(Cell())
      ('1.21 (1.10–1.33)', '-0.20 (-0.30 to 0.10)', '–')
    """
    if cell.ours is None:
        return "–"
    interval = ""
    if cell.interval is not None:
        low, high = (number(n, digits) for n in cell.interval)
        interval = f" ({low} to {high})" if low.startswith("-") else f" ({low}–{high})"
    return number(cell.ours, digits) + interval


def number(value: float, digits: int) -> str:
    """Formats a figure with this number of decimal places; without any if it is an integer, or at least 1000.

    Examples:
      >>> number(1.443, 2), number(39600.0, 2), number(80, 2)
      ('1.44', '39,600', '80')
    """
    whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.{digits}f}"
