"""What drafters share that draft a tree level by level: its likeliest tokens (EAGLE-2, Li et al. 2024), or drawn ones.

Drawn tokens: siblings are drawn from the draft's law without replacement, as in Sequoia (Chen et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.tree import Shape, Tree, along
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.protocol import Proposal
from jaxspec.sampling import Law, is_finite

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


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The shape of a tree whose tokens are drawn from the draft's law.

    Attributes:
      shape: the same in all rows and rounds; siblings are drawn in the order of their numbers.

    Examples:
      >>> tree = Drawn(Shape((-1, -1, 0, 2)))
      >>> tree.num_nodes, tree.depth, tree.num_drafted
      (4, 3, 2)
    """

    shape: Shape

    @property
    def num_nodes(self) -> int:
        """N, the tokens that are verified."""
        return self.shape.num_nodes

    @property
    def depth(self) -> int:
        """The most of them one after the other."""
        return self.shape.depth

    @property
    def num_drafted(self) -> int:
        """How many nodes a draft model runs: those that others follow."""
        return len(set(self.shape.parents) - {-1})


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


def draw(
    shape: Shape,
    level: Level[Carry],
    carry: Carry,
    logits: jax.Array,
    keys: jax.Array,
    law: Law,
    vocabulary: Vocabulary | None = None,
) -> tuple[Proposal, Carry]:
    """Draws a tree of a given shape: the nodes after each from the draft's law there, without replacement.

    Of a law with fewer tokens than a node has places after it, the last of them stay empty; so do those after an empty
    one, and those after a token where the draft's logits are not finite.

    Args:
      shape: of the tree, static; its nodes stand in the order of their depths.
      level, carry, logits: as of `grow`; of each level, those nodes are run that others follow.
      keys: per-row keys [B].
      law: what tokens are drawn from.
      vocabulary: the tokens of which logits are; None for all.

    Returns:
      The proposal, which has parents and log-probabilities, and the carry.

    Examples:
      >>> from jaxspec.sampling import Sampling
      >>> def level(carry, tokens, before, tree):
      ...     return jax.nn.one_hot(tokens, 3), carry
      >>> keys, law = jax.random.split(jax.random.key(0), 1), Sampling(jnp.ones(1))
      >>> proposal, _ = draw(Shape((-1, -1, -1, 0)), level, (), jnp.zeros((1, 3)), keys, law)
      >>> sorted(proposal.tokens[0, :3].tolist())
      [0, 1, 2]
      >>> jnp.exp(proposal.log_probs[0, 2]).max().item()
      1.0
    """
    batch, parents, depths = logits.shape[0], shape.parents, np.array(shape.depths)
    ranks = np.array([parents[:node].count(before) for node, before in enumerate(parents)])
    # What a draft model runs: row 0, and the nodes that others follow.
    inner = sorted({-1, *parents})
    whole = Tree.of(Shape(tuple(inner.index(parents[node]) - 1 for node in inner[1:])), shape.depth)
    logits, there = logits[:, None], jnp.ones((batch, 1), bool)
    tokens, laws = jnp.zeros((batch, 0), jnp.int32), []
    for depth in range(1, shape.depth + 1):
        nodes = np.flatnonzero(depths == depth)
        before = sorted({parents[node] for node in nodes})
        if depth > 1:
            fed = tokens[:, np.array(before)]
            there, fed = fed >= 0, jnp.maximum(fed, 0)
            rows = whole.rows(inner.index(before[0]), len(before))
            logits, carry = level(carry, fed, jnp.broadcast_to(rows.parent, fed.shape), rows)
        logits = jnp.broadcast_to(logits, (batch, len(before), logits.shape[-1]))
        sound = there & is_finite(logits)
        logits = jnp.where(sound[..., None], logits, 0.0)
        slots = np.array([before.index(parents[node]) for node in nodes])
        streams = jax.vmap(jax.random.fold_in, (0, None))(keys, depth)
        drawn, log_probs = _drawn(law, streams, logits, slots, ranks[nodes])
        there = (drawn >= 0) & sound[:, slots]
        if vocabulary is not None:
            drawn, log_probs = vocabulary.ids[drawn], vocabulary.spread(log_probs)
        tokens = jnp.concatenate([tokens, jnp.where(there, drawn, -1)], axis=1)
        laws.append(log_probs)
    count = jnp.full(batch, len(parents), jnp.int32)
    return Proposal(tokens, count, jnp.concatenate(laws, axis=1), parents=shape), carry


def _drawn(
    law: Law, keys: jax.Array, logits: jax.Array, slots: np.ndarray, ranks: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Draws tokens from M laws without replacement: one of rank ranks[n] from law slots[n].

    Gumbel's noise on log-probabilities: the largest sums are such draws, in their order (Kool et al. 2019).

    Returns:
      int32[B, n], −1 where no token is left, and the law of each given those of lower ranks, float32[B, n, V].
    """
    log_probs = law.log_probs(logits)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    most = int(ranks.max()) + 1
    best, index = jax.lax.top_k(log_probs + noise, min(most, logits.shape[-1]))
    spare = ((0, 0), (0, 0), (0, most - best.shape[-1]))
    index = jnp.where(jnp.pad(best, spare, constant_values=-jnp.inf) > -jnp.inf, jnp.pad(index, spare), -1)
    every, left = jnp.arange(logits.shape[-1]), log_probs[:, slots]
    for rank in range(most - 1):
        taken = (index[:, slots, rank, None] == every) & (ranks > rank)[:, None]
        left = jnp.where(taken, -jnp.inf, left)
    total = jax.scipy.special.logsumexp(left, axis=-1, keepdims=True)
    return index[:, slots, ranks], left - jnp.where(total > -jnp.inf, total, 0.0)
