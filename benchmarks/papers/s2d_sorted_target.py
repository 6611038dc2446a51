"""Compares a sorted draft with a sorted target: speed and accuracy (Table 1 of the S2D paper)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.papers import accuracy
from benchmarks.papers.accuracy import Accuracies
from benchmarks.papers.baselines import ORACLE
from benchmarks.papers.counted import Counted
from benchmarks.papers.s2d_printed import TABLE_1
from benchmarks.papers.s2d_runs import SORTED as S2D
from benchmarks.papers.s2d_runs import UNTRAINED, Draft, Served
from benchmarks.papers.tables import Cell, Claim, Row, Table, more_than
from benchmarks.papers.workbench import Workbench
from jaxspec.measuring.bench.speed import spread

TIMES = "× plain"
# The column of the counts at the costs of the paper's Table 1: Llama-2-13B has the shape of this target of Table 2.
PRINTED_FOR = "Vicuna-13B"
FASTER = "A sorted draft speeds its target up more than a sorted target itself (1.53 against 1.21)."
LESS_ACCURATE = "A target is less accurate once it is sorted (49.0 % against 33.5)."
# Indices of the plain target and of the sorted one in the accuracies.
PLAIN, SORTED = 0, 1
LACKING = Claim(
    "A sorted draft is better than a sorted target: faster (1.53 against 1.21), and as accurate as the target was "
    "(49.0 % against 33.5).",
    None,
    "no sorted target was given, so Table 1 is left out; give `sorted_target`, made from the target by `python -m "
    "training.soft` with its last layer among the exits, such as --exits 3 6 9 12",
)


def table(served: Served, alone: Served) -> tuple[Table, Accuracies]:
    """Compares a sorted draft on a plain target with a sorted target that drafts for itself, greedily.

    Args:
      served: the plain target, with its sorted draft.
      alone: the sorted target.
    """
    right = accuracy.accuracies([(one.bench, one.runs[0.0]) for one in (served, alone)])

    def row(name: str, of: Served, run: str | None, printed: str = "") -> Row:
        speed, share = TABLE_1.get(printed, (None, None))
        times = Cell(speed, 1.0) if run is None else of.runs[0.0].ratio(run, paper=speed)
        return Row(name, {TIMES: times, accuracy.COLUMN: right.cell(SORTED if of is alone else PLAIN, share)})

    def drafts(of: Served, whose: str) -> Iterator[tuple[str, Draft]]:
        yield f"{whose}, best single exit ({of.single.run})", of.single
        yield f"{whose}, S2D{f', {of.mine.length}' if of.mine.length else ''}", of.mine

    untrained = served.draft(UNTRAINED)
    rows = [row("plain", served, None, "plain")]
    if served.cut.name is not None:
        times = served.runs[0.0].ratio(served.cut.name)
        rows.append(Row(served.cut.name, {TIMES: times}))
    if untrained is not None:
        rows.append(row(untrained.run, served, untrained.run))
    for of, whose in ((served, "sorted draft"), (alone, "sorted target")):
        for name, draft in drafts(of, whose):
            rows.append(row(name, of, draft.run, whose if draft is of.mine else ""))
        rows.append(row(f"{whose}, {ORACLE}", of, ORACLE))
    notes = (
        f"The paper used Llama-2-13B on GSM8K. Sorted target: {alone.target}, over its own plain decoding; its "
        "single exits share their layers with verification.",
        f"{ORACLE}: the best single exit with a rule that reads the text.",
        served.cut.note,
        right.note,
    )
    return Table(
        "Table 1: a sorted draft, or a sorted target", (TIMES, accuracy.COLUMN), tuple(rows), notes
    ), right


def claims(served: Served, alone: Served, right: Accuracies) -> tuple[Claim, ...]:
    """Judges whether a sorted target is slower, and less accurate."""
    draft, target = (one.runs[0.0].drawn(one.mine.run) for one in (served, alone))
    figure, interval = spread(draft / target)
    one_prompt = len(served.runs[0.0].taken(served.mine.run)) < 2
    ratio = Cell(None, figure, None if one_prompt else interval)
    return (
        more_than(FASTER, "sorted draft ÷ sorted target", ratio),
        _less_accurate(right, (served.target, alone.target)),
    )


def _less_accurate(right: Accuracies, names: tuple[str, str]) -> Claim:
    """Returns the claim that a sorted target is less accurate, with the paper's difference in percentage points."""
    claim = right.more(LESS_ACCURATE, (PLAIN, SORTED), names)
    if claim.figure is None:
        return claim
    printed = TABLE_1["plain"][1] - TABLE_1["sorted target"][1]
    return dataclasses.replace(claim, figure=dataclasses.replace(claim.figure, paper=printed))


def from_counts(
    served: tuple[Workbench, Counted], alone: tuple[Workbench, Counted], single: str
) -> tuple[Table, tuple[Claim, ...]]:
    """Returns Table 1 from exact counts of greedy texts, and its claims at each cost.

    Args:
      served: the plain target, and the counts of its sorted draft.
      alone: the sorted target, and its own counts.
      single: the row of the best single exit in both.
    """
    names = served[0].lm.name, alone[0].lm.name
    right = accuracy.of_reports([bench for bench, _ in (served, alone)])
    known = {column.heading for column in served[1].columns}
    common = [column.heading for column in alone[1].columns if column.heading in known]
    rows, drawn = [Row("plain", {accuracy.COLUMN: right.cell(PLAIN, TABLE_1["plain"][1])})], []
    for model, (whose, (_, counts)) in enumerate({"sorted draft": served, "sorted target": alone}.items()):
        columns = [column for column in counts.columns if column.heading in common]
        best = S2D if S2D in counts.chosen else single  # of one exit
        drawn.append([counts.drawn(best, column) for column in columns])
        for row in dict.fromkeys((single, best)):
            speed, share = TABLE_1[whose] if row == best else (None, None)
            cells = {
                column.heading: counts.over(
                    row, None, column, speed if column.heading == PRINTED_FOR else None
                )
                for column in columns
            }
            rows.append(Row(f"{whose}, {row}", {**cells, accuracy.COLUMN: right.cell(model, share)}))
    printed = TABLE_1["sorted draft"][0] / TABLE_1["sorted target"][0]
    claims = []
    for heading, mine, its in zip(common, *drawn, strict=True):
        ratio = served[1].cell(mine / its, printed if heading == PRINTED_FOR else None)
        claim = more_than(FASTER, "sorted draft ÷ sorted target", ratio)
        claims.append(dataclasses.replace(claim, costs=heading))
    notes = (
        f"The paper used Llama-2-13B on GSM8K. Sorted target: {names[1]}, over its own plain decoding; at the paper's "
        "costs, an exit costs its share of the layers.",
        *(f"Sorted target, {note}" for note in alone[1].settings(dict.fromkeys((single, best)))),
        right.note,
    )
    title = "Table 1 from counts: a sorted draft, or a sorted target, × plain"
    table = Table(title, (*common, accuracy.COLUMN), tuple(rows), notes)
    return table, (*claims, _less_accurate(right, names))
