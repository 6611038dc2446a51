"""DFlash: a head that drafts a whole block in one pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.method import HeadMethod
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash(HeadMethod):
    """A few layers read several of the model's layers and draft a whole block in one pass (Chen et al. 2026).

    A draft costs one pass however long it is. Its tokens do not know each other.

    Examples:
      >>> DFlash(draft="z-lab/Qwen3-8B-DFlash-b16", num_draft_tokens=7)
      DFlash(num_draft_tokens=7, draft='z-lab/Qwen3-8B-DFlash-b16')
    """

    name: ClassVar[str] = "dflash"
    needs: ClassVar[str] = "a head of DFlash: draft=DIR, or heads/dflash beside the model"

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return super().usual() | {"num_draft_tokens": "the head's block less the pending token"}

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of DFlash."""
        from jaxspec.heads.dflash.drafter import DFlash as Drafting

        most = head.block_size - 1
        rule, length = self.stopping(usual=most)
        if length > most:
            raise ValueError(
                f"num_draft_tokens is {length}; the head was trained for blocks of {head.block_size} tokens, give 1 to "
                f"{most}"
            )
        return Drafting(target.config, head, rule, length)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of one pass of the head for a whole block."""
        return dataclasses.replace(super().cost(target, drafter, params), once=True)
