"""Beliefs about the drafts of each candidate: expected acceptance by position, updated by the rounds of a text.

A round that drafts d tokens of which k are accepted shows that positions 0 … k − 1 were right, and, where k < d, that
position k was wrong. It shows nothing about later positions. A draft that ends early, or does not begin, counts as
wrong at the position where it ended. The share of drafts that continue to each position is counted separately:
it decides the price of a round.

Each position has its own counts. All positions together give the candidate a level on this text, which shifts the
expected acceptance of every position in log-odds before the position's own counts are added. Without this shift, a
position that was never reached would keep its prior, and long drafts would look good on a text that suits none.

Functions are pure. Shapes: B rows (one text each), M candidates, K the longest draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

# Draft tokens that a text's level counts as at each position, beside the position's own counts.
POSITION = 8.0
# Draft tokens that the prior of a measured candidate counts as, at most: texts differ, so the rounds of a text soon
# outweigh what a few other texts showed.
BELIEVED = 5.0
# The weight of earlier texts' counts when a text is added, and the draft tokens as which an expectation counts beside
# them.
MEMORY, KNOWN = 0.95, 10.0
# Probabilities stay this far from 0 and 1, so that log-odds are finite.
_EDGE = 1e-3


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Expected drafts of one candidate before a text's first round.

    Attributes:
      accept: acceptance by position, given that the positions before were accepted; a token that was not drafted
        counts as rejected. The last value holds for later positions.
      strength: number of draft tokens that this counts as.
      draft: share of drafts that continue to a position. The last value holds for later positions.
    """

    accept: tuple[float, ...]
    strength: float
    draft: tuple[float, ...] = (1.0,)


# The expectation of a candidate without a measurement: even odds, soon outweighed.
UNKNOWN = Expectation((0.5,), 2.0)


@dataclasses.dataclass(frozen=True)
class Prior:
    """The expectations of M candidates as arrays.

    Attributes:
      accept, draft: float[M, K], see `Expectation`.
      strength: float[M].
      kin: bool[M], candidates that share what a text shows, because a text that does not suit one model-based drafter
        seldom suits another; None for none.
    """

    accept: np.ndarray
    strength: np.ndarray
    draft: np.ndarray
    kin: np.ndarray | None = None


def prior_of(expectations: Sequence[Expectation], longest: int) -> Prior:
    """Returns the prior of M candidates for drafts of up to `longest` tokens.

    Examples:
      >>> prior_of([Expectation((0.5,), 2.0, (0.8, 0.9))], 3).draft.tolist()
      [[0.8, 0.9, 0.9]]
    """

    def positions(values: tuple[float, ...]) -> tuple[float, ...]:
        return (*values, *values[-1:] * longest)[:longest]

    return Prior(
        np.array([positions(one.accept) for one in expectations]),
        np.array([one.strength for one in expectations]),
        np.array([positions(one.draft) for one in expectations]),
    )


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of the rounds of B rows.

    Attributes:
      accept: float[B, M, K, 2], (accepted, rejected) draft tokens by position.
      draft: float[B, M, K, 2], drafts that reached a position and (continued, ended) there.
    """

    accept: np.ndarray
    draft: np.ndarray

    def of(self, rows: np.ndarray) -> Counts:
        """Returns the counts of the rows that bool[B] selects."""
        return Counts(self.accept[rows], self.draft[rows])


def no_counts(rows: int, candidates: int, longest: int) -> Counts:
    """Returns counts before the first round."""
    nothing = np.zeros((rows, candidates, longest, 2))
    return Counts(nothing, nothing.copy())


def with_rounds(
    counts: Counts, candidate: int, rounds: Sequence[Sequence[tuple[int, int]]], asked: int = 0
) -> Counts:
    """Returns the counts after more rounds of one candidate.

    Args:
      counts: before.
      candidate: its index.
      rounds: for each row, (drafted, accepted) of each round.
      asked: requested draft length, or the depth of a tree. A draft that ended before it counts as rejected at its
        end. 0: a draft's end shows nothing about the next token.

    Examples:
      >>> seen = with_rounds(no_counts(1, 1, 2), 0, [[(2, 1), (2, 2), (0, 0)]])
      >>> seen.accept[0, 0].tolist(), seen.draft[0, 0].tolist()
      ([[2.0, 0.0], [1.0, 1.0]], [[2.0, 1.0], [2.0, 0.0]])
      >>> with_rounds(no_counts(1, 1, 2), 0, [[(1, 1)]], asked=2).accept[0, 0].tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    accept, draft = counts.accept.copy(), counts.draft.copy()
    at = np.arange(accept.shape[2])
    for row, of_row in enumerate(rounds):
        if not of_row:
            continue
        # Shape [rounds, 1], compared with the positions.
        drafted, accepted = (np.array(column)[:, None] for column in zip(*of_row, strict=True))
        most = asked or drafted
        # A tree has more nodes than positions.
        drafted = np.minimum(drafted, most)
        rejected = (at == accepted) & (accepted < most)
        # A round without a draft is known to have none, whatever length was requested.
        ended = (at == drafted) & (drafted < np.maximum(most, 1))
        accept[row, candidate] += np.stack([at < accepted, rejected], axis=-1).sum(axis=0)
        draft[row, candidate] += np.stack([at < drafted, ended], axis=-1).sum(axis=0)
    return Counts(accept, draft)


