"""Fits linear probes and Platt scaling to draft tokens, and compares them with cheaper estimates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from training.probes.estimates import cross_entropy, quality
from training.probes.gather import Examples

# Candidate weights of the penalty |v|². None is zero, so that a probe stays finite if its labels are separable.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
LEFT_OUT = 0.2
FIT_STEPS = 100
ESTIMATES = ("base_rate", "draft_probability", "platt", "probe")


def fit(examples: Examples) -> tuple[np.ndarray, float]:
    """Fits the probe σ(v·h + b) with the least binary cross-entropy; returns v, float32[D], and b.

    The weight of the penalty, one of `RIDGES`, is chosen by the cross-entropy on the last `LEFT_OUT` of the examples;
    then the probe is fitted to all of them.

    Raises:
      ValueError: all labels are the same.
    """
    label = examples.label
    if len(label) < 2 or np.ptp(label) < 1e-3:
        raise ValueError(
            f"all {len(label)} gathered draft tokens have the same label; a probe needs both accepted and "
            "rejected ones: take another exit layer, or more prompts"
        )
    kept = max(1, int(len(label) * (1 - LEFT_OUT)))
    first, left_out = (
        Examples(*(array[part] for array in examples)) for part in (np.s_[:kept], np.s_[kept:])
    )

    def entropy(ridge: float) -> float:
        return cross_entropy(predict(*_fit(first, ridge), left_out.hidden), left_out.label)

    return _fit(examples, min(RIDGES, key=entropy))


def _fit(examples: Examples, ridge: float) -> tuple[np.ndarray, float]:
    v, b = _minimise(jnp.asarray(examples.hidden), jnp.asarray(examples.label), ridge)
    return np.asarray(v), float(b)


@jax.jit
def _minimise(hidden: jax.Array, label: jax.Array, ridge: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes `FIT_STEPS` steps of L-BFGS over all examples at once; the problem is convex."""

    def loss(weights):
        v, b = weights
        return jnp.mean(optax.sigmoid_binary_cross_entropy(hidden @ v + b, label)) + ridge * jnp.sum(v**2)

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        weights, state = carry
        value, grad = value_and_grad(weights, state=state)
        updates, state = solver.update(grad, state, weights, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(weights, updates), state), None

    start = (jnp.zeros(hidden.shape[1]), jnp.float32(0))
    return jax.lax.scan(step, (start, solver.init(start)), None, FIT_STEPS)[0][0]


def predict(v: np.ndarray, b: float, hidden: np.ndarray) -> np.ndarray:
    """Computes a probe's estimates σ(v·h + b) for N tokens with states h, float[N]."""
    return 1 / (1 + np.exp(-(hidden @ v + b)))


class Scaling(NamedTuple):
    """Platt scaling of the draft's log-probability: σ(slope · log p + intercept)."""

    slope: float
    intercept: float

    def predict(self, confidence: np.ndarray) -> np.ndarray:
        """Computes the estimates for the draft's raw probabilities [N]."""
        return predict(np.array([self.slope]), self.intercept, _log(confidence)[:, None])


def fit_scaling(examples: Examples) -> Scaling:
    """Fits Platt scaling of the draft's probability, two parameters, by binary cross-entropy (Platt 1999)."""
    log_p = _log(examples.confidence)
    # Standardised for the solver and the penalty: log-probabilities near 0 need a steep slope.
    mean, spread = log_p.mean(), max(float(log_p.std()), 1e-6)
    standard = ((log_p - mean) / spread).astype(np.float32)[:, None]
    v, b = _fit(examples._replace(hidden=standard), RIDGES[0])
    slope = float(v[0]) / spread
    return Scaling(slope, b - slope * float(mean))


def _log(probability: np.ndarray) -> np.ndarray:
    return np.log(np.clip(probability.astype(np.float64), 1e-12, 1.0))


def compared(training: Examples, held_out: Examples, probe: np.ndarray) -> dict[str, Any]:
    """Compares the probe with cheaper estimates on the same held-out tokens.

    Args:
      training: the examples to which the probe was fitted; the cheaper estimates are fitted to them too.
      held_out: the examples for the evaluation.
      probe: the probe's estimates for the held-out tokens, [N].

    Returns:
      the result of `estimates.quality` for each of `ESTIMATES`; the base rate also has `rate`, and Platt scaling
      `slope` and `intercept`.
    """
    rate = float(training.label.mean())
    scaling = fit_scaling(training)
    estimates: dict[str, tuple[np.ndarray, dict[str, float]]] = {
        "base_rate": (np.full(len(held_out.label), rate), {"rate": rate}),
        "draft_probability": (held_out.confidence, {}),
        "platt": (scaling.predict(held_out.confidence), scaling._asdict()),
        "probe": (probe, {}),
    }
    return {
        name: quality(estimate, held_out.label) | numbers for name, (estimate, numbers) in estimates.items()
    }
