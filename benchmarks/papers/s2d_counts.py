"""S2D's Table 2 from exact counts: a sorted draft's exits alone, and its choice among them, at several costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from benchmarks.papers import s2d_runs, s2d_sorted_target
from benchmarks.papers.counted import Case, Column, Counted, Work, choose
from benchmarks.papers.engine_counts import Counter, Counting, generated
from benchmarks.papers.s2d_printed import TABLE_2, TARGETS
from benchmarks.papers.s2d_runs import FIRST, LAST, LONGEST, MIDDLE, SFT, SORTED, shown
from benchmarks.papers.tables import FREE, Cell, Claim, Counts, Row, Table, more_than
from benchmarks.papers.workbench import Workbench
from jaxspec.costs.rounds import DraftCost
from jaxspec.drafting.draft_model_drafter import DraftModel
from jaxspec.drafting.s2d_drafter import S2D as Drafting
from jaxspec.io.methods.method_files import fingerprint
from jaxspec.measuring.bench.prompts import Split
from jaxspec.measuring.tuning.s2d_sweep import SortedDraft, s2d_grid, sorted_draft
from jaxspec.methods.base import layers_of, share_of_step
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.stopping import AdaptiveLength, Constant
from jaxspec.texts.results import Result

# The cost of one layer of the paper's draft in steps of its targets, from its Table 2: MAT ÷ speed-up rises by this for
# each layer and draft token, with five draft tokens a round. Its exits have 6, 9 and 12 layers.
LAYER_COSTS = {"Vicuna-7B": 1 / 32, "Vicuna-13B": 1 / 40, "LLaMA-Chat-70B": 1 / 200}
PAPER_EXITS = {FIRST: 6, MIDDLE: 9, LAST: 12}
# The bytes of an output head in layers, from the shapes of the models: 32,000 tokens; widths 4,096 and 5,120; gated
# MLPs of 11,008 and 13,824. The paper's draft has the layers of Vicuna-7B; its sorted target is Vicuna-13B, 40 layers.
DRAFT_HEAD, SORTED_TARGET_HEAD = (
    32000 * width / (4 * width**2 + 3 * width * inner) for width, inner in ((4096, 11008), (5120, 13824))
)
SORTED_TARGET_LAYERS = 40
SINGLE = "best single exit"
BEST_EXIT = "S2D is faster than the exit of its draft that is fastest alone on tuning prompts."
# The row of the first of the user's drafts: the layers of the sorted draft, fine-tuned without sorting.
TWIN = "SFT + SD"
SORTED_OVER_TWIN = "S2D is faster than a draft of the same layers without sorting (SFT)."
AVERAGE = "the average of three targets"
# The number of draft steps by the deepest exit that ran, and of heads, of the text that is being generated.
_seen: dict[str, np.ndarray] = {}


@struct.dataclass
class Tallied(Drafting):
    """S2D that counts the exits of its draft steps, in `_seen`."""

    def _step(
        self, draft: Any, start: jax.Array, carry: Any, token: jax.Array, i: jax.Array, active: jax.Array
    ) -> Any:
        logits, hidden, (cache, waiting) = Drafting._step(self, draft, start, carry, token, i, active)
        assert isinstance(cache, KVCache)
        here = (start + i)[:, None]
        reached = jnp.stack([jnp.asarray(self._is_reached(number)) for number in range(len(self.exits))])
        jax.debug.callback(_deepest, ((waiting.passed > here) & reached)[0])
        return logits, hidden, (cache, waiting)

    def _is_sure(self, logits: jax.Array, number: int) -> jax.Array:
        # Called for each head that a token looks at, not for exits that only free the slots of waiting tokens.
        jax.debug.callback(_look)
        return Drafting._is_sure(self, logits, number)


def _deepest(ran: np.ndarray) -> None:
    _seen["depths"][int(np.sum(ran)) - 1] += 1


def _look() -> None:
    _seen["heads"] += 1


class Setting(NamedTuple):
    """A draft with its numbers.

    Attributes:
      draft: the sorted draft, or another one of its shape.
      thresholds: of all exits but the last.
      length: the constant length; None for the schedule of the paper's harness.
    """

    draft: SortedDraft
    thresholds: tuple[float, ...]
    length: int | None = None


def counted(
    bench: Workbench, found: SortedDraft, temperatures: Sequence[float] = s2d_runs.TEMPERATURES
) -> tuple[Counted, ...]:
    """Counts all thresholds with the schedule of the paper's harness, and the best also with constant lengths.

    Returns:
      the counts at each temperature, with the settings that are fastest on greedy texts.

    Raises:
      ValueError: see `_others`.
    """
    exits = found.drafter.exits
    columns = _columns(bench, found)
    settings = _grid(found)
    alone = (1.0,) * (len(exits) - 1)
    settings |= {
        Case(row, _words(None)): Setting(draft, alone) for row, draft in _others(bench, found).items()
    }
    works = _count_all(bench, "tuning", settings)
    best = {case for by_heading in choose(works, columns).values() for case in by_heading.values()}
    further = {
        Case(case.row, case.setting.replace(_words(None), _words(length))): settings[case]._replace(
            length=length
        )
        for case in sorted(best)
        for length in s2d_runs.CONSTANTS
    }
    settings |= further
    works |= _count_all(bench, "tuning", further)
    # The exit that is fastest on tuning texts, for each column.
    chosen = choose(works, columns)
    singles = choose(
        {
            Case(SINGLE, f"{c.row}, {c.setting}"): w
            for c, w in works.items()
            if c.row != SORTED and settings[c].draft is found
        },
        columns,
    )
    needed = {case for by_heading in chosen.values() for case in by_heading.values()}
    kinds = bench.kinds("reporting")

    def at(temperature: float) -> Counted:
        counts = _count_all(
            bench, "reporting", {case: settings[case] for case in sorted(needed)}, temperature
        )
        counts |= {Case(SINGLE, f"{case.row}, {case.setting}"): work for case, work in counts.items()}
        return Counted(columns, {**chosen, **singles}, counts, kinds)

    return tuple(map(at, temperatures))


def tables(
    bench: Workbench, found: SortedDraft, sorted_target: Workbench | None = None
) -> tuple[tuple[Table, ...], tuple[Claim, ...], Counts]:
    """Returns the tables of speed-ups and of their ratios, the paper's claims at each cost, and the greedy counts.

    Args:
      bench: the target's workbench.
      found: its sorted draft.
      sorted_target: the workbench of a target that drafts with its own exits, for Table 1.
    """
    one, drawn = counted(bench, found)
    roles = {f"exit {layer} alone": role for layer, role in s2d_runs.roles_of(found.drafter.exits).items()}
    roles[SORTED] = SORTED
    (paper, over), (paper_drawn, over_drawn) = (_printed(roles, place) for place in (0, 2))
    others = [row for row in one.chosen if row not in (*roles, SINGLE)]
    words, last = [*bench.options.runs], f"exit {found.drafter.exits[-1]} alone"
    notes = (
        "Exact counts of greedy texts. The columns of the paper's targets have its costs: a layer of the draft costs "
        "at most 1/32, 1/40 and about 1/200 of a step (from the mean accepted tokens and speed-ups of its Table 2, if "
        "a draft has five tokens; less if drafts are longer), and the exits count as its 6, 9 and 12 layers. Each head "
        f"that a rule looks at costs {DRAFT_HEAD:.2f} layers, by bytes; S2D looks at several for a token, an exit "
        "alone at one.",
        *([f"{TWIN}: `{words[0]}`."] if words else []),
        *one.settings(),
    )
    made = [
        one.table("Table 2 from counts: × plain", paper, rows=[*roles, *others], notes=notes),
        one.table(
            "Table 2 from counts: S2D ÷ the exit that is fastest on tuning prompts",
            {SORTED: over},
            SINGLE,
            [SORTED],
            ("The paper's figures are S2D ÷ its best exit in the same table, chosen on the same prompts.",),
        ),
        one.by_kind("Table 2 by task type, from counts", SORTED, SINGLE),
    ]
    claims = one.claims(BEST_EXIT, SORTED, SINGLE, paper=over)
    claims += _average(one, paper, [*roles])
    if words:
        ratios = {row: _divided(paper, row, TWIN) for row in roles}
        made.append(
            one.table(f"Table 2 from counts: SoFT ÷ SFT, the sorted draft ÷ {TWIN}", ratios, TWIN, [*roles])
        )
        claims += one.claims(SORTED_OVER_TWIN, SORTED, TWIN, paper=ratios[SORTED])
        says = "The sorted draft's last exit alone is as fast as SFT, within 5 %."
        claims += one.claims(says, last, TWIN, 0.95, ratios[last])
    for row in others:
        if row != TWIN:
            claims += one.claims(f"S2D is faster than `{row}`.", SORTED, row)
    sampled = (
        "The settings that are fastest on greedy tuning texts. One seed: every row writes another text, and the "
        "intervals contain that.",
    )
    made.append(_figure_3(bench, found, one.columns))
    made.append(
        drawn.table(
            "Table 2, T = 1, from counts: × plain", paper_drawn, rows=[*roles, *others], notes=sampled
        )
    )
    claims += drawn.claims(f"At T = 1, {BEST_EXIT}", SORTED, SINGLE, paper=over_drawn)
    if sorted_target is not None:
        (alone,) = counted(sorted_target, sorted_draft(sorted_target.lm), (0.0,))
        table, told = s2d_sorted_target.from_counts((bench, one), (sorted_target, alone), SINGLE)
        made.append(table)
        claims += told
    return tuple(made), tuple(claims), one.raw()


def _grid(found: SortedDraft) -> dict[Case, Setting]:
    """Returns all thresholds with the schedule of the paper's harness."""
    exits = found.drafter.exits
    return {_case(exits, one, None): Setting(found, one) for one in s2d_grid(s2d_runs.THRESHOLDS, len(exits))}


