"""What drafts gain where rows are free: a pass costs the weights that it reads, as it nearly does on an accelerator."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.engine.language_model import LanguageModel
from jaxspec.methods import Method
from jaxspec.methods.base import share_of_step
from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True)
class Passes:
    """What a run's drafts read.

    Attributes:
      share: of each pass, see `methods.base.share_of_step`.
      each_round: passes of a round, where that does not depend on how many tokens are drafted; None elsewhere.

    Examples:
      >>> Passes(0.25).speedup(3.0, mean_draft_length=4.0), Passes(0.5, each_round=1).speedup(3.0, 4.0)
      (1.5, 2.0)
    """

    share: float
    each_round: int | None = None

    def speedup(self, tokens_per_round: float, mean_draft_length: float) -> float:
        """Over plain decoding, if a round costs one reading of the target's weights and those of its passes.

        Args:
          tokens_per_round: of all rounds.
          mean_draft_length: draft tokens per round.
        """
        passes = mean_draft_length if self.each_round is None else self.each_round
        return tokens_per_round / (1 + passes * self.share)


def passes(lm: LanguageModel, method: Method, drafter: Drafter, params: Any) -> Passes | None:
    """What a method's drafts read; None where that depends on the text, or where nobody has said it.

    Args:
      lm: the target.
      method: whose drafts they are.
      drafter, params: what it made, see `LanguageModel.drafter`.

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
    each = 1 if draft.once else drafter.num_draft_tokens if drafter.drafts_trees else None
    return Passes(share_of_step(draft, lm.loaded), each)
