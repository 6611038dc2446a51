"""How good estimates of acceptance are: accuracy, cross-entropy, information, ranking, calibration."""

from __future__ import annotations

import numpy as np

from jaxspec.tuning.fitness import auroc, calibration_error


def quality(estimate: np.ndarray, label: np.ndarray) -> dict[str, float | None]:
    """Judges an estimate [N] of labels [N] by five figures.

    Returns:
      `accuracy`: how often the likelier of accepted and rejected, by the estimate, is what happens (of a soft
      label, its probability). `cross_entropy`: nats. `information`: the share of the base rate's cross-entropy
      that the estimate takes away; 0 for the labels' own mean as the estimate of every token, below 0 for what is
      worse, 1 for certainty. `auroc`: the probability that an accepted token is estimated higher than a rejected
      one, ties counting half (of a soft label, both weigh as it says). `calibration_error`: the mean, over
      tokens, of how far the labels' mean in a token's tenth of [0, 1] is from the estimates' (expected
      calibration error). Where all labels are 0 or all are 1, `information` and `auroc` are None.
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
