"""Uno: the model itself drafts a block in one pass, with a LoRA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.tree_method import TreeHeadMethod
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uno(TreeHeadMethod):
    """The model drafts a block for itself in one pass, with a LoRA on the rows of noise tokens (Uno, 2026).

    A round is two passes of the model: one drafts K tokens, of which the first is always accepted, one verifies them.

    Attributes:
      single_pass: draft the next K tokens within the verification, in (K + 1)² rows: one pass in place of two. It pays
        where rows are nearly free.

    Examples:
      >>> Uno(draft="s-sahoo/uno-qwen3-8B", num_draft_tokens=8)
      Uno(num_draft_tokens=8, draft='s-sahoo/uno-qwen3-8B')
    """

    name: ClassVar[str] = "uno"
    needs: ClassVar[str] = "an adapter of Uno: draft=DIR, or heads/uno beside the model"
    independent: ClassVar[bool] = True

    single_pass: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.single_pass and self.tree is not None:
            raise ValueError("single_pass drafts a chain; give single_pass or tree, not both")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the default of each option as text, by option."""
        return super().usual() | {"num_draft_tokens": "8"}

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of an adapter of Uno."""
        from jaxspec.heads.uno.drafter import UnoDrafter, UnoSinglePassDrafter

        made = UnoSinglePassDrafter if self.single_pass else UnoDrafter
        return made(target.config, head, *self.stopping(usual=8))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of one pass of the model, the adapters and a head over a block.

        In a single pass the model runs in the verification. The draft's logits still take a head of their own.
        """
        once = dataclasses.replace(
            super().cost(target, drafter, params),
            once=True,
            rows=drafter.num_draft_tokens,
            absorb_layers=0.0,
        )
        if self.single_pass:
            return dataclasses.replace(once, widths=(drafter.reach,))
        return dataclasses.replace(once, layers=target.config.num_layers + once.layers)
