"""Expected acceptance of drafts by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The weight of earlier texts' counts when a text is added, and the draft tokens as which an expectation counts beside
# them.
MEMORY, KNOWN = 0.95, 10.0


def informed(known: Sequence[float], seen: np.ndarray | None) -> tuple[float, ...]:
    """Returns the expected acceptance by position, from what is known and the counts of earlier texts.

    Args:
      known: of some positions; the last value holds for later ones.
      seen: float[K, 2], accepted and rejected draft tokens by position; None for none.
    """
    if seen is None:
        return tuple(known)
    prior = np.array([*known, *[known[-1]] * len(seen)][: len(seen)])
    found: list[float] = ((KNOWN * prior + seen[:, 0]) / (KNOWN + seen.sum(axis=1))).round(4).tolist()
    return tuple(found)


def remembered(before: np.ndarray | None, seen: np.ndarray) -> np.ndarray:
    """Returns counts [K, 2] over texts, in which those `before` weigh less than those of one more text."""
    sums = np.array(seen, np.float64)
    if before is None:
        return sums
    sums = np.pad(sums, ((0, max(len(before) - len(sums), 0)), (0, 0)))
    sums[: len(before)] += MEMORY * before
    return sums
