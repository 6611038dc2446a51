"""Speculative sampling with a separate draft model (Chen et al. 2023, Leviathan et al. 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import draft_chain
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import once
from jaxspec.protocol import Outcome, Prefill, Proposal, State, StopRule, View, Weights, halving_widths
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class DraftModel:
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

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """K + 1 rows where the draft always has K tokens; else narrower ones too."""
        if isinstance(self.rule, Constant):
            return (self.num_draft_tokens + 1,)
        return halving_widths(self.num_draft_tokens)

    def init(self, params: Weights, view: View, prefill: Prefill) -> State:
        """(cache that holds the prompt, the rule's state, bool[B] whether the cache lacks a token)."""
        batch, capacity = view.tokens.shape
        dtype = params.drafter["embed"].dtype
        cache = kv.create(self.config, batch, capacity, dtype, view.cache.merged)
        _, cache = llama.prefill(
            self.config, params.drafter, view.tokens, view.length - 1, cache, prefill.piece
        )
        return cache, self.rule.init(batch), jnp.zeros(batch, bool)

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, law: Law
    ) -> tuple[Proposal, State, KVCache]:
        """Drafts on the own cache; the target's is returned untouched.

        The last draft token is never fed, so after "all accepted" the own cache lacks it: the token before
        the pending one is fed again. Where a row lacks nothing this writes what is there already.
        """
        cache, rule_state, behind = state
        before = view.length - 2
        pair = jnp.take_along_axis(view.tokens, before[:, None] + jnp.arange(2)[None], axis=1)
        cache = once(jnp.any(behind), lambda c: self._run(params, c, pair[:, :1], before)[1], cache)

        def step(cache, token, i):
            hidden, cache = self._run(params, cache, token[:, None], view.length - 1 + i)
            return llama.logits(self.config, params.drafter, hidden[:, 0]), hidden[:, 0], cache

        proposal, cache, rule_state = draft_chain(
            step, cache, pair[:, 1], view.room, self.num_draft_tokens, keys, law, self.rule, rule_state
        )
        return proposal, (cache, rule_state, behind), view.cache

    def observe(self, params: Weights, state: State, outcome: Outcome) -> State:
        """Notes which rows had everything accepted, and lets the stop rule learn."""
        cache, rule_state, _ = state
        whole = (outcome.drafted > 0) & (outcome.accepted == outcome.drafted)
        return cache, self.rule.observe(rule_state, outcome), whole

    def _run(self, params: Weights, cache: KVCache, tokens: jax.Array, start: jax.Array):
        hidden = llama.embed(params.drafter, tokens)
        return llama.run_layers(self.config, params.drafter, hidden, start, cache)
