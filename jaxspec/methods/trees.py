"""The common options of methods that draft a tree, and named tree shapes."""

from __future__ import annotations

import dataclasses
import heapq
import re
from typing import TYPE_CHECKING

from jaxspec.host.messages import shown
from jaxspec.methods.base import MAX_DRAFT_TOKENS, DraftingMethod, Method, option

if TYPE_CHECKING:
    from jaxspec.methods.resources import LoadedModel, Resources
    from jaxspec.model.tree import Shape

# (nodes, depth) of the named trees.
NAMED = {"small": (8, 4), "medium": (26, 5), "large": (80, 6)}
# The assumed probability that the target's token has a rank, from 0, is SHARE ÷ (rank + 1)². A tree of 80 nodes then
# has about as many nodes per depth as Token Recycling's (8, 21, 25, 15, 8, 3; here 8, 21, 25, 19, 6, 1).
SHARE = 0.46


def grown(num_nodes: int, depth: int, num_ranks: int) -> Shape:
    """Returns the tree of the nodes with the highest acceptance probability, ordered by depth.

    Args:
      num_nodes: N, at least `depth`.
      depth: depth of the tree.
      num_ranks: the maximum number of children of a node.
    """
    from jaxspec.model.tree import Shape

    # The path of first ranks is always included, so that the tree has the requested depth.
    paths = [(0,) * length for length in range(1, depth + 1)]
    candidates: list[tuple[float, tuple[int, ...]]] = [(-SHARE, (0,))]
    chosen = set(paths)
    while candidates and len(chosen) < num_nodes:
        chance, path = heapq.heappop(candidates)
        chosen.add(path)
        # Adding the next sibling and the first child reaches every path exactly once.
        before, rank = path[:-1], path[-1]
        if rank + 1 < num_ranks:
            sibling = (*before, rank + 1)
            heapq.heappush(candidates, (chance * ((rank + 1) / (rank + 2)) ** 2, sibling))
        if len(path) < depth:
            heapq.heappush(candidates, (chance * SHARE, (*path, 0)))
    ordered = sorted(chosen, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate(ordered)}
    parents = tuple(number.get(path[:-1], -1) for path in ordered)
    return Shape(parents, tuple(path[-1] for path in ordered))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeMethod(DraftingMethod):
    """The base of methods that draft a tree.

    Attributes:
      tree: draft a tree: small (8 tokens, depth 4), medium (26x5), large (80x6), or any TOKENSxDEPTH.
      no_tree: draft a chain.
    """

    tree: str | None = option(None, metavar="NAME|NxD")
    no_tree: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is None:
            return
        size_of(self.tree)
        for name in ("no_tree", "num_draft_tokens"):
            if name in self.given:
                raise ValueError(f"tree={self.tree!r} and {name} contradict each other; give one of them")

    def limited(self, longest: int, target: LoadedModel, resources: Resources) -> Method:
        """Returns the method with this K, unless a tree is given, whose depth is K."""
        return self if self.tree is not None else super().limited(longest, target, resources)

    def shape(self, usual: str, num_ranks: int) -> Shape:
        """Returns the shape of the draft tree.

        Args:
          usual: the name of the default tree, whose depth `num_draft_tokens` replaces.
          num_ranks: the maximum number of children of a node.
        """
        nodes, depth = size_of(self.tree or usual)
        depth = self.length(depth)
        return grown(depth if self.no_tree else max(nodes, depth), depth, num_ranks)


def size_of(tree: str) -> tuple[int, int]:
    """Returns nodes and depth of a tree option.

    Raises:
      ValueError: it is neither a name nor a valid size.
    """
    if tree in NAMED:
        return NAMED[tree]
    size = re.fullmatch(r"(\d+)x(\d+)", tree)
    if size is None:
        raise ValueError(f"tree is {shown(tree)}; give {', '.join(NAMED)} or TOKENSxDEPTH, such as 8x4")
    nodes, depth = map(int, size.groups())
    if not 1 <= depth <= nodes <= MAX_DRAFT_TOKENS:
        raise ValueError(f"tree is {shown(tree)}; give 1 <= DEPTH <= TOKENS <= {MAX_DRAFT_TOKENS}")
    return nodes, depth
