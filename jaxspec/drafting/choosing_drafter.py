"""A drafter that chooses among several drafters in each round, inside the compiled loop."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.costs.prices import Prices
from jaxspec.drafting.lookup import LookupDrafter
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest, once
from jaxspec.model.numerics import widened
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Shape, Tree, as_array
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

# The time that drafts may lose against plain decoding: `FIRST` steps, and a share of the text. Time that they save
# counts against it.
FIRST, SHARE = 1.25, 0.015
# The draft tokens as which the expected acceptance of a lookup's first token and of its further tokens count.
_BEGAN, _WENT_ON = 1.0, 2.0
# The acceptance of a model's drafts is estimated this many posterior standard deviations above its mean, because drafts
# also give information.
_OPTIMISM = 0.5
# Acceptance rates are clipped to this distance from 0 and 1.
_EDGE = 1e-3


@struct.dataclass
class Waiting:
    """Hidden states of committed tokens that the candidates have not absorbed: of T slots, the first count[b] are used.

    Attributes:
      aux_hidden_states: [B, T, F], as in `Outcome`.
      tokens: int32[B, T], the token after each.
      start: int32[B], the position of the first.
      count: int32[B].
    """

    aux_hidden_states: jax.Array
    tokens: jax.Array
    start: jax.Array
    count: jax.Array

    def followed_by(self, outcome: Outcome) -> Waiting:
        """Returns these states, followed by those of a round."""
        assert outcome.aux_hidden_states is not None, "the loop must pass the auxiliary hidden states"
        assert outcome.start is not None
        batch, width = outcome.tokens.shape
        column = jnp.arange(width)[None]
        # Columns past the last slot are dropped.
        slot = jnp.where(column < outcome.count[:, None], self.count[:, None] + column, self.tokens.shape[1])
        at = jnp.arange(batch)[:, None], slot
        return Waiting(
            self.aux_hidden_states.at[at].set(outcome.aux_hidden_states, mode="drop"),
            self.tokens.at[at].set(outcome.tokens, mode="drop"),
            jnp.where(self.count > 0, self.start, outcome.start),
            self.count + outcome.count,
        )


def widths_of(candidates: Sequence[Drafter]) -> tuple[int, ...]:
    """Returns the verify widths of a choice among candidates: one row, and theirs."""
    return tuple(sorted({1, *(width for one in candidates for width in one.verify_widths)}))


class Held(NamedTuple):
    """The part of the state with which a text continues: the result of each candidate's `absorbed`, and what waits."""

    own: tuple[State, ...]
    waiting: Waiting | None


class Choice(NamedTuple):
    """The choice of a round.

    Attributes:
      candidate: int32[B], the candidate whose draft each row verifies; −1 for a plain step.
      length: int32[B], the number of draft tokens, for a tree the depth; 0 for a plain step.
      cost: float32[B], the time of the round, in plain steps.
    """

    candidate: jax.Array
    length: jax.Array
    cost: jax.Array


@struct.dataclass
class Found:
    """The drafts of a lookup.

    Attributes:
      tokens: int32[B, K].
      count: int32[B].
      promised: float32[B], the expected number of accepted tokens, if the match is not a coincidence.
    """

    tokens: jax.Array
    count: jax.Array
    promised: jax.Array


class ChoosingState(NamedTuple):
    """The state of `Choosing`, for C candidates.

    Attributes:
      own: the states of the candidates.
      right, wrong: float32[B, C, 2], decayed counts. Of a lookup: rounds by whether its first token was right, and in
        those where it was, further right tokens and rounds with fewer than expected. Of a model: accepted tokens, and
        rounds with a rejection; the last column is unused.
      seen: int32[B, C, K, 2], accepted and rejected draft tokens of the text by position; the second position of a
        lookup counts all further ones.
      used: int32[B, C], the rounds of the text in which a draft of the candidate was verified.
      credit: float32[B], the time that drafts may still lose against plain decoding, in plain steps.
      choice: that of the last round.
      found: the drafts of each lookup in the last round.
      waiting: hidden states that are not absorbed; None if no candidate reads any.
    """

    own: tuple[State, ...]
    right: jax.Array
    wrong: jax.Array
    seen: jax.Array
    used: jax.Array
    credit: jax.Array
    choice: Choice
    found: tuple[Found, ...]
    waiting: Waiting | None


