"""Evaluates estimates of acceptance: accuracy, cross-entropy, information, ranking, calibration."""

from __future__ import annotations

import numpy as np

from training.reports.fitness import auroc, calibration_error


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
