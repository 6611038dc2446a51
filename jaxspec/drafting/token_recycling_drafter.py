"""Drafts from the target's earlier top-k tokens: Token Recycling (Luo et al. 2024, arXiv 2408.08696)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.cache import KVCache
from jaxspec.model.tree import Shape
from jaxspec.protocol import Drafter, Outcome, Prefill, Proposal, View, Weights
from jaxspec.sampling import Distribution


@struct.dataclass
class TokenRecyclingDrafter(Drafter):
    """Drafts a tree from a matrix with the target's latest top-k tokens after each token of the vocabulary.

    Node i is the token of rank `shape.ranks[i]` among the top-k tokens after its parent's token. A round stores the
    target's top-k tokens after every verified token, including rejected ones. If a token occurs at several nodes, the
    last one counts, so that results are reproducible. A text begins with an empty matrix. (Filling it from the prompt
    had no measurable effect.)

    The state is int32[B, V, num_top_tokens], −1 where no tokens are stored.

    Attributes:
      shape: the tree; a tree without branches is drafted and verified as a chain.
      num_top_tokens: the number of tokens stored after each.
    """

    shape: Shape = struct.field(pytree_node=False)
    num_top_tokens: int = struct.field(pytree_node=False, default=8)

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """K, the depth of the tree."""
        return self.shape.depth

    @property
    def drafts_trees(self) -> bool:
        """Whether a draft has branches."""
        return not self.shape.is_chain

    @property
    def num_nodes(self) -> int:
        """N, the maximum number of draft tokens."""
        return len(self.shape.parents)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """1 for rounds without draft tokens, and N + 1."""
        return 1, self.num_nodes + 1

    def init(self, params: Weights, view: View, prefill: Prefill) -> jax.Array:
        """Returns the empty matrix."""
        batch, vocab_size = view.length.shape[0], params.target["embed"].shape[0]
        return jnp.full((batch, vocab_size, self.num_top_tokens), -1, jnp.int32)

    def propose(
        self, keys: jax.Array, params: Weights, state: jax.Array, view: View, distribution: Distribution
    ) -> tuple[Proposal, jax.Array, KVCache]:
        """Reads the tree after the pending token from the matrix; the target's cache is returned unchanged."""
        shape, batch = self.shape, view.length.shape[0]
        rows = jnp.arange(batch)[:, None]
        tokens = jnp.pad(view.pending[:, None], ((0, 0), (0, self.num_nodes)), constant_values=-1)
        # Level by level, because a node's token is looked up by its parent's. Nodes after an empty one stay empty.
        for depth in range(1, shape.depth + 1):
            nodes = [node for node, of in enumerate(shape.depths) if of == depth]
            before = tokens[:, jnp.array([shape.parents[node] + 1 for node in nodes])]
            ranks = jnp.array([shape.ranks[node] for node in nodes])
            found = jnp.where(before < 0, -1, state[rows, jnp.maximum(before, 0), ranks])
            tokens = tokens.at[:, jnp.array(nodes) + 1].set(found)
        drafts, node = tokens[:, 1:], jnp.arange(self.num_nodes)
        # A chain ends at its first empty node; the count of a tree includes empty nodes before its last token.
        if shape.is_chain:
            count = jnp.sum(drafts >= 0, axis=1)
            return Proposal(jnp.maximum(drafts, 0), count), state, view.cache
        count = jnp.max(jnp.where(drafts >= 0, node + 1, 0), axis=1)
        return Proposal(drafts, count, parents=shape), state, view.cache

    def observe(self, params: Weights, state: jax.Array, outcome: Outcome) -> jax.Array:
        """Stores the target's top-k tokens after every verified token."""
        assert outcome.fed is not None, "the loop must pass the top-k target tokens"
        assert outcome.top_tokens is not None
        fed, rows = outcome.fed, jnp.arange(len(state))[:, None]
        # A scatter with repeated indices has no defined order, so only a token's last occurrence is written.
        repeated = jnp.triu(fed[:, :, None] == fed[:, None, :], 1)
        kept = (fed >= 0) & ~jnp.any(repeated, axis=2)
        return state.at[rows, jnp.where(kept, fed, state.shape[1])].set(outcome.top_tokens, mode="drop")