def expected(prior: Prior, counts: Counts, deviations: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the expected acceptance by position and the share of rounds that draft a token there.

    Args:
      prior, counts: of M candidates and B rows.
      deviations: number of standard deviations to add to each level: optimistic above 0, pessimistic below.

    Returns:
      float[B, M, K] each. The first is given that the positions before were accepted; the second is of all rounds.

    Examples:
      >>> flat = prior_of([Expectation((0.5,), 2.0)], 2)
      >>> seen = with_rounds(no_counts(1, 1, 2), 0, [[(2, 0)] * 8])
      >>> expected(flat, seen)[0].round(2).tolist()  # no second token was reached
      [[[0.05, 0.1]]]
      >>> expected(flat, no_counts(1, 1, 2), 1.0)[0].round(2).tolist()
      [[[0.79, 0.79]]]
    """
    goes_on = _shares(prior.strength, counts.draft, prior.draft, deviations)
    accept = np.broadcast_to(prior.accept, counts.accept.shape[:-1])
    if prior.kin is not None:
        # The mean shift of a candidate's kin, weighted by their counts, shifts what is expected of it.
        weight = np.where(prior.kin, counts.accept.sum(axis=(-2, -1)), 0.0)
        others = weight[:, None] * (prior.kin[:, None] & ~np.eye(len(prior.kin), dtype=bool))
        shift = (others @ _shift(prior.strength, counts.accept, accept, 0.0)[..., None])[..., 0]
        accept = _shifted(accept, shift / np.maximum(others.sum(axis=-1), _EDGE))
    return _shares(prior.strength, counts.accept, accept, deviations), np.cumprod(goes_on, axis=-1)


def _shares(strength: np.ndarray, counts: np.ndarray, base: np.ndarray, deviations: float) -> np.ndarray:
    """Returns shares by position, float[B, M, K], from counts float[B, M, K, 2] and their expectation [(B,) M, K]."""
    base = np.broadcast_to(base, counts.shape[:-1])
    # The level shifts every position alike, so that the profile over positions stays; then a position's own counts.
    shifted = _shifted(base, _shift(strength, counts, base, deviations))
    shares: np.ndarray = (POSITION * shifted + counts[..., 0]) / (POSITION + counts.sum(axis=-1))
    return shares


def _shift(strength: np.ndarray, counts: np.ndarray, base: np.ndarray, deviations: float) -> np.ndarray:
    """Returns the difference between a text's level and `base` float[B, M, K] in log-odds, float[B, M]."""
    seen = counts.sum(axis=-1)
    weight = seen.copy()
    weight[..., 0] += _EDGE  # the first position before the first round
    usual = (weight * base).sum(axis=-1) / weight.sum(axis=-1)
    total = strength + seen.sum(axis=-1)
    middle = np.clip((strength * usual + counts[..., 0].sum(axis=-1)) / total, _EDGE, 1 - _EDGE)
    # The standard deviation of a Beta distribution with this mean and number of observations.
    level = middle + deviations * np.sqrt(middle * (1 - middle) / (total + 1))
    shift: np.ndarray = _log_odds(level) - _log_odds(usual)
    return shift


def fitted(counts: Counts) -> list[Expectation]:
    """Returns the expectation of each candidate for the next text, from the counts of other texts, a row each.

    Examples:
      >>> seen = with_rounds(no_counts(9, 1, 1), 0, [[(1, 1)] * 80 + [(1, 0)] * 20] * 9)
      >>> round(fitted(seen)[0].accept[0], 2), fitted(seen)[0].strength
      (0.77, 5.0)
    """
    texts = (counts.accept.sum(axis=-1) > 0).sum(axis=0)
    accept, draft = (
        (of[..., 0].sum(axis=0) + _EDGE) / (of.sum(axis=(0, -1)) + _EDGE)
        for of in (counts.accept, counts.draft)
    )
    # Half an acceptance and half a rejection more, so that nothing is certain.
    accept = (accept * texts + 0.5) / (texts + 1)
    return [
        Expectation(tuple(a), BELIEVED, tuple(d))
        for a, d in zip(accept.tolist(), draft.tolist(), strict=True)
    ]


def remembered(before: Counts | None, counts: Counts) -> Counts:
    """Returns the counts of one candidate over texts, [K, 2] each, in which earlier texts weigh less.

    Args:
      before: of earlier texts; None for none.
      counts: of the texts that have ended, [B, K, 2].
    """
    accept, draft = counts.accept.sum(axis=0), counts.draft.sum(axis=0)
    if before is None:
        return Counts(accept, draft)
    longest = max(len(accept), len(before.accept))

    def added(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        sums = np.zeros((longest, 2))
        sums[: len(old)] += MEMORY * old
        sums[: len(new)] += new
        return sums

    return Counts(added(before.accept, accept), added(before.draft, draft))


def informed(known: Expectation | None, counts: Counts | None) -> Expectation | None:
    """Returns the expectation of a candidate from what is known of it and the counts of earlier texts here.

    Args:
      known: from a file that comes with the model or candidate; None for nothing.
      counts: from `remembered`; None for none.

    Examples:
      >>> seen = with_rounds(no_counts(1, 1, 2), 0, [[(2, 0)] * 90])
      >>> informed(Expectation((0.9,), 5.0), remembered(None, Counts(seen.accept[0], seen.draft[0]))).accept
      (0.09, 0.9)
    """
    if counts is None or counts.accept[0].sum() < KNOWN:
        return known
    base = known or UNKNOWN

    def shares(values: tuple[float, ...], of: np.ndarray) -> tuple[float, ...]:
        prior = np.array((*values, *values[-1:] * len(of))[: len(of)])
        found: list[float] = ((KNOWN * prior + of[:, 0]) / (KNOWN + of.sum(axis=-1))).round(4).tolist()
        return tuple(found)

    return Expectation(shares(base.accept, counts.accept), BELIEVED, shares(base.draft, counts.draft))


def _shifted(probability: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Returns probabilities float[B, M, K] shifted by float[B, M] in log-odds."""
    shifted: np.ndarray = 1 / (1 + np.exp(-_log_odds(probability) - shift[..., None]))
    return shifted


def _log_odds(probability: np.ndarray) -> np.ndarray:
    inside = np.clip(probability, _EDGE, 1 - _EDGE)
    odds: np.ndarray = np.log(inside) - np.log1p(-inside)
    return odds
