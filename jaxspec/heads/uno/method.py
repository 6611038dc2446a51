"""Uno: the model itself drafts a block in one pass, with a LoRA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.tree_method import TreeHeadMethod
from jaxspec.methods.base import layers_of
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uno(TreeHeadMethod):
    """The model drafts a block for itself in one pass, with a LoRA on the rows of noise tokens (Uno, 2026).

    A round is two passes of the model: one drafts K tokens, of which the first is always accepted, one verifies them.

    Examples:
      >>> Uno(draft="s-sahoo/uno-qwen3-8B", num_draft_tokens=8)
      Uno(num_draft_tokens=8, draft='s-sahoo/uno-qwen3-8B')
    """

    name: ClassVar[str] = "uno"
    needs: ClassVar[str] = "an adapter of Uno: draft=DIR, or heads/uno beside the model"

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the default of each option as text, by option."""
        return super().usual() | {"num_draft_tokens": "8"}

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of an adapter of Uno."""
        from jaxspec.heads.uno.drafter import Uno as Drafting

        return Drafting(target.config, head, *self.stopping(usual=8))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of one pass of the model and the adapters over a whole block."""
        layers = target.config.num_layers + layers_of(params["layers"], target)
        drawn = super().cost(target, drafter, params)
        return dataclasses.replace(
            drawn, layers=layers, once=True, rows=drafter.num_draft_tokens, absorb_layers=0.0
        )
