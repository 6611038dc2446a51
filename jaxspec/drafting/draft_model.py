"""Speculative sampling with a separate draft model (Chen et al. 2023, Leviathan et al. 2023)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainDrafter, ChainState, model_step
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.prefill import run_prompts
from jaxspec.protocol import Outcome, Prefill, Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class DraftModel(ChainDrafter):
    """A smaller model of the same vocabulary drafts token by token, with a cache of its own.

    `params.drafter` are its parameters; its first layers alone, or the target's, do as well (the config
    says how many layers run).

    Attributes:
      config: the draft model's.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
      catch_up: how many of the tokens that its cache lacks are fed at once, static.
      pairs: whether each step feeds the token before once more, static: then a draft that was accepted whole takes no
        pass to catch up, and no program for it. For devices on which a second row is free.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)
    catch_up: int = struct.field(pytree_node=False, default=1)
    pairs: bool = struct.field(pytree_node=False, default=False)

    def taking_turns(self) -> DraftModel:
        """The same, for rounds of which some are another drafter's: the cache may lack many tokens."""
        return dataclasses.replace(self, catch_up=self.num_draft_tokens + 1, pairs=False)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Of its own, a cache that holds the prompt, and int32[B] how many positions it holds."""
        batch, capacity = view.tokens.shape
        dtype = params.drafter["embed"].dtype
        cache = kv.create(self.config, batch, capacity, dtype, view.cache.merged)
        _, _, cache = run_prompts(
            self.config, params.drafter, view.tokens, view.start, cache, prefill.chunk_size
        )
        return ChainState(self.rule.init(batch), (cache, view.start))

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts on the own cache; the target's is returned untouched.

        The last draft token is never fed, so after "all accepted" the own cache lacks it; after rounds that another
        drafter had, it lacks what they committed.
        """
        if self.pairs:
            carry = state.own[0], _before(view)
            step_of_two = functools.partial(self._step_of_two, params, view.start)
            proposal, carry, state = self.draft(step_of_two, carry, keys, state, view, law, params.drafter)
            return proposal, state._replace(own=(carry[0], view.start)), view.cache
        step = model_step(self.config, params.drafter, view.start)
        cache = self._caught_up(params, view, *state.own)
        proposal, cache, state = self.draft(step, cache, keys, state, view, law, params.drafter)
        return proposal, state._replace(own=(cache, view.start)), view.cache

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Notes how far each row's cache holds what was committed, and lets the stop rule learn."""
        cache, held = state.own
        # Of a draft the pending token was fed, and all tokens but the last.
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
        """Feeds the token and the one before it, the only one that the cache may lack: after a draft accepted whole.

        There is always one before, for `start` counts the whole prompt; not in a row whose first logits were not
        finite, where no draft means anything.
        """
        del active  # all rows cost what one does
        cache, before = carry
        hidden = llama.embed(params.drafter, jnp.stack([before, token], axis=1))
        at = jnp.maximum(start + i - 1, 0)
        hidden, cache = llama.run_layers(self.config, params.drafter, hidden, at, cache)
        hidden = hidden[:, 1]
        return llama.logits(self.config, params.drafter, hidden), hidden, (cache, token)

    def _caught_up(self, params: Weights, view: View, cache: KVCache, held: jax.Array) -> KVCache:
        """The cache with all positions before the pending token; what is written from there on means nothing."""

        def feed(carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, held = carry
            columns = jnp.minimum(held[:, None] + jnp.arange(self.catch_up), view.tokens.shape[1] - 1)
            hidden = llama.embed(params.drafter, jnp.take_along_axis(view.tokens, columns, axis=1))
            _, cache = llama.run_layers(self.config, params.drafter, hidden, held, cache)
            return cache, jnp.minimum(held + self.catch_up, view.start)

        cache, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1] < view.start), feed, (cache, held))
        return cache


def _before(view: View) -> jax.Array:
    """The token before the pending one, int32[B]."""
    return jnp.take_along_axis(view.tokens, jnp.maximum(view.start - 1, 0)[:, None], axis=1)[:, 0]
