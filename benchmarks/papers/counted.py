"""Speed-ups from exact counts: rounds and draft passes of greedy texts, at given costs of a pass.

Greedy texts and counts do not depend on the machine, so a table of counts can be checked anywhere. A round costs one
step of plain decoding, and a draft pass the sum of its parts. So rows are free, and loops, launches and attention over
the cache cost nothing. On a CPU, where each row costs time, speeds are lower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.papers.tables import Cell, Claim, Counts, Row, Table, more_than
from jaxspec.measuring.bench.speed import spread, weights

# The row in which all kinds of work weigh alike.
MEAN = "geometric mean over types"


class Case(NamedTuple):
    """A row of a table with one of its settings.

    Attributes:
      row: name of the row.
      setting: the numbers that are chosen on tuning prompts.
    """

    row: str
    setting: str


class Work(NamedTuple):
    """The counts of N texts.

    Attributes:
      tokens: int[N], tokens after the first.
      rounds: int[N], passes of the target after the prefill.
      passes: float[N, M], draft passes by part: M parts of a draft that have a price each.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    passes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Column:
    """The costs of a column.

    Attributes:
      heading: heading of the column.
      prices: float[M], price of one pass of each part, in steps of plain decoding.
    """

    heading: str
    prices: Sequence[float]

    def speed(self, work: Work) -> float:
        """Returns the speed-up over plain decoding."""
        cost = work.rounds.sum() + work.passes.sum(axis=0) @ np.asarray(self.prices, np.float64)
        return float(work.tokens.sum() / cost)

    def drawn(self, work: Work, weighted: np.ndarray) -> np.ndarray:
        """Returns the speed-up over plain decoding, and on each draw of the bootstrap, float64[1 + draws].

        Args:
          work: the counts.
          weighted: float64[1 + draws, N], the weight of each text, see `speed.weights`.

        Examples:
          >>> work = Work(np.array([9, 9]), np.array([3, 3]), np.array([[6.0], [6.0]]))
          >>> float(Column("half", [0.5]).drawn(work, np.ones((1, 2)))[0])
          1.5
        """
        cost = work.rounds + work.passes @ np.asarray(self.prices, np.float64)
        ratios: np.ndarray = (weighted @ work.tokens) / (weighted @ cost)
        return ratios


