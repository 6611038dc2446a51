"""An adapter on an early exit drafts: Kangaroo (Liu et al. 2024)."""

from __future__ import annotations

import jax
from flax import struct

from jaxspec.drafting.aux_drafter import AuxDrafter, own_cache
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.exit_drafter import ExitDrafter
from jaxspec.heads.kangaroo import network
from jaxspec.heads.kangaroo.network import KangarooConfig
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import AuxLayer
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import Constant


@struct.dataclass
class KangarooDrafter(ExitDrafter, AuxDrafter):
    """Drafts with the target's first E layers and an adapter; verification reuses the output of those layers.

    Each draft token takes one pass of E layers and of the adapter. After a round the adapter's cache is filled from the
    target's streams for all committed tokens. So no round leaves a gap: neither a fully accepted draft, whose last
    token the adapter has not read, nor a round of another drafter.

    `params.drafter` are the adapter's parameters.

    Attributes:
      config: the target's configuration.
      head: the adapter's configuration.
      exit_layer: E, from 1 to L − 1.
      rule: when to stop before K tokens; the paper uses `ConfidenceBelow` 0.6, and verifies the last token too.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: KangarooConfig = struct.field(pytree_node=False)
    exit_layer: int = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=6)

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """The stream that enters layer E."""
        return (self.exit_layer,)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> KVCache:
        """Returns the adapter's cache before prompts of length int32[B]: empty."""
        return own_cache(self.head.block, length, capacity, params.drafter["norm"].dtype, merged)

    def absorb(
        self,
        params: Weights,
        state: KVCache,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> KVCache:
        """Runs the adapter over streams [B, T, D] from position start[b] on, to fill its cache.

        Rows past count[b] are written too; later tokens overwrite them before they are read.
        """
        del tokens, count
        return network.run_head(self.head, params.drafter, aux_hidden_states, start, state)[1]

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache and the adapter's; the early layers' hidden states are kept for verification."""

        def read(
            stream: jax.Array, position: jax.Array, own: KVCache
        ) -> tuple[jax.Array, jax.Array, KVCache]:
            hidden, own = network.run_head(self.head, params.drafter, stream, position, own)
            logits = network.logits(self.head, params.drafter, self.config, params.target, hidden[:, 0])
            return logits, hidden[:, 0], own

        proposal, own, state, cache = self.draft_from_exit(
            read, state.own, keys, params, state, view, distribution
        )
        return proposal, state._replace(own=own), cache
