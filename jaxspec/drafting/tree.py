"""What drafters share that draft a tree level by level: which nodes are worth it (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxspec.model.tree import Tree, along
from jaxspec.protocol import Proposal
from jaxspec.sampling import is_finite

Carry = TypeVar("Carry")
# (carry, tokens int32[B, k] of some rows of a tree, the row before each int32[B, k], these rows)
#   -> logits float32[B, k, V] of the token after each, [B, 1, V] where they are the same after all; carry
Level = Callable[[Carry, jax.Array, jax.Array, Tree], tuple[jax.Array, Carry]]


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """The size of a tree that follows the draft's probabilities.

    Attributes:
      num_nodes: N, the tokens that are verified.
      depth: the most of them one after the other.
      width: k, the nodes of a level that are drafted from, and the likely tokens after each that are tried.

    Examples:
      >>> Dynamic(num_nodes=8, depth=4, width=3).num_drafted
      9
    """

    num_nodes: int
    depth: int
    width: int

    @property
    def num_drafted(self) -> int:
        """How many nodes a draft model runs: k of each level but the last."""
        return (self.depth - 1) * self.width


def grow(
    size: Dynamic,
    level: Level[Carry],
    carry: Carry,
    logits: jax.Array,
    ids: jax.Array | None = None,
) -> tuple[Proposal, Carry]:
    """Grows a tree in each row of a batch, and keeps its N most probable nodes.

    A node's probability is the product of the draft's on its path. Of each level the k most probable nodes are drafted
    from, and the k likeliest tokens after each are candidates; of all candidates the N best are proposed. A node is
    never more probable than the one before it, and of equal ones the earlier is taken, so that what is kept is a tree.
    Its tokens are certain given the text, whatever the law that the text follows.

    Args:
      size: of the tree, static.
      level: runs the nodes of a level, which are rows of a tree whose row 0 is already there.
      carry: what it carries.
      logits: float32[B, V] of the token after row 0.
      ids: int32[V], the tokens that logits are of; None for all, in their order.

    Returns:
      The proposal, which has parents, and the carry.

    Examples:
      >>> def level(carry, tokens, before, tree):  # the next number is the most likely token, then the one after it
      ...     return 2.0 * jax.nn.one_hot(tokens + 1, 9) + jax.nn.one_hot(tokens + 2, 9), carry
      >>> first = 2.0 * jax.nn.one_hot(jnp.array([1]), 9) + jax.nn.one_hot(jnp.array([2]), 9)
      >>> proposal, _ = grow(Dynamic(3, depth=2, width=2), level, (), first)
      >>> proposal.tokens.tolist(), proposal.parents.tolist()
      ([[1, 2, 2]], [[-1, -1, 0]])
    """
    batch, vocab_size = logits.shape
    width = min(size.width, vocab_size)

    def likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and tokens of the best k after each, [B, ..., k]; impossible where a law is none."""
        sound = is_finite(logits)[..., None]
        scores, index = jax.lax.top_k(jax.nn.log_softmax(jnp.where(sound, logits, 0.0)), width)
        return jnp.where(sound, scores, -jnp.inf), index if ids is None else ids[index]

    scores, tokens = likeliest(logits)
    # Of all candidates: how probable, which token, and the candidate before it.
    every = [(scores, tokens, jnp.full((batch, width), -1, jnp.int32))]
    # Of the nodes that are drafted from: which candidate each is, and the node before it.
    parents = jnp.zeros((batch, 0), jnp.int32)
    frontier, before = jnp.broadcast_to(jnp.arange(width), (batch, width)), every[0][2]
    counted = width
    for number in range(size.depth - 1):
        parents = jnp.concatenate([parents, before], axis=1)
        rows = Tree.of(parents, number + 1).rows(1 + number * width, width)
        logits, carry = level(carry, tokens, rows.parent, rows)
        after, candidates = likeliest(logits)
        candidates = jnp.broadcast_to(candidates, (batch, width, width)).reshape(batch, -1)
        after = (scores[..., None] + after).reshape(batch, -1)
        every.append((after, candidates, jnp.repeat(frontier, width, axis=1)))
        scores, best = jax.lax.top_k(after, width)
        tokens = along(candidates, best)
        before = number * width + best // width
        frontier, counted = counted + best, counted + after.shape[1]
    scores, tokens, before = (jnp.concatenate(of, axis=1) for of in zip(*every, strict=True))
    most = min(size.num_nodes, counted)
    chosen = jnp.sort(jax.lax.top_k(scores, most)[1], axis=1)
    there = along(scores, chosen) > -jnp.inf
    parent = along(before, chosen)
    place = jnp.sum(chosen[:, None, :] < parent[:, :, None], axis=2)
    spare = ((0, 0), (0, size.num_nodes - most))
    drafts = jnp.pad(jnp.where(there, along(tokens, chosen), -1), spare, constant_values=-1)
    places = jnp.pad(jnp.where(parent < 0, -1, place), spare, constant_values=-1)
    return Proposal(drafts, jnp.full(batch, most, jnp.int32), parents=places), carry