@dataclasses.dataclass(frozen=True)
class Counted:
    """Cases chosen on tuning texts for each column, with their counts on reporting texts.

    Attributes:
      columns: the costs.
      chosen: by row and heading, the case that is fastest on tuning texts at these costs.
      reporting: the counts of all chosen cases.
      kinds: task types of the reporting texts.
      again: by case, the same after searches with other seeds, which are random as the texts are.
    """

    columns: tuple[Column, ...]
    chosen: Mapping[str, Mapping[str, Case]]
    reporting: Mapping[Case, Work]
    kinds: Sequence[str]
    again: Mapping[Case, Sequence[Case]] = dataclasses.field(default_factory=dict)

    def drawn(self, row: str, column: Column, kind: str | None = None) -> np.ndarray:
        """Returns the speed-up of a row, see `Column.drawn`, on the texts of one kind or of all.

        With several searches it is their mean, and each draw has one of them.
        """
        weighted = weights(self.kinds) * [kind in (None, one) for one in self.kinds]
        case = self.chosen[row][column.heading]
        searches = [self.reporting[one] for one in (case, *self.again.get(case, ()))]
        found = np.stack([column.drawn(one, weighted) for one in searches])
        which = np.random.default_rng([*row.encode()]).integers(len(found), size=(1, found.shape[1]))
        drawn: np.ndarray = np.take_along_axis(found, which, axis=0)[0]
        drawn[0] = found[:, 0].mean()
        return drawn

    def cell(self, drawn: np.ndarray, paper: float | None = None, *, alone: bool = False) -> Cell:
        """Returns a figure and its draws as a cell; that of one text `alone` has no interval."""
        ours, interval = spread(drawn)
        return Cell(paper, ours, None if alone or len(self.kinds) == 1 else interval)

    def over(self, row: str, other: str | None, column: Column, paper: float | None = None) -> Cell:
        """Returns the speed-up of a row over another, or over plain decoding."""
        mine = self.drawn(row, column)
        return self.cell(mine if other is None else mine / self.drawn(other, column), paper)

    def of_kinds(self, row: str, other: str | None, column: Column) -> dict[str, np.ndarray]:
        """Returns the same for each kind of work, with its draws, and the geometric mean over the kinds."""
        found = {
            kind: self.drawn(row, column, kind) / (1.0 if other is None else self.drawn(other, column, kind))
            for kind in dict.fromkeys(self.kinds)
        }
        return found | {MEAN: np.exp(np.mean(np.log([*found.values()]), axis=0))}

    def raw(self) -> Counts:
        """Returns the counts of the chosen cases as JSON."""
        cases = sorted({case for by_heading in self.chosen.values() for case in by_heading.values()})
        named = {id(self.reporting[case]): case for case in cases}  # some have two rows
        return {
            ", ".join(filter(None, case)): [
                (part if (part % 1).any() else part.astype(int)).tolist() for part in self.reporting[case]
            ]
            for case in named.values()
        }

    def table(
        self,
        title: str,
        paper: Mapping[str, Mapping[str, float] | float],
        other: str | None = None,
        rows: Iterable[str] = (),
        notes: Sequence[str] = (),
    ) -> Table:
        """Returns a table of speed-ups.

        Args:
          title: see `Table`.
          paper: the paper's figures by row, and by heading if the paper has several.
          other: the row that the speed-ups are relative to; None for plain decoding.
          rows: the rows. Default: all.
          notes: see `Table`.
        """
        made = []
        for row in rows or self.chosen:
            given = paper.get(row)
            figures: Mapping[str, float] = given if isinstance(given, Mapping) else {}
            usual = None if isinstance(given, Mapping) else given
            cells = {
                column.heading: self.over(row, other, column, figures.get(column.heading, usual))
                for column in self.columns
            }
            made.append(Row(row, cells))
        return Table(title, tuple(column.heading for column in self.columns), tuple(made), tuple(notes))

    def by_kind(self, title: str, row: str, other: str) -> Table:
        """Returns a table of the speed-up of a row over another, by task type, and the geometric mean over the types.

        In the speed-up of all texts together, a type weighs as much as it has tokens; in this mean all types are equal.
        """
        ratios = {column.heading: self.of_kinds(row, other, column) for column in self.columns}
        rows = [
            Row(
                kind,
                {name: self.cell(of[kind], alone=self.kinds.count(kind) == 1) for name, of in ratios.items()},
            )
            for kind in (*dict.fromkeys(self.kinds), MEAN)
        ]
        return Table(f"{title}: {row} ÷ {other}", tuple(ratios), tuple(rows))

    def settings(self, rows: Iterable[str] = ()) -> tuple[str, ...]:
        """Returns a note for each row, by default all, with its settings."""
        found = []
        for row in rows or self.chosen:
            same: dict[str, list[str]] = {}
            for heading, case in self.chosen[row].items():
                same.setdefault(case.setting, []).append(heading)
            words = "; ".join(
                setting if len(same) == 1 else f"{setting} ({', '.join(headings)})"
                for setting, headings in same.items()
            )
            if words:
                found.append(f"{row}: {words}.")
        return tuple(found)

    def claims(
        self,
        says: str,
        row: str,
        other: str | None,
        bound: float = 1.0,
        paper: Mapping[str, float] | None = None,
    ) -> list[Claim]:
        """Judges at the costs of each column whether a row is faster than another, or than plain decoding.

        Args:
          says: the claim.
          row, other, bound: the row, divided by the other row (None for plain decoding), should exceed the bound.
          paper: the paper's ratio by heading.
        """
        what = f"{row} ÷ {'plain' if other is None else other}"
        found = []
        for column in self.columns:
            ratio = self.over(row, other, column, (paper or {}).get(column.heading))
            alike = self.cell(self.of_kinds(row, other, column)[MEAN]) if len({*self.kinds}) > 1 else None
            claim = more_than(says, what, ratio, bound)
            found.append(dataclasses.replace(claim, costs=column.heading, alike=alike))
        return found


def choose(tuning: Mapping[Case, Work], columns: Sequence[Column]) -> dict[str, dict[str, Case]]:
    """Returns the fastest case of each row on tuning texts, for the costs of each column.

    Examples:
      >>> slow, fast = (Work(np.array([9]), np.array([n]), np.zeros((1, 1))) for n in (9, 3))
      >>> choose({Case("x", "K 1"): slow, Case("x", "K 2"): fast}, [Column("free", [0.1])])["x"]["free"].setting
      'K 2'
    """
    rows: dict[str, list[Case]] = {}
    for case in tuning:
        rows.setdefault(case.row, []).append(case)

    return {
        row: {column.heading: max(cases, key=lambda case: column.speed(tuning[case])) for column in columns}
        for row, cases in rows.items()
    }
