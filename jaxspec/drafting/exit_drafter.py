"""The base of drafters that run the target's first layers and pass the hidden states to verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxspec.drafting.chain_drafter import ChainDrafter, ChainState
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Distribution

Own = TypeVar("Own")
# (stream [B, 1, D] after the first E layers, its position int32[B], own carry)
#   -> logits and hidden [B, D] as in `chain_drafter.Step`, own carry
Read = Callable[[jax.Array, jax.Array, Own], tuple[jax.Array, jax.Array, Own]]


class ExitDrafter(ChainDrafter):
    """A base for chain drafters whose tokens run through the target's first E layers.

    Verification reuses the keys, values and hidden states of these layers, and feeds K + 1 rows to the other layers.
    With a draft window it runs all layers.

    Attributes:
      config: the target.
      exit_layer: E, from 1 to L − 1.
    """

    config: LlamaConfig
    exit_layer: int

    def draft_from_exit(
        self,
        read: Read[Own],
        own: Own,
        keys: jax.Array,
        params: Weights,
        state: ChainState,
        view: View,
        distribution: Distribution,
    ) -> tuple[Proposal, Own, ChainState, KVCache]:
        """Drafts in the target's cache, see `ChainDrafter.draft`; `read` computes logits from each stream."""
        config, target = self.config, params.target

        def run(cache: KVCache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, KVCache]:
            hidden = llama.embed(config, target, token[:, None])
            return llama.run_layers(config, target, hidden, position, cache, layers=range(self.exit_layer))

        def step(
            carry: tuple[KVCache, jax.Array, Own], token: jax.Array, i: jax.Array, active: jax.Array
        ) -> tuple[jax.Array, jax.Array, tuple[KVCache, jax.Array, Own]]:
            del active  # rows are computed together, so skipping some saves nothing
            cache, exits, own = carry
            stream, cache = run(cache, token, view.start + i)
            # Verification goes on from this stream.
            exits = jax.lax.dynamic_update_slice(exits, stream, (0, i, 0))
            logits, hidden, own = read(stream, view.start + i, own)
            return logits, hidden, (cache, exits, own)

        batch = view.length.shape[0]
        exits = jnp.zeros((batch, self.num_draft_tokens + 1, config.hidden_size), llama.stream_of(target))
        carry = (view.cache, exits, own)
        proposal, carry, state = self.draft(step, carry, keys, state, view, distribution, params.drafter)
        cache, exits, own = carry

        if config.draft_window is not None:
            # The streams are not those of the target, which runs all its layers.
            return proposal, own, state, cache
        # No step fed the last draft token of a row; verification needs its stream and its keys and values too.
        fed = jnp.concatenate([view.pending[:, None], proposal.tokens], axis=1)
        last = jnp.take_along_axis(fed, proposal.count[:, None], axis=1)[:, 0]
        stream, cache = run(cache, last, view.start + proposal.count)
        exits = exits.at[jnp.arange(batch), proposal.count].set(stream[:, 0])
        proposal = dataclasses.replace(proposal, exit_hidden=exits, exit_layer=self.exit_layer)
        return proposal, own, state, cache
