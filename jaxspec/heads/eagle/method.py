"""EAGLE-1 and EAGLE-3: a small head predicts the hidden states from which the next tokens follow."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.tree_method import TreeHeadMethod
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(TreeHeadMethod):
    """A one-layer head predicts the model's last hidden states (EAGLE-1, Li et al. 2024).

    The heads of EAGLE-2 are the same; with `tree` they draft its trees.

    Examples:
      >>> Eagle(draft="yuhuili/EAGLE-llama2-chat-7B")
      Eagle(draft='yuhuili/EAGLE-llama2-chat-7B')
    """

    name: ClassVar[str] = "eagle"
    needs: ClassVar[str] = "an EAGLE head: draft=DIR, or heads/eagle beside the model"
    may_pay: ClassVar[bool] = True

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of EAGLE."""
        from jaxspec.heads.eagle.drafter import EagleDrafter

        return EagleDrafter(target.config, head, *self.stopping())

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of a pass for each token, or of one over K rows with a head of P-EAGLE."""
        cost = super().cost(target, drafter, params)
        if "mask_hidden" not in params:
            return cost
        return dataclasses.replace(cost, once=True, rows=drafter.num_draft_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(Eagle):
    """A head reads some of the model's layers and predicts what follows (EAGLE-3, Li et al. 2025).

    A head of P-EAGLE is one too, and drafts all tokens in one pass.

    Examples:
      >>> Eagle3(draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", num_draft_tokens=7)
      Eagle3(num_draft_tokens=7, draft='yuhuili/EAGLE3-LLaMA3.1-Instruct-8B')
    """

    name: ClassVar[str] = "eagle3"
    needs: ClassVar[str] = "an EAGLE-3 head: draft=DIR, or heads/eagle3 beside the model"
