"""ASD's tables from exact counts: its draft and Draft & Verify's, at the costs of two models."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.papers import asd_cosines, asd_other_texts, asd_runs
from benchmarks.papers.asd_other_texts import OF_CODE, PAPER, PARTS
from benchmarks.papers.asd_runs import (
    AS_PRINTED,
    CALIBRATED,
    ELSEWHERE,
    OF_TUNED,
    SEARCHED,
    SEARCHED_PROMPTS,
    SHIFTED,
    THERE,
    TRIALS,
    TUNED,
    K,
)
from benchmarks.papers.counted import Case, Column, Counted, choose
from benchmarks.papers.engine_counts import Counter, Counting, generated
from benchmarks.papers.tables import FREE, Cell, Claim, Counts, Row, Table, all_hold
from benchmarks.papers.workbench import Workbench
from jaxspec.drafting.draft_verify_drafter import DraftVerify as Drafting
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.tuning import asd_sweep
from jaxspec.measuring.tuning.mask_search import search
from jaxspec.measuring.tuning.round_costs import Costs
from jaxspec.measuring.tuning.texts import prepare_texts
from jaxspec.measuring.tuning.tuning_options import SearchOptions
from jaxspec.model.llama import floor_bytes
from jaxspec.model.plan import LayerPlan
from jaxspec.texts.results import Result

# Milliseconds of an attention and an MLP sublayer of Llama-2-13B on a V100 (the paper's Table 1), and its head's share
# of the bytes.
PAPER_MS, PAPER_HEAD = (1.339, 0.768), 0.013
TABLE_3 = {SEARCHED: 1.495, AS_PRINTED: 1.443}
TABLE_5 = {"all rules": 1.443, "cosine and rule 2": 1.340, "cosine alone": 1.307, "rules 1 and 2": 1.179}
ALL_TUNED = "all rules" + OF_TUNED
# Searches of each mask, by their seeds.
SEARCHES = 5
# The numbers of ASD to try: α as quantiles of the model's similarities, m and n.
EVERYS, KEEP_LASTS = (0, 3, 5), (0, 2)
# ASD's numbers, or the mask of Draft & Verify.
Draft = ASDNumbers | LayerPlan


def counted(bench: Workbench, masks: Masks) -> tuple[Counted, dict[Case, Draft]]:
    """Counts ASD with the paper's numbers and with tuned ones, its ablation, and Draft & Verify with searched masks.

    Returns:
      the counts of the chosen cases, and the draft of each case.
    """
    columns = _columns(bench)
    tuning, reporting = (Counter(bench, split, PARTS) for split in ("tuning", "reporting"))
    tried = _Tried({}, {}) if bench.options.untuned else _tried(bench, masks)
    searched = _searched(bench, columns, SEARCHED)
    drafts: dict[Case, Draft] = {**tried.numbers, **searched.plans}
    own = [case for case in (*tried.numbers, *searched.again) if case not in tried.same]
    tuned = tuning.count({case: masks.counting(drafts[case]) for case in own})
    tuned |= {case: tuned[other] for case, other in tried.same.items()}
    chosen = choose(tuned, columns)
    for row, numbers in asd_runs.ablation(ASDNumbers()).items():
        drafts[Case(row, "")] = numbers
        chosen[row] = {column.heading: Case(row, "") for column in columns}
    # The ablation of the fastest setting that has all rules.
    for heading, case in chosen.pop(ALL_TUNED, {}).items():
        for row, numbers in asd_runs.ablation(tried.numbers[case]).items():
            part = Case(row + OF_TUNED, f"with {_shown(tried.numbers[case])}")
            drafts[part] = numbers
            chosen.setdefault(part.row, {})[heading] = part
    needed = {case for by_heading in chosen.values() for case in by_heading.values()}
    needed = needed.union(*(searched.again.get(case, ()) for case in needed))
    counts = reporting.count({case: masks.counting(drafts[case]) for case in sorted(needed)})
    chosen = {AS_PRINTED: chosen["all rules"], **chosen}
    return Counted(columns, chosen, counts, bench.kinds("reporting"), searched.again), drafts


def tables(bench: Workbench) -> tuple[tuple[Table, ...], tuple[Claim, ...], Counts]:
    """Returns the tables of speed-ups, ablation and similarities, the paper's claims, and the greedy counts."""
    masks = Masks(bench)
    one, drafts = counted(bench, masks)
    rows, again, drafts = (
        dict(one.chosen),
        dict(one.again),
        {**drafts, OF_CODE: ASDNumbers(every=4, keep_last=3)},
    )
    # Prompt files have categories of their own; the searches on one kind of work need the project's prompts.
    searches = () if bench.options.prompt_file else ((THERE, CALIBRATED), (ELSEWHERE, SHIFTED))
    for row, kind in searches:
        found = _searched(bench, one.columns, row, kind)
        rows[row] = {column.heading: case for column, case in zip(one.columns, found.again, strict=True)}
        drafts.update(found.plans)
        again |= found.again
    others, told = asd_other_texts.tables(
        bench, one.columns, rows, again, lambda case, temperature: masks.counting(drafts[case], temperature)
    )
    similarities = [masks.similarities(tuple(prompt)) for prompt in bench.encoded("tuning")]
    cosines, observed = asd_cosines.tables(np.stack(similarities), bench.kinds("tuning"))
    compared = [row for row in (SEARCHED, AS_PRINTED, TUNED) if row in one.chosen]
    attention = PAPER_MS[0] / sum(PAPER_MS)
    notes = (
        f"Exact counts of greedy texts. At the cost of {PAPER} on a V100, attention takes {attention:.0%} of a layer's "
        "time and a head 1.3 % of a step.",
        "Each text begins with γ 0.6. The paper carries γ from text to text.",
        "Draft tokens after the end of a text are not counted, a few percent of all.",
        f"{SEARCHED}: the mean of {SEARCHES} searches, whose seeds the bootstrap draws, too.",
        *(one.settings([TUNED]) if TUNED in one.chosen else ()),
    )
    ablated = [row for row in one.chosen if row.removesuffix(OF_TUNED) in TABLE_5]
    made = (
        one.table(
            "Table 3 from counts: × plain",
            {row: {PAPER: figure} for row, figure in TABLE_3.items()},
            rows=compared,
            notes=notes,
        ),
        one.by_kind("Table 3 by task type, from counts", compared[-1], SEARCHED),
        one.table(
            "Table 5 from counts: which rules make the draft, × plain",
            {row: {PAPER: figure} for row, figure in TABLE_5.items()},
            rows=ablated,
            notes=["Tuned: the fastest setting that has all rules.", *one.settings([ALL_TUNED])]
            if ALL_TUNED in one.chosen
            else (),
        ),
        *others,
        cosines,
        _left_out(one, compared, bench.lm.config.num_layers),
    )
    claims: list[Claim] = []
    for run in compared[1:]:
        claims += one.claims(f"{run}, is faster than plain decoding.", run, None, paper=_printed(run))
        claims += one.claims(
            f"{run}, is as fast as {SEARCHED} within 5 %, without its search.",
            run,
            SEARCHED,
            0.95,
            _printed(run, SEARCHED),
        )
    for whose, suffix in (("The paper's numbers", ""), ("Tuned numbers", OF_TUNED)):
        if "all rules" + suffix not in one.chosen:
            continue
        pairs = [one.claims("", more + suffix, less + suffix) for more, less in itertools.pairwise(TABLE_5)]
        says = f"{whose}: every rule adds speed, in the order {' > '.join(TABLE_5)}."
        for parts in zip(*pairs, strict=True):
            joined = all_hold(says, parts)
            claims.append(Claim(says, joined.holds, joined.because, parts[0].costs))
    return made, (*claims, *told, *observed), one.raw()


