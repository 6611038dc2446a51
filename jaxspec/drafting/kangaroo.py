"""An adapter on an early exit drafts: Kangaroo (Liu et al. 2024)."""

from __future__ import annotations

import jax
from flax import struct

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.exits import ExitDrafter
from jaxspec.drafting.tapped import TappedChain, own_cache
from jaxspec.model import kangaroo
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.llama import Tap
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class Kangaroo(ExitDrafter, TappedChain):
    """The target's first E layers and an adapter draft; verification shares those layers.

    Each draft token is a pass of E layers and of the adapter. After a round the adapter's cache gets all that was
    committed from the streams that verification went on from, so no round leaves a gap: not one whose whole draft was
    accepted, whose last token the adapter has not seen, nor one that another drafter had.

    `params.drafter` are the adapter's parameters.

    Attributes:
      config: the target.
      head: the adapter.
      exit_layer: E, from 1 to L − 1.
      rule: when to stop before K tokens; the paper's is `ConfidenceBelow` 0.6, whose last token is verified too.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: KangarooConfig = struct.field(pytree_node=False)
    exit_layer: int = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=6)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The stream that enters layer E."""
        return (self.exit_layer,)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> KVCache:
        """Returns the adapter's cache before prompts of length int32[B]: empty."""
        return own_cache(self.head.block, length, capacity, params.drafter["norm"].dtype, merged)

    def absorb(
        self,
        params: Weights,
        state: KVCache,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> KVCache:
        """Runs the adapter over streams [B, T, D] from position start[b] on, for what its cache keeps of them.

        What lies past count[b] is written as well, where later tokens overwrite it before any of them sees it.
        """
        del tokens, count
        return kangaroo.run(self.head, params.drafter, features, start, state)[1]

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache and the adapter's, and keeps the hidden states."""

        def read(
            stream: jax.Array, position: jax.Array, own: KVCache
        ) -> tuple[jax.Array, jax.Array, KVCache]:
            hidden, own = kangaroo.run(self.head, params.drafter, stream, position, own)
            logits = kangaroo.logits(self.head, params.drafter, self.config, params.target, hidden[:, 0])
            return logits, hidden[:, 0], own

        proposal, own, state, cache = self.draft_from_exit(read, state.own, keys, params, state, view, law)
        return proposal, state._replace(own=own), cache
