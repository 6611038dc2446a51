"""Trees drafted level by level, from top-k tokens or from drawn tokens.

`grow` keeps the most probable nodes, as EAGLE-2 (Li et al. 2024). `combine` does so for positions that do not know each
other, whose logits are all known before, as DDTree (arXiv 2604.12989). `draw` draws siblings from the draft's sampling
distribution without replacement, as Sequoia (Chen et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.allowed_tokens import Grammars
from jaxspec.model.tree import Shape, Tree, along
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.protocol import Proposal
from jaxspec.sampling import Distribution, is_finite

Carry = TypeVar("Carry")
# Log-probabilities and tokens of the k most probable tokens after each row of a level, [B, R, k]; R is 1 if they are
# the same after all rows.
Top = tuple[jax.Array, jax.Array]
# (carry, tokens int32[B, k] of k rows of a tree, the parent row of each int32[B, k], these rows)
#   -> logits float32[B, k, V] of the token after each, or [B, 1, V] if they are the same after all; carry
Level = Callable[[Carry, jax.Array, jax.Array, Tree], tuple[jax.Array, Carry]]


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """The size of a tree whose shape follows the draft's probabilities.

    Attributes:
      num_nodes: N, the number of verified draft tokens.
      depth: the maximum depth of a node.
      width: k, the number of nodes per level that are expanded, and of candidates after each.
    """

    num_nodes: int
    depth: int
    width: int

    @property
    def num_drafted(self) -> int:
        """The number of nodes that the draft model runs: k on each level except the last."""
        return (self.depth - 1) * self.width


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The shape of a tree whose tokens are drawn from the draft's sampling distribution.

    Attributes:
      shape: the same in all rows and rounds; siblings are drawn in their order.
    """

    shape: Shape

    @property
    def num_nodes(self) -> int:
        """N, the number of verified draft tokens."""
        return self.shape.num_nodes

    @property
    def depth(self) -> int:
        """The maximum depth of a node."""
        return self.shape.depth

    @property
    def num_drafted(self) -> int:
        """The number of nodes that the draft model runs: those with children."""
        return len(set(self.shape.parents) - {-1})


def masked(
    grammar: Grammars, level: Level[Carry], carry: Carry, logits: jax.Array, ids: jax.Array | None
) -> tuple[Level[tuple[Carry, jax.Array]], tuple[Carry, jax.Array], jax.Array]:
    """Returns the arguments of `grow` and `draw` for logits that a grammar masks.

    The carry also has the states of the grammar at the rows that have been run, int32[B, R].
    """

    def masked_level(
        carry: tuple[Carry, jax.Array], tokens: jax.Array, before: jax.Array, rows: Tree
    ) -> tuple[jax.Array, tuple[Carry, jax.Array]]:
        inner, states = carry
        logits, inner = level(inner, tokens, before, rows)
        here = grammar.step(along(states, jnp.broadcast_to(before, tokens.shape)), tokens)
        return grammar.mask(logits, here, ids), (inner, jnp.concatenate([states, here], axis=1))

    states = grammar.state[:, None]
    return masked_level, (carry, states), grammar.mask(logits[:, None], states, ids)[:, 0]


def grow(
    size: Dynamic,
    level: Level[Carry],
    carry: Carry,
    logits: jax.Array,
    ids: jax.Array | None = None,
) -> tuple[Proposal, Carry]:
    """Grows a tree in each row of a batch, and keeps its N most probable nodes (EAGLE-2, Li et al. 2024, §4).

    The probability of a node is the product of the draft's probabilities on its path. On each level the k most probable
    nodes are expanded: the top-k tokens after each are candidates. The N most probable of all candidates are proposed.
    They form a tree, because no node is more probable than its parent, and among ties the earlier one is kept. The
    proposal has no `log_probs`, because its tokens are deterministic given the text.

    Args:
      size: the size of the tree, static.
      level: runs the nodes of a level, as rows of a tree whose row 0 has been run.
      carry: the first carry of `level`.
      logits: float32[B, V] of the token after row 0.
      ids: int32[V], the tokens of the logits; None for the whole vocabulary.

    Returns:
      The proposal, with parents, and the last carry.
    """

    def after(carry: Carry, tokens: jax.Array, parents: jax.Array, depth: int) -> tuple[Top, Carry]:
        # The rows of this level see their ancestors among the expanded nodes.
        count = tokens.shape[1]
        rows = Tree.from_parents(parents, depth).rows(1 + parents.shape[1] - count, count)
        logits, carry = level(carry, tokens, rows.parent, rows)
        return _likeliest(logits, size, ids), carry

    return _grown(size, after, carry, _likeliest(logits[:, None], size, ids))


