"""The choice among several drafts in each round, from counts and prices that are arrays."""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.costs.prices import Prices
from jaxspec.drafting.lookup import LookupDrafter
from jaxspec.protocol import Drafter, Outcome

# The time that drafts may lose against plain decoding: `FIRST` steps, and a share of the text. Time that they save
# counts against it.
FIRST, SHARE = 1.0, 0.015
# The rounds as which the expected acceptance of a lookup counts beside those of the text.
_EXPECTED = 3.0
# The acceptance of a model's drafts is estimated this many posterior standard deviations above its mean, because drafts
# also give information.
_OPTIMISM = 0.5
# Acceptance rates are clipped to this distance from 0 and 1.
_EDGE = 1e-3


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


class ChoiceState(NamedTuple):
    """The state of a `ChoiceRule`, for C candidates.

    Attributes:
      right, wrong: float32[B, C, 2], decayed counts. For a lookup, they are rounds by whether its first token was
        right, and, in those where it was, further right tokens and rounds with fewer than expected. For a model, they
        are accepted tokens, and rounds with a rejection; the last column is unused.
      used: int32[B, C], the rounds of the text in which a draft of the candidate was verified.
      credit: float32[B], the time that drafts may still lose against plain decoding, in plain steps.
      choice: that of the last round.
      found: the drafts of each lookup in the last round.
    """

    right: jax.Array
    wrong: jax.Array
    used: jax.Array
    credit: jax.Array
    choice: Choice
    found: tuple[Found, ...]


