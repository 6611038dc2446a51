"""Evaluates estimates of acceptance: accuracy, cross-entropy, information, ranking, calibration."""

from __future__ import annotations

import numpy as np

BINS = 10


def quality(estimate: np.ndarray, label: np.ndarray) -> dict[str, float | None]:
    """Evaluates estimates [N] of labels [N], which may be soft (between 0 and 1), with five figures.

    Returns:
      `accuracy`: share of tokens whose outcome, accepted or rejected, is the one that the estimate favours.
      `cross_entropy`: nats. `information`: the fraction by which the estimate reduces the base rate's cross-entropy: 0
      for the labels' mean as the estimate of every token, negative for worse estimates, 1 for certainty. `auroc`: the
      probability that an accepted token has a higher estimate than a rejected one, with ties counted half; a soft
      label counts as both, with its weights. `calibration_error`: the expected calibration error with ten bins on
      [0, 1]. `information` and `auroc` are None if all labels are 0 or all are 1.
    """
    entropy, base = cross_entropy(estimate, label), cross_entropy(np.full(len(label), label.mean()), label)
    varied = 0 < label.mean() < 1
    return {
        "accuracy": float(np.mean(np.where(estimate >= 0.5, label, 1 - label))),
        "cross_entropy": entropy,
        "information": 1 - entropy / base if varied else None,
        "auroc": auroc(estimate, label),
        "calibration_error": calibration_error(estimate, label),
    }


def cross_entropy(estimate: np.ndarray, label: np.ndarray) -> float:
    """Computes the mean binary cross-entropy of estimates [N], clipped to 1e-6 … 1 − 1e-6, with labels [N], nats."""
    clipped = np.clip(estimate.astype(np.float64), 1e-6, 1 - 1e-6)
    return float(-np.mean(label * np.log(clipped) + (1 - label) * np.log(1 - clipped)))


def auroc(score: np.ndarray, label: np.ndarray) -> float | None:
    """Returns the area under the ROC curve: the probability that a positive has a larger score than a negative.

    Equal scores count half.

    Args:
      score: float[N].
      label: bool[N], or float[N] from 0 to 1. With floats, the pair (i, j) has weight label[i] · (1 − label[j]).

    Returns:
      A number from 0 to 1, 0.5 for an uninformative score; None if all labels are 0 or all are 1.

    Examples:
      >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
      0.75
    """
    _, group = np.unique(score, return_inverse=True)
    positive = np.bincount(group.ravel(), label.astype(np.float64))
    negative = np.bincount(group.ravel(), 1 - label.astype(np.float64))
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else None


def calibration_error(probability: np.ndarray, label: np.ndarray) -> float:
    """Returns the expected calibration error over ten bins of equal width (Guo et al. 2017, equation 3).

    Args:
      probability: float[N], 0 to 1.
      label: bool[N], or float[N] from 0 to 1.

    Examples:
      >>> calibration_error(np.array([0.75, 0.75, 0.75, 0.75]), np.array([True, True, True, False]))
      0.0
    """
    place = np.minimum((probability * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, weights=probability - label, minlength=BINS)
    return float(np.abs(gaps).sum() / max(len(label), 1))
