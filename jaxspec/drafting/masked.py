"""What drafters that skip sublayers of the target share: a draft under the mask of each row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafting.chain import ChainDrafter, ChainState, keep_rows, model_step
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Law


class MaskedChain(ChainDrafter):
    """A base for drafters that are the target without some of its sublayers, and draft in the target's cache.

    A draft token attends to what the full model left in the cache; verification writes every slot that the draft used
    again.

    Attributes:
      config: the target.
    """

    config: LlamaConfig

    def draft_under(
        self,
        plans: LayerPlan | jax.Array,
        keys: jax.Array,
        params: Weights,
        state: ChainState,
        view: View,
        law: Law,
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts; rows of equal mask together, one group after another.

        Args:
          plans: which sublayers run: of all rows, static or traced bool[L, 2], or of each, bool[B, L, 2].
          keys, params, state, view, law: as of `propose`.

        Returns:
          What `propose` returns.
        """

        def draft(
            plan: LayerPlan | jax.Array, state: ChainState, view: View
        ) -> tuple[Proposal, ChainState, KVCache]:
            step = model_step(self.config, params.self_draft, view.start, plan)
            proposal, cache, state = self.draft(step, view.cache, keys, state, view, law, params.self_draft)
            return proposal, state, cache

        if isinstance(plans, LayerPlan) or plans.ndim == 2:
            return draft(plans, state, view)
        if plans.shape[0] == 1:
            return draft(plans[0], state, view)

        def group(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            waiting, proposal, state, cache = carry
            plan = plans[jnp.argmax(waiting)]
            members = waiting & jnp.all(plans == plan, axis=(1, 2))
            room = jnp.where(members, view.room, 0)
            drafted, state, cache = draft(plan, state, dataclasses.replace(view, cache=cache, room=room))
            return waiting & ~members, keep_rows(members, drafted, proposal), state, cache

        shapes = jax.eval_shape(draft, plans[0], state, view)[0]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        carry = (view.room > 0, nothing, state, view.cache)
        _, proposal, state, cache = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), group, carry)
        return proposal, state, cache