@struct.dataclass
class ChoiceRule:
    """The rule that chooses a draft, or none, for each row of a round; the rows choose together.

    Lookups, which copy text, draft in every round. At most one of the other candidates, the *models*, drafts in a
    round. A round is an option: a model or none, the length of its draft, and the width of verification. With an
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

    If a model drafts trees of N nodes and depth D, a draft has only the length D, and aₙ is the rate of trees with an
    accepted node of depth n among those with one of depth n − 1.

    **Bounded loss.** An option is possible only if the rows could, on average, afford that no draft token is accepted.
    At these prices, a text alone never takes longer than plain decoding by more than `FIRST` steps and `SHARE` of its
    tokens. In a batch, this holds for the mean over the rows of each round with drafts.

    Attributes:
      candidates: the drafters.
      prices, memory: as in `choosing_drafter.ChoosingDrafter`.
      widths: the verify widths, rising, static.
    """

    candidates: tuple[Drafter, ...]
    prices: Prices
    memory: jax.Array | float
    widths: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def lookups(self) -> tuple[int, ...]:
        """The indices of the candidates that copy text."""
        return tuple(at for at, one in enumerate(self.candidates) if isinstance(one, LookupDrafter))

    @property
    def models(self) -> tuple[int, ...]:
        """The indices of the other candidates."""
        return tuple(at for at in range(len(self.candidates)) if at not in self.lookups)

    def speedups(
        self, at: int, right: np.ndarray | float = 0.0, wrong: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Returns the expected speed-up of a candidate alone over plain decoding, by draft length, float[K].

        It is that of a text alone in a batch; every draft of a tree has its largest length. `right` and `wrong`,
        float[2], are the counts of a lookup in `ChoiceState`.
        """
        one, prices = self.candidates[at], self.prices
        verify, draft = np.asarray(prices.verify)[0, :, 0], np.asarray(prices.draft)[0, at, 1:, 0]
        longest = one.num_draft_tokens
        accept = np.array(prices.accept[at, :longest])
        if at in self.lookups:
            rates = _rates(np.asarray(prices.accept[at, :2]), right, wrong)
            accept[:1], accept[1:] = rates[:1], rates[1:2]
        nodes = [one.num_nodes] * longest if one.drafts_trees else range(1, longest + 1)
        times = verify[np.searchsorted(self.widths, nodes, side="right")] + draft[:longest]
        speedups: np.ndarray = (1 + np.cumsum(np.cumprod(accept))) * verify[0] / times
        return speedups

    def init(self, batch: int) -> ChoiceState:
        """Returns the state of new texts, with counts of 0."""
        most = self.prices.accept.shape[1]
        counts = jnp.zeros((batch, len(self.candidates), 2), jnp.float32)
        none, zero = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.float32)
        nothing = Found(jnp.zeros((batch, most), jnp.int32), none, zero)
        return ChoiceState(
            right=counts,
            wrong=counts,
            used=jnp.zeros((batch, len(self.candidates)), jnp.int32),
            credit=zero + FIRST,
            choice=Choice(none - 1, none, zero),
            found=(nothing,) * len(self.lookups),
        )

    def choose(
        self, state: ChoiceState, found: tuple[Found, ...], length: jax.Array, budget: jax.Array
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
        verify, draft = self.prices.for_rows(rows, tokens)
        model, depth, width = self._options()
        cost = verify[width] + jnp.where(model < 0, 0.0, draft[model, depth])

        # Expected accepted tokens of the best lookup for each width, and of the model of each option.
        drafts = np.array(self.widths) - 1
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

        gain = jnp.sum(jnp.where(live[:, None], jnp.maximum(best, drafted), 0.0), axis=0) / rows
        credit = jnp.sum(jnp.where(live, state.credit, 0.0)) / rows
        possible = (cost - 1 <= credit) | (jnp.arange(len(model)) == 0)
        # Among equal rates the first option: plain decoding, then the narrowest.
        option = jnp.argmax(jnp.where(possible, (1 + gain) / cost, 0.0))
        expected, from_model, number = best[:, option], drafted[:, option], jnp.asarray(width)[option]
        takes_model, takes_lookup = from_model > expected, (expected >= from_model) & (expected > 0)
        lookup = jnp.argmax(copies[:, :, number], axis=0)
        candidate = jnp.where(takes_model, jnp.asarray(model)[option], -1)
        lengths = jnp.where(takes_model, jnp.minimum(jnp.asarray(depth)[option], budget), 0)
        for place, (at, one) in enumerate(zip(self.lookups, found, strict=True)):
            mine = takes_lookup & (lookup == place)
            fits = jnp.minimum(jnp.asarray(drafts)[number], jnp.minimum(one.count, budget))
            candidate, lengths = jnp.where(mine, at, candidate), jnp.where(mine, fits, lengths)
        costs = jnp.broadcast_to(cost[option], budget.shape)
        return Choice(candidate.astype(jnp.int32), lengths.astype(jnp.int32), costs)

    def _options(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the model of each option (−1 for none), the length of its draft, and the number of the width.

        The options without a model come first, the narrowest before the others; then those of the models, in order.
        """
        widths = self.widths
        options = [(-1, 0, width) for width in range(len(widths))]
        for at in self.models:
            one = self.candidates[at]
            most = one.num_draft_tokens
            for depth in (most,) if one.drafts_trees else range(1, most + 1):
                # The first width above the number of nodes, or a wider one for the lookups of other rows.
                first = bisect.bisect(widths, one.num_nodes if one.drafts_trees else depth)
                options += [(at, depth, width) for width in range(first, len(widths))]
        model, depths, places = np.array(options).T
        return model, depths, places

    def _copied(
        self, state: ChoiceState, at: int, found: Found, lengths: np.ndarray, budget: jax.Array
    ) -> jax.Array:
        """Returns the expected accepted tokens of a lookup's drafts, cut to each of `lengths`, float32[B, W]."""
        right, wrong = state.right[:, at], state.wrong[:, at]
        rates = jnp.clip(_rates(self.prices.accept[at, :2], right, wrong), _EDGE, 1 - _EDGE)
        begins, goes_on = rates[:, :1], rates[:, 1:]
        count = jnp.minimum(found.count, budget)[:, None]
        # The exponent counts the lookup's expected tokens, not its draft tokens.
        share = (found.promised / jnp.maximum(found.count, 1))[:, None]
        return begins * (1 - goes_on ** (jnp.minimum(lengths, count) * share)) / (1 - goes_on)

    def _modelled(self, state: ChoiceState, at: int) -> jax.Array:
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

    def observe(self, state: ChoiceState, outcome: Outcome) -> ChoiceState:
        """Returns the state with the counts and the credit after a round, the data of the next choice."""
        right, wrong = self._evidence(state, outcome)
        mine = state.choice.candidate[:, None] == jnp.arange(len(self.candidates))
        gain = (1 + SHARE) * outcome.count - state.choice.cost
        return state._replace(
            right=self.memory * state.right + right,
            wrong=self.memory * state.wrong + wrong,
            used=state.used + (mine & (outcome.drafted > 0)[:, None]),
            credit=state.credit + jnp.where(outcome.count > 0, gain, 0.0),
        )

    def _evidence(self, state: ChoiceState, outcome: Outcome) -> tuple[jax.Array, jax.Array]:
        """Returns what a round adds to `right` and `wrong`."""
        place = jnp.arange(self.prices.accept.shape[1])[None]
        right, wrong = [], []
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
            else:
                mine = (state.choice.candidate == at)[:, None]
                # In a tree, at most one node of each depth can be accepted.
                longest = jnp.minimum(outcome.drafted, one.num_draft_tokens)[:, None]
                good = outcome.accepted[:, None]
                failed = mine & (good < longest)
                right.append(jnp.concatenate([mine * good, jnp.zeros_like(good)], axis=1))
                wrong.append(jnp.concatenate([failed, jnp.zeros_like(failed)], axis=1))
        return jnp.stack(right, axis=1), jnp.stack(wrong, axis=1)


def _rates(expected: Any, right: Any, wrong: Any) -> Any:
    """Returns the acceptance rates of a lookup's first and further tokens, [..., 2], from expected ones and counts."""
    return (_EXPECTED * expected + right) / (_EXPECTED + right + wrong)
