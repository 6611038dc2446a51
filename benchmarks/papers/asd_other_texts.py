"""ASD on sampled texts and on code, and after a search on another kind of work (Tables 3 and 4, Section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.papers.asd_runs import (
    ADAPTS,
    AS_PRINTED,
    CALIBRATED,
    ELSEWHERE,
    LOSES,
    SEARCHED,
    SHIFTED,
    THERE,
    TUNED,
)
from benchmarks.papers.counted import Case, Column, Counted
from benchmarks.papers.engine_counts import Counter, Counting
from benchmarks.papers.tables import Claim, Table
from benchmarks.papers.workbench import Workbench

# The paper's numbers for code; those for other texts are the default.
OF_CODE = Case(AS_PRINTED, "m 4, n 3")
# The heading of the paper's costs.
PAPER = "Llama-2-13B"
PARTS = "attention, MLP, head"
WARM, WARM_CODE = 0.2, 0.6
_WARM = {SEARCHED: 1.479, AS_PRINTED: 1.422}
_CODE = {0.0: {SEARCHED: 1.282, AS_PRINTED: 1.365}, WARM_CODE: {SEARCHED: 1.282, AS_PRINTED: 1.340}}
# Counts a case at a temperature.
Count = Callable[[Case, float], Counting]


def tables(
    bench: Workbench,
    columns: Sequence[Column],
    chosen: Mapping[str, Mapping[str, Case]],
    again: Mapping[Case, Sequence[Case]],
    count: Count,
) -> tuple[list[Table], list[Claim]]:
    """Returns the tables of those texts, and the paper's claims at each cost.

    Args:
      bench: the workbench.
      columns: the costs.
      chosen: by row and heading, the case that is fastest on greedy tuning texts; without the searches on one kind of
        work, texts of code are left out.
      again: by case, the same after other searches.
      count: counts a case at a temperature.
    """

    def on(rows: Sequence[str], temperature: float, types: Sequence[str] | None = None) -> Counted:
        own = {row: chosen[row] for row in rows}
        if types is not None:
            own[AS_PRINTED] = dict.fromkeys(own[AS_PRINTED], OF_CODE)
        found = {case for by_heading in own.values() for case in by_heading.values()}
        cases = sorted(found.union(*(again.get(case, ()) for case in found)))
        seed = f"-seed-{bench.options.seed}" if temperature else ""
        name = "-".join(["counts", f"T-{temperature:g}{seed}", *(types or ())])
        counter = Counter(bench, "reporting", PARTS, name, types)
        counts = counter.count({case: count(case, temperature) for case in cases})
        return Counted(tuple(columns), own, counts, bench.kinds("reporting", types), again)

    def paper(rows: Mapping[str, float]) -> dict[str, dict[str, float]]:
        return {row: {PAPER: figure} for row, figure in rows.items()}

    runs = [run for run in (AS_PRINTED, TUNED) if run in chosen]
    warm = on((SEARCHED, *runs), WARM)
    sampled = (
        "The numbers that are fastest on greedy tuning texts. One seed: every row writes another text, and the "
        "intervals contain that.",
    )
    made = [warm.table(f"Table 3, T = {WARM:g}, from counts: × plain", paper(_WARM), notes=sampled)]
    claims: list[Claim] = []
    for run in runs:
        printed = {PAPER: _WARM[run] / _WARM[SEARCHED]} if run in _WARM else {}
        says = f"At T = {WARM:g}, {run}, is as fast as {SEARCHED} within 5 %, without its search."
        claims += warm.claims(says, run, SEARCHED, 0.95, printed)
    if ELSEWHERE not in chosen:
        return made, claims
    code = (CALIBRATED,)
    for temperature, printed in _CODE.items():
        found = on((SEARCHED, *runs), temperature, code)
        used = (
            f"The paper used CodeLlama-13B on HumanEval, with {OF_CODE.setting}, which its numbers are here, too. The "
            f"texts are {len(found.kinds)}.",
        )
        made.append(
            found.table(
                f"Table 4, code, T = {temperature:g}, from counts: × plain",
                paper(printed),
                notes=() if temperature else used,
            )
        )
    shift = on((THERE, ELSEWHERE, *runs), 0.0, code)
    made.append(
        shift.table(
            "Section 4.1, code, greedy, from counts: × plain",
            paper({ELSEWHERE: _CODE[0.0][SEARCHED], AS_PRINTED: _CODE[0.0][AS_PRINTED]}),
            notes=(
                f"The searches read prompts of one kind, {CALIBRATED} or {SHIFTED}, a larger step than the paper's: "
                "Python files and HumanEval.",
            ),
        )
    )
    claims += shift.claims(LOSES, THERE, ELSEWHERE)
    for run in runs:
        printed = {PAPER: _CODE[0.0][run] / _CODE[0.0][SEARCHED]} if run in _CODE[0.0] else {}
        claims += shift.claims(ADAPTS.format(run=run), run, ELSEWHERE, paper=printed)
    return made, claims
