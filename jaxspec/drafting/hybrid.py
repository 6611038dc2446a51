"""A drafter made of two: one that copies from text and one that runs a model, the better of them in each round."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
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
    MaskedDrafter,
    Outcome,
    Prefill,
    Proposal,
    State,
    TappedDrafter,
    View,
    Weights,
    num_likely_of,
    taps_of,
)
from jaxspec.sampling import Law

# What a row's counts begin with: as if of the first's tokens so many had been accepted and rejected, and as if the
# second had drafted in so many rounds.
PRIOR_KEPT, PRIOR_MISSED, PRIOR_ROUNDS = 1.0, 1.0, 1.0


@struct.dataclass
class Counts:
    """What was seen of each row's drafts, float32[B] each; of earlier rounds less and less.

    Attributes:
      kept, missed: of rounds of the first drafter, how many of its tokens were accepted, and how many of those rounds
        accepted fewer than it promised.
      rounds, drafted, accepted: of the second's.
    """

    kept: jax.Array
    missed: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    accepted: jax.Array

    @classmethod
    def none(cls, batch_size: int) -> Counts:
        """Returns those of a new text."""
        return cls(*(jnp.zeros(batch_size, jnp.float32) for _ in range(5)))


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
class Hybrid:
    """Takes for each row and round the draft of `first` if it is worth more than one of `second`, which costs more.

    The first draft is looked up in every round. It is taken where the tokens per cost that are expected of it are at
    least the second's, by its running means: 1 + expected ≥ (1 + accepted) ÷ (1 + draft_cost · drafted), with a
    verification as the unit of cost. Of a draft that promises n tokens r + r² + … + rⁿ are expected, where r is the
    share of the first's tokens that were accepted in this row, of those of which that is known: a long find in a text
    that does not repeat itself is mostly chance. So a round may also be a plain step, where nothing was found and the
    second's drafts do not pay. Counts fade, so that what was given up is tried again.

    The second drafter runs only in rounds in which some row has a use for it; rows that took the first sit it out. (The
    choice rests on earlier rounds and on the first's draft alone, never on the second's, so that the law of the text
    stays.)

    Attributes:
      config: the target.
      first: looks drafts up.
      second: any other drafter; one with a cache of its own as its `taking_turns` gives it.
      draft_cost: what a draft token of the second costs, in verifications.
      memory: what a count is worth a round later, 0 to 1.
      accept: of the second before it has drafted, the share of draft tokens that are accepted where those before them
        are: by position, float32[K], or one for all.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    first: LookupDrafter
    second: Drafter
    draft_cost: jax.Array | float = 0.25
    memory: jax.Array | float = 0.95
    accept: jax.Array | float = 0.75

    @property
    def num_draft_tokens(self) -> int:
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
        return taps_of(self.second)

    @property
    def num_likely(self) -> int:
        """How many likely tokens the second wants to know after each that was verified."""
        return num_likely_of(self.second)

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns what the second, a `TappedDrafter`, begins with."""
        return cast(TappedDrafter, self.second).begin(params, length, capacity, merged)

    def absorb(
        self,
        params: Weights,
        state: State,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> State:
        """Lets the second, a `TappedDrafter`, take in a piece of the prompts."""
        return cast(TappedDrafter, self.second).absorb(params, state, features, tokens, start, count)

    @property
    def static(self) -> bool:
        """Whether the second, a `MaskedDrafter`, is to be compiled for the rows' mask."""
        return getattr(self.second, "static", False)

    def plans(self, state: HybridState, live: jax.Array) -> jax.Array:
        """The masks of the second, a `MaskedDrafter`."""
        return cast(MaskedDrafter, self.second).plans(state.second, live)

    def specialised(self, plan: LayerPlan) -> Hybrid:
        """The same with a static mask of the second, a `MaskedDrafter`."""
        return dataclasses.replace(self, second=cast(MaskedDrafter, self.second).specialised(plan))

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

    def takes_first(self, counts: Counts, promised: jax.Array, room: jax.Array) -> jax.Array:
        """Whether the first draft is worth more, bool[B]: `promised` float32[B] of its tokens would be accepted if the
        text went on as what was found. There is room for int32[B] draft tokens."""
        kept, missed = PRIOR_KEPT + counts.kept, PRIOR_MISSED + counts.missed
        right = kept / (kept + missed)
        expected = right * (1 - right**promised) / (1 - right)
        longest = self.second.num_draft_tokens
        usual = jnp.minimum(room, longest)
        stand = jnp.cumprod(jnp.broadcast_to(self.accept, longest))
        usually = jnp.sum(jnp.where(jnp.arange(longest) < usual[:, None], stand, 0), axis=1)
        rounds = PRIOR_ROUNDS + counts.rounds
        drafted = (PRIOR_ROUNDS * usual + counts.drafted) / rounds
        accepted = (PRIOR_ROUNDS * usually + counts.accepted) / rounds
        return (1 + expected) * (1 + self.draft_cost * drafted) >= 1 + accepted

    def propose(
        self, keys: jax.Array, params: Weights, state: HybridState, view: View, law: Law
    ) -> tuple[Proposal, HybridState, KVCache]:
        """Each row's better draft; the second drafts only if some row takes it."""
        keys = jax.vmap(jax.random.split)(keys)
        found, promised = self.first.look_up(keys[:, 0], view)
        takes = self.takes_first(state.counts, promised, view.room)

        def draft(carry: tuple[Proposal | None, State, KVCache]) -> tuple[Proposal, State, KVCache]:
            _, own, cache = carry
            rest = dataclasses.replace(view, cache=cache, room=jnp.where(takes, 0, view.room))
            return self.second.propose(keys[:, 1], params, own, rest, law)

        shapes = jax.eval_shape(draft, (None, state.second, view.cache))[0]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        runs = jnp.any(~takes & (view.room > 0))
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
        new = Counts(
            first.accepted,
            jnp.where(first.drafted > 0, jnp.clip(state.promised - first.accepted, 0, 1), 0),
            second.drafted > 0,
            second.drafted,
            second.accepted,
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
