"""Predicts speed-ups for devices where a pass costs only the weights that it reads, as is nearly so on accelerators."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.drafting.choosing_drafter import Choosing
from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods import Method
from jaxspec.methods.base import share_of_step
from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True)
class Passes:
    """The draft passes of a method.

    Attributes:
      share: share of the target's weights that a pass reads, see `methods.base.share_of_step`.
      each_round: passes per round; None for one pass per draft token.

    Examples:
      >>> Passes(0.25).speedup(3.0, mean_draft_length=4.0), Passes(0.5, each_round=1).speedup(3.0, 4.0)
      (1.5, 2.0)
    """

    share: float
    each_round: int | None = None

    def speedup(self, tokens_per_round: float, mean_draft_length: float) -> float:
        """The speed-up over plain decoding if a round only reads the target's weights and those of its draft passes.

        Args:
          tokens_per_round: mean over all rounds.
          mean_draft_length: draft tokens per round.
        """
        passes = mean_draft_length if self.each_round is None else self.each_round
        return tokens_per_round / (1 + passes * self.share)


def passes(lm: LanguageModel, method: Method, drafter: Drafter, params: Any) -> Passes | None:
    """The draft passes of a method; None if they depend on the text or the method does not declare its cost.

    Args:
      lm: the target.
      method: the method.
      drafter, params: its drafter, see `LanguageModel.drafter`.

    Examples:
      >>> from jaxspec.methods import LayerSkip
      >>> from jaxspec.testing import language_model
      >>> lm, method = language_model(), LayerSkip(exit_layer=1)
      >>> 0.5 < passes(lm, method, *lm.drafter(method)).share < 0.6
      True
    """
    draft = method.cost(lm.loaded, drafter, params)
    if draft is None:
        return None
    runs = drafter.candidates[1] if isinstance(drafter, Choosing) else drafter  # in a hybrid
    each = 1 if draft.once else runs.num_draft_tokens if runs.drafts_trees else None
    return Passes(share_of_step(draft, lm.loaded), each)
