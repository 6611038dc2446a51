"""What drafters share that read the target's residual stream and draft token by token, or level by level."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.drafting.chain import ChainDrafter, ChainState
from jaxspec.drafting.tree import Drawn, Dynamic, Level, draw, grow
from jaxspec.model import cache as kv
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest
from jaxspec.model.llama import Params, Tap
from jaxspec.protocol import Outcome, Prefill, Proposal, State, View, Weights
from jaxspec.sampling import Law

Carry = TypeVar("Carry")


def latest(values: jax.Array, count: jax.Array, before: jax.Array) -> jax.Array:
    """Returns the last of values [B, T, D], of which the first count[b] mean something; of none, `before` [B, D].

    Examples:
      >>> values = jnp.arange(6.0).reshape(2, 3, 1)
      >>> latest(values, count=jnp.array([2, 0]), before=-jnp.ones((2, 1))).tolist()
      [[1.0], [-1.0]]
    """
    here = jnp.take_along_axis(values, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((count > 0)[:, None], here, before)


def own_cache(
    config: LlamaConfig, length: jax.Array, capacity: int, dtype: DTypeLike, merged: bool
) -> KVCache:
    """The empty cache of a head with attention of its own, before prompts of length int32[B]; see `cache.create`."""
    cache = kv.create(config, length.shape[0], capacity, dtype, merged)
    return dataclasses.replace(cache, rope_length=length)


class TappedChain(ChainDrafter):
    """A base for chain drafters with taps, whose state's `own` is what they have absorbed.

    A subclass adds `begin` and `absorb` (see `protocol.Drafter`), and `propose`.

    Attributes:
      head: says what is tapped, by its `taps`.
    """

    head: Any

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the head reads of the target."""
        taps: tuple[Tap, ...] = self.head.taps
        return taps

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Of its own, what was absorbed of the prompt."""
        return super().init(params, view, prefill)._replace(own=prefill.absorbed)

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Absorbs the features of what was committed, and lets the stop rule learn."""

        def absorb(width: int, own: State) -> State:
            assert outcome.features is not None, "the loop must hand over what is tapped"
            assert outcome.start is not None
            features, tokens = outcome.features[:, :width], outcome.tokens[:, :width]
            return self.absorb(params, own, features, tokens, outcome.start, outcome.count)

        # Another drafter's round may have committed more than K + 1 tokens.
        full = outcome.tokens.shape[1]
        widths = (*(width for width in self.verify_widths if width < full), full)
        own = narrowest(widths, outcome.count.max(), absorb, state.own)
        return super().observe(params, state._replace(own=own), outcome)


class TappedTree(TappedChain):
    """A base for those that draft a chain, or in its place a tree, of likely tokens or of drawn ones.

    Attributes:
      tree: the size or the shape of the tree, of depth K; None for a chain. The stop rule then has no say.
    """

    tree: Dynamic | Drawn | None

    @property
    def drafts_trees(self) -> bool:
        """Whether it drafts a tree in place of a chain."""
        return self.tree is not None

    @property
    def num_nodes(self) -> int:
        """The most tokens of a draft: K, or N of a tree."""
        return self.num_draft_tokens if self.tree is None else self.tree.num_nodes

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The widths of verification; of a tree all its nodes."""
        return super().verify_widths if self.tree is None else (self.num_nodes + 1,)

    def draft_tree(
        self,
        level: Level[Carry],
        carry: Carry,
        logits: jax.Array,
        keys: jax.Array,
        params: Weights,
        law: Law,
    ) -> tuple[Proposal, Carry]:
        """Drafts a tree, see `tree.grow` and `tree.draw`; logits are of the heads' `vocabulary`, if there is one."""
        few = params.drafter.get("vocabulary")
        if isinstance(self.tree, Drawn):
            return draw(self.tree.shape, level, carry, logits, keys, law, few)
        assert self.tree is not None
        return grow(self.tree, level, carry, logits, None if few is None else few.ids)


class ParallelChain(TappedChain):
    """A base for tapped chains whose tokens do not know each other: one pass says what all of them may be."""

    def draft_said(
        self,
        said: jax.Array,
        hidden: jax.Array,
        keys: jax.Array,
        state: ChainState,
        view: View,
        law: Law,
        params: Params,
    ) -> tuple[Proposal, ChainState]:
        """Draws the draft tokens one after another, so that a stop rule may end the draft.

        Args:
          said: float32[B, K, V], the logits of each token, or [B, K, N] of a vocabulary of N tokens.
          hidden: [B, K, D], what they were made of.
          keys, state, view, law, params: as of `ChainDrafter.draft`.
        """

        def step(
            carry: tuple[()], token: jax.Array, i: jax.Array, active: jax.Array
        ) -> tuple[jax.Array, jax.Array, tuple[()]]:
            del token, active
            logits, read = (
                jax.lax.dynamic_index_in_dim(of, i, axis=1, keepdims=False) for of in (said, hidden)
            )
            return logits, read, carry

        proposal, _, state = self.draft(step, (), keys, state, view, law, params)
        return proposal, state
