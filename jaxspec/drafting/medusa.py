"""Heads that each predict a token by itself draft a chain or a tree: Medusa (Cai et al. 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.tapped import ParallelChain, TappedTree, latest
from jaxspec.drafting.tree import Drawn, Dynamic
from jaxspec.model import medusa
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.medusa import MedusaConfig
from jaxspec.model.tree import Tree
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class Medusa(ParallelChain, TappedTree):
    """Head i drafts token i of the round; no head knows what the others draft.

    All heads run at once, on what the target's head read to say the pending token. A tree holds the combinations of the
    heads' likeliest tokens that are most probable together, by what the heads say in this round. (The authors' tree is
    one of ranks, the same in all rounds.)

    `params.drafter` are the heads' parameters, of the first K heads at least.

    Attributes:
      config: of the target.
      head: of the heads.
      rule: when to stop before K tokens.
      num_draft_tokens: K, at most as many as there are heads.
      tree: the size, or the shape, of the tree that is drafted in place of a chain, of depth K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: MedusaConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)
    tree: Dynamic | Drawn | None = struct.field(pytree_node=False, default=None)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> jax.Array:
        """Returns what has been absorbed before prompts of length int32[B]: nothing, [B, D]."""
        return jnp.zeros((length.shape[0], self.head.width), params.target["embed"].dtype)

    def absorb(
        self,
        params: Weights,
        state: jax.Array,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        """Keeps the last of features [B, T, D], of which the first count[b] mean something."""
        return latest(features, count, state)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts by all heads; the target's cache is returned untouched."""
        hidden = state.own
        heads = {**params.drafter, "heads": params.drafter["heads"][: self.num_draft_tokens]}
        said = medusa.logits(self.head, heads, self.config, params.target, hidden)
        if self.tree is not None:

            def level(number: int, tokens: jax.Array, before: jax.Array, rows: Tree) -> tuple[jax.Array, int]:
                del tokens, before, rows  # a head says the same after each
                return said[:, number, None], number + 1

            proposal, _ = self.draft_tree(level, 1, said[:, 0], keys, params, law)
            return proposal, state, view.cache

        read = jnp.broadcast_to(hidden[:, None], (*said.shape[:2], self.head.width))
        proposal, state = self.draft_said(said, read, keys, state, view, law, params.drafter)
        return proposal, state, view.cache
