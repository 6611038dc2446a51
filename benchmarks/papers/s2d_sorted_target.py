"""Compares a sorted draft with a sorted target: speed and accuracy (Table 1 of the S2D paper)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import accuracy
from benchmarks.papers.accuracy import Accuracies
from benchmarks.papers.baselines import ORACLE
from benchmarks.papers.s2d_printed import TABLE_1
from benchmarks.papers.s2d_runs import UNTRAINED, Draft, Served
from benchmarks.papers.tables import Cell, Claim, Row, Table, more_than
from jaxspec.bench.speed import spread

TIMES = "× plain"
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
        more_than(
            "A sorted draft speeds its target up more than a sorted target itself (1.53 against 1.21).",
            "sorted draft ÷ sorted target",
            ratio,
        ),
        right.more(
            "A target is less accurate once it is sorted (49.0 % against 33.5).",
            (PLAIN, SORTED),
            (served.target, alone.target),
        ),
    )
