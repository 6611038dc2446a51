"""Prices of rounds and the expected speed-up of each candidate, from which the policy chooses."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxspec.choosing import beliefs
from jaxspec.choosing.beliefs import Counts, Prior
from jaxspec.choosing.costs import DraftCost, StepCosts

# The candidate that every list begins with: plain decoding.
OFF = 0


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of rounds of M candidates, in milliseconds.

    Attributes:
      round_ms: float[M, K + 1], by draft length; ∞ for a length that a candidate does not have. Length 0 is a round
        in which it found no draft.
      start_ms: float[M], time to bring a candidate's own state up to date, without the tokens.
      absorb_ms: float[M], the same for each token.
      shortest: int[M], the shortest draft that may be requested.
    """

    round_ms: np.ndarray
    start_ms: np.ndarray
    absorb_ms: np.ndarray
    shortest: np.ndarray

    def state_ms(self, tokens: float) -> np.ndarray:
        """Returns the time to bring each candidate's state up to date, float[M]."""
        return self.start_ms + tokens * self.absorb_ms


@functools.lru_cache(maxsize=64)
def price_table(
    costs: StepCosts, drafts: tuple[DraftCost, ...], longest: tuple[int, ...], live: int | None, batch: int
) -> Prices:
    """Returns the prices of plain decoding and of drafts.

    Args:
      costs: of the device.
      drafts: of the candidates after plain decoding.
      longest: K of each.
      live, batch: as for `StepCosts.step_ms`.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 14.0)), 1, 4.0, 0.0)
      >>> price_table(costs, (DraftCost(lookup=True),), (2,), None, 1).round_ms.tolist()
      [[10.0, inf, inf], [10.0, 11.0, 12.0]]
    """
    every = (DraftCost(), *drafts)
    table = np.full((len(every), max(longest) + 1), np.inf)
    for at, (draft, most) in enumerate(zip(every, (0, *longest), strict=True)):
        table[at, : most + 1] = [draft.round_ms(costs, length, live, batch) for length in range(most + 1)]
    # A state is brought up in one pass at least. Plain decoding and lookups have none.
    start = [
        costs.step_ms(layers=one.absorb_layers, head=False) if one.absorb_layers else 0.0 for one in every
    ]
    # Only plain decoding requests no draft. A drafter that ends its drafts itself has no length to choose.
    shortest = [0, *(most if one.adapts else 1 for one, most in zip(drafts, longest, strict=True))]
    absorb = [one.absorb_ms(costs) for one in every]
    return Prices(table, np.array(start), np.array(absorb), np.array(shortest))


def tokens_of_rounds(accept: np.ndarray) -> np.ndarray:
    """Returns expected tokens of a round by draft length, float[…, K + 1], from acceptances float[…, K].

    Examples:
      >>> tokens_of_rounds(np.array([0.5, 0.5])).tolist()
      [1.0, 1.5, 1.75]
    """
    right = np.cumsum(np.cumprod(accept, axis=-1), axis=-1)
    return np.concatenate([np.ones_like(right[..., :1]), 1 + right], axis=-1)


def times_of_rounds(table: Prices, drafted: np.ndarray) -> np.ndarray:
    """Returns expected milliseconds of a round by draft length, float[…, M, K + 1]; ∞ if it cannot be requested.

    Args:
      table: prices.
      drafted: float[…, M, K], the share of rounds that draft a token at each position.
    """
    finite = np.where(np.isinf(table.round_ms), 0.0, table.round_ms)
    further = np.cumsum(drafted * np.diff(finite), axis=-1)
    times = finite[:, :1] + np.concatenate([np.zeros_like(further[..., :1]), further], axis=-1)
    lengths = np.arange(finite.shape[1])
    closed = np.isinf(table.round_ms) | (lengths < table.shortest[:, None])
    return np.where(closed, np.inf, times)


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Expected performance of M candidates with the best length of each, all rows together.

    Attributes:
      speedup: float[M], over plain decoding, without the time for a candidate's state.
      length: int[M], the best draft length.
      accept: float[M], acceptance of the first draft token.
      round_ms: float[M], time of a round.
    """

    speedup: np.ndarray
    length: np.ndarray
    accept: np.ndarray
    round_ms: np.ndarray


def outlook(table: Prices, prior: Prior, counts: Counts, deviations: float = 0.0) -> Outlook:
    """Returns the expected performance of each candidate.

    Args:
      table: prices of rounds of the batch.
      prior, counts: beliefs about the rows that are still going on.
      deviations: as for `beliefs.expected`.

    Examples:
      >>> costs = StepCosts("a device", "a model", "float32", 4, 100, ((1, 1, 10.0), (5, 1, 10.0)), 1, 4.0, 0.0)
      >>> table = price_table(costs, (DraftCost(lookup=True),), (1,), None, 1)
      >>> prior = beliefs.prior_of([beliefs.UNKNOWN, beliefs.Expectation((0.8,), 2.0)], 1)
      >>> outlook(table, prior, beliefs.no_counts(1, 2, 1)).speedup.round(2).tolist()
      [1.0, 1.8]
    """
    accept, drafted = beliefs.expected(prior, counts, deviations)
    tokens = tokens_of_rounds(accept).mean(axis=0)
    # A round takes as long as that of the row with the longest draft.
    times = times_of_rounds(table, drafted).max(axis=0)
    speed = tokens / times * table.round_ms[OFF, 0]
    length = speed.argmax(axis=-1)
    each = np.arange(len(length))
    return Outlook(speed[each, length], length, accept[:, :, 0].mean(axis=0), times[each, length])
