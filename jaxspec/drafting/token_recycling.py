"""Drafts made of what the target held likely before: Token Recycling (Luo et al. 2024, arXiv 2408.08696)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.cache import KVCache
from jaxspec.model.tree import Shape
from jaxspec.protocol import Drafter, Outcome, Prefill, Proposal, View, Weights
from jaxspec.sampling import Law


@struct.dataclass
class TokenRecycling(Drafter):
    """Follows a matrix of the tokens that the target last held most likely after each token.

    The nodes of a tree are read from the matrix: node i is, of the likely tokens after the token it follows, that of
    rank `shape.ranks[i]`. A round leaves the target's likely tokens after every token that it verified, rejected ones
    too. Of a token that stood at several nodes, the last one counts, so that rounds are the same each time. A text
    begins with an empty matrix. (What followed the tokens of its prompt added nothing that could be measured.)

    The state is int32[B, V, num_likely], −1 where nothing is known.

    Attributes:
      shape: the tree, or a chain, which is then verified as one.
      num_likely: how many tokens are kept after each.
    """

    shape: Shape = struct.field(pytree_node=False)
    num_likely: int = struct.field(pytree_node=False, default=8)

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
        """N, the most tokens of a draft."""
        return len(self.shape.parents)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """One row where nothing is known, else all."""
        return 1, self.num_nodes + 1

    def init(self, params: Weights, view: View, prefill: Prefill) -> jax.Array:
        """Nothing is known."""
        batch, vocab_size = view.length.shape[0], params.target["embed"].shape[0]
        return jnp.full((batch, vocab_size, self.num_likely), -1, jnp.int32)

    def propose(
        self, keys: jax.Array, params: Weights, state: jax.Array, view: View, law: Law
    ) -> tuple[Proposal, jax.Array, KVCache]:
        """The tree after the pending token; the target's cache is returned untouched."""
        shape, batch = self.shape, view.length.shape[0]
        rows = jnp.arange(batch)[:, None]
        tokens = jnp.pad(view.pending[:, None], ((0, 0), (0, self.num_nodes)), constant_values=-1)
        for depth in range(1, shape.depth + 1):
            nodes = [node for node, of in enumerate(shape.depths) if of == depth]
            before = tokens[:, jnp.array([shape.parents[node] + 1 for node in nodes])]
            ranks = jnp.array([shape.ranks[node] for node in nodes])
            found = jnp.where(before < 0, -1, state[rows, jnp.maximum(before, 0), ranks])
            tokens = tokens.at[:, jnp.array(nodes) + 1].set(found)
        drafts, node = tokens[:, 1:], jnp.arange(self.num_nodes)
        if shape.is_chain:
            count = jnp.sum(drafts >= 0, axis=1)
            return Proposal(jnp.maximum(drafts, 0), count), state, view.cache
        count = jnp.max(jnp.where(drafts >= 0, node + 1, 0), axis=1)
        return Proposal(drafts, count, parents=shape), state, view.cache

    def observe(self, params: Weights, state: jax.Array, outcome: Outcome) -> jax.Array:
        """Replaces what is known of every token that was verified."""
        assert outcome.fed is not None, "the loop must hand over what is likely"
        assert outcome.likely is not None
        fed, rows = outcome.fed, jnp.arange(len(state))[:, None]
        again = jnp.triu(fed[:, :, None] == fed[:, None, :], 1)
        kept = (fed >= 0) & ~jnp.any(again, axis=2)
        return state.at[rows, jnp.where(kept, fed, state.shape[1])].set(outcome.likely, mode="drop")
