"""Medusa: heads that each predict one of the next tokens by itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.tree_method import SeveralHeads
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(SeveralHeads):
    """Several small heads, each of which predicts one of the next tokens by itself (Cai et al. 2024).

    Here they draft a chain, of each head's token, greedy or drawn from the head's distribution; with `tree` the
    combinations of the heads' likely tokens that are most probable together. The text keeps the model's own
    distribution, unlike with the authors' typical acceptance (`acceptor="typical"`, which is lossy).

    Examples:
      >>> Medusa(draft="FasterDecoding/medusa-vicuna-7b-v1.3", num_draft_tokens=3)
      Medusa(num_draft_tokens=3, draft='FasterDecoding/medusa-vicuna-7b-v1.3')
    """

    name: ClassVar[str] = "medusa"
    needs: ClassVar[str] = "heads of Medusa: draft=DIR, or heads/medusa beside the model"
    independent: ClassVar[bool] = True

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of heads of Medusa."""
        from jaxspec.heads.medusa.drafter import MedusaDrafter

        return MedusaDrafter(target.config, head, *self.stopping(usual=self.heads_of(head.num_heads)))
