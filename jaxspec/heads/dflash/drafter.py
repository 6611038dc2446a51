"""A head that drafts a block in one pass: DFlash (Chen et al. 2026), and trees of it: DDTree (arXiv 2604.12989)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import AuxDrafter, ParallelDrafter, own_cache
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.heads.dflash import network
from jaxspec.heads.dflash.network import DFlashConfig
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Distribution


@struct.dataclass
class DFlashDrafter(ParallelDrafter, AuxDrafter):
    """Drafts all tokens of a round in one pass over the pending token and mask tokens, independently of each other.

    The head's cache holds keys and values of committed tokens, from the target's hidden states. Those of a drafted
    block follow them until verification overwrites them.

    `params.drafter` are the head's parameters.
    """

    head: DFlashConfig = struct.field(pytree_node=False)
    num_draft_tokens: int = struct.field(pytree_node=False, default=15)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> KVCache:
        """Returns the head's cache before prompts of length int32[B]: empty."""
        return own_cache(self.head.block, length, capacity, params.drafter["fc"].dtype, merged)

    def absorb(
        self,
        params: Weights,
        state: KVCache,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> KVCache:
        """Writes the keys and values of auxiliary hidden states [B, T, F] from position start[b] on.

        Rows past count[b] are written too; later tokens overwrite them before they are read.
        """
        del tokens, count
        return network.absorb(self.head, params.drafter, aux_hidden_states, start, state)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts on the head's cache; the target's is returned untouched."""
        first = self.head.first
        masks = ((0, 0), (0, self.num_draft_tokens + first - 1))
        block = jnp.pad(view.pending[:, None], masks, constant_values=self.head.mask_id)
        embedded = llama.embedding_rows(params.target, block)
        hidden, cache = network.run_head(self.head, params.drafter, embedded, view.start, state.own)
        hidden = hidden[:, first:]
        logits = network.logits(self.head, params.drafter, self.config, params.target, hidden)
        proposal, state = self.draft_said(logits, hidden, keys, state, view, distribution, params.drafter)
        return proposal, state._replace(own=cache), view.cache
