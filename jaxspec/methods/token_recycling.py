"""Token Recycling (Luo et al. 2024): drafts made of what the model held likely before."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.resources import LoadedModel, Resources
from jaxspec.methods.trees import TreeMethod

if TYPE_CHECKING:
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.protocol import Drafter

# Tokens kept after each, as in the paper.
NUM_LIKELY = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRecycling(TreeMethod):
    """A tree of what the model last held likely after each token (Luo et al. 2024).

    Nothing is trained or loaded. Each text begins with a plain step, and learns from every draft, rejected ones too.

    Examples:
      >>> TokenRecycling(tree="large")
      TokenRecycling(tree='large')
    """

    name: ClassVar[str] = "token-recycling"

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return {"num_draft_tokens": "the depth of the tree", "tree": "small on a CPU, else large"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; it has no parameters."""
        from jaxspec.drafting.token_recycling import TokenRecycling as Drafting

        kept = min(NUM_LIKELY, target.config.vocab_size)
        usual = "small" if resources.platform == "cpu" else "large"
        return Drafting(self.shape(usual, kept), kept), None

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns a look-up."""
        from jaxspec.choosing.costs import DraftCost

        return DraftCost(lookup=True)
