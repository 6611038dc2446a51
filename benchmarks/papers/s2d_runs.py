"""The runs of S2D's tables: a sorted draft and its rivals on one target, each tuned on it and then measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.papers import baselines
from benchmarks.papers.workbench import Measured, Workbench, distribution
from jaxspec.io.methods import method_files
from jaxspec.measuring.tuning.s2d_sweep import THRESHOLDS, SortedDraft, s2d_grid, sorted_draft
from jaxspec.methods import S2D, DraftModel, LayerSkip, Method
from jaxspec.methods.chain import ChainMethod

# Roles of drafts in the paper's tables; `UNTRAINED` is in none of them.
SFT, FIRST, MIDDLE, LAST, SORTED, UNTRAINED = "SFT", "first", "middle", "last", "S2D", "untrained"
# Prefix of the roles of the exits of another sorted draft, a small pretrained model.
SMALL = "small "
# One row for all targets, although their useful depths differ.
CUT = "plain, cut to the useful depth"
TEMPERATURES = (0.0, 1.0)
# Constant lengths to try beside the schedule of the paper's harness.
CONSTANTS = (2, 4, 8)
LONGEST = 12


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft.

    Attributes:
      name: its name, the same on every target.
      method: the drafting method.
      role: its role in the paper's tables; None without one.
      length: its draft length; None for the schedule of the paper's harness.
      tuning: its speed-up on tuning prompts; None if it was not measured there.
      exit_layer: number of layers of a single exit of the sorted draft; 0 for all others.
      note: a note for the report.
    """

    name: str
    method: Method
    role: str | None = None
    length: str = ""
    tuning: float | None = None
    exit_layer: int = 0
    note: str = ""

    @property
    def run(self) -> str:
        """The name of the draft's run."""
        return f"{self.name}, {self.length}" if self.length else self.name


@dataclasses.dataclass(frozen=True)
class Served:
    """All drafts on one target.

    Attributes:
      bench: the target's workbench.
      drafts: all drafts, in the order of the tables.
      thresholds: speed-up on tuning prompts by thresholds of all exits but the last.
      runs: measurements by temperature.
      cut: plain decoding of the target truncated to its useful depth.
    """

    bench: Workbench
    drafts: tuple[Draft, ...]
    thresholds: Mapping[tuple[float, ...], float]
    runs: Mapping[float, Measured]
    cut: baselines.Cut

    @property
    def target(self) -> str:
        """The target's name."""
        return self.bench.lm.name

    @property
    def best(self) -> tuple[float, ...]:
        """The thresholds that were fastest on tuning prompts."""
        return fastest_thresholds(self.thresholds)

    @property
    def named(self) -> dict[str, str]:
        """The names of all runs but plain decoding, by the names that are common to all targets."""
        cut = {} if self.cut.name is None else {CUT: self.cut.name}
        return {draft.name: draft.run for draft in self.drafts} | cut | {baselines.ORACLE: baselines.ORACLE}

    @property
    def oracle(self) -> str:
        """A note on the ideal stop."""
        return (
            f"{baselines.ORACLE}: the best single exit ({self.single.run}) with a rule that reads the text."
        )

    def draft(self, role: str) -> Draft | None:
        """Returns the draft with a role, the fastest on tuning prompts if there are several."""
        found = [draft for draft in self.drafts if draft.role == role]
        return max(found, key=lambda draft: draft.tuning or 0.0, default=None)

    @property
    def single(self) -> Draft:
        """The single exit of the sorted draft that was fastest on tuning prompts."""
        return _single(self.drafts)

    @property
    def mine(self) -> Draft:
        """S2D."""
        return next(draft for draft in self.drafts if draft.role == SORTED)


def check(bench: Workbench, name: str | None) -> None:
    """Checks the drafts before an hour of tuning; the arguments are those of `serve`.

    Raises:
      ValueError: the draft has no sorted exits or another vocabulary than the target.
      FileNotFoundError: there is no such draft, or a run lacks a file.
    """
    sorted_draft(bench.lm, name)
    for at, method in itertools.product(TEMPERATURES, bench.options.runs.values() if name else ()):
        bench.lm.drafter(method, distributions=(method_files.distribution_name(at),))


