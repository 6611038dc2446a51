"""A drafter made of two: one that copies from text and one that runs a model, the better of them in each round."""

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
from jaxspec.protocol import (
    Drafter,
    Outcome,
    Prefill,
    Proposal,
    State,
    View,
    Weights,
)
from jaxspec.sampling import Law

# What a row's counts begin with: as if the first had begun a draft rightly so many times and wrongly so many, and gone
# on with so many tokens rightly and so many wrongly. The second's begin as if it had drafted in one round, with what is
# expected.
BEGAN, BEGAN_WRONG, WENT_ON, WENT_WRONG = 0.5, 0.5, 1.5, 0.5
# By how many standard deviations of its law the second's share is taken above the mean: longer drafts also tell more.
_HOPE = 0.5
# Acceptances stay this far from 0 and 1.
_EDGE = 1e-3


@struct.dataclass
class Counts:
    """What was seen of each row's drafts, float32[B] each; of earlier rounds less and less.

    Attributes:
      began, began_wrong: rounds of the first drafter, by whether its first token was accepted.
      went_on, went_wrong: of the former, how many further tokens were accepted, and how many of those rounds accepted
        fewer than it promised.
      right, wrong: of rounds of the second, how many of its tokens were accepted, and how many of those rounds had one
        rejected.
    """

    began: jax.Array
    began_wrong: jax.Array
    went_on: jax.Array
    went_wrong: jax.Array
    right: jax.Array
    wrong: jax.Array

    @classmethod
    def none(cls, batch_size: int) -> Counts:
        """Returns those of a new text."""
        return cls(*(jnp.zeros(batch_size, jnp.float32) for _ in range(6)))


class HybridState(NamedTuple):
    """The state of a `Hybrid`: those of both drafters, and what their choice rests on.

    Attributes:
      first, second: the drafters' own.
      counts: what was seen of them.
      took_first: bool[B], whose draft the last round verified.
      promised: float32[B], how many tokens of it should be accepted, if it is the first's.
    """

    first: State
    second: State
    counts: Counts
    took_first: jax.Array
    promised: jax.Array


