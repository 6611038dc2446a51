"""The bases of drafters of trees, of blocks, and of those that read auxiliary hidden states of the target."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxspec.drafting.chain_drafter import ChainDrafter, ChainState
from jaxspec.drafting.tree_drafter import Drawn, Dynamic, Level, combine, draw, grow, masked
from jaxspec.model import cache as kv
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest
from jaxspec.model.llama import AuxLayer, Params
from jaxspec.model.tree import Tree
from jaxspec.protocol import Outcome, Prefill, Proposal, State, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import Constant

Carry = TypeVar("Carry")


def latest(values: jax.Array, count: jax.Array, before: jax.Array) -> jax.Array:
    """Returns entry count[b] − 1 of values [B, T, D], or `before` [B, D] where the count is 0."""
    here = jnp.take_along_axis(values, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((count > 0)[:, None], here, before)


def own_cache(
    config: LlamaConfig, length: jax.Array, capacity: int, dtype: DTypeLike, merged: bool
) -> KVCache:
    """Returns the empty cache of a head with attention, for prompts of length int32[B]; see `cache.create`."""
    cache = kv.create(config, length.shape[0], capacity, dtype, merged)
    return dataclasses.replace(cache, rope_length=length)


class AuxDrafter(ChainDrafter):
    """A base for chain drafters that read auxiliary hidden states; their state's `own` is the result of `absorb`.

    A subclass adds `begin` and `absorb` (see `protocol.Drafter`), and `propose`.

    Attributes:
      head: the head's configuration, which has `aux_layers`.
    """

    head: Any

    @property
    def aux_layers(self) -> tuple[AuxLayer, ...]:
        """The places at which the head reads the target's residual stream."""
        aux_layers: tuple[AuxLayer, ...] = self.head.aux_layers
        return aux_layers

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with the result of `absorb` over the prompt as `own`."""
        return super().init(params, view, prefill)._replace(own=prefill.absorbed)

    def absorbed(self, state: ChainState) -> State:
        """Returns the result of `absorb`."""
        return state.own

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Absorbs the auxiliary hidden states of the committed tokens, if there are any, and updates the stop rule."""
        hidden = outcome.aux_hidden_states
        if hidden is None:
            return super().observe(params, state, outcome)

        def absorb(width: int, own: State) -> State:
            assert outcome.start is not None
            aux_hidden_states, tokens = hidden[:, :width], outcome.tokens[:, :width]
            return self.absorb(params, own, aux_hidden_states, tokens, outcome.start, outcome.count)

        # Rejected tokens are not absorbed, so the longest accepted draft decides the width. Another drafter's round
        # may have committed more than K + 1 tokens.
        full = outcome.tokens.shape[1]
        widths = (*(width for width in self.verify_widths if width < full), full)
        own = narrowest(widths, outcome.count.max(), absorb, state.own)
        return super().observe(params, state._replace(own=own), outcome)


@struct.dataclass
class TreeDrafter(ChainDrafter):
    """A base for drafters with a head that drafts a chain, or a tree of top-k or drawn tokens.

    Attributes:
      config: the target's configuration.
      head: the head's configuration.
      rule: when to stop before K tokens; not used with a tree.
      num_draft_tokens: K.
      tree: the size or the shape of the tree, of depth K; None for a chain.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: Any = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)
    tree: Dynamic | Drawn | None = struct.field(pytree_node=False, default=None)

    @property
    def drafts_trees(self) -> bool:
        """Whether it drafts a tree in place of a chain."""
        return self.tree is not None

    @property
    def num_nodes(self) -> int:
        """The maximum number of draft tokens: K, or N for a tree."""
        return self.num_draft_tokens if self.tree is None else self.tree.num_nodes

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The widths of verification; for a tree only N + 1."""
        return super().verify_widths if self.tree is None else (self.num_nodes + 1,)

    def draft_tree(
        self,
        level: Level[Carry],
        carry: Carry,
        logits: jax.Array,
        keys: jax.Array,
        params: Params,
        view: View,
        distribution: Distribution,
    ) -> tuple[Proposal, Carry]:
        """Drafts a tree by `tree_drafter.grow` or `draw`; logits are of the draft's `vocabulary`, if it has one."""
        vocabulary = params.get("vocabulary")
        ids = None if vocabulary is None else vocabulary.ids
        begin: tuple[Level[Any], Any, jax.Array] = (level, carry, logits)
        if view.grammar is not None:
            begin = masked(view.grammar, *begin, ids)
        assert self.tree is not None
        if isinstance(self.tree, Drawn):
            proposal, end = draw(self.tree.shape, *begin, keys, distribution, vocabulary)
        else:
            proposal, end = grow(self.tree, *begin, ids)
        return proposal, end if view.grammar is None else end[0]


class AuxTreeDrafter(TreeDrafter, AuxDrafter):
    """A base for drafters with `aux_layers` of a chain or a tree."""


class ParallelDrafter(TreeDrafter):
    """A base for chains and trees whose hidden states are all computed in one pass, before any token is drawn.

    Attributes:
      independent: whether `given` changes nothing: a token does not depend on the draft tokens before it.
    """

    independent: ClassVar[bool] = True

    def given(
        self, params: Params, logits: jax.Array, hidden: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the logits and the hidden states of draft tokens given the tokens before them.

        Args:
          params: the draft's parameters.
          logits: float32[..., V], or [..., N] for a vocabulary of N tokens.
          hidden: [..., D].
          token: int32[...], the tokens before.
        """
        del params, token
        return logits, hidden

    def draft_said(
        self,
        said: jax.Array,
        hidden: jax.Array,
        keys: jax.Array,
        state: ChainState,
        view: View,
        distribution: Distribution,
        params: Params,
    ) -> tuple[Proposal, ChainState]:
        """Draws the tokens of a chain one after another, so that a stop rule can end it, or combines those of a tree.

        Args:
          said: float32[B, K, V], the logits of each token, or [B, K, N] for a vocabulary of N tokens.
          hidden: [B, K, D], the states from which the logits were computed.
          keys, state, view, distribution, params: as in `ChainDrafter.draft`.
        """
        vocabulary = params.get("vocabulary")
        # Under a grammar a token depends on those before it.
        if isinstance(self.tree, Dynamic) and self.independent and view.grammar is None:
            return combine(self.tree, said, None if vocabulary is None else vocabulary.ids), state
        if self.tree is not None:

            def level(number: int, tokens: jax.Array, before: jax.Array, rows: Tree) -> tuple[jax.Array, int]:
                del before, rows  # a token depends on its parent only
                logits = self.given(params, said[:, number, None], hidden[:, number, None], tokens)[0]
                return logits, number + 1

            first = self.given(params, said[:, 0], hidden[:, 0], view.pending)[0]
            return self.draft_tree(level, 1, first, keys, params, view, distribution)[0], state

        def step(
            carry: tuple[()], token: jax.Array, i: jax.Array, active: jax.Array
        ) -> tuple[jax.Array, jax.Array, tuple[()]]:
            del active
            logits, read = (
                jax.lax.dynamic_index_in_dim(of, i, axis=1, keepdims=False) for of in (said, hidden)
            )
            return *self.given(params, logits, read, token), carry

        proposal, _, state = self.draft(step, (), keys, state, view, distribution, params)
        return proposal, state
