"""The costs of the parts of a round of Draft & Verify, for the search of a mask."""

from __future__ import annotations

import dataclasses

from jaxspec.costs.rounds import LONGEST
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress, shows_progress
from jaxspec.measuring.bench.step_costs import remembered_step_costs
from jaxspec.measuring.tuning.inspection import SUBLAYERS, sublayer_ms
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import rising_widths


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the parts of a round for one text, in milliseconds.

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
def measure_costs(lm: LanguageModel, *, on_progress: OnProgress = lambda step: None) -> Costs:
    """Returns the costs of rounds of one text, from the remembered costs of steps and the times of the two sublayers.

    A layer's time comes from `step_costs`; attention and MLP have the shares that `sublayer_ms` measures.

    Args:
      lm: the model.
      on_progress: called before each step of the work.
    """
    costs, _ = remembered_step_costs(lm, on_progress=on_progress)
    on_progress("timing attention and MLP")
    times = sublayer_ms(lm, costs.live)
    rest_ms = costs.step_ms(layers=0)
    layer_ms, both_ms = costs.step_ms(layers=1) - rest_ms, sum(times.values()) or 1.0
    attention_ms, mlp_ms = (layer_ms * times[name] / both_ms for name in SUBLAYERS)
    verify = tuple((rows, costs.step_ms(rows) + costs.loop_ms) for rows in rising_widths(LONGEST))
    return Costs(attention_ms, mlp_ms, rest_ms, verify)