def combine(size: Dynamic, logits: jax.Array, ids: jax.Array | None = None) -> Proposal:
    """Returns the tree of the most probable combinations of tokens that do not know each other.

    It is the tree of DDTree (Ringel and Romano 2026). The probability of a node is the product of its positions'
    probabilities. If `size.width` is N, these are the N most probable of all nodes up to the depth: at most N nodes of
    a level, and N tokens of a position, are among them.

    Args:
      size: the size of the tree, static.
      logits: float32[B, K, V] of the token at each depth from 1; K is at least the depth of the tree.
      ids: as in `grow`.

    Returns:
      The proposal, with parents and without `log_probs`.

    Examples:
      >>> probabilities = jnp.array([[[0.6, 0.4, 0.0], [0.9, 0.0, 0.1]]])  # 0: .6, 1: .4, then 0: .54 and .36
      >>> proposal = combine(Dynamic(num_nodes=3, depth=2, width=3), jnp.log(probabilities))
      >>> proposal.tokens.tolist(), proposal.parents.tolist()
      ([[0, 1, 0]], [[-1, -1, 0]])
    """
    scores, tokens = _likeliest(logits, size, ids)

    def after(carry: tuple[()], nodes: jax.Array, parents: jax.Array, depth: int) -> tuple[Top, tuple[()]]:
        del nodes, parents  # a token does not know the ones before it
        return (scores[:, depth, None], tokens[:, depth, None]), carry

    return _grown(size, after, (), (scores[:, :1], tokens[:, :1]))[0]


def _likeliest(logits: jax.Array, size: Dynamic, ids: jax.Array | None) -> Top:
    """Returns log-probabilities and tokens of the top k, [B, ..., k]; −inf where logits are not finite."""
    finite = is_finite(logits)[..., None]
    scores = jax.nn.log_softmax(jnp.where(finite, logits, 0.0))
    scores, index = jax.lax.top_k(scores, min(size.width, logits.shape[-1]))
    return jnp.where(finite, scores, -jnp.inf), index if ids is None else ids[index]


