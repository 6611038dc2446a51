"""Draft on the Fly: Adaptive Self-Speculative Decoding using Cosine Similarity (Metel et al. 2024).

Compares ASD with Draft & Verify, which needs a search for its mask. γ is carried from text to text, as in the
evaluation of Draft & Verify, whose experiments the paper repeats. Differences from the paper: 40 short prompts instead
of 1,000 long ones, a search by agreement with the model's own text (Xia et al. 2024) instead of speed, and few trials.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.papers import asd_cosines, asd_counts, asd_runs, baselines
from benchmarks.papers.asd_runs import (
    ADAPTS,
    AS_PRINTED,
    CALIBRATED,
    ELSEWHERE,
    LOSES,
    OF_TUNED,
    SEARCHED,
    SHIFTED,
    THERE,
    TUNED,
    Found,
)
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.tables import Cell, Claim, Report, Row, Table, all_hold, more_than
from benchmarks.papers.workbench import Column, Measured, Workbench, speeds
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.extras import require
from jaxspec.host.progress import OnProgress
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.tuning.inspection import SUBLAYERS

PAPER = "Draft on the Fly: Adaptive Self-Speculative Decoding using Cosine Similarity (Metel et al. 2024)"
# Paper: Llama-2-13B on CNN/DM, by temperature; CodeLlama-13B on HumanEval.
TABLE_3 = {SEARCHED: {"T = 0": 1.495, "T = 0.2": 1.479}, AS_PRINTED: {"T = 0": 1.443, "T = 0.2": 1.422}}
TABLE_4 = {SEARCHED: {"T = 0": 1.282, "T = 0.6": 1.282}, AS_PRINTED: {"T = 0": 1.365, "T = 0.6": 1.340}}
TABLE_5 = {"all rules": 1.443, "cosine and rule 2": 1.340, "cosine alone": 1.307, "rules 1 and 2": 1.179}
TABLE_1 = {**asd_cosines.PAPER, "time, ms": (1.339, 0.768)}
TIMES = ("time, ms",)
SEARCH_SECONDS = 11 * 3600.0


def measure(lm: LanguageModel, options: PaperOptions, on_progress: OnProgress = lambda what: None) -> Report:
    """Measures ASD against Draft & Verify, the ablation, the cosines, and the cost and transfer of a search.

    Raises:
      MissingExtra: Bayesian optimisation is not installed.
      ValueError: `prompt_file` or `untuned` is given without `counts`, or see `Workbench` and `Suite`.
    """
    require("search", "bayes_opt")
    for name in ("prompt_file", "untuned"):
        if getattr(options, name) and not options.counts:
            raise ValueError(
                f"{name} is given, and the times of paper asd compare tuned numbers on kinds of the project's own "
                f"prompts; give `counts` too, or leave {name} out"
            )
    with Workbench(lm, options, on_progress) as bench:
        if options.counts:
            return bench.report(PAPER, *asd_counts.tables(bench))
        cosines = asd_runs.cosines(bench)
        found = asd_runs.search_masks(bench)
        grid = asd_runs.tune_numbers(bench)
        tuned = ASDNumbers(**{name: grid["best"][name] for name in ("alpha", "every", "keep_last")})
        chosen = asd_runs.chosen(bench, tuned)
        compared = {AS_PRINTED: asd_runs.asd(lm, ASDNumbers()), TUNED: asd_runs.asd(lm, tuned)}
        runs = {SEARCHED: found[SEARCHED].method, **compared}
        greedy = asd_runs.against_plain(bench, 0.0, None, {**chosen, **runs}, tuned)
        warm = asd_runs.against_plain(bench, 0.2, None, {**chosen, **runs}, tuned)
        code = asd_runs.against_plain(bench, 0.6, (CALIBRATED,), {**chosen, **runs}, tuned)
        shift = bench.measure(
            "shift",
            "reporting",
            {run: found[run].method for run in (ELSEWHERE, THERE)} | compared,
            kinds=(CALIBRATED,),
            carry_gamma=True,
        )
        rules = asd_runs.rules_apart(bench, grid)
        numbers = f"{TUNED}: α {tuned.alpha:g}, m {tuned.every}, n {tuned.keep_last}."
        notes = (numbers, baselines.cut(bench).note, *greedy.different([*chosen, *runs]))
        tables = (
            _table_1(cosines),
            _table_3(greedy, warm, notes),
            _table_4(greedy, code),
            _table_5(rules, grid),
            _search_cost(greedy, found[SEARCHED], grid),
            _table_shift(shift),
        )
        return bench.report(PAPER, tables, _claims(greedy, shift, rules, cosines))


# Tables


def _table_1(cosines: dict[str, Any]) -> Table:
    ours = {
        row: [cosines["time_ms" if row in TIMES else "similarity"][name] for name in SUBLAYERS]
        for row in TABLE_1
    }
    return Table(
        "Table 1: cosine similarity of attention and MLP sublayers, and their time",
        SUBLAYERS,
        tuple(
            Row(
                row,
                {
                    name: Cell(paper, figure if row in TIMES else figure[row])
                    for name, paper, figure in zip(SUBLAYERS, TABLE_1[row], ours[row], strict=True)
                },
            )
            for row in TABLE_1
        ),
        ("The paper's figures are for Llama-2-13B on CNN/DM, ours for the tuning prompts.",),
        digits=3,
    )


def _table_3(greedy: Measured, warm: Measured, notes: Sequence[str]) -> Table:
    return speeds(
        "Table 3: Draft & Verify and ASD, × plain decoding",
        {"T = 0": Column(greedy), "T = 0.2": Column(warm)},
        TABLE_3,
        notes=(
            "The paper used Llama-2-13B on CNN/DM (XSum at T = 0: 1.415 and 1.383; the chat model 1.238 and "
            "1.247). Ours are for all kinds of work.",
            "γ is carried from text to text. The oracle stop is ASD's draft, tuned, with a rule that reads the text.",
            *notes,
        ),
    )


def _table_4(greedy: Measured, code: Measured) -> Table:
    return speeds(
        "Table 4: the same on code, × plain decoding",
        {"T = 0": Column(greedy, (CALIBRATED,)), "T = 0.6": Column(code)},
        TABLE_4,
        notes=(
            "The paper used CodeLlama-13B on HumanEval, with m 4 and n 3; here they are 3 and 2, as its general "
            "models have.",
        ),
    )


def _table_5(rules: Measured, grid: dict[str, Any]) -> Table:
    columns = ("the paper's numbers", "tuned")
    rows = []
    for name, paper in TABLE_5.items():
        cells = {columns[0]: rules.ratio(name, paper=paper)}
        if name + OF_TUNED in rules.suite.runs:
            cells[columns[1]] = rules.ratio(name + OF_TUNED)
        rows.append(Row(name, cells))
    base = next((row for row in grid["ablation"] if row["rules"] == "all rules"), None)
    tuned = "none found in which every rule counts"
    if base is not None:
        tuned = f"α {base['alpha']:g}, m {base['every']}, n {base['keep_last']}"
    return Table(
        "Table 5: which rules make the draft, × plain decoding, greedy",
        columns,
        (Row("plain", dict.fromkeys(columns, Cell(1.0, 1.0))), *rows),
        (
            f"The paper used Llama-2-13B on CNN/DM. Tuned: a fast setting in which the rules count ({tuned}).",
            "The baselines on the same prompts are in Table 3.",
            *rules.different([run for run in rules.suite.runs if run != BASELINE]),
        ),
    )


def _search_cost(greedy: Measured, found: Found, grid: dict[str, Any]) -> Table:
    columns = ("masks tried", "seconds", "× plain")
    rows = (
        Row(
            SEARCHED,
            {
                columns[0]: Cell(ours=found.trials),
                columns[1]: Cell(SEARCH_SECONDS, found.seconds),
                columns[2]: greedy.ratio(SEARCHED, paper=TABLE_3[SEARCHED]["T = 0"]),
            },
        ),
        Row(
            AS_PRINTED,
            {
                columns[0]: Cell(0, 0),
                columns[1]: Cell(0, 0),
                columns[2]: greedy.ratio(AS_PRINTED, paper=TABLE_3[AS_PRINTED]["T = 0"]),
            },
        ),
        Row(
            TUNED,
            {
                columns[0]: Cell(ours=grid["distinct"]),
                columns[1]: Cell(ours=grid["seconds"]),
                columns[2]: greedy.ratio(TUNED),
            },
        ),
    )
    return Table(
        "Section 4: what the draft costs before the first text",
        columns,
        rows,
        (
            f"The paper's search took 11 hours a model, on average of three; ours tries {asd_runs.TRIALS} masks by "
            f"Bayesian optimisation and {asd_runs.TRIALS} at random (fewer if there are fewer), by agreement "
            "with the model's own text. Its seconds exclude one-time work: compiling, writing that text, timing "
            "the parts of a round. Those of the grid are all.",
            f"ASD's numbers are from a grid of {grid['settings']} settings with {grid['distinct']} distinct masks; the "
            "paper does not give the cost of its own numbers.",
        ),
    )


def _table_shift(shift: Measured) -> Table:
    return speeds(
        f"Section 4.1: a search on another kind of work, × plain decoding on {CALIBRATED}, greedy",
        {CALIBRATED: Column(shift)},
        {ELSEWHERE: {CALIBRATED: 1.282}, AS_PRINTED: {CALIBRATED: 1.365}},
        notes=(
            "The paper used CodeLlama-13B on HumanEval, with Draft & Verify searched on Python of StarCoder, a "
            "smaller step than ours.",
            "The baselines on the same prompts are in Table 4.",
        ),
    )


# Claims


def _claims(greedy: Measured, shift: Measured, rules: Measured, cosines: dict[str, Any]) -> list[Claim]:
    return [
        *(
            more_than(
                f"{run}, is as fast as {SEARCHED} within 5 %, without its search.",
                f"ASD ÷ {SEARCHED}",
                greedy.ratio(run, SEARCHED),
                0.95,
            )
            for run in (AS_PRINTED, TUNED)
        ),
        *(
            more_than(f"{run}, is faster than plain decoding.", "ASD ÷ plain", greedy.ratio(run))
            for run in (AS_PRINTED, TUNED)
        ),
        more_than(
            LOSES,
            f"searched on {CALIBRATED} ÷ searched on {SHIFTED}, on {CALIBRATED}",
            shift.ratio(THERE, ELSEWHERE),
        ),
        *(
            more_than(
                ADAPTS.format(run=run),
                f"{run} ÷ searched on {SHIFTED}, on {CALIBRATED}",
                shift.ratio(run, ELSEWHERE),
            )
            for run in (AS_PRINTED, TUNED)
        ),
        _ordered("The paper's numbers", rules, ""),
        *([_ordered("Tuned numbers", rules, OF_TUNED)] if _all_rules(rules) else []),
        _attention_first(cosines),
    ]


def _all_rules(rules: Measured) -> bool:
    return all(name + OF_TUNED in rules.suite.runs for name in TABLE_5)


def _ordered(whose: str, rules: Measured, suffix: str) -> Claim:
    """Judges the order of Table 5, pair by pair."""
    names = list(TABLE_5)
    parts = [
        more_than("", f"{more} ÷ {less}", rules.ratio(more + suffix, less + suffix))
        for more, less in itertools.pairwise(names)
    ]
    return all_hold(f"{whose}: every rule adds speed, in the order {' > '.join(names)}.", parts)


def _attention_first(cosines: dict[str, Any]) -> Claim:
    """Judges the three observations of Section 3.1."""
    attention, mlp = (cosines["similarity"][name] for name in SUBLAYERS)
    times = [cosines["time_ms"][name] for name in SUBLAYERS]
    spread = [one["max"] - one["min"] for one in (attention, mlp)]
    observed = {
        "mean": (attention["mean"], mlp["mean"]),
        "median": (attention["median"], mlp["median"]),
        "range": (spread[0], spread[1]),
        "ms": (times[0], times[1]),
    }
    return Claim(
        "Attention is to be skipped: it has the higher mean and median cosine, the wider range, and takes longer.",
        all(left > right for left, right in observed.values()),
        "attention and MLP: "
        + ", ".join(f"{name} {left:.3f} and {right:.3f}" for name, (left, right) in observed.items()),
    )
