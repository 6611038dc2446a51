"""S2D: Sorted Speculative Decoding for More Efficient Deployment of Nested LLMs (Kavehzadeh et al. 2024).

Compares one draft with sorted exits on several targets: each of its exits as a draft of its own, S2D's choice among
them for each token, and the targets' own first layers, untrained. Further drafts can be added, such as one fine-tuned
without sorting (SFT), or a small pretrained model that was sorted (the paper's Table 4). The paper's result is the
average over targets: one draft, with thresholds for each of them, against one exit for all.

Draft lengths grow and shrink as in the harness of the paper's measurements. A draft may have a constant length instead,
if that is faster on tuning prompts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.papers import s2d_average, s2d_counts, s2d_runs, s2d_sorted_target, s2d_targets
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.s2d_printed import TARGETS, printed
from benchmarks.papers.s2d_runs import FIRST, LAST, MIDDLE, SFT, SORTED, TEMPERATURES, UNTRAINED, Served
from benchmarks.papers.tables import Cell, Claim, Report, Row, Table, more_than
from benchmarks.papers.workbench import Workbench
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host.progress import OnProgress
from jaxspec.io.embedded import embedded_names
from jaxspec.measuring.tuning.s2d_sweep import sorted_draft

PAPER = "S2D: Sorted Speculative Decoding (Kavehzadeh et al. 2024, arXiv:2407.01955)"
# The default draft, an embedded one.
USUAL_DRAFT = "sorted"


def measure(lm: LanguageModel, options: PaperOptions, on_progress: OnProgress = lambda what: None) -> Report:
    """Measures a sorted draft on its targets: its exits alone, S2D's choice, and drafts without sorting.

    Raises:
      ValueError: the draft has no sorted exits or another vocabulary than a target, a target is given twice, or see
        `Suite`.
      FileNotFoundError: there is no such draft or target, or a run lacks a file.
    """
    name = options.draft or (USUAL_DRAFT if USUAL_DRAFT in embedded_names() else None)
    if name is None:
        raise ValueError("the paper needs a sorted draft; give draft=DIR, made by `python -m training.soft`")
    if options.counts and options.targets:
        raise ValueError(
            "`targets` is given, and `counts` are of one target; leave it out, and count each target alone"
        )
    with contextlib.ExitStack() as stack:
        benches = [stack.enter_context(bench) for bench in _benches(lm, options, on_progress)]
        sorted_target = _sorted_target(benches[0])
        for bench in benches:
            s2d_runs.check(bench, name)
        if sorted_target is not None:
            s2d_runs.check(stack.enter_context(sorted_target), None)
        _check_prompts([*benches, *([sorted_target] if sorted_target else [])])
        if options.counts:
            found = sorted_draft(lm, name)
            return benches[0].report(PAPER, *s2d_counts.tables(benches[0], found, sorted_target))
        served = [s2d_runs.serve(bench, name) for bench in benches]
        tables = [table for number, one in enumerate(served) for table in _of_one(one, number, len(served))]
        claims = list(_claims(served))
        by_target, trained = s2d_targets.table(served)
        tables.insert(0, by_target)
        if len(served) > 1:
            tables.insert(0, s2d_average.table(served))
            claims += [*s2d_average.claims(served), trained]
        if sorted_target is None:
            claims.append(s2d_sorted_target.LACKING)
        else:
            alone = s2d_runs.serve(sorted_target, None, temperatures=(0.0,))
            table, right = s2d_sorted_target.table(served[0], alone)
            tables.append(table)
            claims += s2d_sorted_target.claims(served[0], alone, right)
        return benches[0].report(PAPER, tables, claims)


def _benches(lm: LanguageModel, options: PaperOptions, on_progress: OnProgress) -> Iterator[Workbench]:
    """Yields a workbench for each target. All targets are loaded before the first measurement, to find errors early."""
    first = Workbench(lm, options, on_progress)
    yield first
    known = {lm.fingerprint}
    for name in options.targets:
        target = _loaded(first, name)
        if target.fingerprint in known:
            raise ValueError(f"`targets` has {name}, which is measured already; give each target once")
        known.add(target.fingerprint)
        # Named by the weights, so that the records do not depend on the order of the targets.
        yield _bench(first, target, f"target-{target.fingerprint}")


def _sorted_target(first: Workbench) -> Workbench | None:
    """Returns a workbench for the sorted target, if there is one."""
    name = first.options.sorted_target
    return None if name is None else _bench(first, _loaded(first, name), "sorted-target")


def _loaded(first: Workbench, name: str) -> LanguageModel:
    first.on_progress(f"loading {name}")
    lm = first.lm
    return load(
        name, dtype=lm.dtype, weights=lm.weights, device=lm.platform, mesh=lm.mesh, compilation_cache=False
    )


def _bench(first: Workbench, target: LanguageModel, below: str) -> Workbench:
    """Returns a workbench for another model on the same prompts, with records in its own directory."""
    directory = first.options.directory
    return Workbench(
        target,
        dataclasses.replace(first.options, directory=None if directory is None else directory / below),
        lambda what: first.on_progress(f"{target.name}: {what}"),
        first.lm.directory,
    )


def _check_prompts(benches: Sequence[Workbench]) -> None:
    """Refuses targets with different prompts, because their figures are averaged and compared.

    Raises:
      ValueError: some prompts fit only into the context of one of them.
    """
    first, *others = benches
    for other in others:
        apart = first.fitting("reporting").keys() ^ other.fitting("reporting").keys()
        if apart:
            raise ValueError(
                f"{len(apart)} of the prompts fit into the context of only one of {first.lm.name} and {other.lm.name} "
                f"with max_new_tokens={first.options.max_new_tokens}, and both need the same; give fewer"
            )


def _of_one(served: Served, number: int, targets: int) -> tuple[Table, Table]:
    """Returns the tables of one target; the first three targets are compared with the paper's three, smallest first."""
    title = f", target {served.target}" if targets > 1 else ""
    return _table_2(served, number, title, [] if number == 0 else [_fitness(served)]), _figure_3(
        served, title
    )


