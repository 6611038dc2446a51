"""Self-speculation that skips sublayers by a mask found offline: Draft & Verify (Zhang et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.masked_drafter import MaskedDrafter
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Prefill, Proposal, State, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow


class Chosen(NamedTuple):
    """The mask of each row, and what it was chosen by.

    Attributes:
      plan: bool[B, L, 2].
      vectors: float32[B, D], the mean over `held` tokens of the prompt of the hidden states after the final norm.
      held: int32[B].
    """

    plan: jax.Array
    vectors: jax.Array
    held: jax.Array


def nearest(centres: jax.Array, vectors: jax.Array) -> jax.Array:
    """Returns the index of the nearest of C centres [C, D] to each vector [B, D], int32[B].

    Examples:
      >>> nearest(jnp.array([[0.0, 0.0], [4.0, 0.0]]), jnp.array([[1.0, 1.0], [3.0, 5.0]])).tolist()
      [0, 1]
    """
    # ‖v − c‖² without the part that all centres have in common.
    products = jnp.matmul(vectors, centres.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.argmax(products - 0.5 * jnp.sum(centres**2, axis=1), axis=1).astype(jnp.int32)


@struct.dataclass
class DraftVerifyDrafter(MaskedDrafter):
    """The target drafts for itself with some sublayers skipped, in its own cache.

    With a bank of masks, each text has the mask of the centre that is nearest to its prompt: KNN-SSD (Song et al.
    2025). In a prompt that continues an earlier text, the mean of that text counts for the tokens not fed again.

    Attributes:
      config: the target.
      plan: the sublayers that the draft runs: static, or traced bool[L, 2], which shares one executable between masks;
        bool[C, L, 2] for a bank.
      rule: when to stop before K tokens; the paper's by default.
      num_draft_tokens: K.
      static: whether the host compiles a program for the mask and uses it as soon as it is ready, static.
      centres: float32[C, D], vectors of prompts for which the masks of the bank were found; None for one mask.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    plan: LayerPlan | jax.Array
    rule: StopRule = ConfidenceBelow(AdaptiveGamma())
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)
    static: bool = struct.field(pytree_node=False, default=False)
    centres: jax.Array | None = None

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with the mask of each prompt from a bank as `own`."""
        state = super().init(params, view, prefill)
        if self.centres is None:
            return state
        assert prefill.vectors is not None
        vectors, held = prefill.vectors, view.start
        if prefill.absorbed is not None and prefill.start is not None:
            before, known = prefill.absorbed
            fed, known = held - prefill.start, jnp.minimum(known, prefill.start)
            held = known + fed
            vectors = (known[:, None] * before + fed[:, None] * vectors) / held[:, None]
        plan = jnp.take(jnp.asarray(self.plan), nearest(self.centres, vectors), axis=0)
        return state._replace(own=Chosen(plan, vectors, held))

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns the mean of no token, and 0; None without a bank."""
        if self.centres is None:
            return None
        return jnp.zeros((len(length), self.centres.shape[1]), jnp.float32), jnp.zeros_like(length)

    def absorbed(self, state: ChainState) -> State:
        """Returns the mean of the prompt's hidden states, and how many tokens it is of; None without a bank."""
        return None if self.centres is None else state.own[1:]

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache, one group of rows with equal masks after another."""
        return self.draft_under(self._masks(state), keys, params, state, view, distribution)

    def plans(self, state: ChainState, live: jax.Array) -> jax.Array:
        """Returns the mask of each row, bool[B, L, 2]."""
        plan = self._masks(state)
        plan = plan.traced() if isinstance(plan, LayerPlan) else plan
        return jnp.broadcast_to(plan, (len(live), *plan.shape[-2:]))

    def specialised(self, plan: LayerPlan) -> DraftVerifyDrafter:
        """Returns the same drafter with a static mask."""
        return dataclasses.replace(self, plan=plan)

    def _masks(self, state: ChainState) -> LayerPlan | jax.Array:
        """Returns the mask of all rows, or of each row from a bank."""
        if self.centres is None or isinstance(self.plan, LayerPlan):
            return self.plan
        plans: jax.Array = state.own.plan
        return plans
