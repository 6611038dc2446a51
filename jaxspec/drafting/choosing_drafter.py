"""A drafter that chooses among several drafters in each round, inside the compiled loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.costs.prices import Prices
from jaxspec.drafting.choice_rule import Choice, ChoiceRule, ChoiceState, Found
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest, once
from jaxspec.model.numerics import widened
from jaxspec.model.plan import LayerPlan
from jaxspec.model.tree import Shape, Tree, as_array
from jaxspec.protocol import Drafter, Outcome, Prefill, Proposal, State, View, Weights
from jaxspec.sampling import Distribution


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


class ChoosingState(NamedTuple):
    """The state of `ChoosingDrafter`.

    Attributes:
      own: the states of the candidates.
      rule: the state of the choice.
      waiting: hidden states that are not absorbed; None if no candidate reads any.
    """

    own: tuple[State, ...]
    rule: ChoiceState
    waiting: Waiting | None


@struct.dataclass
class ChoosingDrafter(Drafter):
    """Uses in each round the draft with the most expected tokens for its time, or none.

    `choice_rule.ChoiceRule` chooses. Candidates that copy text (`LookupDrafter`) draft in every round, and at most
    one of the others, the *models*. If a model drafts trees, chains are trees without branches.

    **Losslessness.** The choice depends on committed tokens, on earlier rounds and on the drafts of lookups, which
    follow from the text; never on a model's draft of this round. So the text keeps its distribution.

    Drafters with auxiliary layers absorb hidden states only before they draft, or when no more can wait.

    `params.drafter` are the parameters of the candidates, a tuple.

    Attributes:
      config: the target.
      candidates: drafters that can take turns, see `Drafter.taking_turns`.
      prices: the data of the choice.
      memory: the factor by which counts decay per round, 0 to 1.
      plain: whether every choice is plain decoding, static: a smaller program, for the same state, that counts which
        copies would have been right.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    candidates: tuple[Drafter, ...]
    prices: Prices
    memory: jax.Array | float = 0.95
    plain: bool = struct.field(pytree_node=False, default=False)
    mixes_rows = True  # they choose together

    @property
    def rule(self) -> ChoiceRule:
        """The choice among the candidates."""
        return ChoiceRule(self.candidates, self.prices, self.memory, self.verify_widths)

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
        """One row, and the widths of the candidates unless every choice is plain decoding."""
        return (1,) if self.plain else widths_of(self.candidates)

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

    def specialised(self, plan: LayerPlan) -> ChoosingDrafter:
        """Returns the same drafter with a static mask of that candidate."""
        candidates = list(self.candidates)
        candidates[self._masked] = candidates[self._masked].specialised(plan)
        return dataclasses.replace(self, candidates=tuple(candidates))

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> State:
        """Returns the results of the candidates' `begin`; None if all are None."""
        own = tuple(one.begin(weights, length, capacity, merged) for one, weights in self._each(params))
        waiting = None
        if self.aux_layers:
            slots, width = (len(length), self._num_waiting), len(self.aux_layers) * self.config.hidden_size
            nothing = jnp.zeros((*slots, width), llama.stream_of(params.target))
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
        held = prefill.absorbed or Held((None,) * len(self.candidates), None)
        own = tuple(
            one.init(weights, view, dataclasses.replace(prefill, absorbed=its))
            for (one, weights), its in zip(self._each(params), held.own, strict=True)
        )
        return ChoosingState(own, self.rule.init(len(view.length)), held.waiting)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChoosingState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChoosingState, KVCache]:
        """Proposes each row's draft; a model runs only if some row takes its draft."""
        each = jax.vmap(lambda key: jax.random.split(key, len(self.candidates)), out_axes=1)(keys)
        rule, found = self.rule, []
        models = () if self.plain else rule.models
        for at in rule.lookups:
            lookup: Any = self.candidates[at]
            copied, promised = lookup.drafts(each[at], view)
            found.append(Found(widened(copied.tokens, self.num_draft_tokens), copied.count, promised))
        # The choice comes before a model drafts, so it cannot depend on the tokens drawn.
        choice = rule.choose(state.rule, tuple(found), view.length, view.budget)
        chosen = state.rule._replace(choice=choice, found=tuple(found))
        own, waiting = list(state.own), state.waiting
        runs = {at: jnp.any((choice.candidate == at) & (choice.length > 0)) for at in models}
        if waiting is not None:
            aux = [runs[at] for at in models if self.candidates[at].aux_layers]
            full = jnp.any(waiting.count + self.num_draft_tokens + 1 > self._num_waiting)
            absorb = jnp.any(jnp.stack([full, *aux]))
            own, waiting = self._absorbed_waiting(absorb, params, state.own, waiting, view.start)

        def drafted(at: int, its: State, view: View) -> tuple[Proposal, State, KVCache]:
            weights = Weights(params.target, params.drafter[at])
            proposal, its, cache = self.candidates[at].propose(each[at], weights, its, view, distribution)
            # A pending token that has run all layers saves nothing, because other rows have not run theirs.
            whole = proposal.exit_layer == self.config.num_layers
            return dataclasses.replace(proposal, exit_hidden=None) if whole else proposal, its, cache

        def draft(carry: tuple[Proposal, State, KVCache], at: int) -> tuple[Proposal, State, KVCache]:
            joined, its, cache = carry
            # The chosen length is the budget of the rows that use this model; the others do not draft.
            mine = choice.candidate == at
            rest = dataclasses.replace(view, cache=cache, budget=jnp.where(mine, choice.length, 0))
            proposal, its, cache = drafted(at, its, rest)
            return _with(joined, proposal, mine, choice.length), its, cache

        shapes = {at: jax.eval_shape(functools.partial(drafted, at), own[at], view)[0] for at in models}
        joined, cache = self._copies(chosen, shapes, params), view.cache
        for at in models:
            carry = joined, own[at], cache
            joined, own[at], cache = once(runs[at], functools.partial(draft, at=at), carry)
        view = dataclasses.replace(view, cache=cache)
        proposal, cache = self._completed(joined, choice, runs, shapes, params, view)
        return proposal, ChoosingState(tuple(own), chosen, waiting), cache

    def _each(self, params: Weights) -> list[tuple[Drafter, Weights]]:
        """Returns each candidate with the target's parameters and its own."""
        own = params.drafter
        return [(one, Weights(params.target, its)) for one, its in zip(self.candidates, own, strict=True)]

    def _copies(self, chosen: ChoiceState, shapes: dict[int, Proposal], params: Weights) -> Proposal:
        """Returns the proposal of the rows that use a lookup, with space for the drafts of all models."""
        choice, full = chosen.choice, self.num_nodes
        batch = len(choice.length)
        tokens, count = jnp.zeros((batch, full), jnp.int32), jnp.zeros(batch, jnp.int32)
        for at, one in zip(self.rule.lookups, chosen.found, strict=True):
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
            most = max(siblings, default=1) if all(siblings) else 0
        return Proposal(tokens, count, log_probs, streams, layer, parents, most)

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
            tree = (
                None if joined.parents is None else Tree.from_parents(joined.parents, self.num_draft_tokens)
            )

            def through(width: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
                exits, cache = carry
                hidden = llama.embed(self.config, params.target, fed[:, :width])
                branches = None if tree is None else tree.rows(0, width)
                hidden, cache = llama.run_layers(
                    self.config,
                    params.target,
                    hidden,
                    view.start,
                    cache,
                    layers=range(joined.exit_layer),
                    tree=branches,
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
            mine = state.rule.choice.candidate == at
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
        return ChoosingState(tuple(own), self.rule.observe(state.rule, outcome), waiting)


def _with(joined: Proposal, drafted: Proposal, mine: jax.Array, length: jax.Array) -> Proposal:
    """Returns `joined` with a model's drafts in the rows `mine`, bool[B]; chains are cut to `length`."""
    full, parents, log_probs = joined.tokens.shape[1], joined.parents, joined.log_probs
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


def _most_siblings(proposal: Proposal) -> int:
    """Returns the largest number of siblings in a proposal's tree; 0 if it is unknown, 1 for a chain."""
    parents = proposal.parents
    if parents is None:
        return 1
    return parents.most_siblings if isinstance(parents, Shape) else proposal.most_siblings
