"""A drafter that combines text lookup with a model-based drafter and uses the better draft in each round."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafting.lookup import LookupDrafter
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest, once
from jaxspec.model.numerics import widened
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Shape, as_array
from jaxspec.protocol import (
    Drafter,
    Outcome,
    Prefill,
    Proposal,
    State,
    View,
    Weights,
)
from jaxspec.sampling import Distribution

# Prior counts of the first drafter: rounds by whether the first token was accepted, and further tokens accepted and
# rejected. The prior of the second is one round with the expected acceptance.
BEGAN, BEGAN_WRONG, WENT_ON, WENT_WRONG = 0.5, 0.5, 1.5, 0.5
# The second's acceptance estimate is this many posterior standard deviations above its mean, because its drafts also
# give information.
_OPTIMISM = 0.5
# Acceptance rates are clipped to this distance from 0 and 1.
_EDGE = 1e-3


@struct.dataclass
class Counts:
    """Exponentially decayed counts of each row's accepted and rejected drafts, float32[B] each.

    Attributes:
      began, began_wrong: rounds of the first drafter, by whether its first token was accepted.
      went_on, went_wrong: in rounds of `began`, further accepted tokens, and the number of rounds that accepted fewer
        tokens than expected.
      right, wrong: in rounds of the second drafter, accepted tokens, and the number of rounds with a rejection.
    """

    began: jax.Array
    began_wrong: jax.Array
    went_on: jax.Array
    went_wrong: jax.Array
    right: jax.Array
    wrong: jax.Array

    @classmethod
    def none(cls, batch_size: int) -> Counts:
        """Returns the counts of a new text, all 0."""
        return cls(*(jnp.zeros(batch_size, jnp.float32) for _ in range(6)))


class HybridState(NamedTuple):
    """The state of a `Hybrid`: the states of both drafters, and the data of the choice between them.

    Attributes:
      first, second: the states of the drafters.
      counts: their accepted and rejected drafts.
      took_first: bool[B], whether the last round verified the first's draft.
      promised: float32[B], the expected number of accepted tokens of that draft, if it was the first's.
    """

    first: State
    second: State
    counts: Counts
    took_first: jax.Array
    promised: jax.Array


@struct.dataclass
class Hybrid(Drafter):
    """Uses, per row and round, the draft of `first` or of the more expensive `second`, whichever has the larger rate.

    The first drafter looks up a draft in every round. The rate of a draft of n tokens is the expected number of tokens
    of the round divided by its cost, in steps of one row:

        first:   (1 + b + b·r + … + b·rⁿ⁻¹) ÷ (1 + rows(n))
        second:  (1 + a₁ + a₁a₂ + … + a₁⋯aₙ) ÷ (1 + rows(n) + n · draft_cost)

    b is the acceptance rate in this row of the first's first tokens, and r that of its further tokens. They are
    separate because many matches are coincidences, but few of those whose first token was accepted. The aᵢ are
    `accept`, raised to the power that fits the row's accepted tokens of the second. rows(n) is `row_cost` for each row
    after the first of the narrowest verification that fits. The draft with the larger rate is used at its best length;
    if no rate exceeds 1, the rate of a plain step, the row drafts nothing. Counts decay, so that a drafter that was
    given up is tried again.

    If the second drafts trees of N nodes and depth D, n is a depth, and aₙ the rate of trees with an accepted node of
    depth n among those with one of depth n − 1. A tree is drafted and verified as a whole, so it always costs
    1 + rows(N) + D · draft_cost. A draft of the first is then a tree without branches, and each row has its own tree.

    The second drafter runs only in rounds in which some row uses it, and only those rows draft. (The choice depends on
    earlier rounds and on the first's draft, never on the second's, so the text keeps its distribution.)

    Attributes:
      config: the target.
      first: the lookup drafter.
      second: any other drafter; if it has its own cache, the result of its `taking_turns`.
      draft_cost: the cost of a draft token of the second, or of a level of its trees, in steps of one row.
      row_cost: the cost of a further row of a verification, in the same unit.
      memory: the factor by which counts decay per round, 0 to 1.
      accept: the second's prior acceptance rate of a draft token whose predecessors are accepted: by position,
        float32[K], or one number.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    first: LookupDrafter
    second: Drafter
    draft_cost: jax.Array | float = 0.25
    row_cost: jax.Array | float = 0.0
    memory: jax.Array | float = 0.95
    accept: jax.Array | float = 0.75

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """K, the larger one of both drafters."""
        return max(self.first.num_draft_tokens, self.second.num_draft_tokens)

    @property
    def num_nodes(self) -> int:
        """N, the larger one of both drafters; K unless the second drafts trees."""
        return max(self.first.num_nodes, self.second.num_nodes)

    @property
    def drafts_trees(self) -> bool:
        """Whether the second drafter drafts trees; drafts of the first are then trees too."""
        return self.second.drafts_trees

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The widths of both drafters."""
        return tuple(sorted({*self.first.verify_widths, *self.second.verify_widths}))

    @property
    def reach(self) -> int:
        """The number of slots that a round may write, the larger one of both drafters."""
        return max(self.first.reach, self.second.reach)

    @property
    def aux_layers(self) -> tuple[llama.AuxLayer, ...]:
        """The auxiliary layers of the second drafter."""
        return self.second.aux_layers

    @property
    def num_top_tokens(self) -> int:
        """The number of top-k target tokens that the second drafter reads."""
        return self.second.num_top_tokens

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns the state of the second drafter's `begin`."""
        return self.second.begin(params, length, capacity, merged)

    def absorb(
        self,
        params: Weights,
        state: State,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> State:
        """Returns the state of the second drafter's `absorb`."""
        return self.second.absorb(params, state, aux_hidden_states, tokens, start, count)

    def absorbed(self, state: HybridState) -> State:
        """Returns the part of the second drafter's state with which a text continues."""
        return self.second.absorbed(state.second)

    @property
    def static(self) -> bool:
        """Whether a program is compiled for the mask of the second drafter."""
        return self.second.static

    @property
    def shared_mask(self) -> bool:
        """Whether the second drafter has one mask for all rows."""
        return self.second.shared_mask

    def plans(self, state: HybridState, live: jax.Array) -> jax.Array:
        """Returns the masks of the second drafter."""
        return self.second.plans(state.second, live)

    def specialised(self, plan: LayerPlan) -> Hybrid:
        """Returns the same hybrid with a static mask of the second drafter."""
        return dataclasses.replace(self, second=self.second.specialised(plan))

    def init(self, params: Weights, view: View, prefill: Prefill) -> HybridState:
        """Returns the initial states of both drafters, with counts of 0."""
        batch = view.length.shape[0]
        return HybridState(
            self.first.init(params, view, prefill),
            self.second.init(params, view, prefill),
            Counts.none(batch),
            jnp.zeros(batch, bool),
            jnp.zeros(batch, jnp.float32),
        )

    def choose(
        self, counts: Counts, found: jax.Array, promised: jax.Array, budget: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Chooses the draft with the larger rate, and its length.

        Args:
          counts: the rows' counts so far.
          found: int32[B], the number of tokens of the first draft.
          promised: float32[B], the expected number of accepted ones among them, if the match is not a coincidence.
          budget: int32[B], the budget of draft tokens.

        Returns:
          bool[B], whether it is the first's; and int32[B], its best length, 0 for a plain step.
        """
        # First: b, then powers of r. The exponent counts the look-up's expected tokens, not its draft tokens.
        began, went_on = BEGAN + counts.began, WENT_ON + counts.went_on
        begins = began / (began + BEGAN_WRONG + counts.began_wrong)
        goes_on = (went_on / (went_on + WENT_WRONG + counts.went_wrong))[:, None]
        lengths = jnp.arange(1, self.first.num_draft_tokens + 1)
        so_far = lengths * (promised / jnp.maximum(found, 1))[:, None]
        copied = begins[:, None] * (1 - goes_on**so_far) / (1 - goes_on)
        first, first_length = self._best(copied, 0.0, jnp.minimum(found, budget))

        # Second: the posterior of its acceptance rate, which starts at the expectation of one round.
        accept = jnp.clip(self.accept, _EDGE, 1 - _EDGE)
        expected = jnp.cumprod(jnp.broadcast_to(accept, self.second.num_draft_tokens))
        right, wrong = jnp.sum(expected), 1 - expected[-1]
        seen = counts.right + counts.wrong
        share = (right + counts.right) / (right + wrong + seen)
        spread = jnp.sqrt(share * (1 - share) / (right + wrong + seen + 1))
        share = jnp.minimum(share + _OPTIMISM * spread, 1 - _EDGE)
        # One power for all positions fits the profile `accept` to the estimated rate.
        power = jnp.log(share) / jnp.log(right / (right + wrong))
        drafted = jnp.cumsum(expected ** power[:, None], axis=1)
        nodes = self.second.num_nodes if self.drafts_trees else None
        second, second_length = self._best(drafted, self.draft_cost, budget, nodes)
        takes_first = first >= second
        return takes_first, jnp.where(takes_first, first_length, second_length)

    def _best(
        self, accepted: jax.Array, draft_cost: jax.Array | float, most: jax.Array, nodes: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the best rate of a draft, float32[B], and its length, int32[B]; 1 and 0 for a plain step.

        Args:
          accepted: float32[B, L], the expected accepted tokens of drafts of 1 … L tokens, or of trees of these depths.
          draft_cost: the cost of each token, or of each level of a tree.
          most: int32[B], the maximum length.
          nodes: the number of nodes of a tree; None for a chain.
        """
        lengths = passes = verified = np.arange(accepted.shape[1] + 1)
        if nodes is not None:  # all levels and nodes, even of a tree that is deeper than the budget
            passes, verified = (np.where(lengths > 0, whole, 0) for whole in (lengths[-1], nodes))
        # A draft of n tokens is verified at the first compiled width above n.
        widths = np.array(self.verify_widths)
        rows = widths[np.searchsorted(widths, verified, side="right")] - 1
        cost = 1 + self.row_cost * rows + draft_cost * passes
        rates = (1 + jnp.pad(accepted, ((0, 0), (1, 0)))) / cost
        rates = jnp.where(lengths <= most[:, None], rates, 0)
        return jnp.max(rates, axis=1), jnp.argmax(rates, axis=1).astype(jnp.int32)

    def propose(
        self, keys: jax.Array, params: Weights, state: HybridState, view: View, distribution: Distribution
    ) -> tuple[Proposal, HybridState, KVCache]:
        """Proposes each row's better draft; the second drafter runs only if some row uses it."""
        # The choice comes before the second drafts, so it cannot depend on the tokens drawn.
        keys = jax.vmap(jax.random.split)(keys)
        found, promised = self.first.look_up(keys[:, 0], view)
        takes, length = self.choose(state.counts, found.count, promised, view.budget)
        # A shortened draft keeps its share of the expected tokens.
        promised = promised * length / jnp.maximum(found.count, 1)
        found = dataclasses.replace(found, count=jnp.where(takes, length, 0))

        def draft(carry: tuple[Proposal | None, State, KVCache]) -> tuple[Proposal, State, KVCache]:
            _, own, cache = carry
            # The chosen length is the budget of the rows that use the second; the others do not draft.
            rest = dataclasses.replace(view, cache=cache, budget=jnp.where(takes, 0, length))
            return self.second.propose(keys[:, 1], params, own, rest, distribution)

        shapes = jax.eval_shape(draft, (None, state.second, view.cache))[0]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        runs = jnp.any(~takes & (length > 0))
        drafted, second, cache = once(runs, draft, (nothing, state.second, view.cache))
        view = dataclasses.replace(view, cache=cache)
        proposal, cache = self._joined(takes, runs, found, drafted, params, view)
        return proposal, state._replace(second=second, took_first=takes, promised=promised), cache

    def observe(self, params: Weights, state: HybridState, outcome: Outcome) -> HybridState:
        """Counts accepted and rejected drafts, and passes each drafter the outcome of its own rounds."""

        def rounds_of(rows: jax.Array) -> Outcome:
            drafted, accepted = (jnp.where(rows, n, 0) for n in (outcome.drafted, outcome.accepted))
            return dataclasses.replace(outcome, drafted=drafted, accepted=accepted)

        first, second = rounds_of(state.took_first), rounds_of(~state.took_first)
        begun = first.accepted > 0
        # In a tree, at most one node of each depth can be accepted.
        longest = second.drafted
        if self.drafts_trees:
            longest = jnp.minimum(longest, self.second.num_draft_tokens)
        # Further tokens count only in rounds whose first was accepted, and a rejection only up to the expected length.
        new = Counts(
            begun,
            (first.drafted > 0) & ~begun,
            jnp.maximum(first.accepted - 1, 0),
            jnp.where(begun, jnp.clip(state.promised - first.accepted, 0, 1), 0),
            second.accepted,
            longest > second.accepted,
        )
        return state._replace(
            first=self.first.observe(params, state.first, first),
            second=self.second.observe(params, state.second, second),
            counts=jax.tree.map(lambda before, now: self.memory * before + now, state.counts, new),
        )

    def _joined(
        self,
        takes: jax.Array,
        ran: jax.Array,
        found: Proposal,
        drafted: Proposal,
        params: Weights,
        view: View,
    ) -> tuple[Proposal, KVCache]:
        """Joins both proposals: `found` in the rows `takes`, bool[B]; `ran`, bool[], is whether the second drafted."""
        # Both are padded to the same number of nodes, so that one verification serves all rows.
        full, parents, most_siblings = self.num_nodes, drafted.parents, 0
        tokens = jnp.where(takes[:, None], widened(found.tokens, full), widened(drafted.tokens, full))
        count = jnp.where(takes, found.count, drafted.count)
        if parents is None:
            count = jnp.minimum(count, view.budget)
        else:  # each copied token is the child of the one before it
            most_siblings = parents.most_siblings if isinstance(parents, Shape) else drafted.most_siblings
            parents = jnp.where(takes[:, None], jnp.arange(-1, full - 1), widened(as_array(parents), full))
        log_probs, exits, cache = drafted.log_probs, drafted.exit_hidden, view.cache
        if log_probs is not None:  # copied tokens are point masses

            def certain(log_probs: jax.Array) -> jax.Array:
                points = jnp.log(jax.nn.one_hot(tokens, log_probs.shape[-1], dtype=log_probs.dtype))
                return jnp.where(takes[:, None, None], points, log_probs)

            log_probs = once(jnp.any(takes & (count > 0)), certain, widened(log_probs, full))
        if exits is not None:
            # Verification starts after the second's exit layer, so copied tokens run through the first layers here. If
            # the second ran, it has fed the pending token of every row; else it must be fed here, in all rows.
            fed = jnp.concatenate([view.pending[:, None], tokens], axis=1)
            needed = jnp.where(jnp.any(takes & (count > 0)) | ~ran, jnp.max(count) + 1, 0)

            def through(width: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
                exits, cache = carry
                hidden, layers = llama.embed(params.target, fed[:, :width]), range(drafted.exit_layer)
                hidden, cache = llama.run_layers(
                    self.config, params.target, hidden, view.start, cache, layers=layers
                )
                return exits.at[:, :width].set(hidden), cache

            carry = widened(exits, full + 1), cache
            exits, cache = narrowest(self.verify_widths, needed, through, carry)
        proposal = Proposal(tokens, count, log_probs, exits, drafted.exit_layer, parents, most_siblings)
        return proposal, cache
