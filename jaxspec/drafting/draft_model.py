"""Speculative sampling with a separate draft model (Chen et al. 2023, Leviathan et al. 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainDrafter, ChainState, model_step
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import once
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
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Of its own, a cache that holds the prompt, and bool[B] whether the cache lacks a token."""
        batch, capacity = view.tokens.shape
        dtype = params.drafter["embed"].dtype
        cache = kv.create(self.config, batch, capacity, dtype, view.cache.merged)
        _, _, cache = llama.prefill(
            self.config, params.drafter, view.tokens, view.start, cache, prefill.chunk_size
        )
        return ChainState(self.rule.init(batch), (cache, jnp.zeros(batch, bool)))

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts on the own cache; the target's is returned untouched.

        The last draft token is never fed, so after "all accepted" the own cache lacks it: the token before
        the pending one is fed again. Where a row lacks nothing this writes what is there already.
        """
        cache, behind = state.own
        before = jnp.take_along_axis(view.tokens, view.start[:, None] - 1, axis=1)
        catch_up = model_step(self.config, params.drafter, view.start - 1)
        cache = once(
            jnp.any(behind), lambda cache: catch_up(cache, before[:, 0], jnp.int32(0), behind)[2], cache
        )
        step = model_step(self.config, params.drafter, view.start)
        proposal, cache, state = self.draft(step, cache, keys, state, view, law, params.drafter)
        return proposal, state._replace(own=(cache, behind)), view.cache

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Notes which rows had everything accepted, and lets the stop rule learn."""
        whole = (outcome.drafted > 0) & (outcome.accepted == outcome.drafted)
        return super().observe(params, state._replace(own=(state.own[0], whole)), outcome)
