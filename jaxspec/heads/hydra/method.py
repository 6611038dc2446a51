"""Hydra and Hydra++: heads that each predict one of the next tokens, given those before it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.tree_method import SeveralHeads
from jaxspec.methods.resources import LoadedModel

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hydra(SeveralHeads):
    """Several small heads, each of which also reads what was drafted before it (Hydra, Hydra++, Ankner et al. 2024).

    Which of both the heads are is told by their file. Here they draft a chain; with `tree` the most probable tree.

    Examples:
      >>> Hydra(draft="ankner/hydra-vicuna-7b-v1.3")
      Hydra(draft='ankner/hydra-vicuna-7b-v1.3')
    """

    name: ClassVar[str] = "hydra"
    needs: ClassVar[str] = "heads of Hydra: draft=DIR, or heads/hydra beside the model"

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of heads of Hydra."""
        from jaxspec.heads.hydra.drafter import HydraDrafter

        return HydraDrafter(target.config, head, *self.stopping(usual=self.heads_of(head.num_heads)))