def _figure_3(bench: Workbench, found: SortedDraft, columns: Sequence[Column]) -> Table:
    """Returns a table of all thresholds on tuning prompts, the fastest of which are measured on the others."""
    settings = _grid(found)
    works = _count_all(bench, "tuning", settings)
    rows = tuple(
        Row(
            s2d_runs.shown(setting.thresholds),
            {one.heading: Cell(ours=one.speed(works[case])) for one in columns},
        )
        for case, setting in settings.items()
    )
    return Table(
        "Figure 3, thresholds of all exits but the last, on tuning prompts, from counts: × plain",
        tuple(one.heading for one in columns),
        rows,
        ("Draft lengths by the schedule of the paper's harness. The largest of many figures is too high.",),
    )


def _printed(roles: Mapping[str, str], place: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Returns the paper's speed-ups by row and target, and S2D ÷ its best exit, at a place of `TABLE_2`'s entries."""

    def speeds(role: str) -> dict[str, float]:
        return {target: TABLE_2[role][number][place] for number, target in enumerate(TARGETS)}

    paper = {row: speeds(role) for row, role in {**roles, TWIN: SFT}.items()}
    mine, exits = speeds(SORTED), [speeds(role) for role in (FIRST, MIDDLE, LAST)]
    return paper, {target: mine[target] / max(one[target] for one in exits) for target in TARGETS}


def _divided(paper: Mapping[str, Mapping[str, float]], row: str, other: str) -> dict[str, float]:
    """Returns the paper's ratio of two rows at each of its costs."""
    return {target: paper[row][target] / paper[other][target] for target in TARGETS}


def _average(one: Counted, paper: Mapping[str, Mapping[str, float]], rows: Sequence[str]) -> Iterator[Claim]:
    """Judges whether S2D is faster than the fastest single exit for all targets, on average over their costs."""
    columns = [column for column in one.columns if column.heading in TARGETS]
    if not columns:
        return

    def mean(row: str) -> np.ndarray:
        found: np.ndarray = np.mean([one.drawn(row, column) for column in columns], axis=0)
        return found

    # The fastest on reporting prompts: this favours the exit.
    rival = max((row for row in rows if row != SORTED), key=lambda row: mean(row)[0])
    printed = {row: sum(paper[row][target] for target in TARGETS) for row in rows}
    best = max(figure for row, figure in printed.items() if row != SORTED)
    ratio = one.cell(mean(SORTED) / mean(rival), printed[SORTED] / best)
    claim = more_than(
        "On average over its targets, S2D is faster than the best one exit for all of them.",
        f"S2D ÷ {rival}",
        ratio,
    )
    yield dataclasses.replace(claim, costs=AVERAGE)


def _others(bench: Workbench, found: SortedDraft) -> dict[str, SortedDraft]:
    """Returns the user's drafts by the names of their rows; a sorted target has none.

    Raises:
      ValueError: a draft has another shape than the sorted one, so that its passes have other costs.
    """
    made: dict[str, SortedDraft] = {}
    if found.drafter.sorted_target:
        return made
    for words, method in bench.options.runs.items():
        drafter, params = bench.lm.drafter(method)
        if not isinstance(drafter, DraftModel) or drafter.config != found.drafter.config:
            raise ValueError(
                f"`runs` has {words!r}; for counts give a draft-model of the sorted draft's shape, such as the same "
                "layers without sorting"
            )
        own = fingerprint(drafter.config, llama.truncate(params, drafter.config.num_layers))
        made[words if made else TWIN] = found._replace(params=params, fingerprint=own)
    return made


def _columns(bench: Workbench, found: SortedDraft) -> tuple[Column, ...]:
    target, exits = bench.lm.loaded, found.drafter.exits
    params = bench.lm.params if found.params is None else found.params
    whole = (
        share_of_step(DraftCost(layers=target.config.num_layers, heads=0), target) / target.config.num_layers
    )
    layer = layers_of(params["layers"][: exits[-1]], target) / exits[-1] * whole
    head = layers_of(llama.head(found.drafter.config, params), target) * whole
    free = Column(FREE, (*(layers * layer for layers in exits), head))
    if found.drafter.sorted_target:
        step = SORTED_TARGET_LAYERS + SORTED_TARGET_HEAD
        shares = [layers / target.config.num_layers * SORTED_TARGET_LAYERS / step for layers in exits]
        return free, Column(s2d_sorted_target.PRINTED_FOR, (*shares, SORTED_TARGET_HEAD / step))
    roles = s2d_runs.roles_of(exits)
    if len(roles) < len(exits):
        return (free,)
    depths = [PAPER_EXITS[roles[layers]] for layers in exits]
    return (
        free,
        *(
            Column(name, (*(depth * cost for depth in depths), DRAFT_HEAD * cost))
            for name, cost in LAYER_COSTS.items()
        ),
    )


def _case(exits: Sequence[int], thresholds: Sequence[float], length: int | None) -> Case:
    """Returns the case; thresholds that always take the same exit are that exit alone."""
    fixed = next((number for number, one in enumerate((*thresholds, 0.0)) if one < 1), 0)
    words = _words(length)
    if (*thresholds, 0.0)[fixed] == 0:
        return Case(f"exit {exits[fixed]} alone", words)
    return Case(SORTED, f"{shown(thresholds)}, {words}")


def _words(length: int | None) -> str:
    return "schedule" if length is None else f"K {length}"


def _count_all(
    bench: Workbench, split: Split, settings: Mapping[Case, Setting], temperature: float = 0.0
) -> dict[Case, Work]:
    """Counts on the prompts of a split, with a file for each draft."""
    found: dict[Case, Work] = {}
    for own in dict.fromkeys(setting.draft.fingerprint for setting in settings.values()):
        cases = {
            case: _counting(bench, setting, temperature)
            for case, setting in settings.items()
            if setting.draft.fingerprint == own
        }
        exits = next(iter(settings.values())).draft.drafter.exits
        drawn = f"-T-{temperature:g}-seed-{bench.options.seed}" if temperature else ""
        found |= Counter(bench, split, f"exits {exits}, heads", f"counts-{own}{drawn}").count(cases)
    return found


def _counting(bench: Workbench, setting: Setting, temperature: float = 0.0) -> Counting:
    made, length = setting.draft.drafter, setting.length
    drafter = Tallied(
        made.config,
        made.exits,
        jnp.asarray(setting.thresholds, jnp.float32),
        AdaptiveLength(maximum=LONGEST) if length is None else Constant(),
        LONGEST if length is None else length,
        made.sorted_target,
    )
    return functools.partial(_count, bench, drafter, setting.draft.params, temperature)


def _count(
    bench: Workbench, drafter: Tallied, params: Any, temperature: float, prompt: Sequence[int]
) -> tuple[Result, Sequence[float]]:
    _seen.update(depths=np.zeros(len(drafter.exits)), heads=np.zeros(()))
    result = generated(bench, prompt, (drafter, params), temperature)
    jax.effects_barrier()
    return result, [*_seen["depths"], float(_seen["heads"])]