@struct.dataclass
class Choosing(Drafter):
    """Uses in each round the draft with the most expected tokens for its time, or none.

    Candidates that copy text (`LookupDrafter`) draft in every round. Of the others, the *models*, at most one drafts in
    a round. A round is an option: a model or none, the length of its draft, and the width of verification. With an
    option, each row takes the draft with the most expected accepted tokens that fits the width: that of the model, or
    of a lookup. The option is chosen that maximises

        (1 + mean expected accepted tokens of the rows) ÷ time of the round

    The expected accepted tokens of a draft of n tokens are

        of a lookup:  b + b·r + … + b·rⁿ⁻¹
        of a model:   a₁ + a₁a₂ + … + a₁⋯aₙ

    b is the acceptance rate in this row of the lookup's first tokens, and r that of its further tokens. They are
    separate because many matches are coincidences, but few of those whose first token was right. They are known from
    all rounds, because the text shows whether a draft that was not verified was right. The aᵢ are the expected
    acceptance, `Prices.accept`, raised to the power that fits the row's drafts of this model. Counts decay, so that a
    model that was given up is tried again.

    **Bounded loss.** An option is possible only if the row could afford that none of its draft tokens is accepted: a
    text never takes longer than plain decoding by more than `FIRST` steps and `SHARE` of its tokens, at these prices.

    **Losslessness.** The choice depends on committed tokens, on earlier rounds and on the drafts of lookups, which
    follow from the text; never on a model's draft of this round. So the text keeps its distribution.

    If a model drafts trees of N nodes and depth D, a draft has only the length D, and aₙ is the rate of trees with an
    accepted node of depth n among those with one of depth n − 1. Chains are then trees without branches.

    Drafters with auxiliary layers absorb hidden states only before they draft, or when no more can wait.

    `params.drafter` are the parameters of the candidates, a tuple.

    Attributes:
      config: the target.
      candidates: drafters that can take turns, see `Drafter.taking_turns`.
      prices: the data of the choice.
      memory: the factor by which counts decay per round, 0 to 1.
      joint: whether the rows of a batch choose an option together, static. Otherwise each row chooses for itself, as if
        it were alone; then there may be only one model.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    candidates: tuple[Drafter, ...]
    prices: Prices
    memory: jax.Array | float = 0.95
    joint: bool = struct.field(pytree_node=False, default=True)

    @property
    def lookups(self) -> tuple[int, ...]:
        """The indices of the candidates that copy text."""
        return tuple(at for at, one in enumerate(self.candidates) if isinstance(one, LookupDrafter))

    @property
    def models(self) -> tuple[int, ...]:
        """The indices of the other candidates."""
        return tuple(at for at in range(len(self.candidates)) if at not in self.lookups)

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """K, the largest of the candidates."""
        return max(one.num_draft_tokens for one in self.candidates)

    @property
    def num_nodes(self) -> int:
        """N, the largest of the candidates; K unless one of them drafts trees."""
        return max(one.num_nodes for one in self.candidates)

    @property
    def drafts_trees(self) -> bool:
        """Whether a candidate drafts trees; all drafts are then trees."""
        return any(one.drafts_trees for one in self.candidates)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """One row, and the widths of the candidates."""
        return widths_of(self.candidates)

    @property
    def reach(self) -> int:
        """The largest number of slots that a candidate writes in a round, or that wait to be absorbed."""
        return max(*(one.reach for one in self.candidates), self._num_waiting if self.aux_layers else 0)

    @property
    def _num_waiting(self) -> int:
        """T, the number of hidden states that can wait: those of a round, and up to K of the rounds before."""
        return 2 * self.num_draft_tokens + 1

    @property
    def aux_layers(self) -> tuple[llama.AuxLayer, ...]:
        """The auxiliary layers of all candidates."""
        return tuple(dict.fromkeys(layer for one in self.candidates for layer in one.aux_layers))

    @property
    def num_top_tokens(self) -> int:
        """The largest number of top-k target tokens that a candidate reads."""
        return max(one.num_top_tokens for one in self.candidates)

    @property
    def mixes_rows(self) -> bool:
        """Whether the choice, or a candidate's drafts, depend on the other rows."""
        return self.joint or any(one.mixes_rows for one in self.candidates)

    @property
    def static(self) -> bool:
        """Whether a program is compiled for the mask of a candidate."""
        return any(one.static for one in self.candidates)

    @property
    def _masked(self) -> int:
        """The index of the candidate with the mask that is compiled."""
        return next(at for at, one in enumerate(self.candidates) if one.static)

    def plans(self, state: ChoosingState, live: jax.Array) -> jax.Array:
        """Returns the masks of the first candidate with `static`."""
        return self.candidates[self._masked].plans(state.own[self._masked], live)

    def specialised(self, plan: LayerPlan) -> Choosing:
        """Returns the same drafter with a static mask of that candidate."""
        at = self._masked
        special = self.candidates[at].specialised(plan)
        return dataclasses.replace(
            self, candidates=(*self.candidates[:at], special, *self.candidates[at + 1 :])
        )

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns the results of the candidates' `begin`; None if all are None."""
        own = tuple(one.begin(weights, length, capacity, merged) for one, weights in self._each(params))
        waiting = None
        if self.aux_layers:
            slots, width = (len(length), self._num_waiting), len(self.aux_layers) * self.config.hidden_size
            nothing = jnp.zeros((*slots, width), params.target["embed"].dtype)
            none = jnp.zeros(len(length), jnp.int32)
            waiting = Waiting(nothing, jnp.zeros(slots, jnp.int32), none, none)
        return None if all(one is None for one in own) else Held(own, waiting)

    def absorb(
        self,
        params: Weights,
        state: Held,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> Held:
        """Returns the state after each candidate with auxiliary layers has absorbed what waited, and these tokens."""
        waiting = state.waiting
        assert waiting is not None

        def absorbed(own: tuple[State, ...], hidden: jax.Array, *rest: jax.Array) -> tuple[State, ...]:
            return tuple(
                one.absorb(weights, its, self._aux_of(one, hidden), *rest) if one.aux_layers else its
                for (one, weights), its in zip(self._each(params), own, strict=True)
            )

        # In a text that continues another one, only the tokens before `start` are common to both.
        kept = jnp.clip(start - waiting.start, 0, waiting.count)
        begin = jnp.where(kept > 0, waiting.start, start)

        def absorb_waiting(own: tuple[State, ...]) -> tuple[State, ...]:
            return absorbed(own, waiting.aux_hidden_states, waiting.tokens, begin, kept)

        own = once(jnp.any(kept > 0), absorb_waiting, state.own)
        own = absorbed(own, aux_hidden_states, tokens, start, count)
        return Held(own, dataclasses.replace(waiting, count=jnp.zeros_like(waiting.count)))

    def absorbed(self, state: ChoosingState) -> State:
        """Returns the results of the candidates' `absorbed`, with the hidden states that wait; None if all are None."""
        own = tuple(one.absorbed(its) for one, its in zip(self.candidates, state.own, strict=True))
        return None if all(one is None for one in own) else Held(own, state.waiting)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChoosingState:
        """Returns the initial states of the candidates, with counts of 0."""
        held = prefill.absorbed
        if held is None:
            held = Held((None,) * len(self.candidates), None)
        own = tuple(
            one.init(weights, view, dataclasses.replace(prefill, absorbed=its))
            for (one, weights), its in zip(self._each(params), held.own, strict=True)
        )
        return self.begun(len(view.length))._replace(own=own, waiting=held.waiting)

    def begun(self, batch: int) -> ChoosingState:
        """Returns the state of new texts, without the states of the candidates."""
        most = self.num_draft_tokens
        counts = jnp.zeros((batch, len(self.candidates), 2), jnp.float32)
        none, zero = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.float32)
        nothing = Found(jnp.zeros((batch, most), jnp.int32), none, zero)
        return ChoosingState(
            own=(),
            right=counts,
            wrong=counts,
            seen=jnp.zeros((batch, len(self.candidates), most, 2), jnp.int32),
            used=jnp.zeros((batch, len(self.candidates)), jnp.int32),
            credit=zero + FIRST,
            choice=Choice(none - 1, none, zero),
            found=(nothing,) * len(self.lookups),
            waiting=None,
        )

    def choose(
        self, state: ChoosingState, found: tuple[Found, ...], length: jax.Array, budget: jax.Array
    ) -> Choice:
        """Chooses the option of a round, and each row's draft.

        Args:
          state: the state before the round.
          found: the drafts of each lookup.
          length: int32[B], the tokens of each row.
          budget: int32[B], the budget of draft tokens; 0 for a row that has ended.
        """
        live = budget > 0
        rows = jnp.maximum(jnp.sum(live), 1)
        tokens = jnp.sum(jnp.where(live, length, 0)) / rows
        verify, draft = self.prices.of(rows if self.joint else jnp.int32(1), tokens)
        model, depth, width = self._options()
        cost = verify[width] + jnp.where(model < 0, 0.0, draft[model, depth])

        # Expected accepted tokens of the best lookup for each width, and of the model of each option.
        drafts = np.array(self.verify_widths) - 1
        copied = [
            self._copied(state, at, one, drafts, budget) for at, one in zip(self.lookups, found, strict=True)
        ]
        copies = jnp.stack(copied or [jnp.zeros((len(budget), len(drafts)))])
        best = jnp.max(copies, axis=0)[:, width]
        modelled = [jnp.zeros((len(budget), int(np.sum(model < 0))))]
        for at in self.models:
            lengths = jnp.minimum(depth[model == at], budget[:, None])
            modelled.append(jnp.take_along_axis(self._modelled(state, at), lengths, axis=1))
        drafted = jnp.concatenate(modelled, axis=1)

        gain, credit = jnp.maximum(best, drafted), state.credit[:, None]
        if self.joint:
            gain, credit = (
                jnp.sum(jnp.where(live[:, None], of, 0.0), axis=0, keepdims=True) / rows
                for of in (gain, credit)
            )
        possible = (cost - 1 <= credit) | (jnp.arange(len(model)) == 0)
        # Among equal rates the first option: plain decoding, then the narrowest.
        option = jnp.argmax(jnp.where(possible, (1 + gain) / cost, 0.0), axis=1)
        option = jnp.broadcast_to(option, budget.shape)

        def of_option(values: jax.Array) -> jax.Array:
            return jnp.take_along_axis(values, option[:, None], axis=1)[:, 0]

        expected, from_model = of_option(best), of_option(drafted)
        takes_model, takes_lookup = from_model > expected, (expected >= from_model) & (expected > 0)
        lookup = jnp.argmax(copies[:, jnp.arange(len(budget)), jnp.asarray(width)[option]], axis=0)
        candidate = jnp.where(takes_model, jnp.asarray(model)[option], -1)
        lengths = jnp.where(takes_model, jnp.minimum(jnp.asarray(depth)[option], budget), 0)
        for number, (at, one) in enumerate(zip(self.lookups, found, strict=True)):
            mine = takes_lookup & (lookup == number)
            fits = jnp.minimum(
                jnp.asarray(drafts)[jnp.asarray(width)[option]], jnp.minimum(one.count, budget)
            )
            candidate, lengths = jnp.where(mine, at, candidate), jnp.where(mine, fits, lengths)
        return Choice(candidate.astype(jnp.int32), lengths.astype(jnp.int32), cost[option])

    def _options(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the model of each option (−1 for none), the length of its draft, and the number of the width.

        The options without a model come first, the narrowest before the others; then those of the models, in order.
        """
        widths = self.verify_widths
        options = [(-1, 0, width) for width in range(len(widths))]
        for at in self.models:
            one = self.candidates[at]
            most = one.num_draft_tokens
            for depth in (most,) if one.drafts_trees else range(1, most + 1):
                # The first width above the number of nodes, or a wider one for the lookups of other rows.
                first = bisect.bisect(widths, one.num_nodes if one.drafts_trees else depth)
                options += [(at, depth, width) for width in range(first, len(widths))][
                    : None if self.joint else 1
                ]
        model, depths, places = np.array(options).T
        return model, depths, places

    def _copied(
        self, state: ChoosingState, at: int, found: Found, lengths: np.ndarray, budget: jax.Array
    ) -> jax.Array:
        """Returns the expected accepted tokens of a lookup's drafts, cut to each of `lengths`, float32[B, W]."""
        right, wrong, prior = state.right[:, at], state.wrong[:, at], self.prices.accept[at]
        first, further = prior[0], prior[min(1, len(prior) - 1)]
        begins = (_BEGAN * first + right[:, :1]) / (_BEGAN + right[:, :1] + wrong[:, :1])
        goes_on = (_WENT_ON * further + right[:, 1:]) / (_WENT_ON + right[:, 1:] + wrong[:, 1:])
        goes_on = jnp.clip(goes_on, _EDGE, 1 - _EDGE)
        count = jnp.minimum(found.count, budget)[:, None]
        # The exponent counts the lookup's expected tokens, not its draft tokens.
        share = (found.promised / jnp.maximum(found.count, 1))[:, None]
        return begins * (1 - goes_on ** (jnp.minimum(lengths, count) * share)) / (1 - goes_on)

    def _modelled(self, state: ChoosingState, at: int) -> jax.Array:
        """Returns the expected accepted tokens of a model's drafts of 0 … K tokens, float32[B, K + 1]."""
        accept = self.prices.accept[at, : self.candidates[at].num_draft_tokens]
        expected = jnp.cumprod(jnp.clip(accept, _EDGE, 1 - _EDGE))
        # The posterior of the acceptance rate, which starts at the expectation of one round.
        right, wrong = jnp.sum(expected), 1 - expected[-1]
        accepted, rejected = state.right[:, at, :1], state.wrong[:, at, :1]
        total = right + wrong + accepted + rejected
        rate = (right + accepted) / total
        rate = jnp.minimum(rate + _OPTIMISM * jnp.sqrt(rate * (1 - rate) / (total + 1)), 1 - _EDGE)
        # One power for all positions fits the profile to the estimated rate.
        power = jnp.log(rate) / jnp.log(right / (right + wrong))
        return jnp.pad(jnp.cumsum(expected**power, axis=1), ((0, 0), (1, 0)))

    def propose(
        self, keys: jax.Array, params: Weights, state: ChoosingState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChoosingState, KVCache]:
        """Proposes each row's draft; a model runs only if some row takes its draft."""
        each = jax.vmap(lambda key: jax.random.split(key, len(self.candidates)))(keys)
        found = tuple(self._found(at, each[:, at], view) for at in self.lookups)
        # The choice comes before a model drafts, so it cannot depend on the tokens drawn.
        choice = self.choose(state, found, view.length, view.budget)
        own, waiting = list(state.own), state.waiting
        runs = {at: jnp.any((choice.candidate == at) & (choice.length > 0)) for at in self.models}
        if waiting is not None:
            aux = [runs[at] for at in self.models if self.candidates[at].aux_layers]
            full = jnp.any(waiting.count + self.num_draft_tokens + 1 > self._num_waiting)
            absorb = jnp.any(jnp.stack([full, *aux]))
            own, waiting = self._absorbed_waiting(absorb, params, state.own, waiting, view.start)

        def draft(carry: tuple[Proposal, State, KVCache], at: int) -> tuple[Proposal, State, KVCache]:
            joined, its, cache = carry
            # The chosen length is the budget of the rows that use this model; the others do not draft.
            mine = choice.candidate == at
            rest = dataclasses.replace(view, cache=cache, budget=jnp.where(mine, choice.length, 0))
            weights = Weights(params.target, params.drafter[at])
            drafted, its, cache = self.candidates[at].propose(each[:, at], weights, its, rest, distribution)
            return self._with(joined, drafted, mine, choice.length), its, cache

        shapes = {at: self._shape(at, each, params, own[at], view, distribution) for at in self.models}
        joined, cache = self._copies(choice, found, shapes, params), view.cache
        for at in self.models:
            carry = joined, own[at], cache
            joined, own[at], cache = once(runs[at], functools.partial(draft, at=at), carry)
        view = dataclasses.replace(view, cache=cache)
        proposal, cache = self._completed(joined, choice, runs, shapes, params, view)
        state = state._replace(own=tuple(own), choice=choice, found=found, waiting=waiting)
        return proposal, state, cache

    def _each(self, params: Weights) -> list[tuple[Drafter, Weights]]:
        """Returns each candidate with the target's parameters and its own."""
        own = params.drafter
        return [(one, Weights(params.target, its)) for one, its in zip(self.candidates, own, strict=True)]

    def _found(self, at: int, keys: jax.Array, view: View) -> Found:
        """Returns the drafts of a lookup."""
        lookup: Any = self.candidates[at]
        proposal, promised = lookup.look_up(keys, view)
        return Found(widened(proposal.tokens, self.num_draft_tokens), proposal.count, promised)

    def _shape(
        self, at: int, keys: jax.Array, params: Weights, own: State, view: View, distribution: Distribution
    ) -> Proposal:
        """Returns the shapes of a model's proposal."""
        weights = Weights(params.target, params.drafter[at])

        def propose(own: State, view: View) -> Proposal:
            return self.candidates[at].propose(keys[:, at], weights, own, view, distribution)[0]

        shape: Proposal = jax.eval_shape(propose, own, view)
        return shape

    def _copies(
        self, choice: Choice, found: tuple[Found, ...], shapes: dict[int, Proposal], params: Weights
    ) -> Proposal:
        """Returns the proposal of the rows that use a lookup, with space for the drafts of all models."""
        batch, full = len(choice.length), self.num_nodes
        tokens, count = jnp.zeros((batch, full), jnp.int32), jnp.zeros(batch, jnp.int32)
        for at, one in zip(self.lookups, found, strict=True):
            mine = choice.candidate == at
            tokens = jnp.where(mine[:, None], widened(one.tokens, full), tokens)
            count = jnp.where(mine, choice.length, count)
        drawn = next((one.log_probs for one in shapes.values() if one.log_probs is not None), None)
        log_probs = None if drawn is None else jnp.zeros((batch, full, drawn.shape[-1]), drawn.dtype)
        # Verification begins after one layer in all rows, so streams of several exits are of no use. It must run the
        # layers that a head reads.
        exits = {one.exit_layer: one.exit_hidden for one in shapes.values() if one.exit_hidden is not None}
        streams, layer = None, max(exits, default=0)
        read = [of for of in self.aux_layers if isinstance(of, int)]
        if len(exits) == 1 and (stream := exits[layer]) is not None and min(read, default=layer) >= layer:
            streams = jnp.zeros((batch, full + 1, stream.shape[-1]), stream.dtype)
        layer = 0 if streams is None else layer
        parents, most = None, 0
        if self.drafts_trees:  # each copied token is the child of the one before it
            parents = jnp.broadcast_to(jnp.arange(-1, full - 1), (batch, full))
            siblings = [_most_siblings(one) for one in shapes.values()]
            most = max(siblings) if all(siblings) else 0
        return Proposal(tokens, count, log_probs, streams, layer, parents, most)

    def _with(self, joined: Proposal, drafted: Proposal, mine: jax.Array, length: jax.Array) -> Proposal:
        """Returns `joined` with a model's drafts in the rows `mine`, bool[B]; chains are cut to `length`."""
        full, parents, log_probs = self.num_nodes, joined.parents, joined.log_probs
        exits, count = joined.exit_hidden, jnp.minimum(drafted.count, length)
        if parents is not None:
            own = jnp.arange(-1, full - 1)[None]
            if drafted.parents is not None:
                own, count = widened(as_array(drafted.parents), full), drafted.count
            parents = jnp.where(mine[:, None], own, as_array(parents))
        if log_probs is not None and drafted.log_probs is not None:
            log_probs = jnp.where(mine[:, None, None], widened(drafted.log_probs, full), log_probs)
        if exits is not None and drafted.exit_hidden is not None:
            # Also of the other rows, whose pending tokens the draft has run.
            exits = widened(drafted.exit_hidden, full + 1)
        return dataclasses.replace(
            joined,
            tokens=jnp.where(mine[:, None], widened(drafted.tokens, full), joined.tokens),
            count=jnp.where(mine, count, joined.count),
            parents=parents,
            log_probs=log_probs,
            exit_hidden=exits,
        )

    def _completed(
        self,
        joined: Proposal,
        choice: Choice,
        runs: dict[int, jax.Array],
        shapes: dict[int, Proposal],
        params: Weights,
        view: View,
    ) -> tuple[Proposal, KVCache]:
        """Adds what verification needs of the rows whose draft does not have it: log-probabilities and streams."""

        def drafted_by(models: list[int]) -> jax.Array:
            return jnp.any(choice.candidate[:, None] == jnp.array(models), axis=1)

        log_probs, exits, cache = joined.log_probs, joined.exit_hidden, view.cache
        if log_probs is not None:  # other tokens are point masses
            drawn = drafted_by([at for at, one in shapes.items() if one.log_probs is not None])

            def certain(log_probs: jax.Array) -> jax.Array:
                points = jnp.log(jax.nn.one_hot(joined.tokens, log_probs.shape[-1], dtype=log_probs.dtype))
                return jnp.where(drawn[:, None, None], log_probs, points)

            log_probs = once(jnp.any(~drawn & (joined.count > 0)), certain, log_probs)
        if exits is not None:
            # Verification starts after the exit layer, so other tokens run through the first layers here. If the model
            # with the exit ran, it has fed the pending token of every row; else it must be fed here, in all rows.
            models = [at for at, one in shapes.items() if one.exit_hidden is not None]
            ran = jnp.any(jnp.stack([runs[at] for at in models]))
            others = jnp.any(~drafted_by(models) & (joined.count > 0))
            fed = jnp.concatenate([view.pending[:, None], jnp.maximum(joined.tokens, 0)], axis=1)
            needed = jnp.where(others | ~ran, jnp.max(joined.count) + 1, 0)
            # In all rows, the drafts have the places of verification, which are those of a tree if there is one.
            tree = None if joined.parents is None else Tree.of(joined.parents, self.num_draft_tokens)

            def through(width: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
                exits, cache = carry
                hidden, layers = llama.embed(params.target, fed[:, :width]), range(joined.exit_layer)
                branches = None if tree is None else tree.rows(0, width)
                hidden, cache = llama.run_layers(
                    self.config, params.target, hidden, view.start, cache, layers=layers, tree=branches
                )
                return exits.at[:, :width].set(hidden), cache

            exits, cache = narrowest(self.verify_widths, needed, through, (exits, cache))
        return dataclasses.replace(joined, log_probs=log_probs, exit_hidden=exits), cache

    def _aux_of(self, one: Drafter, hidden: jax.Array) -> jax.Array:
        """Returns a candidate's auxiliary hidden states among those of all candidates, [B, T, F]."""
        width = self.config.hidden_size
        every = [hidden[..., at * width : (at + 1) * width] for at in range(len(self.aux_layers))]
        return jnp.concatenate([every[self.aux_layers.index(layer)] for layer in one.aux_layers], axis=-1)

    def _absorbed_waiting(
        self, run: jax.Array, params: Weights, own: tuple[State, ...], waiting: Waiting, start: jax.Array
    ) -> tuple[list[State], Waiting]:
        """Returns the states after the candidates have absorbed what waits, if `run`; `start` is the next position."""
        zero = jnp.zeros_like(waiting.count)
        begin = jnp.where(waiting.count > 0, waiting.start, start)

        def absorb(own: State, at: int) -> State:
            one, weights = self._each(params)[at]
            hidden = self._aux_of(one, waiting.aux_hidden_states)
            return one.observe(
                weights, own, Outcome(waiting.tokens, waiting.count, zero, zero, hidden, begin)
            )

        # One loop for each: XLA copies caches that one loop writes for several heads.
        states = [
            once(run, functools.partial(absorb, at=at), its) if one.aux_layers else its
            for at, (one, its) in enumerate(zip(self.candidates, own, strict=True))
        ]
        return states, dataclasses.replace(waiting, count=jnp.where(run, 0, waiting.count))

    def observe(self, params: Weights, state: ChoosingState, outcome: Outcome) -> ChoosingState:
        """Counts right and wrong drafts, and passes each candidate the outcome of its own rounds."""
        own = []
        for at, (one, weights) in enumerate(self._each(params)):
            mine = state.choice.candidate == at
            top = outcome.top_tokens
            its = dataclasses.replace(
                outcome,
                drafted=jnp.where(mine, outcome.drafted, 0),
                accepted=jnp.where(mine, outcome.accepted, 0),
                aux_hidden_states=None,
                start=None,
                top_tokens=None if top is None else top[..., : one.num_top_tokens],
            )
            own.append(one.observe(weights, state.own[at], its))
        waiting = None if state.waiting is None else state.waiting.followed_by(outcome)
        return self.counted(state, outcome)._replace(own=tuple(own), waiting=waiting)

    def counted(self, state: ChoosingState, outcome: Outcome) -> ChoosingState:
        """Returns the state with the counts and the credit after a round, the data of the next choice."""
        right, wrong, seen = self._evidence(state, outcome)
        mine = state.choice.candidate[:, None] == jnp.arange(len(self.candidates))
        gain = (1 + SHARE) * outcome.count - state.choice.cost
        return state._replace(
            right=self.memory * state.right + right,
            wrong=self.memory * state.wrong + wrong,
            seen=state.seen + seen,
            used=state.used + (mine & (outcome.drafted > 0)[:, None]),
            credit=state.credit + jnp.where(outcome.count > 0, gain, 0.0),
        )

    def _evidence(self, state: ChoosingState, outcome: Outcome) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what a round adds to `right`, `wrong` and `seen`."""
        place = jnp.arange(self.num_draft_tokens)[None]
        right, wrong, seen = [], [], []
        for at, one in enumerate(self.candidates):
            if at in self.lookups:
                found = state.found[self.lookups.index(at)]
                # The committed tokens decide on a draft, whether it was verified or not.
                decided = jnp.minimum(found.count, outcome.count)[:, None]
                same = (found.tokens == outcome.tokens[:, : place.shape[1]]) & (place < decided)
                good = jnp.sum(jnp.cumprod(same, axis=1), axis=1, keepdims=True)
                began, failed = good > 0, good < decided
                # A wrong further token counts only up to the expected length.
                short = jnp.where(began & failed, jnp.clip(found.promised[:, None] - good, 0, 1), 0)
                further = jnp.maximum(good - 1, 0)
                right.append(jnp.concatenate([began, further], axis=1))
                wrong.append(jnp.concatenate([failed & ~began, short], axis=1))
                yes = jnp.where(place == 0, began, jnp.where(place == 1, further, 0))
                no = failed & (place == jnp.minimum(good, 1))
            else:
                mine = (state.choice.candidate == at)[:, None]
                # In a tree, at most one node of each depth can be accepted.
                longest = jnp.minimum(outcome.drafted, one.num_draft_tokens)[:, None]
                good = outcome.accepted[:, None]
                failed = mine & (good < longest)
                right.append(jnp.concatenate([mine * good, jnp.zeros_like(good)], axis=1))
                wrong.append(jnp.concatenate([failed, jnp.zeros_like(failed)], axis=1))
                yes, no = mine & (place < good), failed & (place == good)
            seen.append(jnp.stack([yes, no], axis=-1).astype(jnp.int32))
        return jnp.stack(right, axis=1), jnp.stack(wrong, axis=1), jnp.stack(seen, axis=1)


def _most_siblings(proposal: Proposal) -> int:
    """Returns the largest number of siblings in a proposal's tree; 0 if it is unknown, 1 for a chain."""
    parents = proposal.parents
    if parents is None:
        return 1
    return parents.most_siblings if isinstance(parents, Shape) else proposal.most_siblings
