"""Predicts speed-ups for devices where a pass costs only the weights that it reads, as is nearly so on accelerators."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.costs.rounds import DraftCost, StepCosts
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods import Method
from jaxspec.methods.base import read_costs
from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True)
class FreeRows:
    """The rounds of a method, of which any number of rows costs as much as one row.

    Attributes:
      draft: the work of its drafts.
      costs: the target's costs of steps, see `methods.base.read_costs`.
      length: the number of draft passes in each round; None for one pass per draft token.
    """

    draft: DraftCost
    costs: StepCosts
    length: int | None = None

    def speedup(self, tokens_per_round: float, mean_draft_length: float) -> float:
        """Returns the speed-up over plain decoding.

        Args:
          tokens_per_round: mean over all rounds.
          mean_draft_length: draft tokens per round.

        Examples:
          >>> from jaxspec.costs.rounds import guessed
          >>> costs = guessed(3, row=0.0, rest=0.25)  # a layer and the head are half of a step
          >>> FreeRows(DraftCost(layers=1), costs).speedup(3.0, mean_draft_length=4.0)
          1.0
        """
        length = mean_draft_length if self.length is None else self.length
        return tokens_per_round * self.costs.step_ms() / self.draft.round_ms(self.costs, length)


def free_rows(lm: LanguageModel, method: Method, drafter: Drafter, params: Any) -> FreeRows | None:
    """Returns the rounds of a method; None if their work depends on the text or the method does not declare it.

    Args:
      lm: the target.
      method: the method.
      drafter, params: its drafter, see `LanguageModel.drafter`.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> from jaxspec.testing import language_model
      >>> lm, method = language_model(), LayerSkip(exit_layer=1)
      >>> 1.8 < free_rows(lm, method, *lm.drafter(method)).speedup(3.0, mean_draft_length=1.0) < 2.0
      True
    """
    draft = method.cost(lm.loaded, drafter, params)
    if draft is None:
        return None
    # A method that drafts in one pass drafts in every round, and a tree takes a pass for each of its levels.
    length = drafter.num_draft_tokens if draft.once or drafter.drafts_trees else None
    return FreeRows(draft, read_costs(lm.loaded), length)
