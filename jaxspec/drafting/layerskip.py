"""Self-speculation by early exit: LayerSkip (Elhoushi et al. 2024), and with other stop rules AdaSPEED."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainDrafter, ChainState
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


@struct.dataclass
class LayerSkip(ChainDrafter):
    """The first E layers of the target, its final norm and its head draft; verification shares those layers.

    What the draft computed of the first E layers stands, KV and hidden states: verification feeds K + 1 rows
    to the other layers only. The draft never fed its last token, which one pass of the first E layers makes
    up for, without the head.

    AdaSPEED is this draft with `ProductBelow` as its rule.

    Attributes:
      config: the target.
      exit_layer: E, from 1 to L − 1.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    exit_layer: int = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache, and keeps the hidden states."""
        config, draft = self.config, params.self_draft

        def run(cache: KVCache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, KVCache]:
            hidden = llama.embed(draft, token[:, None])
            return llama.run_layers(config, draft, hidden, position, cache, layers=range(self.exit_layer))

        def step(
            carry: tuple[KVCache, jax.Array], token: jax.Array, i: jax.Array, active: jax.Array
        ) -> tuple[jax.Array, jax.Array, tuple[KVCache, jax.Array]]:
            del active
            cache, exits = carry
            hidden, cache = run(cache, token, view.start + i)
            exits = jax.lax.dynamic_update_slice(exits, hidden, (0, i, 0))
            return llama.logits(config, draft, hidden[:, 0]), hidden[:, 0], (cache, exits)

        batch = view.length.shape[0]
        exits = jnp.zeros((batch, self.num_draft_tokens + 1, config.hidden_size), draft["embed"].dtype)
        proposal, (cache, exits), state = self.draft(step, (view.cache, exits), keys, state, view, law, draft)

        fed = jnp.concatenate([view.pending[:, None], proposal.tokens], axis=1)
        last = jnp.take_along_axis(fed, proposal.count[:, None], axis=1)[:, 0]
        hidden, cache = run(cache, last, view.start + proposal.count)
        exits = exits.at[jnp.arange(batch), proposal.count].set(hidden[:, 0])
        proposal = dataclasses.replace(proposal, exit_hidden=exits, exit_layer=self.exit_layer)
        return proposal, state, cache
