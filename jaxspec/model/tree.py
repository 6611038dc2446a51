"""Trees of draft tokens: which rows of a verification see each other, where they stand, and paths through them.

R rows: row 0 is the pending token, row i + 1 draft token i, a node. Rows lie one after the other in the cache, from the
pending token's slot on; a row's *position*, by which it is rotated, is the pending token's plus its depth.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shape:
    """A tree that is the same in all rows and rounds.

    Attributes:
      parents: by node: the node that it follows, an earlier one, or −1 for the pending token.
      ranks: by node: which of the likely tokens after that one it is, from 0; () where nobody asks.

    Raises:
      ValueError: a node does not stand after the one that it follows.

    Examples:
      >>> shape = Shape((-1, -1, 0, 2), (0, 1, 0, 0))
      >>> shape.depths, shape.depth
      ((1, 1, 2, 3), 3)
      >>> shape.num_nodes, shape.most_siblings
      (4, 2)
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} of a tree follows node {parent}; give -1 or an earlier one")
        if self.ranks and len(self.ranks) != len(self.parents):
            raise ValueError(
                f"a tree has {len(self.parents)} nodes and {len(self.ranks)} ranks; give a rank for each node"
            )

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """By node: how many tokens it stands after the pending one, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The largest of `depths`; 0 without nodes."""
        return max(self.depths, default=0)

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parents)

    @property
    def most_siblings(self) -> int:
        """The most nodes that follow the same one."""
        return max(map(self.parents.count, self.parents), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))


# A tree of all rows of a batch, or of each: int32[B, N], by node the one that it follows, −1 for the pending token.
Parents = Shape | jax.Array


@struct.dataclass
class Tree:
    """The tree of each row of a batch, or some rows of it; the first axis is 1 where all have the same.

    Attributes:
      parent: int32[B, T], the row before each; that of row 0 is 0.
      depth: int32[B, T], how many rows before each, 0 to the depth of the tree.
      behind: bool[B, T, R], whether row j of the whole tree is row i or on the path to it.
      depths: int32[B, R], of the whole tree.
      begin: which row of the whole tree is the first of these, static.

    Examples:
      >>> tree = Tree.of(Shape((-1, -1, 0)), most=2)
      >>> tree.depth.tolist(), tree.behind[0, 3].tolist()
      ([[0, 1, 1, 2]], [True, True, False, True])
    """

    parent: jax.Array
    depth: jax.Array
    behind: jax.Array
    depths: jax.Array
    begin: int = struct.field(pytree_node=False, default=0)

    @classmethod
    def of(cls, parents: Parents, most: int) -> Tree:
        """Returns the tree of N nodes, each after those it follows, of depth `most` or less."""
        nodes = jnp.array([parents.parents], jnp.int32) if isinstance(parents, Shape) else parents
        parent = jnp.pad(nodes + 1, ((0, 0), (1, 0)))
        rows = jnp.arange(parent.shape[1])
        at = jnp.broadcast_to(rows, parent.shape)
        depth, behind = jnp.zeros_like(parent), at[..., None] == rows
        for _ in range(most):
            depth += at > 0
            at = jnp.take_along_axis(parent, at, axis=1)
            behind |= at[..., None] == rows
        return cls(parent, depth, behind, depth)

    @classmethod
    def block(cls, count: int) -> Tree:
        """Returns `count` rows one after the other that all see each other: no tree, but told in its words.

        Examples:
          >>> Tree.block(3).behind.all().item(), Tree.block(3).positions(jnp.array([7])).tolist()
          (True, [[7, 8, 9]])
        """
        place = jnp.arange(count)[None]
        return cls(jnp.maximum(place - 1, 0), place, jnp.ones((1, count, count), bool), place)

    def rows(self, begin: int, count: int) -> Tree:
        """Returns some of a whole tree's rows; the others are in the cache, as far as these see them."""
        cut = slice(begin, begin + count)
        return Tree(self.parent[:, cut], self.depth[:, cut], self.behind[:, cut], self.depths, begin)

    def positions(self, start: jax.Array) -> jax.Array:
        """Returns where each row stands, int32[B, T], the first of them in slot `start`, int32[B]."""
        return start[:, None] - self.begin + self.depth

    def visible(self, start: jax.Array, slots: int, window: int | None) -> jax.Array:
        """Returns which of a cache's slots each row sees, bool[B, T, slots].

        Args:
          start: int32[B], the slot of the first row.
          slots: of a row of the cache.
          window: how many latest positions are seen, None for all.
        """
        batch, rows = start.shape[0], self.depths.shape[1]
        depth, behind, depths = (
            jnp.broadcast_to(of, (batch, *of.shape[1:])) for of in (self.depth, self.behind, self.depths)
        )
        # By slot: how far it is from that of row 0.
        offset = jnp.arange(slots)[None] - (start - self.begin)[:, None]
        of_row = jnp.clip(offset, 0, rows - 1)
        within = (offset >= 0) & (offset < rows)
        on_path = jnp.take_along_axis(behind, of_row[:, None], axis=2) & within[:, None]
        mask = (offset < 0)[:, None] | on_path
        if window is None:
            return mask
        place = jnp.where(within, jnp.take_along_axis(depths, of_row, axis=1), offset)
        return mask & (depth[:, :, None] - place[:, None] < window)


def along(rows: jax.Array, path: jax.Array) -> jax.Array:
    """Returns what [B, R, ...] holds of the rows of a path int32[B, P], in its order, [B, P, ...].

    Examples:
      >>> along(jnp.array([[5, 6, 7, 8]]), jnp.array([[0, 2]])).tolist()
      [[5, 7]]
    """
    return jax.vmap(functools.partial(jnp.take, axis=0))(rows, path)
