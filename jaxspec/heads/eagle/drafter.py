"""Drafts a chain or a tree with an EAGLE head: EAGLE-1 and -2 (Li et al. 2024), EAGLE-3 (Li et al. 2025), P-EAGLE."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import AuxTreeDrafter, ParallelDrafter, latest, own_cache
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.heads.eagle import network
from jaxspec.heads.eagle.network import EagleConfig
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.control import once
from jaxspec.model.tree import Tree, along
from jaxspec.protocol import Proposal, View, Weights
from jaxspec.sampling import Distribution


class Absorbed(NamedTuple):
    """The head's state after all committed tokens except the pending one, from the target's auxiliary hidden states.

    Attributes:
      cache: the head's, with one pair per slot.
      hidden: [B, D], its output at each row's last pair, which predicts the token after the pending one.
    """

    cache: KVCache
    hidden: jax.Array


@struct.dataclass
class EagleDrafter(ParallelDrafter, AuxTreeDrafter):
    """Drafts with a head that predicts the target's auxiliary hidden states, and from each of them the next token.

    For committed tokens the head's cache holds pairs of the target's own auxiliary hidden states: verification computes
    those of accepted tokens, and they overwrite the pairs of predicted auxiliary hidden states. The last true pair
    gives the first draft token, so a draft of K tokens takes K − 1 passes of the head, and one over the tokens of the
    round before. With a head of P-EAGLE one pass over K − 1 pairs of masks takes their place.

    `params.drafter` are the head's parameters.
    """

    head: EagleConfig = struct.field(pytree_node=False)

    @property
    def reach(self) -> int:
        """The number of slots that a round writes: those of verification, or of the head if it runs more nodes."""
        return super().reach if self.tree is None else max(self.num_nodes, self.tree.num_drafted) + 1

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> Absorbed:
        """Returns the empty state before prompts of length int32[B]."""
        batch, dtype = length.shape[0], params.drafter["fc"].dtype
        hidden = jnp.zeros((batch, self.head.block.hidden_size), llama.stream_of(params.target))
        return Absorbed(own_cache(self.head.block, length, capacity, dtype, merged), hidden)

    def absorb(
        self,
        params: Weights,
        state: Absorbed,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> Absorbed:
        """Runs the head over auxiliary hidden states [B, T, F] from position start[b] on, each with the token after it.

        Pairs past count[b] are written too; later pairs overwrite them before they are read.
        """
        fused = network.fuse(self.head, params.drafter, aux_hidden_states)
        hidden, cache = self._run(params, tokens, fused, start, state.cache)
        return Absorbed(cache, latest(hidden, count, state.hidden))

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts on the head's cache; the target's cache and `hidden` are returned unchanged."""
        if self.head.mask_id is not None:
            own = self._run_masks(params, view.start, state.own)
            logits = network.logits(self.head, params.drafter, self.config, params.target, own.hidden)
            proposal, state = self.draft_said(
                logits, own.hidden, keys, state, view, distribution, params.drafter
            )
            return proposal, state._replace(own=Absorbed(own.cache, state.own.hidden)), view.cache
        if self.tree is not None:
            proposal, cache = self._draft_tree(keys, params, state.own, view, distribution)
            return proposal, state._replace(own=Absorbed(cache, state.own.hidden)), view.cache
        step = functools.partial(self._step, params, view.start)
        proposal, drafted, state = self.draft(
            step, state.own, keys, state, view, distribution, params.drafter
        )
        return proposal, state._replace(own=Absorbed(drafted.cache, state.own.hidden)), view.cache

    def _run(
        self,
        params: Weights,
        tokens: jax.Array,
        aux_hidden_state: jax.Array,
        start: jax.Array,
        cache: KVCache,
        tree: Tree | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Runs the head over pairs of auxiliary hidden state [B, T, D] and token int32[B, T]."""
        table = params.drafter if self.head.own_embedding else params.target
        return network.run_head(
            self.head,
            params.drafter,
            llama.embedding_rows(table, tokens),
            aux_hidden_state,
            start,
            cache,
            tree,
        )

    def _run_masks(self, params: Weights, start: jax.Array, own: Absorbed) -> Absorbed:
        """Runs K − 1 pairs of masks after the last true pair; their hidden states, with that pair's, are [B, K, D]."""
        hidden, count, mask = own.hidden[:, None], self.num_draft_tokens - 1, self.head.mask_id
        if not count or mask is None:
            return Absorbed(own.cache, hidden)
        masks = jnp.full((len(hidden), count), mask, jnp.int32)
        fused = network.fuse(self.head, params.drafter, params.drafter["mask_hidden"])
        fused = jnp.broadcast_to(fused, (*masks.shape, *fused.shape)).astype(hidden.dtype)
        new, cache = self._run(params, masks, fused, start, own.cache)
        return Absorbed(cache, jnp.concatenate([hidden, new], axis=1))

    def _draft_tree(
        self, keys: jax.Array, params: Weights, own: Absorbed, view: View, distribution: Distribution
    ) -> tuple[Proposal, KVCache]:
        """Drafts a tree. Its row 0 is the last true pair; the pairs of the nodes take the slots after it."""

        def logits(hidden: jax.Array) -> jax.Array:
            return network.logits(self.head, params.drafter, self.config, params.target, hidden)

        def level(
            carry: tuple[KVCache, jax.Array], tokens: jax.Array, before: jax.Array, rows: Tree
        ) -> tuple[jax.Array, tuple[KVCache, jax.Array]]:
            cache, hidden = carry
            aux_hidden_state = network.fed_back(self.head, params.drafter, along(hidden, before))
            start = view.start + rows.begin - 1
            new, cache = self._run(params, tokens, aux_hidden_state, start, cache, rows)
            return logits(new), (cache, jnp.concatenate([hidden, new], axis=1))

        carry = own.cache, own.hidden[:, None]
        first = logits(own.hidden)
        proposal, (cache, _) = self.draft_tree(level, carry, first, keys, params.drafter, view, distribution)
        return proposal, cache

    def _step(
        self,
        params: Weights,
        start: jax.Array,
        own: Absorbed,
        token: jax.Array,
        i: jax.Array,
        active: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Absorbed]:
        """Drafts token i: the first from the last true pair, each other one from the pair of the token before it."""
        del active  # a pass costs the same for all rows as for one

        def run_pair(own: Absorbed) -> Absorbed:
            aux_hidden_state = network.fed_back(self.head, params.drafter, own.hidden)
            hidden, cache = self._run(
                params, token[:, None], aux_hidden_state[:, None], start + i - 1, own.cache
            )
            return Absorbed(cache, hidden[:, 0])

        own = once(i > 0, run_pair, own)
        logits = network.logits(self.head, params.drafter, self.config, params.target, own.hidden)
        return logits, own.hidden, own
