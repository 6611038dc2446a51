"""A head that drafts a block in one pass: DFlash (Chen et al. 2026)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.tapped import ParallelChain, own_cache
from jaxspec.model import dflash, llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.dflash import DFlashConfig
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class DFlash(ParallelChain):
    """All tokens of a round come from one pass over the pending token and K masks; none knows what the others are.

    The head's cache holds keys and values of the target's taps alone: a block's own stand behind them, until
    verification brings the taps of what was committed.

    `params.drafter` are the head's parameters.

    Attributes:
      config: of the target.
      head: of the head.
      rule: when to stop before K tokens.
      num_draft_tokens: K, less than the head's `block_size`.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: DFlashConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=15)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> KVCache:
        """Returns the head's cache before prompts of length int32[B]: empty."""
        return own_cache(self.head.block, length, capacity, params.drafter["fc"].dtype, merged)

    def absorb(
        self,
        params: Weights,
        state: KVCache,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> KVCache:
        """Keeps the keys and values of features [B, T, F] from position start[b] on.

        What lies past count[b] is written as well, where later tokens overwrite it before any of them sees it.
        """
        del tokens, count
        return dflash.absorb(self.head, params.drafter, features, start, state)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts on the head's cache; the target's is returned untouched."""
        masks = ((0, 0), (0, self.num_draft_tokens))
        block = jnp.pad(view.pending[:, None], masks, constant_values=self.head.mask_id)
        embedded = llama.embed(params.target, block)
        hidden, cache = dflash.run(self.head, params.drafter, embedded, view.start, state.own)
        hidden = hidden[:, 1:]
        said = dflash.logits(self.head, params.drafter, self.config, params.target, hidden)
        proposal, state = self.draft_said(said, hidden, keys, state, view, law, params.drafter)
        return proposal, state._replace(own=cache), view.cache
