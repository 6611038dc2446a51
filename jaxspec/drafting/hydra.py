"""Heads that each read what was drafted before it: Hydra and Hydra++ (Ankner et al. 2024)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.tapped import TappedTree, latest, own_cache
from jaxspec.drafting.tree import Drawn, Dynamic
from jaxspec.model import hydra, llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.hydra import HydraConfig
from jaxspec.model.tree import Tree, along
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


class Absorbed(NamedTuple):
    """What the heads keep of the committed tokens but the pending one.

    Attributes:
      hidden: [B, D], of the last of them: what the target's head read, or what the prefix attention makes of it.
      cache: the prefix attention's; None without it.
    """

    hidden: jax.Array
    cache: KVCache | None


@struct.dataclass
class Hydra(TappedTree):
    """Head i drafts token i of the round, given the tokens that the heads before it drafted; or level i of a tree.

    `params.drafter` are the heads' parameters, of the first K heads at least.

    Attributes:
      config: of the target.
      head: of the heads.
      rule: when to stop before K tokens.
      num_draft_tokens: K, at most as many as there are heads.
      tree: the size, or the shape, of the tree that is drafted in place of a chain, of depth K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: HydraConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=4)
    tree: Dynamic | Drawn | None = struct.field(pytree_node=False, default=None)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> Absorbed:
        """Returns what has been absorbed before prompts of length int32[B]: nothing."""
        batch, dtype = length.shape[0], params.target["embed"].dtype
        hidden, prefix = jnp.zeros((batch, self.head.width), dtype), self.head.prefix
        if prefix is None:
            return Absorbed(hidden, None)
        return Absorbed(hidden, own_cache(prefix, length, capacity, dtype, merged))

    def absorb(
        self,
        params: Weights,
        state: Absorbed,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> Absorbed:
        """Keeps the last of features [B, T, D], with a prefix attention of what that makes of them.

        What lies past count[b] goes into its cache as well, where later tokens overwrite it before any sees it.
        """
        cache = state.cache
        if self.head.prefix is not None and cache is not None:
            prefix = self.head.prefix, params.drafter["prefix"]
            features, cache = hydra.run_prefix(*prefix, features, start, cache)
        return Absorbed(latest(features, count, state.hidden), cache)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts head by head; the target's cache is returned untouched."""
        if self.tree is not None:
            return self._draft_tree(keys, params, state.own.hidden, view, law), state, view.cache
        hidden = state.own.hidden

        def say(number: int, read: jax.Array) -> jax.Array:
            return hydra.logits(self.head, params.drafter, number, read[:, : number + 2])

        heads = [functools.partial(say, number) for number in range(self.num_draft_tokens)]

        def step(
            read: jax.Array, token: jax.Array, i: jax.Array, active: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            del active  # all rows cost what one does
            embedded = llama.embed(params.target, token[:, None]).astype(read.dtype)
            read = jax.lax.dynamic_update_slice(read, embedded, (0, i + 1, 0))
            return jax.lax.switch(i, heads, read), hidden, read

        path = jnp.zeros((hidden.shape[0], self.num_draft_tokens, self.head.width), hidden.dtype)
        read = jnp.concatenate([hidden[:, None], path], axis=1)
        proposal, _, state = self.draft(step, read, keys, state, view, law, params.drafter)
        return proposal, state, view.cache

    def _draft_tree(
        self, keys: jax.Array, params: Weights, hidden: jax.Array, view: View, law: Law
    ) -> Proposal:
        """Drafts a tree; each level carries what its nodes read, [B, k, D each], and which of all rows is its first."""

        def say(read: jax.Array) -> jax.Array:
            return hydra.logits(self.head, params.drafter, read.shape[2] - 2, read)

        def level(
            carry: tuple[jax.Array, int], tokens: jax.Array, before: jax.Array, rows: Tree
        ) -> tuple[jax.Array, tuple[jax.Array, int]]:
            read, begin = carry
            embedded = llama.embed(params.target, tokens).astype(read.dtype)
            read = jnp.concatenate([along(read, before - begin), embedded[:, :, None]], axis=2)
            return say(read), (read, rows.begin)

        pending = llama.embed(params.target, view.pending[:, None]).astype(hidden.dtype)
        read = jnp.concatenate([hidden[:, None], pending], axis=1)[:, None]
        return self.draft_tree(level, (read, 0), say(read)[:, 0], keys, params, law)[0]
