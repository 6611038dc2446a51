"""Measures the costs of the parts of a round of Draft & Verify, for the search of a mask."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.costs.rounds import LONGEST
from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.measuring.bench.steps import DraftSteps, Steps, WrongDrafts
from jaxspec.measuring.bench.timing import interleaved, median_ratio
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import local
from jaxspec.protocol import Drafter, Weights, rising_widths


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured times of the parts of a round for one text, in milliseconds.

    `StepCosts` has whole layers only; a mask skips the attention and the MLP of a layer separately.

    Attributes:
      attention_ms, mlp_ms: time of one sublayer in a draft step of one token.
      rest_ms: the rest of a draft step: embedding, final norm, head, choice of the token.
      verify_ms: pairs (rows, time of a round that verifies them), ascending; the first has 1 row and is a step of
        plain decoding. A round uses the narrowest entry that holds its draft.
    """

    attention_ms: float
    mlp_ms: float
    rest_ms: float
    verify_ms: tuple[tuple[int, float], ...]

    def draft_step_ms(self, plan: LayerPlan) -> float:
        """Time to draft one token with the sublayers that a plan runs."""
        attention = plan.num_layers - len(plan.skip_attention)
        mlp = plan.num_layers - len(plan.skip_mlp)
        return self.rest_ms + attention * self.attention_ms + mlp * self.mlp_ms

    def round_ms(self, plan: LayerPlan, length: int) -> float:
        """Time of a round that drafts `length` tokens with a plan and verifies them."""
        return length * self.draft_step_ms(plan) + next(ms for rows, ms in self.verify_ms if rows > length)


@shows_progress
def measure_costs(
    lm: LanguageModel, *, repeats: int = 9, on_progress: OnProgress = lambda step: None
) -> Costs:
    """Times the parts of a round of one text, alternating with plain decoding; each figure is a median.

    Draft steps run under four masks (all, no attention, no MLP, neither) in one executable; least squares give
    the cost of one sublayer. Rounds are those of the decoding loop, as in `bench.steps`.
    """
    num_layers = lm.config.num_layers
    every = range(num_layers)
    plans = {
        "all": LayerPlan.skipping(num_layers),
        "no attention": LayerPlan.skipping(num_layers, attention=every),
        "no mlp": LayerPlan.skipping(num_layers, mlp=every),
        "neither": LayerPlan.skipping(num_layers, every, every),
    }
    widths = rising_widths(LONGEST)

    def verifying(rows: int) -> Drafter:
        return WrongDrafts(rows - 1) if rows > 1 else Autoregressive()

    with jax.default_device(local(lm.device)):
        draft = DraftSteps(lm)
        timed: dict[str, Callable[[], Any]] = {
            name: functools.partial(draft, plan.traced()) for name, plan in plans.items()
        }
        rounds = {rows: Steps(lm, Weights(lm.params), verifying(rows)) for rows in widths}
        timed |= {str(rows): steps for rows, steps in rounds.items()}
        for number, (name, run) in enumerate(timed.items(), 1):
            what = f"a round of {name} rows" if name.isdigit() else "a draft"
            on_progress(f"compiling {what}, {number} of {len(timed)}")
            run()
        taken = interleaved(
            timed,
            repeats,
            lambda turn: on_progress(f"measuring the costs of a round's parts, {turn}"),
            lm.mesh,
        )
    plain_ms = statistics.median(taken["1"])

    def typical_ms(name: str, count: int) -> float:
        """Time of one of `count` repetitions, from the ratio to plain decoding in the same turn."""
        return plain_ms * median_ratio(taken[name], taken["1"]) / count

    ran = [(1, num_layers - len(p.skip_attention), num_layers - len(p.skip_mlp)) for p in plans.values()]
    step_ms = [typical_ms(name, draft.rounds) for name in plans]
    fitted, *_ = np.linalg.lstsq(np.array(ran), np.array(step_ms), rcond=None)
    rest, attention, mlp = (max(float(ms), 0.0) for ms in fitted)
    verify = tuple((rows, typical_ms(str(rows), rounds[rows].rounds)) for rows in widths)
    return Costs(attention, mlp, rest, verify)