def _printed(run: str, other: str | None = None) -> dict[str, float]:
    """Returns the paper's ratio of two rows of Table 3, or of one over plain decoding."""
    return {PAPER: TABLE_3[run] / (TABLE_3[other] if other else 1.0)} if run in TABLE_3 else {}


def _left_out(one: Counted, rows: Sequence[str], depth: int) -> Table:
    """Returns a table of the numbers of sublayers that a draft pass leaves out, the mean over draft passes."""
    made = []
    for row in rows:
        cells = {}
        for column in one.columns:
            attention, mlp, drafted = one.reporting[one.chosen[row][column.heading]].passes.sum(axis=0)
            for name, ran in (("attentions", attention), ("MLPs", mlp)):
                # Without a draft pass, nothing is known.
                ours = depth * (1 - float(ran / drafted)) if drafted else None
                cells[f"{column.heading}: {name}"] = Cell(ours=ours)
        made.append(Row(row, cells))
    headings = tuple(f"{column.heading}: {name}" for column in one.columns for name in ("attentions", "MLPs"))
    return Table(
        f"Sublayers left out, of {depth} attentions and {depth} MLPs", headings, tuple(made), digits=1
    )


def _columns(bench: Workbench) -> tuple[Column, ...]:
    """Returns the prices of all attention sublayers, all MLP sublayers and the head."""
    lm = bench.lm
    whole, layers = floor_bytes(lm.config, lm.params), lm.params["layers"]
    bytes_of = {
        name: sum(leaf.nbytes for layer in layers for leaf in jax.tree.leaves(layer[name]))
        for name in ("attention", "mlp")
    }
    free = [bytes_of[name] / whole for name in ("attention", "mlp")]
    paper = [(1 - PAPER_HEAD) * ms / sum(PAPER_MS) for ms in PAPER_MS]
    return Column(FREE, (*free, 1 - sum(free))), Column(PAPER, (*paper, PAPER_HEAD))


class _Tried(NamedTuple):
    """The settings of ASD to choose from: all with `TUNED`, and those with all rules also with `ALL_TUNED`.

    Attributes:
      numbers: by case.
      same: by case of `ALL_TUNED`, the case of `TUNED` with the same masks.
    """

    numbers: dict[Case, ASDNumbers]
    same: dict[Case, Case]