def serve(bench: Workbench, name: str | None, temperatures: Sequence[float] = TEMPERATURES) -> Served:
    """Measures a sorted draft on one target: its exits alone, S2D's choice, and drafts without sorting.

    Thresholds and draft lengths are tuned on this target's tuning prompts.

    Args:
      bench: the target's workbench.
      name: name of the draft; None for a sorted target that drafts with its own exits.
      temperatures: temperatures of the measurement on reporting prompts; the first is 0.

    Raises:
      ValueError, FileNotFoundError: see `check` and `Suite`.
    """
    found = sorted_draft(bench.lm, name)
    thresholds = _tuned_thresholds(bench, S2D(draft=name), found)
    made = _drafts(bench, name, found, fastest_thresholds(thresholds))
    drafts = tuple(_with_best_length(bench, draft, number) for number, draft in enumerate(made))
    short = {at: baselines.cut(bench, at) for at in temperatures}
    exit_layer = _single(drafts).exit_layer
    ideal = (
        baselines.ideal_exit(bench, exit_layer, LONGEST)
        if name is None
        else baselines.ideal_draft(bench, name, exit_layer, LONGEST)
    )
    runs = {
        at: bench.measure(
            f"temperature-{at:g}",
            "reporting",
            {draft.run: draft.method for draft in drafts},
            sampling=distribution(at),
            peers={**short[at].peers, **({} if at else {baselines.ORACLE: ideal})},
            models=short[at].models,
        )
        for at in temperatures
    }
    return Served(bench, drafts, thresholds, runs, short[0.0])


def _single(drafts: Sequence[Draft]) -> Draft:
    return max((draft for draft in drafts if draft.exit_layer), key=lambda draft: draft.tuning or 0.0)


def fastest_thresholds(tried: Mapping[tuple[float, ...], float]) -> tuple[float, ...]:
    """Returns the thresholds with the largest speed-up."""
    return max(tried, key=tried.__getitem__)


def shown(thresholds: Sequence[float]) -> str:
    """Formats thresholds.

    Examples:
      >>> shown((0.9, 0.5))
      'τ 0.9, 0.5'
    """
    return "τ " + ", ".join(f"{one:g}" for one in thresholds)


def _tuned_thresholds(
    bench: Workbench, method: S2D, draft: SortedDraft, of: str = "thresholds"
) -> dict[tuple[float, ...], float]:
    """Returns the speed-up on tuning prompts by thresholds of all exits but the last."""
    exits = draft.drafter.exits
    settings = s2d_grid(THRESHOLDS, len(exits)) if len(exits) > 1 else [()]
    methods = {shown(one): _sorted(bench, method, draft, one, of) for one in settings}
    tried = bench.measure(of, "tuning", methods)
    return {one: tried.ratio(shown(one)).ours or 0.0 for one in settings}


def _sorted(
    bench: Workbench, method: S2D, draft: SortedDraft, thresholds: tuple[float, ...], of: str = "thresholds"
) -> S2D:
    """Returns the method with given thresholds, which it reads from a file."""
    exits = draft.drafter.exits
    path = bench.directory / f"{of}-{'-'.join(f'{one:g}' for one in thresholds) or 'none'}.json"
    found_by = {"tool": "python -m benchmarks.papers s2d"}
    method_files.write_thresholds(path, bench.lm.fingerprint, draft.fingerprint, exits, thresholds, found_by)
    length: dict[str, Any] = {} if _has_length(method) else {"num_draft_tokens": LONGEST}
    return dataclasses.replace(method, thresholds=str(path), **length)


