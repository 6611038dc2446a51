"""Drafts a chain or a tree with independent heads: Medusa (Cai et al. 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import AuxDrafter, ParallelDrafter, latest
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.heads.medusa import network
from jaxspec.heads.medusa.network import MedusaConfig
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Distribution


@struct.dataclass
class MedusaDrafter(ParallelDrafter, AuxDrafter):
    """Drafts token i of the round with head i, independently of the other heads.

    All heads run at once, on the hidden state from which the target's head predicted the pending token. A tree contains
    the most probable combinations of the heads' top tokens, by the heads' probabilities in this round. (The authors'
    tree is a fixed set of ranks, the same in all rounds.)

    `params.drafter` are the parameters of at least the first K heads.
    """

    head: MedusaConfig = struct.field(pytree_node=False)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> jax.Array:
        """Returns the empty state [B, D] before prompts of length int32[B]."""
        return jnp.zeros((length.shape[0], self.head.width), llama.stream_of(params.target))

    def absorb(
        self,
        params: Weights,
        state: jax.Array,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        """Keeps the last valid row of auxiliary hidden states [B, T, D], of which the first count[b] are valid."""
        return latest(aux_hidden_states, count, state)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts with all heads; the target's cache is returned unchanged."""
        hidden = state.own
        heads = {**params.drafter, "heads": params.drafter["heads"][: self.num_draft_tokens]}
        logits = network.logits(self.head, heads, self.config, params.target, hidden)
        read = jnp.broadcast_to(hidden[:, None], (*logits.shape[:2], self.head.width))
        proposal, state = self.draft_said(logits, read, keys, state, view, distribution, params.drafter)
        return proposal, state, view.cache
