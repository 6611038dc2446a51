"""S2D: Sorted Speculative Decoding for More Efficient Deployment of Nested LLMs (Kavehzadeh et al. 2024).

One draft with sorted exits for a target: each of its exits as a draft of its own, S2D's choice among them token by
token, and the target's own first layers, which nobody trained to draft. Further drafts, such as one fine-tuned without
sorting (SFT) or a small model that was trained before (the paper's Table 4), stand beside them. The paper's point is
several targets: it is measured once per target.

Draft lengths grow and shrink as in the harness that the paper was measured in; each draft may have a constant length
instead, where that is faster on tuning prompts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.bench.papers import baselines
from jaxspec.bench.papers.options import PaperOptions
from jaxspec.bench.papers.tables import Cell, Claim, Report, Row, Table, more_than
from jaxspec.bench.papers.workbench import Measured, Workbench, law
from jaxspec.bench.timing import OnProgress
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import method_files
from jaxspec.io.embedded import embedded_names
from jaxspec.methods import S2D, DraftModel, Method
from jaxspec.methods.chain import ChainMethod
from jaxspec.tuning.s2d import THRESHOLDS, SortedDraft, s2d_grid, sorted_draft

PAPER = "S2D: Sorted Speculative Decoding (Kavehzadeh et al. 2024, arXiv:2407.01955)"
# The kind of a draft that the paper does not have.
UNTRAINED = "untrained"
# The paper's kinds of drafts, with its Table 2: Vicuna-7B, whose draft has 12 of 32 layers; speed-up and mean accepted
# tokens at T = 0, then at T = 1.
TABLE_2 = {
    "SFT": (1.19, 3.19, 1.16, 3.44),
    "first": (1.38, 2.43, 1.30, 2.53),
    "middle": (1.24, 2.80, 1.26, 3.05),
    "last": (1.17, 3.11, 1.07, 3.22),
    "S2D": (1.34, 2.86, 1.27, 3.01),
}
SORTED = "S2D"
# The embedded draft, which is taken where none is given.
USUAL_DRAFT = "sorted"
TEMPERATURES = (0.0, 1.0)
# Constant lengths that are tried beside the schedule of the paper's harness.
CONSTANTS = (2, 4, 8)
LONGEST = 12


@dataclasses.dataclass(frozen=True)
class Draft:
    """One row of the table.

    Attributes:
      name: of the row.
      method: what drafts.
      kind: `UNTRAINED`, or a key of `TABLE_2`; None for one that the paper does not have.
      tuning: its speed-up on tuning prompts; None where it was not measured there.
    """

    name: str
    method: Method
    kind: str | None = None
    tuning: float | None = None


def measure(lm: LanguageModel, options: PaperOptions, on_progress: OnProgress = lambda what: None) -> Report:
    """Measures a sorted draft on one target: its exits alone, S2D's choice, and drafts without sorting.

    Raises:
      ValueError: the draft has no sorted exits or other tokens than the model, or what `Suite` raises.
      FileNotFoundError: there is no such draft, or a run lacks a file.
    """
    name = options.draft or (USUAL_DRAFT if USUAL_DRAFT in embedded_names() else None)
    if name is None:
        raise ValueError("the paper needs a sorted draft; give draft=DIR, made by `python -m training.soft`")
    with Workbench(lm, options, on_progress) as bench:
        found = sorted_draft(lm, name)
        # Before an hour of tuning: whatever is wrong with them.
        for at, method in itertools.product(TEMPERATURES, options.runs.values()):
            lm.drafter(method, laws=(method_files.law_name(at),))
        thresholds = _tuned_thresholds(bench, name, found)
        best = max(thresholds, key=thresholds.__getitem__)
        drafts = [
            _with_best_length(bench, draft, number)
            for number, draft in enumerate(_drafts(bench, name, found, best))
        ]
        short = {at: baselines.cut(bench, at) for at in TEMPERATURES}
        runs = {
            at: bench.measure(
                f"temperature-{at:g}",
                "reporting",
                {draft.name: draft.method for draft in drafts},
                sampling=law(at),
                peers=short[at].peers,
                models=short[at].models,
            )
            for at in TEMPERATURES
        }
        tables = (_table_2(runs, drafts, short[0.0].note), _figure_3(thresholds, best))
        return bench.report(PAPER, tables, _claims(runs, drafts))


def _tuned_thresholds(bench: Workbench, name: str, draft: SortedDraft) -> dict[tuple[float, ...], float]:
    """By thresholds of all exits but the last, the speed-up over plain decoding on tuning prompts."""
    exits = draft.drafter.exits
    settings = s2d_grid(THRESHOLDS, len(exits)) if len(exits) > 1 else [()]
    methods = {_shown(one): _sorted(bench, name, draft, one) for one in settings}
    tried = bench.measure("thresholds", "tuning", methods)
    return {one: tried.ratio(_shown(one)).ours or 0.0 for one in settings}


def _sorted(bench: Workbench, name: str, draft: SortedDraft, thresholds: tuple[float, ...]) -> S2D:
    """The method with some thresholds, which it reads from a file."""
    exits = draft.drafter.exits
    path = bench.directory / f"thresholds-{'-'.join(f'{one:g}' for one in thresholds) or 'none'}.json"
    found_by = {"tool": "jaxspec bench --paper s2d"}
    method_files.write_thresholds(path, bench.lm.fingerprint, draft.fingerprint, exits, thresholds, found_by)
    return S2D(draft=name, thresholds=str(path), num_draft_tokens=LONGEST)


def _drafts(bench: Workbench, name: str, found: SortedDraft, thresholds: tuple[float, ...]) -> list[Draft]:
    """All drafts, each with the schedule of the paper's harness."""
    exits = found.drafter.exits
    schedule: dict[str, Any] = {"stop_rule": ("adaptive-length",), "num_draft_tokens": LONGEST}
    own = [layer for layer in exits if layer < bench.lm.config.num_layers]
    drafts = [
        Draft(f"the target's first {layer}, untrained", DraftModel(draft_exit=layer, **schedule), UNTRAINED)
        for layer in own
    ]
    for number, (words, method) in enumerate(bench.options.runs.items()):
        if isinstance(method, ChainMethod) and not _has_length(method):
            method = dataclasses.replace(method, **schedule)
        drafts.append(Draft(words, method, None if number else "SFT"))
    places = {exits[0]: "first", exits[len(exits) // 2]: "middle", exits[-1]: "last"}
    drafts += [
        Draft(
            f"sorted, exit {layer} + SD",
            DraftModel(draft=name, draft_exit=layer, **schedule),
            places.get(layer),
        )
        for layer in exits
    ]
    return [*drafts, Draft(SORTED, _sorted(bench, name, found, thresholds), SORTED)]


def _has_length(method: ChainMethod) -> bool:
    """Whether it says when a draft stops."""
    return bool(method.stop_rule) or method.num_draft_tokens is not None


def _with_best_length(bench: Workbench, draft: Draft, number: int) -> Draft:
    """The draft with the length that is fastest on tuning prompts; a length that the user gave stays as it is."""
    given = bench.options.runs.get(draft.name)
    if not isinstance(draft.method, ChainMethod) or (isinstance(given, ChainMethod) and _has_length(given)):
        return draft
    candidates: dict[str, ChainMethod] = {"schedule": draft.method}
    for count in CONSTANTS:
        constant = dataclasses.replace(draft.method, stop_rule=("constant",), num_draft_tokens=count)
        candidates[f"K {count}"] = constant
    measured = bench.measure(f"length-{number}", "tuning", candidates)
    length = measured.best(list(candidates))
    name = draft.name if length == "schedule" else f"{draft.name}, {length}"
    return Draft(name, candidates[length], draft.kind, measured.ratio(length).ours)


def _shown(thresholds: tuple[float, ...]) -> str:
    return "τ " + ", ".join(f"{one:g}" for one in thresholds)


def _table_2(runs: Mapping[float, Measured], drafts: Sequence[Draft], note: str) -> Table:
    columns = [f"{what}, T = {at:g}" for at in TEMPERATURES for what in ("× plain", "MAT")]
    rows = [Row("plain", {column: Cell(1.0, 1.0) for column in columns})]
    for name in dict.fromkeys(run for one in runs.values() for run in one.suite.runs[1:]):
        kind = next((one.kind for one in drafts if one.name == name), None)
        paper = TABLE_2.get(kind or "", (None,) * 4)
        cells = {}
        for at, place in zip(TEMPERATURES, (0, 2), strict=True):
            speed, length = columns[place : place + 2]
            cells[speed] = runs[at].ratio(name, paper=paper[place])
            cells[length] = Cell(paper[place + 1], runs[at].acceptance(name)["mean_acceptance_length"])
        rows.append(Row(name, cells))
    notes = (
        "The paper's are of Vicuna-7B on MT-bench, a draft of 12 layers with exits 6, 9 and 12. MAT: tokens per round, "
        "the target's own included.",
        "K: the constant length that was faster on tuning prompts than the schedule of the paper's harness.",
        note,
        *runs[0.0].different([draft.name for draft in drafts]),
    )
    return Table("Table 2: one sorted draft", tuple(columns), tuple(rows), notes)


def _figure_3(thresholds: Mapping[tuple[float, ...], float], best: tuple[float, ...]) -> Table:
    """The thresholds that were tried, the fastest first."""
    order = sorted(thresholds, key=thresholds.__getitem__, reverse=True)
    return Table(
        "Figure 3: thresholds of all exits but the last, × plain on tuning prompts, greedy",
        ("× plain",),
        tuple(Row(_shown(one), {"× plain": Cell(ours=thresholds[one])}) for one in order),
        (
            f"The table above has {_shown(best)}: the largest of many noisy figures, so less on other prompts.",
        ),
    )


def _claims(runs: Mapping[float, Measured], drafts: Sequence[Draft]) -> tuple[Claim, ...]:
    greedy = runs[0.0]
    mine = next(draft.name for draft in drafts if draft.kind == SORTED)
    claims = [more_than("S2D speeds the target up.", "S2D ÷ plain", greedy.ratio(mine))]
    known = {draft.kind: draft.name for draft in drafts}
    for exit_of, says in (
        ("last", "S2D is faster than its whole draft alone (1.34 against 1.17)."),
        ("middle", "S2D is faster than the middle exit of its draft alone (1.34 against 1.24)."),
    ):
        if exit_of in known:
            rival = known[exit_of]
            claims.append(more_than(says, f"S2D ÷ {rival}", greedy.ratio(mine, rival)))
    if "first" in known:
        rival = known["first"]
        claims.append(
            more_than(
                "On a small target the first exit alone is faster than S2D (1.38 against 1.34).",
                f"{rival} ÷ S2D",
                greedy.ratio(rival, mine),
            )
        )
    untrained = [draft for draft in drafts if draft.kind == UNTRAINED]
    if untrained:
        # Chosen on tuning prompts: the best of several on the others would be too good.
        rival = max(untrained, key=lambda draft: draft.tuning or 0.0).name
        claims.append(
            more_than("A trained draft is faster than none.", f"S2D ÷ {rival}", greedy.ratio(mine, rival))
        )
    twin = next((draft.name for draft in drafts if draft.kind == "SFT"), None)
    says = "S2D is faster than a draft of the same layers without sorting."
    if twin is None:
        claims.append(Claim(says, None, "none was given; `runs` takes it first"))
    else:
        claims.append(more_than(says, f"S2D ÷ {twin}", greedy.ratio(mine, twin)))
    return tuple(claims)