def _fitness(served: Served) -> str:
    """Returns a note on the fitness of the target."""
    report = served.bench.fitness
    if report is None:
        return f"There is no fitness test of {served.target} beside it."
    failed = ", ".join(one["name"] for one in report["checks"] if not one["passed"])
    return f"The fitness test of {served.target}: {f'FAILED ({failed})' if failed else 'passed'}."


def _table_2(served: Served, number: int, title: str, notes: Sequence[str]) -> Table:
    columns = [f"{what}, T = {at:g}" for at in TEMPERATURES for what in ("× plain", "MAT")]
    rows = [Row("plain", {column: Cell(1.0, 1.0) for column in columns})]
    roles = {draft.run: draft.role for draft in served.drafts}
    for run in served.named.values():
        paper = printed(roles.get(run), number)
        cells = {}
        for at, place in zip(TEMPERATURES, (0, 2), strict=True):
            if run not in served.runs[at].suite.runs:
                continue
            speed, length = columns[place : place + 2]
            cells[speed] = served.runs[at].ratio(run, paper=paper[place])
            cells[length] = Cell(paper[place + 1], served.runs[at].acceptance(run)["mean_acceptance_length"])
        rows.append(Row(run, cells))
    model = TARGETS[number] if number < len(TARGETS) else None
    small = any((draft.role or "").startswith(s2d_runs.SMALL) for draft in served.drafts)
    printed_of = f"The paper used {model} on MT-bench, a draft of 12 layers with exits 6, 9 and 12."
    notes = (
        *([printed_of] if model else []),
        *(["The small sorted model is compared with the paper's Table 4."] if small else []),
        "MAT: tokens per round, the target's own included.",
        "K: the constant length that was faster on tuning prompts than the schedule of the paper's harness.",
        *(draft.note for draft in served.drafts if draft.note),
        served.oracle,
        served.cut.note,
        *notes,
        *served.runs[0.0].different([draft.run for draft in served.drafts]),
    )
    return Table(f"Table 2: one sorted draft{title}", tuple(columns), tuple(rows), notes)


def _figure_3(served: Served, title: str) -> Table:
    """Returns a table of the thresholds tried, the fastest first."""
    tried = served.thresholds
    order = sorted(tried, key=tried.__getitem__, reverse=True)
    return Table(
        f"Figure 3: thresholds of all exits but the last, × plain on tuning prompts, greedy{title}",
        ("× plain",),
        tuple(Row(s2d_runs.shown(one), {"× plain": Cell(ours=tried[one])}) for one in order),
        (
            f"The table above has {s2d_runs.shown(served.best)}: the largest of many noisy figures; expect less on "
            "other prompts.",
        ),
    )


def _claims(served: Sequence[Served]) -> Iterator[Claim]:
    """Yields the paper's claims for each target."""
    for number, one in enumerate(served):
        before = f"{one.target}: " if len(served) > 1 else ""
        for claim in _of_target(one, number):
            yield dataclasses.replace(claim, says=before + claim.says)


def _of_target(served: Served, number: int) -> Iterator[Claim]:
    greedy, mine = served.runs[0.0], served.mine.run
    yield more_than("S2D speeds the target up.", "S2D ÷ plain", greedy.ratio(mine))
    best = served.single.run
    yield more_than(s2d_counts.BEST_EXIT, f"S2D ÷ {best}", greedy.ratio(mine, best))
    (sorted_speed, *_) = printed(SORTED, number)
    for role, words in (
        (LAST, "its whole draft alone"),
        (MIDDLE, "the middle exit of its draft alone"),
        (FIRST, "the first exit of its draft alone"),
    ):
        rival, (speed, *_) = served.draft(role), printed(role, number)
        # For the paper's second target two of the speed-ups are equal.
        if rival is None or speed is None or sorted_speed is None or speed == sorted_speed:
            continue
        figures = f"({sorted_speed:g} against {speed:g})"
        if sorted_speed > speed:
            yield more_than(
                f"S2D is faster than {words} {figures}.", f"S2D ÷ {rival.run}", greedy.ratio(mine, rival.run)
            )
        else:
            yield more_than(
                f"S2D is slower than {words} {figures}.", f"{rival.run} ÷ S2D", greedy.ratio(rival.run, mine)
            )
    untrained = served.draft(UNTRAINED)
    if untrained is not None:
        ratio = greedy.ratio(mine, untrained.run)
        yield more_than("A trained draft is faster than none.", f"S2D ÷ {untrained.run}", ratio)
    twin = served.draft(SFT)
    says = s2d_counts.SORTED_OVER_TWIN
    if twin is None:
        yield Claim(says, None, "no such draft was given; name it first in `runs`")
    else:
        yield more_than(says, f"S2D ÷ {twin.run}", greedy.ratio(mine, twin.run))
