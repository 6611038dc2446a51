"""What the methods share whose heads draft a chain or a tree."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.heads.method import HeadMethod
from jaxspec.methods.base import MAX_DRAFT_TOKENS, Method
from jaxspec.methods.resources import LoadedHead, LoadedModel, Resources
from jaxspec.methods.trees import TreeMethod, grown, size_of

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.model.llama import Params
    from jaxspec.protocol import Drafter

# The most nodes of a level that are drafted from, and of tokens that are tried after each, as in EAGLE-2.
WIDTH = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeHeadMethod(TreeMethod, HeadMethod):
    """The base of methods whose heads draft a chain, or the tree of their most probable tokens, as EAGLE-2 does.

    Attributes:
      drawn_tree: at a temperature above 0, draw the tokens of the tree from the draft's distribution, siblings without
        replacement, instead of taking the most likely ones. At high temperatures more of them are accepted. The text
        keeps the model's distribution, but differs from the text of plain sampling with the same seed.

    Class attributes:
      independent: whether the tokens of a draft do not know each other. The whole tree then takes one pass, and has the
        most probable of all combinations.
    """

    independent: ClassVar[bool] = False

    drawn_tree: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drawn_tree and self.tree is None:
            raise ValueError("drawn_tree draws the tokens of a tree; give tree=TOKENSxDEPTH, such as 8x4")
        if self.tree is not None and self.stop_rule:
            raise ValueError("stop_rule applies to chains only; give stop_rule or tree, not both")

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the default of each option as text, by option."""
        return {**super().usual(), "tree": "a chain"}

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are the head's."""
        drafter, params = super().build(target, resources)
        if self.tree is None:
            return drafter, params
        from jaxspec.drafting.tree_drafter import Drawn, Dynamic

        nodes, depth = size_of(self.tree)
        made: Any = drafter
        tree: Drawn | Dynamic = Dynamic(nodes, depth, nodes if self.independent else min(nodes, WIDTH))
        # Draws from a point mass are all equal, so at temperature 0 a drawn tree would be a chain.
        if self.drawn_tree and set(resources.distributions) != {"greedy"}:
            tree = Drawn(grown(nodes, depth, WIDTH))
        return dataclasses.replace(made, num_draft_tokens=depth, tree=tree), params

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of the head; on each level of a tree it runs the nodes that are drafted from."""
        rows = 1 if self.tree is None or self.independent else min(size_of(self.tree)[0], WIDTH)
        return dataclasses.replace(super().cost(target, drafter, params), rows=rows)

    def most(self, head: Any) -> int:
        """Returns the largest K of a head, given its config."""
        return MAX_DRAFT_TOKENS

    def limited(self, longest: int, target: LoadedModel, resources: Resources) -> Method:
        """Returns the method with this K, or the head's largest if that is less, unless K is given."""
        most = self.most(self._head(target, resources).config)
        return super().limited(min(longest, most), target, resources)

    def length_of(self, most: int, reason: str) -> int:
        """Returns K: as given, or the depth of the tree that is, else `most`.

        Args:
          most: the largest K.
          reason: why it is, such as "the file has 5 heads".

        Raises:
          ValueError: K is larger; one line.
        """
        if self.tree is not None:
            depth = size_of(self.tree)[1]
            if depth > most:
                raise ValueError(
                    f"tree is {self.tree!r}, {depth} tokens one after the other; {reason}, give TOKENSxDEPTH of a "
                    f"depth from 1 to {most}"
                )
            return depth
        length = self.length(most)
        if length > most:
            raise ValueError(f"num_draft_tokens is {length}; {reason}, give 1 to {most}")
        return length


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralHeads(TreeHeadMethod):
    """The base of methods with one head for each draft token."""

    @classmethod
    def usual(cls) -> dict[str, str]:
        """Returns the default of each option as text, by option."""
        return super().usual() | {"num_draft_tokens": "the number of heads"}

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns all heads as one pass: each is read once for a draft, as long as it may be."""
        return dataclasses.replace(super().cost(target, drafter, params), once=True)

    def most(self, head: Any) -> int:
        """Returns the number of heads."""
        return int(head.num_heads)

    def heads_of(self, num_heads: int) -> int:
        """Returns K, see `length_of`; there is a head for each token."""
        return self.length_of(num_heads, f"the file has {num_heads} heads")

    def _params(self, head: LoadedHead, target: LoadedModel, resources: Resources) -> Params:
        """Returns the parameters of the heads that draft."""
        own = dict(super()._params(head, target, resources))
        own["heads"] = own["heads"][: self.heads_of(len(own["heads"]))]
        return own