def _grown(
    size: Dynamic,
    after: Callable[[Carry, jax.Array, jax.Array, int], tuple[Top, Carry]],
    carry: Carry,
    top: Top,
) -> tuple[Proposal, Carry]:
    """Grows the trees of `grow` and `combine`.

    Args:
      size: the size of the tree, static.
      after: (carry, tokens int32[B, k] of the nodes of a level, parents int32[B, n] of these and all expanded nodes
        before them, depth of the level) → the top tokens after each, carry.
      carry: its first carry.
      top: the top tokens of the first level, [B, 1, k].
    """
    scores, tokens = (of[:, 0] for of in top)
    batch, width = tokens.shape
    # All candidates: log-probability, token, and parent candidate.
    every = [(scores, tokens, jnp.full((batch, width), -1, jnp.int32))]
    # The expanded nodes: their candidate numbers, and their parent nodes.
    parents = jnp.zeros((batch, 0), jnp.int32)
    frontier, before = jnp.broadcast_to(jnp.arange(width), (batch, width)), every[0][2]
    counted = width
    for depth in range(1, size.depth):
        begin, count = parents.shape[1], tokens.shape[1]
        parents = jnp.concatenate([parents, before], axis=1)
        (further, candidates), carry = after(carry, tokens, parents, depth)
        candidates = jnp.broadcast_to(candidates, (batch, count, width)).reshape(batch, -1)
        # Every child is a candidate of the final tree, even if it is not expanded.
        further = (scores[..., None] + further).reshape(batch, -1)
        every.append((further, candidates, jnp.repeat(frontier, width, axis=1)))
        # The k best children are the next level to expand.
        scores, best = jax.lax.top_k(further, min(size.width, count * width))
        tokens = along(candidates, best)
        before = begin + best // width
        frontier, counted = counted + best, counted + further.shape[1]
    scores, tokens, before = (jnp.concatenate(of, axis=1) for of in zip(*every, strict=True))
    # Keep the N best candidates, in the order of drafting, so that every parent comes before its children.
    most = min(size.num_nodes, counted)
    chosen = jnp.sort(jax.lax.top_k(scores, most)[1], axis=1)
    there = along(scores, chosen) > -jnp.inf
    # Renumber the parents from all candidates to the chosen ones.
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
    distribution: Distribution,
    vocabulary: Vocabulary | None = None,
) -> tuple[Proposal, Carry]:
    """Draws a tree of a given shape: the children of each node without replacement (Sequoia, Chen et al. 2024).

    If a distribution has fewer tokens than the node has children, the last children are empty. The children of an empty
    node are empty, and so are those of a node after which the draft's logits are not finite.

    Args:
      shape: the shape of the tree, static, with nodes in the order of their depths.
      level, carry, logits: as in `grow`; only the nodes with children are run.
      keys: per-row keys [B].
      distribution: the sampling distribution, applied to the draft's logits.
      vocabulary: the tokens of the logits; None for all.

    Returns:
      The proposal, with parents and log-probabilities, and the last carry.
    """
    batch, parents, depths = logits.shape[0], shape.parents, np.array(shape.depths)
    ranks = np.array([parents[:node].count(before) for node, before in enumerate(parents)])
    # The draft model runs row 0 and the nodes with children; leaves need no logits.
    inner = sorted({-1, *parents})
    whole = Tree.from_parents(Shape(tuple(inner.index(parents[node]) - 1 for node in inner[1:])), shape.depth)
    logits, there = logits[:, None], jnp.ones((batch, 1), bool)
    tokens, distributions = jnp.zeros((batch, 0), jnp.int32), []
    for depth in range(1, shape.depth + 1):
        nodes = np.flatnonzero(depths == depth)
        before = sorted({parents[node] for node in nodes})
        if depth > 1:
            # Run the parents of this level. An empty one is fed as token 0, and its children are empty.
            fed = tokens[:, np.array(before)]
            there, fed = fed >= 0, jnp.maximum(fed, 0)
            rows = whole.rows(inner.index(before[0]), len(before))
            logits, carry = level(carry, fed, jnp.broadcast_to(rows.parent, fed.shape), rows)
        # Logits that are not finite are replaced before the draw, so that NaN does not spread to other nodes.
        logits = jnp.broadcast_to(logits, (batch, len(before), logits.shape[-1]))
        finite = there & is_finite(logits)
        logits = jnp.where(finite[..., None], logits, 0.0)
        slots = np.array([before.index(parents[node]) for node in nodes])
        # Each level has its own keys, and each parent its own row of noise.
        streams = jax.vmap(jax.random.fold_in, (0, None))(keys, depth)
        drawn, log_probs = _drawn(distribution, streams, logits, slots, ranks[nodes])
        there = (drawn >= 0) & finite[:, slots]
        if vocabulary is not None:
            drawn, log_probs = vocabulary.ids[drawn], vocabulary.spread(log_probs)
        # Verification needs the distribution of each node given its earlier siblings.
        tokens = jnp.concatenate([tokens, jnp.where(there, drawn, -1)], axis=1)
        distributions.append(log_probs)
    count = jnp.full(batch, len(parents), jnp.int32)
    return Proposal(tokens, count, jnp.concatenate(distributions, axis=1), parents=shape), carry


def _drawn(
    distribution: Distribution, keys: jax.Array, logits: jax.Array, slots: np.ndarray, ranks: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Draws n tokens from M distributions without replacement: draw number ranks[n] from distribution slots[n].

    The largest sums of log-probabilities and Gumbel noise, in their order, are draws without replacement (Kool et al.
    2019).

    Returns:
      int32[B, n], −1 where no token is left, and log-probabilities given the draws of lower rank, float32[B, n, V].
    """
    log_probs = distribution.log_probs(logits)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    most = int(ranks.max()) + 1
    best, index = jax.lax.top_k(log_probs + noise, min(most, logits.shape[-1]))
    spare = ((0, 0), (0, 0), (0, most - best.shape[-1]))
    index = jnp.where(jnp.pad(best, spare, constant_values=-jnp.inf) > -jnp.inf, jnp.pad(index, spare), -1)
    # The distribution of a draw given the earlier ones: without their tokens, and renormalised.
    every, left = jnp.arange(logits.shape[-1]), log_probs[:, slots]
    for rank in range(most - 1):
        taken = (index[:, slots, rank, None] == every) & (ranks > rank)[:, None]
        left = jnp.where(taken, -jnp.inf, left)
    total = jax.scipy.special.logsumexp(left, axis=-1, keepdims=True)
    return index[:, slots, ranks], left - jnp.where(total > -jnp.inf, total, 0.0)
