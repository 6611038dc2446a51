"""Token Recycling (Luo et al. 2024): drafts from the top-k target tokens of earlier steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import Lookup, Method
from jaxspec.methods.resources import LoadedModel, Resources
from jaxspec.methods.trees import TreeMethod, size_of

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter

# Top-k target tokens kept after each token, as in the paper.
NUM_LIKELY = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRecycling(Lookup, TreeMethod):
    """A tree of the last top-k target tokens after each token (Luo et al. 2024).

    Needs no training and no files. Each text begins with a plain step; the stored tokens are updated from every draft,
    including rejected tokens.

    Examples:
      >>> TokenRecycling(tree="large")
      TokenRecycling(tree='large')
    """

    name: ClassVar[str] = "token-recycling"

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the description of the default, by option."""
        return {"num_draft_tokens": "the depth of the tree", "tree": "small on a CPU, otherwise large"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; it has no parameters."""
        from jaxspec.drafting.token_recycling_drafter import TokenRecyclingDrafter

        kept = min(NUM_LIKELY, target.config.vocab_size)
        return TokenRecyclingDrafter(self.shape(_usual(resources), kept), kept), None

    def limited(self, longest: int, target: LoadedModel, resources: Resources) -> Method:
        """Returns the method with this K if it drafts a chain, or if its usual tree is deeper."""
        if self.no_tree or longest < size_of(_usual(resources))[1]:
            return super().limited(longest, target, resources)
        return self


def _usual(resources: Resources) -> str:
    return "small" if resources.platform == "cpu" else "large"
