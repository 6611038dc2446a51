"""EAGLE heads that draft a chain, or EAGLE-2's tree: EAGLE-1 and -2 (Li et al. 2024) and EAGLE-3 (Li et al. 2025)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainState
from jaxspec.drafting.tapped import TappedTree, latest, own_cache
from jaxspec.drafting.tree import Drawn, Dynamic
from jaxspec.model import eagle, llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import once
from jaxspec.model.eagle import HeadConfig
from jaxspec.model.tree import Tree, along
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import Constant


class Absorbed(NamedTuple):
    """What a head has made of the committed tokens but the pending one, with the target's own features.

    Attributes:
      cache: the head's: a pair a slot.
      hidden: [B, D], its output at each row's last pair, which predicts the token after the pending one.
    """

    cache: KVCache
    hidden: jax.Array


@struct.dataclass
class Eagle(TappedTree):
    """A head predicts the target's features, and from each the token after it.

    The head's cache is filled with true features alone: those of accepted drafts come with verification, and
    overwrite what the head had put there from its own. The last of them gives the first draft token, so a draft of K
    tokens takes K − 1 passes of the head, and one over the tokens of the round before.

    `params.drafter` are the head's parameters.

    Attributes:
      config: of the target.
      head: of the head.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
      tree: the size, or the shape, of the tree that is drafted in place of a chain, of depth K, without the rule.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: HeadConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=5)
    tree: Dynamic | Drawn | None = struct.field(pytree_node=False, default=None)

    @property
    def reach(self) -> int:
        """The number of slots that a round writes: those of verification, or of the head where it runs more nodes."""
        return super().reach if self.tree is None else max(self.num_nodes, self.tree.num_drafted) + 1

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> Absorbed:
        """Returns what has been absorbed before prompts of length int32[B]: nothing."""
        batch, dtype = length.shape[0], params.drafter["fc"].dtype
        hidden = jnp.zeros((batch, self.head.block.hidden_size), dtype)
        return Absorbed(own_cache(self.head.block, length, capacity, dtype, merged), hidden)

    def absorb(
        self,
        params: Weights,
        state: Absorbed,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> Absorbed:
        """Runs the head over features [B, T, F] from position start[b] on, each with the token after it.

        What lies past count[b] is written as well, where later pairs overwrite it before any of them sees it.
        """
        fused = eagle.fuse(self.head, params.drafter, features)
        hidden, cache = self._run(params, tokens, fused, start, state.cache)
        return Absorbed(cache, latest(hidden, count, state.hidden))

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts on the head's cache; the target's is returned untouched, and `hidden` as it was."""
        if self.tree is not None:
            proposal, cache = self._draft_tree(keys, params, state.own, view, law)
            return proposal, state._replace(own=Absorbed(cache, state.own.hidden)), view.cache
        step = functools.partial(self._step, params, view.start)
        proposal, drafted, state = self.draft(step, state.own, keys, state, view, law, params.drafter)
        return proposal, state._replace(own=Absorbed(drafted.cache, state.own.hidden)), view.cache

    def _run(
        self,
        params: Weights,
        tokens: jax.Array,
        feature: jax.Array,
        start: jax.Array,
        cache: KVCache,
        tree: Tree | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Runs the head over pairs of feature [B, T, D] and token int32[B, T]."""
        table = params.drafter if self.head.own_embedding else params.target
        return eagle.run(self.head, params.drafter, llama.embed(table, tokens), feature, start, cache, tree)

    def _draft_tree(
        self, keys: jax.Array, params: Weights, own: Absorbed, view: View, law: Law
    ) -> tuple[Proposal, KVCache]:
        """Drafts a tree, whose row 0 is the last true pair; the pair of a node stands in the slot after it."""

        def logits(hidden: jax.Array) -> jax.Array:
            return eagle.logits(self.head, params.drafter, self.config, params.target, hidden)

        def level(
            carry: tuple[KVCache, jax.Array], tokens: jax.Array, before: jax.Array, rows: Tree
        ) -> tuple[jax.Array, tuple[KVCache, jax.Array]]:
            cache, hidden = carry
            feature = eagle.fed_back(self.head, params.drafter, along(hidden, before))
            start = view.start + rows.begin - 1
            new, cache = self._run(params, tokens, feature, start, cache, rows)
            return logits(new), (cache, jnp.concatenate([hidden, new], axis=1))

        carry = own.cache, own.hidden[:, None]
        proposal, (cache, _) = self.draft_tree(level, carry, logits(own.hidden), keys, params, law)
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
        """The first token comes from the last true pair; each other one from the pair of the token before it."""
        del active  # all rows cost what one does

        def go_on(own: Absorbed) -> Absorbed:
            feature = eagle.fed_back(self.head, params.drafter, own.hidden)
            hidden, cache = self._run(params, token[:, None], feature[:, None], start + i - 1, own.cache)
            return Absorbed(cache, hidden[:, 0])

        own = once(i > 0, go_on, own)
        logits = eagle.logits(self.head, params.drafter, self.config, params.target, own.hidden)
        return logits, own.hidden, own