@struct.dataclass
class Hybrid(Drafter):
    """Takes for each row and round the draft of `first` if it is worth more than one of `second`, which costs more.

    The first draft is looked up in every round. Each draft is worth its rate: the tokens that are expected of the round
    over what it costs, at the length at which that is most, with a step of one row as the unit:

        first:   (1 + b + b·r + … + b·rⁿ⁻¹) ÷ (1 + rows(n))
        second:  (1 + a₁ + a₁a₂ + … + a₁⋯aₙ) ÷ (1 + rows(n) + n · draft_cost)

    b is the share of the first's drafts that began rightly in this row, r that of its further tokens that were
    accepted, of those of which it is known: what is found is often chance, but hardly where its first token was right.
    The aᵢ are `accept`, all raised to the power that explains what was accepted of the second's in this row. rows(n) is
    `row_cost` for each row after the first of the narrowest verification that fits. The better draft is taken, at its
    best length; where neither is worth more than a plain step, which is 1, the round is one. Counts fade, so that what
    was given up is tried again.

    The second drafter runs only in rounds in which some row has a use for it; rows that took the first sit it out. (The
    choice rests on earlier rounds and on the first's draft alone, never on the second's, so that the law of the text
    stays.)

    Attributes:
      config: the target.
      first: looks drafts up.
      second: any other drafter; one with a cache of its own as its `taking_turns` gives it.
      draft_cost: what a draft token of the second costs, in steps of one row.
      row_cost: what a further row of a verification costs, in the same.
      memory: what a count is worth a round later, 0 to 1.
      accept: of the second before it has drafted, the share of draft tokens that are accepted where those before them
        are: by position, float32[K], or one for all.
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
        """K, the larger of both."""
        return max(self.first.num_draft_tokens, self.second.num_draft_tokens)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """Those of both."""
        return tuple(sorted({*self.first.verify_widths, *self.second.verify_widths}))

    @property
    def reach(self) -> int:
        """The number of slots that a round may write: the larger of both."""
        return max(self.first.reach, self.second.reach)

    @property
    def taps(self) -> tuple[llama.Tap, ...]:
        """What the second reads of the target; `begin` and `absorb` are its own."""
        return self.second.taps

    @property
    def num_likely(self) -> int:
        """How many likely tokens the second wants to know after each that was verified."""
        return self.second.num_likely

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns the state of the second drafter's `begin`."""
        return self.second.begin(params, length, capacity, merged)

    def absorb(
        self,
        params: Weights,
        state: State,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> State:
        """Returns the state of the second drafter's `absorb`."""
        return self.second.absorb(params, state, features, tokens, start, count)

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
        """Both states, and nothing seen."""
        batch = view.length.shape[0]
        return HybridState(
            self.first.init(params, view, prefill),
            self.second.init(params, view, prefill),
            Counts.none(batch),
            jnp.zeros(batch, bool),
            jnp.zeros(batch, jnp.float32),
        )

    def choose(
        self, counts: Counts, found: jax.Array, promised: jax.Array, room: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Which draft is worth more, and how long it is to be.

        Args:
          counts: of the rows so far.
          found: int32[B], the tokens of the first draft.
          promised: float32[B], how many of them would be accepted if the text went on as what was found.
          room: int32[B], draft tokens that there is room for.

        Returns:
          bool[B], whether it is the first; and int32[B], its best length, 0 for a plain step.
        """
        began, went_on = BEGAN + counts.began, WENT_ON + counts.went_on
        begins = began / (began + BEGAN_WRONG + counts.began_wrong)
        goes_on = (went_on / (went_on + WENT_WRONG + counts.went_wrong))[:, None]
        lengths = jnp.arange(1, self.first.num_draft_tokens + 1)
        so_far = lengths * (promised / jnp.maximum(found, 1))[:, None]
        copied = begins[:, None] * (1 - goes_on**so_far) / (1 - goes_on)
        first, first_length = self._best(copied, 0.0, jnp.minimum(found, room))

        accept = jnp.clip(self.accept, _EDGE, 1 - _EDGE)
        expected = jnp.cumprod(jnp.broadcast_to(accept, self.second.num_draft_tokens))
        right, wrong = jnp.sum(expected), 1 - expected[-1]
        seen = counts.right + counts.wrong
        share = (right + counts.right) / (right + wrong + seen)
        spread = jnp.sqrt(share * (1 - share) / (right + wrong + seen + 1))
        share = jnp.minimum(share + _HOPE * spread, 1 - _EDGE)
        power = jnp.log(share) / jnp.log(right / (right + wrong))
        drafted = jnp.cumsum(expected ** power[:, None], axis=1)
        second, second_length = self._best(drafted, self.draft_cost, room)
        takes_first = first >= second
        return takes_first, jnp.where(takes_first, first_length, second_length)

    def _best(
        self, accepted: jax.Array, draft_cost: jax.Array | float, most: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The best rate of a draft, float32[B], and the length that has it, int32[B]; 1 and 0 of none.

        Args:
          accepted: float32[B, N], expected accepted tokens of drafts of 1 … N tokens.
          draft_cost: of each token.
          most: int32[B], the longest that there may be.
        """
        lengths = np.arange(accepted.shape[1] + 1)
        widths = np.array(self.verify_widths)
        rows = widths[np.searchsorted(widths, lengths, side="right")] - 1
        cost = 1 + self.row_cost * rows + draft_cost * lengths
        rates = (1 + jnp.pad(accepted, ((0, 0), (1, 0)))) / cost
        rates = jnp.where(lengths <= most[:, None], rates, 0)
        return jnp.max(rates, axis=1), jnp.argmax(rates, axis=1).astype(jnp.int32)

    def propose(
        self, keys: jax.Array, params: Weights, state: HybridState, view: View, law: Law
    ) -> tuple[Proposal, HybridState, KVCache]:
        """Each row's better draft; the second drafts only if some row takes it."""
        keys = jax.vmap(jax.random.split)(keys)
        found, promised = self.first.look_up(keys[:, 0], view)
        takes, length = self.choose(state.counts, found.count, promised, view.room)
        promised = promised * length / jnp.maximum(found.count, 1)
        found = dataclasses.replace(found, count=jnp.where(takes, length, 0))

        def draft(carry: tuple[Proposal | None, State, KVCache]) -> tuple[Proposal, State, KVCache]:
            _, own, cache = carry
            rest = dataclasses.replace(view, cache=cache, room=jnp.where(takes, 0, length))
            return self.second.propose(keys[:, 1], params, own, rest, law)

        shapes = jax.eval_shape(draft, (None, state.second, view.cache))[0]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        runs = jnp.any(~takes & (length > 0))
        drafted, second, cache = once(runs, draft, (nothing, state.second, view.cache))
        view = dataclasses.replace(view, cache=cache)
        proposal, cache = self._joined(takes, runs, found, drafted, params, view)
        return proposal, state._replace(second=second, took_first=takes, promised=promised), cache

    def observe(self, params: Weights, state: HybridState, outcome: Outcome) -> HybridState:
        """Counts what became of the draft, and tells each drafter of its own rounds alone."""

        def rounds_of(rows: jax.Array) -> Outcome:
            drafted, accepted = (jnp.where(rows, n, 0) for n in (outcome.drafted, outcome.accepted))
            return dataclasses.replace(outcome, drafted=drafted, accepted=accepted)

        first, second = rounds_of(state.took_first), rounds_of(~state.took_first)
        begun = first.accepted > 0
        new = Counts(
            begun,
            (first.drafted > 0) & ~begun,
            jnp.maximum(first.accepted - 1, 0),
            jnp.where(begun, jnp.clip(state.promised - first.accepted, 0, 1), 0),
            second.accepted,
            second.drafted > second.accepted,
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
        """One proposal of both: `found` where a row takes it, bool[B]; `ran`, bool[], whether the second drafted."""
        full = self.num_draft_tokens
        tokens = jnp.where(takes[:, None], widened(found.tokens, full), widened(drafted.tokens, full))
        count = jnp.minimum(jnp.where(takes, found.count, drafted.count), view.room)
        log_probs, exits, cache = drafted.log_probs, drafted.exit_hidden, view.cache
        if log_probs is not None:  # what was found is certain

            def certain(log_probs: jax.Array) -> jax.Array:
                points = jnp.log(jax.nn.one_hot(tokens, log_probs.shape[-1], dtype=log_probs.dtype))
                return jnp.where(takes[:, None, None], points, log_probs)

            log_probs = once(jnp.any(takes & (count > 0)), certain, widened(log_probs, full))
        if exits is not None:
            # The second's verification goes on from its first layers: what was found goes through them here. Where the
            # second ran, it has fed the pending token of every row; else nobody has, not even of a row without room.
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
        return Proposal(tokens, count, log_probs, exits, drafted.exit_layer), cache
