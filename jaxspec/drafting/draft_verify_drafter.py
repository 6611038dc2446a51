"""Self-speculation that skips sublayers by a mask found offline: Draft & Verify (Zhang et al. 2023)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.masked_drafter import MaskedDrafter
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow


@struct.dataclass
class DraftVerifyDrafter(MaskedDrafter):
    """The target drafts for itself with some sublayers skipped, in its own cache.

    Attributes:
      config: the target.
      plan: the sublayers that the draft runs: static, or traced bool[L, 2], which shares one executable between masks.
      rule: when to stop before K tokens; the paper's by default.
      num_draft_tokens: K.
      static: whether the host compiles a program for the mask and uses it as soon as it is ready, static.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    plan: LayerPlan | jax.Array
    rule: StopRule = ConfidenceBelow(AdaptiveGamma())
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)
    static: bool = struct.field(pytree_node=False, default=False)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache."""
        return self.draft_under(self.plan, keys, params, state, view, distribution)

    def plans(self, state: ChainState, live: jax.Array) -> jax.Array:
        """Returns the mask of each row, bool[B, L, 2]; all rows have the same."""
        plan = self.plan.traced() if isinstance(self.plan, LayerPlan) else self.plan
        return jnp.broadcast_to(plan, (*live.shape, *plan.shape))

    def specialised(self, plan: LayerPlan) -> DraftVerifyDrafter:
        """Returns the same drafter with a static mask."""
        return dataclasses.replace(self, plan=plan)
