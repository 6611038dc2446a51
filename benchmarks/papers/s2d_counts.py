"""S2D's Table 2 from exact counts: a sorted draft's exits alone, and its choice among them, at several costs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from benchmarks.papers import s2d_runs
from benchmarks.papers.counted import Case, Column, Counted, choose
from benchmarks.papers.engine_counts import Counter, Counting, greedy
from benchmarks.papers.s2d_printed import TABLE_2, TARGETS
from benchmarks.papers.s2d_runs import FIRST, LAST, LONGEST, MIDDLE, SORTED, shown
from benchmarks.papers.tables import FREE, Claim, Table
from benchmarks.papers.workbench import Workbench
from jaxspec.choosing.costs import DraftCost
from jaxspec.drafting.s2d_drafter import S2D as Drafting
from jaxspec.engine.results import Result
from jaxspec.methods.base import layers_of, share_of_step
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.stopping import AdaptiveLength, Constant
from jaxspec.tuning.s2d_sweep import SortedDraft, s2d_grid

# The cost of one layer of the paper's draft in steps of its targets, from its Table 2: MAT ÷ speed-up rises by this for
# each layer and draft token, with five draft tokens a round. Its exits have 6, 9 and 12 layers.
LAYER_COSTS = {"Vicuna-7B": 1 / 32, "Vicuna-13B": 1 / 40, "LLaMA-Chat-70B": 1 / 200}
PAPER_EXITS = {FIRST: 6, MIDDLE: 9, LAST: 12}
SINGLE = "best single exit"
BEST_EXIT = "S2D is faster than the exit of its draft that is fastest alone on tuning prompts."
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
        offered = jnp.stack([jnp.asarray(self._is_offered(number)) for number in range(len(self.exits))])
        ran = (waiting.passed > here) & reached
        jax.debug.callback(_tally, ran[0], (ran & offered)[0])
        return logits, hidden, (cache, waiting)


def _tally(ran: np.ndarray, looked: np.ndarray) -> None:
    _seen["depths"][int(np.sum(ran)) - 1] += 1
    _seen["heads"] += np.sum(looked)


def counted(bench: Workbench, found: SortedDraft) -> Counted:
    """Counts all thresholds with the schedule of the paper's harness, and the best also with constant lengths."""
    exits = found.drafter.exits
    columns = _columns(bench, found)
    tuning, reporting = (Counter(bench, split, f"exits {exits}, heads") for split in ("tuning", "reporting"))
    cases = {
        _case(exits, one, None): _counting(bench, found, one, None)
        for one in s2d_grid(s2d_runs.THRESHOLDS, len(exits))
    }
    works = tuning.count(cases)
    settings: dict[Case, tuple[tuple[float, ...], int | None]] = {
        case: (one, None) for case, one in zip(cases, s2d_grid(s2d_runs.THRESHOLDS, len(exits)), strict=True)
    }
    best = {case for by_heading in choose(works, columns).values() for case in by_heading.values()}
    further = {
        _case(exits, settings[case][0], length): (settings[case][0], length)
        for case in best
        for length in s2d_runs.CONSTANTS
    }
    settings |= further
    works |= tuning.count({case: _counting(bench, found, *setting) for case, setting in further.items()})
    # The exit that is fastest on tuning texts, for each column.
    chosen = choose(works, columns)
    singles = choose(
        {Case(SINGLE, f"{c.row}, {c.setting}"): w for c, w in works.items() if c.row != SORTED}, columns
    )
    needed = {case for by_heading in chosen.values() for case in by_heading.values()}
    counts = reporting.count({case: _counting(bench, found, *settings[case]) for case in sorted(needed)})
    counts |= {Case(SINGLE, f"{case.row}, {case.setting}"): work for case, work in counts.items()}
    kinds = bench.kinds("reporting")
    return Counted(columns, {**chosen, **singles}, counts, kinds)


def tables(bench: Workbench, found: SortedDraft) -> tuple[tuple[Table, ...], tuple[Claim, ...]]:
    """Returns the table of speed-ups, the ratio to the best exit, and the paper's claim at each cost."""
    one = counted(bench, found)
    roles = {f"exit {layer} alone": role for layer, role in s2d_runs.roles_of(found.drafter.exits).items()}
    roles[SORTED] = SORTED
    paper = {
        row: {target: TABLE_2[role][number][0] for number, target in enumerate(TARGETS)}
        for row, role in roles.items()
    }
    rivals = {
        target: max(TABLE_2[role][number][0] for role in (FIRST, MIDDLE, LAST))
        for number, target in enumerate(TARGETS)
    }
    over = {
        SORTED: {target: TABLE_2[SORTED][number][0] / rivals[target] for number, target in enumerate(TARGETS)}
    }
    notes = (
        "Exact counts of greedy texts. The columns of the paper's targets have its costs: a layer of the draft costs "
        "1/32, 1/40 and about 1/200 of a step, and the exits count as its 6, 9 and 12 layers.",
        *one.settings(),
    )
    made = (
        one.table("Table 2 from counts: × plain", paper, rows=[*roles], notes=notes),
        one.table(
            "Table 2 from counts: S2D ÷ the exit that is fastest on tuning prompts", over, SINGLE, [SORTED],
            ("The paper's figures are S2D ÷ its best exit in the same table, chosen on the same prompts.",),
        ),
    )  # fmt: skip
    return made, tuple(one.claims(BEST_EXIT, SORTED, SINGLE, paper=over[SORTED]))


def _columns(bench: Workbench, found: SortedDraft) -> tuple[Column, ...]:
    target, exits = bench.lm.loaded, found.drafter.exits
    params = found.params
    whole = (
        share_of_step(DraftCost(layers=target.config.num_layers, head=False), target)
        / target.config.num_layers
    )
    layer = layers_of(params["layers"], target) / exits[-1] * whole
    head = layers_of(llama.head(found.drafter.config, params), target) * whole
    free = Column(FREE, (*(layers * layer for layers in exits), head))
    roles = s2d_runs.roles_of(exits)
    if len(roles) < len(exits):
        return (free,)
    depths = [PAPER_EXITS[roles[layers]] for layers in exits]
    return (
        free,
        *(Column(name, (*(depth * cost for depth in depths), 0.0)) for name, cost in LAYER_COSTS.items()),
    )


def _case(exits: Sequence[int], thresholds: Sequence[float], length: int | None) -> Case:
    """Returns the case; thresholds that always take the same exit are that exit alone."""
    fixed = next((number for number, one in enumerate((*thresholds, 0.0)) if one < 1), 0)
    words = "schedule" if length is None else f"K {length}"
    if (*thresholds, 0.0)[fixed] == 0:
        return Case(f"exit {exits[fixed]} alone", words)
    return Case(SORTED, f"{shown(thresholds)}, {words}")


def _counting(
    bench: Workbench, found: SortedDraft, thresholds: Sequence[float], length: int | None
) -> Counting:
    made = found.drafter
    drafter = Tallied(
        made.config,
        made.exits,
        jnp.asarray(thresholds, jnp.float32),
        AdaptiveLength(maximum=LONGEST) if length is None else Constant(),
        LONGEST if length is None else length,
    )
    return functools.partial(_count, bench, drafter, found.params)


def _count(
    bench: Workbench, drafter: Tallied, params: Any, prompt: Sequence[int]
) -> tuple[Result, Sequence[float]]:
    _seen.update(depths=np.zeros(len(drafter.exits)), heads=np.zeros(()))
    result = greedy(bench, prompt, (drafter, params))
    jax.effects_barrier()
    return result, [*_seen["depths"], float(_seen["heads"])]
