"""The target drafts a block for itself in one pass: Uno (arXiv 2609.04010)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import ParallelChain, TreeChain
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.tree_drafter import Drawn, Dynamic
from jaxspec.heads.uno import network
from jaxspec.heads.uno.network import UnoConfig
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.tree import Tree
from jaxspec.protocol import Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import Constant

# The log-probability at the root of a tree of tokens that the target never chooses.
_NEVER = -1e30


@struct.dataclass
class Uno(ParallelChain, TreeChain):
    """Runs the target over the pending token and K − 1 noise tokens, with adapters on the noise tokens' rows.

    The first draft token has the target's own distribution, so it is always accepted, and verification need not run the
    pending token. The keys and values of the noise tokens are in the target's cache after the pending token's, until
    verification overwrites them.

    `params.drafter` are the adapters.

    Attributes:
      config: the target's configuration.
      head: the adapters' configuration.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
      tree: the size or the shape of a draft tree of depth K; None for a chain.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    head: UnoConfig = struct.field(pytree_node=False)
    rule: StopRule = Constant()
    num_draft_tokens: int = struct.field(pytree_node=False, default=8)
    tree: Dynamic | Drawn | None = struct.field(pytree_node=False, default=None)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache."""
        target, own = params.target, params.drafter
        tokens = network.block(self.head, view.pending, view.start, self.num_draft_tokens)
        hidden, cache = network.run(self.config, target, self.head, own, tokens, view.start, view.cache)
        logits = network.logits(own, self.config, target, hidden)
        if self.tree is None:
            proposal, state = self.draft_said(logits, hidden, keys, state, view, distribution, own)
        else:
            proposal = self._tree_of(logits, keys, params, distribution)
        return dataclasses.replace(proposal, pending_hidden=hidden[:, :1]), state, cache

    def _tree_of(
        self, logits: jax.Array, keys: jax.Array, params: Weights, distribution: Distribution
    ) -> Proposal:
        """Returns the tree of the rows' logits, float32[B, K, V]."""

        def level(number: int, tokens: jax.Array, before: jax.Array, rows: Tree) -> tuple[jax.Array, int]:
            del tokens, before, rows  # a row does not know the draft tokens before its own
            return logits[:, number, None], number + 1

        first = logits[:, 0]
        if isinstance(self.tree, Dynamic):
            # The target will draw the first token from this distribution: in a greedy text there is one candidate.
            first = jnp.maximum(distribution.log_probs(first), _NEVER)
        return self.draft_tree(level, 1, first, keys, params, distribution)[0]
