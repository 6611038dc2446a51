"""The target drafts a block for itself in one pass: Uno (arXiv 2609.04010)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import ParallelDrafter
from jaxspec.drafting.chain_drafter import ChainState
from jaxspec.drafting.tree_drafter import Dynamic
from jaxspec.heads.uno import network
from jaxspec.heads.uno.network import UnoConfig
from jaxspec.model.cache import KVCache
from jaxspec.model.tree import Shape
from jaxspec.protocol import Beside, Drafter, Outcome, Prefill, Proposal, View, Weights
from jaxspec.sampling import Distribution

# The log-probability at the root of a tree of tokens that the target never chooses.
_NEVER = -1e30


@struct.dataclass
class UnoDrafter(ParallelDrafter):
    """Runs the target over the pending token and K − 1 noise tokens, with adapters on the noise tokens' rows.

    The first draft token has the target's own distribution, so it is always accepted, and verification need not run the
    pending token. The keys and values of the noise tokens are in the target's cache after the pending token's, until
    verification overwrites them.

    `params.drafter` are the adapters.
    """

    head: UnoConfig = struct.field(pytree_node=False)
    num_draft_tokens: int = struct.field(pytree_node=False, default=8)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache."""
        config, target, own = self.config, params.target, params.drafter
        tokens = network.block(self.head, view.pending, view.start, self.num_draft_tokens)
        hidden, cache = network.run_head(config, target, self.head, own, tokens, view.start, view.cache)
        logits = network.logits(own, config, target, hidden)
        if isinstance(self.tree, Dynamic):
            # The target will draw the first token from this distribution: in a greedy text there is one candidate.
            first = logits[:, :1]
            if view.grammar is not None:
                ids = own["vocabulary"].ids if "vocabulary" in own else None
                first = view.grammar.mask(first, view.grammar.state[:, None], ids)
            first = jnp.maximum(distribution.log_probs(first), _NEVER)
            logits = jnp.concatenate([first, logits[:, 1:]], axis=1)
        proposal, state = self.draft_said(logits, hidden, keys, state, view, distribution, own)
        # The first row has run all layers on the pending token.
        proposal = dataclasses.replace(proposal, exit_hidden=hidden[:, :1], exit_layer=config.num_layers)
        return proposal, state, cache


@struct.dataclass
class UnoSinglePassDrafter(ParallelDrafter):
    """Drafts within the verification of the draft before, so that a round is one pass of the target.

    Under each of the K + 1 beginnings of the verified draft there are K noise tokens, in the places of the token that
    the target will draw after this beginning and of those after it. Row i of the noise gives the distribution of the
    token i places after the drawn one. The rows under the accepted beginning are the next draft: its tokens do not know
    the pending token, and the first is not certain to be accepted.

    `params.drafter` are the adapters. The state's `own` are the hidden states [B, K, D] of the next draft.
    """

    head: UnoConfig = struct.field(pytree_node=False)
    num_draft_tokens: int = struct.field(pytree_node=False, default=8)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The width of verification, K + 1; a shorter draft would save few of its rows."""
        return (self.num_draft_tokens + 1,)

    @property
    def reach(self) -> int:
        """The rows of a verification, (K + 1)²: K + 1 of the draft, and K of noise after each of them."""
        return (self.num_draft_tokens + 1) ** 2

    def taking_turns(self) -> Drafter:
        """Refuses: in a round of another drafter there is no noise."""
        raise ValueError(
            "uno with single_pass drafts in its own verifications; give it all rounds, or two passes"
        )

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the state of a new text, with a draft by a pass of its own."""
        tokens = network.block(self.head, view.pending, view.start, self.num_draft_tokens)
        hidden, _ = network.run_head(
            self.config, params.target, self.head, params.drafter, tokens, view.start, view.cache
        )
        return super().init(params, view, prefill)._replace(own=hidden)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Draws the tokens of the draft; the target's cache is returned as it was."""
        logits = network.logits(params.drafter, self.config, params.target, state.own)
        proposal, state = self.draft_said(logits, state.own, keys, state, view, distribution, params.drafter)
        return proposal, state, view.cache

    def beside(self, params: Weights, view: View, proposal: Proposal) -> Beside:
        """Returns K noise tokens under each beginning of the draft, in the order of the beginnings."""
        count = self.num_draft_tokens
        parents = list(range(-1, count - 1))
        for ahead in range(count + 1):
            parents += [ahead - 1, *range(len(parents), len(parents) + count - 1)]
        last = jnp.concatenate([view.pending[:, None], proposal.tokens], axis=1)[:, :, None]
        places = jnp.arange(count + 1)[:, None] + jnp.arange(1, count + 1)
        places = view.start[:, None, None] + places
        noise = network.noise(self.head, jnp.broadcast_to(last, places.shape), places)
        rows = jnp.arange((count + 1) ** 2) > count
        adapted = network.adapted(self.config, params.target, self.head, params.drafter, rows)
        return Beside(noise.reshape(noise.shape[0], -1), Shape(tuple(parents)), adapted)

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Keeps the hidden states under the accepted beginning, and updates the stop rule."""
        assert outcome.beside is not None, "the loop must run the rows beside"
        batch, _, width = outcome.beside.shape
        under = outcome.beside.reshape(batch, self.num_draft_tokens + 1, self.num_draft_tokens, width)
        own = jnp.take_along_axis(under, outcome.accepted[:, None, None, None], axis=1)[:, 0]
        return super().observe(params, state._replace(own=own), outcome)
