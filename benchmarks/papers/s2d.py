"""S2D's Table 2, greedy (Kavehzadeh et al. 2024): one sorted draft, its exits alone, and its choice among them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from benchmarks.papers.counts import FREE, Bench, Case, Claim, Counting, Counts, Paper, Table, choose
from jaxspec.costs.rounds import DraftCost
from jaxspec.drafting.draft_model_drafter import DraftModelDrafter as Separate
from jaxspec.drafting.s2d_drafter import S2DDrafter
from jaxspec.measuring.tuning.s2d_sweep import s2d_grid, sorted_draft
from jaxspec.methods import DraftModel
from jaxspec.methods.base import layers_of, share_of_step
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.requests.results import Result
from jaxspec.stopping import AdaptiveLength, Constant

SORTED, SFT, SINGLE = "S2D", "SFT + SD", "best single exit"
ALONE = FIRST, MIDDLE, LAST = "first exit alone", "middle exit alone", "last exit alone"
# The paper's targets: the cost of a layer of its draft in steps of the target, from its Table 2: MAT ÷ speed-up rises
# by this for each layer and draft token, with five draft tokens a round. Its exits have 6, 9 and 12 layers.
LAYER_COSTS = {"Vicuna-7B": 1 / 32, "Vicuna-13B": 1 / 40, "LLaMA-Chat-70B": 1 / 200}
PAPER_EXITS = (6, 9, 12)
# The bytes of the draft's output head in layers: 32,000 tokens, width 4,096, a gated MLP of 11,008.
HEAD = 32000 * 4096 / (4 * 4096**2 + 3 * 4096 * 11008)
THRESHOLDS, LENGTHS, LONGEST = (1.0, 0.9, 0.7, 0.5, 0.3, 0.0), (2, 4, 8), 12
PAPER = Paper(
    "S2D: Sorted Speculative Decoding (Kavehzadeh et al. 2024, arXiv:2407.01955)",
    (
        Table("Table 2 from counts: × plain", None, (SORTED, FIRST, MIDDLE, LAST, SFT)),
        Table("Table 2 from counts: S2D ÷ the exit that is fastest on tuning prompts", SINGLE, (SORTED,)),
        Table(f"Table 2 by task type, from counts: {SORTED} ÷ {SINGLE}", SINGLE, (SORTED,), True),
        Table(
            f"Table 2 from counts: SoFT ÷ SFT, the sorted draft ÷ {SFT}", SFT, (SORTED, FIRST, MIDDLE, LAST)
        ),
    ),
    (
        Claim(
            "S2D is faster than the exit of its draft that is fastest alone on tuning prompts.",
            SORTED,
            SINGLE,
        ),
        Claim("S2D is faster than a draft of the same layers without sorting (SFT).", SORTED, SFT),
        Claim("The sorted draft's last exit alone is as fast as SFT, within 5 %.", LAST, SFT, 0.95),
    ),
    {
        row: dict(zip(LAYER_COSTS, figures, strict=True))
        for row, figures in {
            SORTED: (1.34, 1.38, 1.95),
            FIRST: (1.38, 1.38, 1.83),
            MIDDLE: (1.24, 1.31, 1.92),
            LAST: (1.17, 1.23, 1.91),
            SFT: (1.19, 1.21, 1.94),
            # The best exit in the same table.
            SINGLE: (1.38, 1.38, 1.92),
        }.items()
    },
    average=tuple(LAYER_COSTS),
)
# The number of draft steps by the deepest exit that ran, and of heads, of the text that is being generated.
_seen: dict[str, np.ndarray] = {}


@struct.dataclass
class Tallied(S2DDrafter):
    """S2D that counts the exits of its draft steps, in `_seen`."""

    def _step(
        self, draft: Any, start: jax.Array, carry: Any, token: jax.Array, i: jax.Array, active: jax.Array
    ) -> Any:
        logits, hidden, (cache, waiting) = S2DDrafter._step(self, draft, start, carry, token, i, active)
        assert isinstance(cache, KVCache)
        here = (start + i)[:, None]
        reached = jnp.stack([jnp.asarray(self._is_reached(number)) for number in range(len(self.exits))])
        jax.debug.callback(_deepest, ((waiting.passed > here) & reached)[0])
        return logits, hidden, (cache, waiting)

    def _is_sure(self, logits: jax.Array, number: int) -> jax.Array:
        # Called for each head that a token looks at, not for exits that only free the slots of waiting tokens.
        jax.debug.callback(_look)
        return S2DDrafter._is_sure(self, logits, number)


def _deepest(ran: np.ndarray) -> None:
    _seen["depths"][int(np.sum(ran)) - 1] += 1


def _look() -> None:
    _seen["heads"] += 1


class Setting(NamedTuple):
    """A draft with its numbers.

    Attributes:
      params: the parameters of the sorted draft, or of another one of its shape.
      thresholds: of all exits but the last.
      length: the constant length; None for the schedule of the paper's harness.
    """

    params: Any
    thresholds: tuple[float, ...]
    length: int | None = None


def measure(bench: Bench) -> Counts:
    """Counts all thresholds with the schedule of the paper's harness, and the best also with constant lengths.

    Raises:
      ValueError: the draft has no sorted exits, or the unsorted draft has another shape.
    """
    made = sorted_draft(bench.lm, bench.draft)
    drafter = made.drafter
    columns, parts = _columns(bench, drafter, made.params), f"draft {made.fingerprint}, exits, heads"
    settings = {
        case(drafter.exits, thresholds): Setting(made.params, thresholds)
        for thresholds in s2d_grid(THRESHOLDS, len(drafter.exits))
    }
    if bench.unsorted is not None:
        other, params = bench.lm.drafter(DraftModel(draft=bench.unsorted))
        if not isinstance(other, Separate) or other.config != drafter.config:
            raise ValueError(f"{bench.unsorted} has not the shape of {bench.draft}; give one that has")
        settings[Case(SFT, "schedule")] = Setting(params, (1.0,) * (len(drafter.exits) - 1))
    works = _count(bench, settings, drafter, parts)
    best = {one for by in choose(works, [*settings], columns).values() for one in by.values()}
    further = {
        Case(one.row, one.setting.replace("schedule", f"K {length}")): settings[one]._replace(length=length)
        for one in sorted(best)
        for length in LENGTHS
    }
    settings |= further
    works |= _count(bench, settings, drafter, parts)
    chosen = choose(works, [*settings], columns)
    if len(drafter.exits) == len(ALONE):  # the rows of the paper
        named = {f"exit {layers} alone": row for layers, row in zip(drafter.exits, ALONE, strict=True)}
        chosen = {named.get(row, row): by for row, by in chosen.items()}
    # The exit that is fastest on tuning texts, for each column.
    alone = [row for row in chosen if row not in (SORTED, SFT)]
    chosen[SINGLE] = {
        name: max(
            (chosen[row][name] for row in alone),
            key=lambda one, prices=prices: float(works[str(one)].speed(prices)),  # type: ignore[misc]
        )
        for name, prices in columns.items()
    }
    return bench.counts("s2d", columns, chosen, _countings(bench, settings, drafter), parts)


def case(exits: Sequence[int], thresholds: Sequence[float]) -> Case:
    """Returns the case; thresholds that always take the same exit are that exit alone.

    Examples:
      >>> print(case((2, 4, 6), (0.9, 0.7))), print(case((2, 4, 6), (1.0, 0.0)))
      S2D, τ 0.9, 0.7, schedule
      exit 4 alone, schedule
      (None, None)
    """
    fixed = next((number for number, one in enumerate((*thresholds, 0.0)) if one < 1), 0)
    if (*thresholds, 0.0)[fixed] == 0:
        return Case(f"exit {exits[fixed]} alone", "schedule")
    return Case(SORTED, f"τ {', '.join(f'{one:g}' for one in thresholds)}, schedule")


def _columns(bench: Bench, drafter: S2DDrafter, params: Any) -> dict[str, Sequence[float]]:
    """Returns the prices of a draft step by its deepest exit, and of a head."""
    target, exits = bench.lm.loaded, drafter.exits
    depth = target.config.num_layers
    whole = share_of_step(DraftCost(layers=depth, heads=0), target) / depth
    layer = layers_of(params["layers"][: exits[-1]], target) / exits[-1] * whole
    head = layers_of(llama.head(drafter.config, params), target) * whole
    found: dict[str, Sequence[float]] = {FREE: (*(layers * layer for layers in exits), head)}
    if len(exits) == len(PAPER_EXITS):
        found |= {
            name: (*(depth * cost for depth in PAPER_EXITS), HEAD * cost)
            for name, cost in LAYER_COSTS.items()
        }
    return found


def _count(bench: Bench, settings: Mapping[Case, Setting], drafter: S2DDrafter, parts: str) -> dict[str, Any]:
    return bench.count("tuning", _countings(bench, settings, drafter), parts)


def _countings(bench: Bench, settings: Mapping[Case, Setting], drafter: S2DDrafter) -> dict[Case, Counting]:
    return {one: functools.partial(count, bench, drafter, setting) for one, setting in settings.items()}


def count(
    bench: Bench, made: S2DDrafter, setting: Setting, prompt: Sequence[int]
) -> tuple[Result, Sequence[float]]:
    """Counts the draft steps of a text by their deepest exit, and the heads."""
    drafter = Tallied(
        made.config,
        made.exits,
        jnp.asarray(setting.thresholds, jnp.float32),
        AdaptiveLength(maximum=LONGEST) if setting.length is None else Constant(),
        LONGEST if setting.length is None else setting.length,
        made.sorted_target,
    )
    _seen.update(depths=np.zeros(len(made.exits)), heads=np.zeros(()))
    result = bench.generate(prompt, (drafter, setting.params))
    jax.effects_barrier()
    return result, [*_seen["depths"], float(_seen["heads"])]
