"""Enumerated distributions of texts, and comparisons of samples with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats


def warp(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Returns the probabilities [V] of logits [V] after temperature, top-k, top-p and min-p, computed one by one."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        certain: np.ndarray = np.eye(len(logits))[np.argmax(logits)]
        return certain
    probs = _normalised(np.exp((logits - logits.max()) / temperature))
    if top_k > 0:
        probs = _normalised(np.where(probs >= np.sort(probs)[::-1][min(top_k, len(probs)) - 1], probs, 0))
    if top_p < 1:
        kept, mass = np.zeros(len(probs), bool), 0.0
        for token in np.argsort(-probs, kind="stable"):
            if mass < top_p:
                kept[token] = True
            mass += probs[token]
        probs = _normalised(np.where(kept, probs, 0))
    return _normalised(np.where(probs >= min_p * probs.max(), probs, 0))


def _normalised(weights: np.ndarray) -> np.ndarray:
    probs: np.ndarray = weights / weights.sum()
    return probs


def text_distribution(
    next_probs: Callable[[tuple[int, ...]], np.ndarray | None], length: int, eos: Collection[int] = ()
) -> dict[tuple[int, ...], float]:
    """Returns the probability of every text of `length` tokens, or of fewer that end with one of `eos`.

    A text also ends where `next_probs` returns None.
    """

    def texts(prefix: tuple[int, ...], mass: float) -> Iterator[tuple[tuple[int, ...], float]]:
        ended = len(prefix) == length or (prefix and prefix[-1] in eos)
        if ended or (probs := next_probs(prefix)) is None:
            yield prefix, mass
            return
        for token, prob in enumerate(probs):
            if prob > 0:
                yield from texts((*prefix, token), mass * prob)

    return dict(texts((), 1.0))


def distance(distribution: dict[Any, float], other: dict[Any, float]) -> float:
    """Returns the total variation distance of two distributions, 0 to 1."""
    return (
        sum(abs(distribution.get(text, 0.0) - other.get(text, 0.0)) for text in {*distribution, *other}) / 2
    )


def chi_square(samples: Sequence[Any], distribution: dict[Any, float]) -> float:
    """Returns the p-value of a χ² test of samples against a distribution, with rare outcomes pooled."""
    counts: dict[Any, int] = {}
    for sample in samples:
        counts[sample] = counts.get(sample, 0) + 1
    assert set(counts) <= set(distribution), "an impossible outcome"
    cells = sorted((len(samples) * prob, counts.get(text, 0)) for text, prob in distribution.items())
    pooled = [[0.0, 0]]
    for expected, count in cells:
        if pooled[-1][0] >= 8:
            pooled.append([0.0, 0])
        pooled[-1][0] += expected
        pooled[-1][1] += count
    statistic = sum((count - expected) ** 2 / expected for expected, count in pooled)
    return float(stats.chi2.sf(statistic, max(len(pooled) - 1, 1)))
