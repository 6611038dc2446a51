"""Speculative sampling with a separate draft model (Chen et al. 2023, Leviathan et al. 2023)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain_drafter import (
    ChainDrafter,
    ChainState,
    empty_cache,
    model_step,
    prompt_cache,
)
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Outcome, Prefill, Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import Constant


@struct.dataclass
class DraftModelDrafter(ChainDrafter):
    """A smaller model drafts token by token, with its own cache.

    `params.drafter` are its parameters. They may have more layers than `config`, of which the first ones run.

    Attributes:
      config: the draft model's.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
      catch_up: the number of missing tokens fed at once when the cache catches up, static.
      pairs: whether each step also feeds the token before, static. A draft that was fully accepted then needs no pass
        to catch up, and no program for it. For devices on which a second row is free.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)
    catch_up: int = struct.field(pytree_node=False, default=1)
    pairs: bool = struct.field(pytree_node=False, default=False)

    def taking_turns(self) -> DraftModelDrafter:
        """Returns the same drafter for rounds shared with another one, where the cache may lack many tokens."""
        return dataclasses.replace(self, catch_up=self.num_draft_tokens + 1, pairs=False)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with a cache of the prompt and its number of positions, int32[B], as `own`."""
        cache = prompt_cache(self.config, params.drafter, view, prefill)
        return super().init(params, view, prefill)._replace(own=(cache, view.start))

    def begin(
        self, params: Weights, length: jax.Array, capacity: int, merged: bool
    ) -> tuple[KVCache, jax.Array]:
        """Returns an empty cache and its number of positions, 0."""
        return empty_cache(self.config, params.drafter, length, capacity, merged)

    def absorbed(self, state: ChainState) -> tuple[KVCache, jax.Array]:
        """Returns the cache and its number of positions."""
        own: tuple[KVCache, jax.Array] = state.own
        return own

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts with the drafter's own cache; the target's cache is returned unchanged."""
        if self.pairs:
            carry = state.own[0], _before(view)
            step_of_two = functools.partial(self._step_of_two, params, view.start)
            proposal, carry, state = self.draft(
                step_of_two, carry, keys, state, view, distribution, params.drafter
            )
            return proposal, state._replace(own=(carry[0], view.start)), view.cache
        step = model_step(self.config, params.drafter, view.start)
        # The last draft token was not fed, so after full acceptance the cache lacks it. After another drafter's rounds
        # it lacks all tokens of these.
        cache = self._caught_up(params, view, *state.own)
        proposal, cache, state = self.draft(step, cache, keys, state, view, distribution, params.drafter)
        return proposal, state._replace(own=(cache, view.start)), view.cache

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Updates the number of valid positions in the cache, and the stop rule."""
        cache, held = state.own
        # The draft fed the pending token and all draft tokens except the last. Rejected ones are invalid.
        fed = jnp.where(outcome.drafted > 0, jnp.minimum(outcome.accepted + 1, outcome.drafted), 0)
        return super().observe(params, state._replace(own=(cache, held + fed)), outcome)

    def _step_of_two(
        self,
        params: Weights,
        start: jax.Array,
        carry: tuple[KVCache, jax.Array],
        token: jax.Array,
        i: jax.Array,
        active: jax.Array,
    ) -> tuple[jax.Array, jax.Array, tuple[KVCache, jax.Array]]:
        """Feeds the token and the one before it, the only one that the cache may lack (after full acceptance).

        There is a token before, because `start` counts the prompt. The exception is a row whose first logits were not
        finite, whose drafts are meaningless.
        """
        del active  # rows are computed together, so skipping some saves nothing
        cache, before = carry
        hidden = llama.embed(self.config, params.drafter, jnp.stack([before, token], axis=1))
        at = jnp.maximum(start + i - 1, 0)
        hidden, cache = llama.run_layers(self.config, params.drafter, hidden, at, cache)
        hidden = hidden[:, 1]
        return llama.logits(self.config, params.drafter, hidden), hidden, (cache, token)

    def _caught_up(self, params: Weights, view: View, cache: KVCache, held: jax.Array) -> KVCache:
        """Returns the cache with all positions before the pending token; later slots are meaningless."""

        def feed(carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, held = carry
            columns = jnp.minimum(held[:, None] + jnp.arange(self.catch_up), view.tokens.shape[1] - 1)
            hidden = llama.embed(
                self.config, params.drafter, jnp.take_along_axis(view.tokens, columns, axis=1)
            )
            _, cache = llama.run_layers(self.config, params.drafter, hidden, held, cache)
            return cache, jnp.minimum(held + self.catch_up, view.start)

        cache, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1] < view.start), feed, (cache, held))
        return cache


def _before(view: View) -> jax.Array:
    """Returns the token before the pending one, int32[B]."""
    return jnp.take_along_axis(view.tokens, jnp.maximum(view.start - 1, 0)[:, None], axis=1)[:, 0]
