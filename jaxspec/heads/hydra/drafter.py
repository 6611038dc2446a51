"""Drafts with sequentially dependent heads: Hydra and Hydra++ (Ankner et al. 2024)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import AuxTreeDrafter, latest, own_cache
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.heads.hydra import network
from jaxspec.heads.hydra.network import HydraConfig
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.tree import Tree, along
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Distribution


class Absorbed(NamedTuple):
    """The heads' state after all committed tokens except the pending one.

    Attributes:
      hidden: [B, D], of the last of these tokens: the input of the target's head, or the prefix attention's output.
      cache: the prefix attention's; None without it.
    """

    hidden: jax.Array
    cache: KVCache | None


@struct.dataclass
class HydraDrafter(AuxTreeDrafter):
    """Drafts token i of the round, or level i of a tree, with head i, given the draft tokens before it.

    `params.drafter` are the parameters of at least the first K heads.
    """

    head: HydraConfig = struct.field(pytree_node=False)
    num_draft_tokens: int = struct.field(pytree_node=False, default=4)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> Absorbed:
        """Returns the empty state before prompts of length int32[B]."""
        batch, dtype = length.shape[0], params.target["embed"].dtype
        hidden = jnp.zeros((batch, self.head.width), llama.stream_of(params.target))
        prefix = self.head.prefix
        if prefix is None:
            return Absorbed(hidden, None)
        return Absorbed(hidden, own_cache(prefix, length, capacity, dtype, merged))

    def absorb(
        self,
        params: Weights,
        state: Absorbed,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> Absorbed:
        """Keeps the last of auxiliary hidden states [B, T, D], after the prefix attention if there is one.

        Its cache is written past count[b] too; later tokens overwrite these slots before they are read.
        """
        cache = state.cache
        if self.head.prefix is not None and cache is not None:
            prefix = self.head.prefix, params.drafter["prefix"]
            aux_hidden_states, cache = network.run_prefix(*prefix, aux_hidden_states, start, cache)
        return Absorbed(latest(aux_hidden_states, count, state.hidden), cache)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts head by head; the target's cache is returned unchanged."""
        if self.tree is not None:
            return self._draft_tree(keys, params, state.own.hidden, view, distribution), state, view.cache
        hidden = state.own.hidden

        def logits(number: int, read: jax.Array) -> jax.Array:
            return network.logits(self.head, params.drafter, number, read[:, : number + 2])

        heads = [functools.partial(logits, number) for number in range(self.num_draft_tokens)]

        def step(
            read: jax.Array, token: jax.Array, i: jax.Array, active: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            del active  # a step costs the same for all rows as for one
            embedded = llama.embedding_rows(params.target, token[:, None]).astype(read.dtype)
            read = jax.lax.dynamic_update_slice(read, embedded, (0, i + 1, 0))
            return jax.lax.switch(i, heads, read), hidden, read

        path = jnp.zeros((hidden.shape[0], self.num_draft_tokens, self.head.width), hidden.dtype)
        read = jnp.concatenate([hidden[:, None], path], axis=1)
        proposal, _, state = self.draft(step, read, keys, state, view, distribution, params.drafter)
        return proposal, state, view.cache

    def _draft_tree(
        self, keys: jax.Array, params: Weights, hidden: jax.Array, view: View, distribution: Distribution
    ) -> Proposal:
        """Drafts a tree; each level carries the input of its nodes' head and the index of its first row."""

        def logits(read: jax.Array) -> jax.Array:
            return network.logits(self.head, params.drafter, read.shape[2] - 2, read)

        def level(
            carry: tuple[jax.Array, int], tokens: jax.Array, before: jax.Array, rows: Tree
        ) -> tuple[jax.Array, tuple[jax.Array, int]]:
            read, begin = carry
            embedded = llama.embedding_rows(params.target, tokens).astype(read.dtype)
            read = jnp.concatenate([along(read, before - begin), embedded[:, :, None]], axis=2)
            return logits(read), (read, rows.begin)

        pending = llama.embedding_rows(params.target, view.pending[:, None]).astype(hidden.dtype)
        read = jnp.concatenate([hidden[:, None], pending], axis=1)[:, None]
        carry, first = (read, 0), logits(read)[:, 0]
        return self.draft_tree(level, carry, first, keys, params.drafter, view, distribution)[0]
