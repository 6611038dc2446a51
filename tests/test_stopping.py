"""Stop rules, one signal at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.protocol import Outcome, Signal
from jaxspec.stopping import AdaptiveLength, AnyOf, ConfidenceBelow, Constant

B, V, D = 3, 4, 2
PROBS = np.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.4, 0.5]])


def signal(step: int = 0, token=(0, 0, 0)) -> Signal:
    return Signal(jnp.int32(step), jnp.array(token), jnp.log(PROBS) + 3.0, jnp.zeros((B, D)))


def outcome(drafted, accepted) -> Outcome:
    accepted = jnp.array(accepted)
    return Outcome(jnp.zeros((B, 4), jnp.int32), accepted + 1, jnp.array(drafted), accepted)


def test_constant_never_stops():
    rule = Constant()
    assert not rule.stop(rule.init(B), signal(50))[0].any()


@pytest.mark.parametrize("token", [(0, 1, 3), (1, 2, 0)])
def test_confidence_is_that_of_the_drafted_token(token):
    """Not the largest one; and each row may have its own γ."""
    for gamma in (0.3, np.array([0.8, 0.2, 0.3], np.float32)):
        rule = ConfidenceBelow(jnp.asarray(gamma))
        stopped, _ = rule.stop(rule.init(B), signal(0, token))
        expected = [PROBS[row, token[row]] < np.broadcast_to(gamma, B)[row] for row in range(B)]
        assert stopped.tolist() == expected


def test_adaptive_length_counts_and_learns():
    rule = AdaptiveLength(first=2, rise=2, fall=1)
    lengths = rule.init(B)
    assert [bool(rule.stop(lengths, signal(step))[0][0]) for step in range(3)] == [False, True, True]
    # All of two, one of two, and a round without a draft.
    lengths = rule.observe(lengths, outcome([2, 2, 0], [2, 1, 0]))
    assert lengths.tolist() == [4, 1, 2]
    lengths = rule.observe(lengths, outcome([4, 1, 2], [0, 0, 2]))
    assert lengths.tolist() == [3, 1, 4]
    assert rule.stop(lengths, signal(2))[0].tolist() == [True, True, False]
    capped = AdaptiveLength(first=3, rise=2, fall=1, most=4)
    assert capped.observe(capped.init(B), outcome([3, 3, 3], [3, 2, 3])).tolist() == [4, 2, 4]


def test_any_of_stops_with_the_first_and_teaches_all():
    rule = AnyOf((ConfidenceBelow(0.3), AdaptiveLength(first=2, rise=1, fall=1)))
    state = rule.init(B)
    assert rule.stop(state, signal(0))[0].tolist() == [False, True, True]
    assert rule.stop(state, signal(1))[0].all()
    state = rule.observe(state, outcome([1, 1, 1], [1, 0, 1]))
    assert state[1].tolist() == [3, 1, 3]
    assert not AnyOf(()).stop((), signal(9))[0].any()
