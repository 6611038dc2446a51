"""One sorted draft on several targets, and its average speed-up (the S2D paper's Table 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.papers.s2d_printed import AVERAGE
from benchmarks.papers.s2d_runs import SFT, TEMPERATURES, UNTRAINED, Draft, Served
from benchmarks.papers.tables import Cell, Claim, Row, Table, all_hold, more_than
from jaxspec.measuring.bench.speed import spread

# The average over all temperatures, as in the paper.
BOTH = "both"
COLUMNS = {**{f"T = {at:g}": (at,) for at in TEMPERATURES}, BOTH: TEMPERATURES}


def table(served: Sequence[Served]) -> Table:
    """Returns the average speed-up of each draft that all targets have, at each temperature and over all."""
    rows = [Row("plain", {column: Cell(1.0, 1.0) for column in COLUMNS})]
    roles = {draft.name: draft.role for draft in served[0].drafts}
    for name in _common(served):
        paper = AVERAGE.get(roles.get(name) or "")
        cells = {
            column: _cell(served, drawn(served, name, over), paper if column == BOTH else None)
            for column, over in COLUMNS.items()
            if all(one.named[name] in one.runs[at].suite.runs for one in served for at in over)
        }
        rows.append(Row(name, cells))
    targets = ", ".join(one.target for one in served)
    return Table(
        f"Table 2: one sorted draft on {len(served)} targets, average × plain",
        tuple(COLUMNS),
        tuple(rows),
        (
            f"Targets: {targets}. The paper's average is of three, at both temperatures.",
            "Draft lengths, and thresholds of S2D, are the fastest on a target's tuning prompts. Drafts that a target "
            "lacks are left out. The interval is for other prompts, not for other targets.",
        ),
    )


def claims(served: Sequence[Served]) -> tuple[Claim, ...]:
    """Judges whether S2D is faster on average than every exit of its draft alone, and than a draft without sorting."""
    common = _common(served)
    first = served[0]
    single = [draft for draft in first.drafts if draft.exit_layer]
    untrained = [draft for draft in first.drafts if draft.role == UNTRAINED and draft.name in common]
    twin = first.draft(SFT)

    def than(draft: Draft) -> Claim:
        mine, its = (drawn(served, one.name, TEMPERATURES) for one in (first.mine, draft))
        return more_than("", f"S2D ÷ {draft.name}", _cell(served, mine / its))

    says = "On average over targets S2D is faster than a draft of the same layers without sorting (1.55 against 1.42)."
    found = [
        all_hold(
            "On average over targets S2D is faster than every exit of its draft alone (1.55 against 1.51 at most).",
            [than(draft) for draft in single],
        ),
        Claim(says, None, "no such draft was given; name it first in `runs`")
        if twin is None
        else all_hold(says, [than(twin)]),
    ]
    if untrained:
        found.append(
            all_hold(
                "On average over targets S2D is faster than their own first layers, untrained.",
                [than(draft) for draft in untrained],
            )
        )
    return tuple(found)


def drawn(served: Sequence[Served], name: str, temperatures: Sequence[float]) -> np.ndarray:
    """Returns the mean over targets and temperatures of a draft's speed-up over plain decoding, float64[1 + draws]."""
    ratios = [one.runs[at].drawn(one.named[name]) for one in served for at in temperatures]
    mean: np.ndarray = np.mean(ratios, axis=0)
    return mean


def _common(served: Sequence[Served]) -> list[str]:
    """Returns the drafts that all targets have, in the order of the first target."""
    return [name for name in served[0].named if all(name in one.named for one in served)]


def _cell(served: Sequence[Served], ratios: np.ndarray, paper: float | None = None) -> Cell:
    ours, interval = spread(ratios)
    alone = any(len(one.runs[at].taken(one.mine.run)) < 2 for one in served for at in TEMPERATURES)
    return Cell(paper, ours, None if alone else interval)
