"""Heads that each predict a token by itself draft a chain: Medusa (Cai et al. 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.tapped import ParallelChain, latest
from jaxspec.model import medusa
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.medusa import MedusaConfig
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class Medusa(ParallelChain):
    """Head i drafts token i of the round; no head knows what the others draft.

    All heads run at once, on what the target's head read to say the pending token.

    `params.drafter` are the heads' parameters, of the first K heads at least.

    Attributes:
      config: of the target.
      head: of the heads.
      rule: when to stop before K tokens.
      num_draft_tokens: K, at most as many as there are heads.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: MedusaConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)

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
        read = jnp.broadcast_to(hidden[:, None], (*said.shape[:2], self.head.width))
        proposal, state = self.draft_said(said, read, keys, state, view, law, params.drafter)
        return proposal, state, view.cache
