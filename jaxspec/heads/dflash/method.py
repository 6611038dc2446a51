"""DFlash: a head that drafts a whole block in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.tree_method import TreeHeadMethod
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.protocol import Drafter
    from jaxspec.stopping import Estimate


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash(TreeHeadMethod):
    """A few layers read several of the model's layers and draft a whole block in one pass (Chen et al. 2026).

    A draft costs one pass however long it is. Its tokens do not know each other. With `tree` the draft is the tree of
    their most probable combinations (DDTree, Ringel and Romano 2026).

    Examples:
      >>> DFlash(draft="z-lab/Qwen3-8B-DFlash-b16", num_draft_tokens=7)
      DFlash(num_draft_tokens=7, draft='z-lab/Qwen3-8B-DFlash-b16')
    """

    name: ClassVar[str] = "dflash"
    needs: ClassVar[str] = "a head of DFlash: draft=DIR, or heads/dflash beside the model"
    independent: ClassVar[bool] = True

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return super().usual() | {"num_draft_tokens": "the tokens that the head's block drafts"}

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of DFlash."""
        from jaxspec.heads.dflash.drafter import DFlashDrafter

        return DFlashDrafter(target.config, head, *self.block(head))

    def most(self, head: Any) -> int:
        """Returns the number of tokens that a block of the head drafts."""
        return int(head.longest)

    def block(self, head: Any, probe: Callable[[], Estimate] | None = None) -> tuple[Any, ...]:
        """Returns the stop rule, K and the tree; raises ValueError if the head's blocks are shorter."""
        reason = f"the head was trained for blocks of {head.block_size} tokens"
        return self.stopping(probe, usual=self.length_of(head.longest, reason))

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of one pass of the head over a block: the pending token and K mask tokens."""
        rows = drafter.num_draft_tokens + 1
        return dataclasses.replace(super().cost(target, drafter, params), once=True, rows=rows)
