"""Trees of draft tokens: visibility, positions and paths of the rows of a verification.

A tree has R rows: row 0 is the pending token, row i + 1 is draft token i, a node. Rows have consecutive cache slots
from the pending token's on. A row's *position*, by which it is rotated, is the pending token's plus the row's depth.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shape:
    """A static tree, the same for all rows of a batch and all rounds.

    Attributes:
      parents: the parent of each node, an earlier node, or −1 for the pending token.
      ranks: the rank of each node among the top-k tokens after its parent, from 0; () if unused.

    Raises:
      ValueError: a node does not come after its parent, or the numbers of parents and ranks differ.

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
        """The depth of each node, from 1: its distance from the pending token."""
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
        """N, the number of nodes."""
        return len(self.parents)

    @property
    def most_siblings(self) -> int:
        """The largest number of nodes with the same parent."""
        return max(map(self.parents.count, self.parents), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether the parent of each node is the node before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))


# One tree for all rows of a batch, or the parents of the nodes in each, int32[B, N]; −1 is the pending token.
Parents = Shape | jax.Array


@struct.dataclass
class Tree:
    """The tree of each row of a batch, or T consecutive rows of it; B is 1 if all trees are equal.

    Attributes:
      parent: int32[B, T], the parent row of each row; that of row 0 is 0.
      depth: int32[B, T], the depth of each row, 0 for row 0.
      behind: bool[B, T, R], whether row j of the whole tree is row i or an ancestor of it.
      depths: int32[B, R], the depths of all rows of the whole tree.
      begin: the index in the whole tree of the first of these rows, static.
    """

    parent: jax.Array
    depth: jax.Array
    behind: jax.Array
    depths: jax.Array
    begin: int = struct.field(pytree_node=False, default=0)

    @classmethod
    def from_parents(cls, parents: Parents, most: int) -> Tree:
        """Returns the tree of N nodes, each after its parent; `most` is at least its depth."""
        # A static tree is computed now, not in each round.
        static = isinstance(parents, Shape)
        xp: Any = np if static else jnp
        step = np.take_along_axis if static else functools.partial(jnp.take_along_axis, mode="clip")
        parent = xp.pad(as_array(parents) + 1, ((0, 0), (1, 0)))
        rows = np.arange(parent.shape[1])
        at = xp.broadcast_to(rows, parent.shape)
        depth, behind = xp.zeros_like(parent), at[..., None] == rows
        # Each iteration moves one step up from every row at once and marks the ancestor reached.
        for _ in range(most):
            depth, at = depth + (at > 0), step(parent, at, axis=1)
            behind = behind | (at[..., None] == rows)
        parent, depth, behind = map(jnp.asarray, (parent, depth, behind))
        return cls(parent, depth, behind, depth)

    def rows(self, begin: int, count: int) -> Tree:
        """Returns `count` rows of a whole tree; the cache must contain the other rows that these see."""
        cut = slice(begin, begin + count)
        return Tree(self.parent[:, cut], self.depth[:, cut], self.behind[:, cut], self.depths, begin)

    def first(self, count: int) -> Tree:
        """Returns the first `count` rows of a whole tree as a whole tree."""
        rows = self.rows(0, count)
        return dataclasses.replace(rows, behind=rows.behind[:, :, :count], depths=rows.depth)

    def positions(self, start: jax.Array) -> jax.Array:
        """Returns the position of each row, int32[B, T]; `start`, int32[B], is the slot of the first."""
        return start[:, None] - self.begin + self.depth

    def places(self, start: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the position of each cache slot, int32[B, S]; `start` and `slots` are as in `visible`."""
        of_row, within, depths = self._rows_at(start, slots, self.depths)
        return jnp.where(
            within, (start - self.begin)[:, None] + jnp.take_along_axis(depths, of_row, 1), slots
        )

    def visible(self, start: jax.Array, slots: jax.Array, window: int | None) -> jax.Array:
        """Returns the mask of the cache slots that each row sees, bool[B, T, S].

        Args:
          start: int32[B], the slot of the first row.
          slots: int32[B, S] or [1, S], the slots of a layer, see `KVCache.held`.
          window: the attention window in positions, None for all.
        """
        of_row, within, behind = self._rows_at(start, slots, self.behind)
        before = slots < (start - self.begin)[:, None]
        # A row sees all of the committed text, and in the tree its ancestors only.
        on_path = jnp.take_along_axis(behind, of_row[:, None], axis=2, mode="clip") & within[:, None]
        mask = before[:, None] | on_path
        if window is None:
            return mask
        # A window counts positions, and the position of a tree's row follows its depth, not its slot.
        return mask & (self.positions(start)[:, :, None] - self.places(start, slots)[:, None] < window)

    def _rows_at(
        self, start: jax.Array, slots: jax.Array, of: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the row of the tree in each slot and whether it has one, [B, S], and `of` for all B rows."""
        rows = self.depths.shape[1]
        offset = slots - (start - self.begin)[:, None]
        within = (offset >= 0) & (offset < rows)
        return jnp.clip(offset, 0, rows - 1), within, jnp.broadcast_to(of, (start.shape[0], *of.shape[1:]))


def as_array(parents: Parents) -> Any:
    """Returns the parents of the nodes, int32[B, N]; for a `Shape` of NumPy, [1, N]."""
    return np.array([parents.parents], np.int32) if isinstance(parents, Shape) else parents


def along(rows: jax.Array, path: jax.Array) -> jax.Array:
    """Returns the entries of rows [B, R, ...] along a path int32[B, P], in its order, [B, P, ...]."""
    return jax.vmap(functools.partial(jnp.take, axis=0, mode="clip"))(rows, path)