def _drafts(
    bench: Workbench, name: str | None, found: SortedDraft, thresholds: tuple[float, ...]
) -> list[Draft]:
    """Returns all drafts, each with the schedule of the paper's harness."""
    exits = found.drafter.exits
    schedule: dict[str, Any] = {"stop_rule": ("adaptive-length",), "num_draft_tokens": LONGEST}
    mine = Draft(SORTED, _sorted(bench, S2D(draft=name), found, thresholds), SORTED)
    if name is None:
        own = [(layer, LayerSkip(exit_layer=layer, **schedule)) for layer in exits]
        return [*(Draft(f"exit {layer}", method, exit_layer=layer) for layer, method in own), mine]
    drafts = [
        Draft(f"the target's first {layer}, untrained", DraftModel(draft_exit=layer, **schedule), UNTRAINED)
        for layer in exits
        if layer < bench.lm.config.num_layers
    ]
    drafts += _others(bench, name, schedule)
    roles = roles_of(exits)
    drafts += [
        Draft(
            f"sorted, exit {layer} + SD",
            DraftModel(draft=name, draft_exit=layer, **schedule),
            roles.get(layer),
            exit_layer=layer,
        )
        for layer in exits
    ]
    return [*drafts, mine]


def roles_of(exits: Sequence[int]) -> dict[int, str]:
    """Returns the role of each exit of a sorted draft."""
    return {exits[0]: FIRST, exits[len(exits) // 2]: MIDDLE, exits[-1]: LAST}


def _others(bench: Workbench, name: str, schedule: Mapping[str, Any]) -> Iterator[Draft]:
    """Yields the user's drafts. The first unsorted one has the role SFT; a sorted one that of the paper's Table 4."""
    runs = bench.options.runs
    small = [
        (method.draft, sorted_draft(bench.lm, method.draft).drafter.exits)
        for method in runs.values()
        if isinstance(method, S2D) and method.draft not in (None, name)
    ]
    unsorted = []
    for number, (words, method) in enumerate(runs.items()):
        role, note = None, ""
        (exits,) = [its for draft, its in small if draft == getattr(method, "draft", None)][:1] or [()]
        if isinstance(method, S2D):
            role = SMALL + SORTED if exits else None
            if method.thresholds is None:
                method, note = _with_best_thresholds(bench, words, method, f"thresholds-run-{number}")
        elif exits and isinstance(method, DraftModel):
            role = SMALL + roles_of(exits).get(method.draft_exit or exits[-1], "")
        else:
            unsorted.append(words)
            role = SFT if len(unsorted) == 1 else None
        if isinstance(method, ChainMethod) and not _has_length(method):
            method = dataclasses.replace(method, **schedule)
        yield Draft(words, method, role, note=note)


def _with_best_thresholds(bench: Workbench, words: str, method: S2D, of: str) -> tuple[S2D, str]:
    """Returns another sorted draft with tuned thresholds, and a note."""
    found = sorted_draft(bench.lm, method.draft)
    best = fastest_thresholds(_tuned_thresholds(bench, method, found, of))
    return _sorted(bench, method, found, best, of), f"{words}: {shown(best)}, the fastest on tuning prompts."


def _has_length(method: ChainMethod) -> bool:
    """Whether the method has its own draft length or stop rule."""
    return bool(method.stop_rule) or method.num_draft_tokens is not None


def _with_best_length(bench: Workbench, draft: Draft, number: int) -> Draft:
    """Returns the draft with the length that is fastest on tuning prompts; the user's own length is kept."""
    given = bench.options.runs.get(draft.name)
    if not isinstance(draft.method, ChainMethod) or (isinstance(given, ChainMethod) and _has_length(given)):
        return draft
    candidates: dict[str, ChainMethod] = {"schedule": draft.method}
    for count in CONSTANTS:
        constant = dataclasses.replace(draft.method, stop_rule=("constant",), num_draft_tokens=count)
        candidates[f"K {count}"] = constant
    measured = bench.measure(f"length-{number}", "tuning", candidates)
    length = measured.best(list(candidates))
    return dataclasses.replace(
        draft,
        method=candidates[length],
        length="" if length == "schedule" else length,
        tuning=measured.ratio(length).ours,
    )
