"""What the methods share whose heads draft a chain or a tree."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxspec.methods.base import LoadedModel, Resources
from jaxspec.methods.heads import HeadMethod
from jaxspec.methods.trees import TreeMethod, size_of

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter

# The most nodes of a level that are drafted from, and of tokens that are tried after each, as in EAGLE-2.
WIDTH = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeHeadMethod(TreeMethod, HeadMethod):
    """The base of methods whose head drafts a chain, or the tree of its most probable tokens (EAGLE-2, Li et al. 2024).

    Examples:
      >>> from jaxspec.methods import Eagle3
      >>> Eagle3(draft="head", tree="60x8")
      Eagle3(draft='head', tree='60x8')
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None and self.stop_rule:
            raise ValueError("stop_rule ends chains, and tree asks for a tree; give one of them")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns what is done where an option is left out, by option."""
        return {**super().usual(), "tree": "a chain"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are the head's."""
        drafter, params = super().build(target, resources)
        if self.tree is None:
            return drafter, params
        from jaxspec.drafting.eagle import Eagle as Drafting
        from jaxspec.drafting.tree import Dynamic

        assert isinstance(drafter, Drafting)
        nodes, depth = size_of(self.tree)
        size = Dynamic(nodes, depth, min(nodes, WIDTH))
        return dataclasses.replace(drafter, num_draft_tokens=depth, tree=size), params
