"""The base of drafters that skip sublayers of the target, with a mask for each row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafting.chain_drafter import ChainDrafter, ChainState, keep_rows, model_step
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Distribution


class MaskedDrafter(ChainDrafter):
    """A base for drafters that run the target without some of its sublayers, in the target's cache.

    Draft tokens attend to the full model's keys and values; verification overwrites every slot that the draft wrote.

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
        distribution: Distribution,
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts rows with equal masks together, one group after another.

        Args:
          plans: the sublayers that run: for all rows, static or traced bool[L, 2], or for each, bool[B, L, 2].
          keys, params, state, view, distribution: as in `propose`.

        Returns:
          The result of `propose`.
        """

        def draft(
            plan: LayerPlan | jax.Array, state: ChainState, view: View
        ) -> tuple[Proposal, ChainState, KVCache]:
            step = model_step(self.config, params.self_draft, view.start, plan)
            proposal, cache, state = self.draft(
                step, view.cache, keys, state, view, distribution, params.self_draft
            )
            return proposal, state, cache

        if isinstance(plans, LayerPlan) or plans.ndim == 2:
            return draft(plans, state, view)
        if plans.shape[0] == 1:
            return draft(plans[0], state, view)

        # A pass runs one mask for the whole batch, so each distinct mask takes a draft of its own.
        def group(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            waiting, proposal, state, cache = carry
            plan = plans[jnp.argmax(waiting)]
            members = waiting & jnp.all(plans == plan, axis=(1, 2))
            # A budget of 0 keeps the rows of other groups from drafting and from changing their rule's state.
            budget = jnp.where(members, view.budget, 0)
            drafted, state, cache = draft(plan, state, dataclasses.replace(view, cache=cache, budget=budget))
            return waiting & ~members, keep_rows(members, drafted, proposal), state, cache

        shapes = jax.eval_shape(draft, plans[0], state, view)[0]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        carry = (view.budget > 0, nothing, state, view.cache)
        _, proposal, state, cache = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), group, carry)
        return proposal, state, cache
