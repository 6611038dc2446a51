"""Expected acceptance of drafts by position, and its fitting to the rounds of texts.

A round that drafts d tokens of which k are accepted shows that positions 0 … k − 1 were right, and, where k < d, that
position k was wrong. It shows nothing about later positions.

Functions are pure. Shapes: B rows (one text each), M candidates, K the longest draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

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


def informed(known: Sequence[float], seen: np.ndarray | None) -> tuple[float, ...]:
    """Returns the expected acceptance by position, from what is known and the counts of earlier texts.

    Args:
      known: of some positions; the last value holds for later ones.
      seen: float[K, 2], accepted and rejected draft tokens by position; None for none.

    Examples:
      >>> informed((0.9,), np.array([[0.0, 90.0], [0.0, 0.0]]))
      (0.09, 0.9)
    """
    if seen is None:
        return tuple(known)
    prior = np.array([*known, *[known[-1]] * len(seen)][: len(seen)])
    found: list[float] = ((KNOWN * prior + seen[:, 0]) / (KNOWN + seen.sum(axis=1))).round(4).tolist()
    return tuple(found)


def remembered(before: np.ndarray | None, seen: np.ndarray) -> np.ndarray:
    """Returns counts [K, 2] over texts, in which those `before` weigh less than those of one more text.

    Examples:
      >>> remembered(np.array([[100.0, 0.0]]), np.array([[1.0, 2.0], [1.0, 0.0]])).tolist()
      [[96.0, 2.0], [1.0, 0.0]]
    """
    sums = np.array(seen, np.float64)
    if before is None:
        return sums
    sums = np.pad(sums, ((0, max(len(before) - len(sums), 0)), (0, 0)))
    sums[: len(before)] += MEMORY * before
    return sums
