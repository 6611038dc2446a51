"""What a paper's measurement comes to: tables with the paper's figure and ours in every cell, and its claims judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

FORMAT = "jaxspec.paper/1"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure.

    Attributes:
      paper: as the paper prints it; None where it has none.
      ours: measured here; None where it was not, or is not defined.
      interval: of ours, 95 %; None where there is none, as of a single prompt.
    """

    paper: float | None = None
    ours: float | None = None
    interval: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      name: what was measured.
      cells: by column; a column that is not named is empty.
    """

    name: str
    cells: Mapping[str, Cell]


@dataclasses.dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
      title: with the paper's number and what the figures are, such as "Table 3: …, × plain decoding".
      columns: their headings.
      rows: see `Row`.
      notes: what must be read beside the figures, a sentence each: which model the paper measured, which baseline
        does not apply.
      digits: of our figures, after the point.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    digits: int = 2

    def cell(self, row: str, column: str) -> Cell:
        """The cell of a row and column; an empty one where there is none.

        Examples:
          >>> Table("t", ("a",), (Row("x", {"a": Cell(ours=1.5)}),)).cell("x", "a").ours
          1.5
        """
        found = (one.cells.get(column) for one in self.rows if one.name == row)
        return next(found, None) or Cell()


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence of the paper, judged.

    Attributes:
      says: what the paper says.
      holds: whether it does here; None where that cannot be told.
      because: the figures that decide, or why they do not.
    """

    says: str
    holds: bool | None
    because: str


@dataclasses.dataclass(frozen=True)
class Report:
    """All tables of a paper on one model.

    Attributes:
      paper: title and identification.
      model, device, dtype: what was measured, on what.
      fitness: names of the checks that the model fails, by the fitness report beside it; None where there is no
        report, so that nothing is known of its depth.
      prompts: how many of the tuning and reporting prompts there were, the most of any table.
      amount: `max_new_tokens`, `repeats` and `seed` of the measurement.
      tables, claims: see there.
      format: of the JSON that `dataclasses.asdict` gives.
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
    format: str = FORMAT


def more_than(says: str, what: str, ratio: Cell, bound: float = 1.0) -> Claim:
    """Judges a claim by a ratio with its interval: it holds above the bound, and not below; on both sides nobody knows.

    Args:
      says: the claim.
      what: the ratio in words, such as "asd ÷ draft-verify".
      ratio: measured.
      bound: what it should exceed.

    Examples:
      >>> more_than("A is faster.", "A ÷ plain", Cell(ours=1.2, interval=(1.1, 1.3))).holds
      True
      >>> more_than("A is faster.", "A ÷ plain", Cell(ours=1.0, interval=(0.9, 1.1))).because
      'A ÷ plain is 1.00 (0.90–1.10), and its interval holds 1.00'
    """
    if ratio.ours is None:
        return Claim(says, None, f"{what} was not measured")
    found = f"{what} is {shown(ratio)}"
    if ratio.interval is None:
        return Claim(says, None, f"{found}, of one prompt, which has no interval")
    low, high = ratio.interval
    if low <= bound <= high:
        return Claim(says, None, f"{found}, and its interval holds {bound:.2f}")
    return Claim(says, low > bound, f"{found}, {'above' if low > bound else 'below'} {bound:.2f}")


def all_hold(says: str, parts: Sequence[Claim]) -> Claim:
    """A claim that holds if all its parts do, and does not if one does not.

    Examples:
      >>> all_hold("Both.", [Claim("a", True, "1 > 0"), Claim("b", None, "nobody knows")])
      Claim(says='Both.', holds=None, because='1 > 0; nobody knows')
    """
    found = [part.holds for part in parts]
    holds = False if False in found else None if None in found else True
    return Claim(says, holds, "; ".join(part.because for part in parts))


def shown(cell: Cell, digits: int = 2) -> str:
    """Our figure with its interval, in words.

    Examples:
      >>> shown(Cell(1.55, 1.21, (1.1, 1.33))), shown(Cell())
      ('1.21 (1.10–1.33)', '–')
    """
    if cell.ours is None:
        return "–"
    interval = "" if cell.interval is None else " ({}–{})".format(*(number(n, digits) for n in cell.interval))
    return number(cell.ours, digits) + interval


def number(value: float, digits: int) -> str:
    """A figure with so many digits after the point; without, where it is a count, or from a thousand on.

    Examples:
      >>> number(1.443, 2), number(39600.0, 2), number(80, 2)
      ('1.44', '39,600', '80')
    """
    whole = isinstance(value, int) or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.{digits}f}"