def _tried(bench: Workbench, masks: Masks) -> _Tried:
    similarities = np.stack([masks.similarities(tuple(prompt))[:, 0] for prompt in _searched_on(bench)])
    settings = asd_sweep.grid(asd_sweep.default_alphas(similarities), EVERYS, KEEP_LASTS)
    tried = _Tried({}, {})
    for group in asd_sweep.grouped(similarities, settings):
        first = Case(TUNED, _shown(group.settings[0]))
        tried.numbers[first] = group.settings[0]
        for one in group.settings:
            if one.alpha < 1 and one.every and one.keep_last:
                case = Case(ALL_TUNED, _shown(one))
                tried.numbers[case], tried.same[case] = one, first
    return tried


def _searched_on(bench: Workbench, kinds: Sequence[str] | None = None) -> list[list[int]]:
    return bench.encoded("tuning", kinds, SEARCHED_PROMPTS)


def _shown(numbers: ASDNumbers) -> str:
    return f"α {numbers.alpha:g}, m {numbers.every}, n {numbers.keep_last}"


class _Searched(NamedTuple):
    """The masks of the searches of a row.

    Attributes:
      plans: by case.
      again: by the case of the first search for each column, the cases of the others.
    """

    plans: dict[Case, LayerPlan]
    again: dict[Case, tuple[Case, ...]]


def _searched(bench: Workbench, columns: Sequence[Column], row: str, kind: str | None = None) -> _Searched:
    """Searches Draft & Verify's masks at the costs of each column, several times; see `_search`."""
    found = _Searched({}, {})
    for column in columns:
        first, *others = (
            Case(row, f"searched for {column.heading}{f', seed {seed}' if seed else ''}")
            for seed in range(SEARCHES)
        )
        found.again[first] = tuple(others)
        found.plans.update(
            {case: _search(bench, column, kind, seed) for seed, case in enumerate((first, *others))}
        )
    return found


def _search(bench: Workbench, column: Column, kind: str | None, seed: int) -> LayerPlan:
    """Searches Draft & Verify's mask by agreement with the model's own text.

    Args:
      bench: the workbench.
      column: the costs.
      kind: task type of the prompts; None for all.
      seed: added to that of the options.
    """
    lm, depth = bench.lm, bench.lm.config.num_layers
    words = column.heading.replace(" ", "-"), kind, f"seed-{seed}" if seed else None
    name = "-".join(filter(None, words))
    options = SearchOptions(
        trials=TRIALS,
        keep_first_last=depth > 2,
        max_new_tokens=min(SearchOptions().tokens, bench.options.max_new_tokens),
        seed=bench.options.seed + seed,
    )
    attention, mlp, head = column.prices
    costs = Costs(attention / depth, mlp / depth, head, ((1, 1.0), (K + 1, 1.0)))
    found = search(
        lm,
        _searched_on(bench, None if kind is None else (kind,)),
        options,
        bench.directory / f"{name}.trials.jsonl",
        resume=bench.options.resume,
        costs=costs,
        on_progress=bench.on_progress,
    )
    if found.interrupted:
        raise KeyboardInterrupt
    return found.best.plan


class Masks:
    """Counts texts under masks.

    A count depends on the prompt, its mask and the temperature only, and many settings give the same mask. So each is
    counted once.
    """

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.similarities = functools.cache(self._similarities)
        self._known = functools.cache(self._count)

    def counting(self, draft: Draft, temperature: float = 0.0) -> Counting:
        """Returns the counting of texts with ASD's numbers, or with one mask for all prompts."""

        def count(prompt: Sequence[int]) -> tuple[Result, Sequence[float]]:
            ids = tuple(prompt)
            if isinstance(draft, LayerPlan):
                return self._known(ids, draft, temperature)
            numbers = asd_runs.fitting(self._bench.lm, draft)
            found = asd_sweep.masks_of(self.similarities(ids)[None, :, 0], [numbers])[0, 0]
            return self._known(ids, LayerPlan(tuple((bool(a), bool(m)) for a, m in found)), temperature)

        return count

    def _similarities(self, prompt: tuple[int, ...]) -> np.ndarray:
        """Returns the similarities of the attention and MLP sublayers on a prompt, float[L, 2]."""
        bench = self._bench
        _, found = prepare_texts(bench.lm, [prompt], [[0] * bench.options.max_new_tokens])
        return np.asarray(found)[0]

    def _count(
        self, prompt: tuple[int, ...], plan: LayerPlan, temperature: float
    ) -> tuple[Result, Sequence[float]]:
        """Counts a text; each draft pass runs the shares of the attention and MLP sublayers that the mask keeps."""
        drafter = Drafting(self._bench.lm.config, plan.traced(), num_draft_tokens=K)
        result = generated(self._bench, prompt, drafter, temperature)
        drafted = result.statistics.num_draft_tokens
        return result, [drafted * float(share) for share in (*np.mean(plan.run, axis=0), 1.0)]
