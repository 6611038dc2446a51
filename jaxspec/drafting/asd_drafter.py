"""Self-speculation that skips sublayers chosen per prompt by cosine similarity: ASD (Metel et al. 2024)."""

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
from jaxspec.protocol import Prefill, Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow


def admg(
    similarity: jax.Array,
    alpha: jax.Array | float,
    every: jax.Array | int,
    keep_last: jax.Array | int,
) -> jax.Array:
    """Computes the mask of the Adaptive Draft Model Generator, Algorithm 1 of the paper.

    Attention l is skipped if C_l ≥ α. Both sublayers of every m-th layer are skipped. The last n layers always run.
    (Algorithm 1 of the paper misprints l = jm, j natural.)

    Args:
      similarity: float32[..., L], C, the mean cosine between the residual stream before and after each attention
        sublayer.
      alpha: α in (0, 1]; 1 disables its rule.
      every: m; 0 disables its rule.
      keep_last: n; 0 disables its rule.

    Returns:
      bool[..., L, 2], True for the sublayers to run.
    """
    num_layers = similarity.shape[-1]
    number = jnp.arange(1, num_layers + 1)
    free = number <= num_layers - keep_last
    whole = free & (every > 0) & (number % jnp.maximum(every, 1) == 0)
    attention = whole | (free & (similarity >= alpha) & (jnp.asarray(alpha) < 1))
    return ~jnp.stack([attention, jnp.broadcast_to(whole, attention.shape)], axis=-1)


@struct.dataclass
class ASDDrafter(MaskedDrafter):
    """The target drafts for itself without the sublayers that change the residual stream of the prompt least.

    The similarities come from the ordinary prefill, and each text keeps the mask of its prompt. Rows with equal
    masks draft together, one group after another; all rows are verified in one pass.

    Attributes:
      config: the target.
      alpha, every, keep_last: α, m and n of `admg`.
      rule: when to stop before K tokens; the rule of Draft & Verify, as in the paper.
      num_draft_tokens: K.
      shared_mask: one mask for the whole batch, from the mean similarities of its live rows, static.
      static: whether the host compiles a program for the rows' mask and uses it as soon as it is ready, static.
      plan: a static mask in place of the prompts' masks, for a program specialised to it.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    alpha: jax.Array | float = 0.985
    every: jax.Array | int = 3
    keep_last: jax.Array | int = 2
    rule: StopRule = ConfidenceBelow(AdaptiveGamma())
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)
    shared_mask: bool = struct.field(pytree_node=False, default=False)
    static: bool = struct.field(pytree_node=False, default=False)
    plan: LayerPlan | None = None

    @property
    def mixes_rows(self) -> bool:
        """Whether the rows share a mask."""
        return self.shared_mask

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with the similarities of the attention sublayers, float32[B, L], as `own`."""
        return super().init(params, view, prefill)._replace(own=prefill.similarities[:, :, 0])

    def plans(self, state: ChainState, live: jax.Array) -> jax.Array:
        """Returns the mask of each row, bool[B, L, 2]; a shared mask follows the rows where `live`, bool[B]."""
        similarity = state.own
        if self.shared_mask:
            # Finished rows must not influence the mask of the others.
            rows = jnp.maximum(jnp.sum(live), 1)
            mean = jnp.sum(similarity, axis=0, where=live[:, None]) / rows
            similarity = jnp.broadcast_to(mean, similarity.shape)
        return admg(similarity, self.alpha, self.every, self.keep_last)

    def specialised(self, plan: LayerPlan) -> ASDDrafter:
        """Returns the same drafter with a static mask."""
        return dataclasses.replace(self, plan=plan)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache, one group of rows after another."""
        # A specialised program runs its static mask for all rows, without a loop over groups.
        if self.plan is not None:
            return self.draft_under(self.plan, keys, params, state, view, distribution)
        plans = self.plans(state, view.budget > 0)
        return self.draft_under(
            plans[0] if self.shared_mask else plans, keys, params, state, view, distribution
        )
