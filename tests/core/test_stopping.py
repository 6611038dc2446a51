"""Stop rules, one signal at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.protocol import Outcome, Signal
from jaxspec.stopping import (
    AdaptiveGamma,
    AdaptiveLength,
    AnyOf,
    ConfidenceBelow,
    Constant,
    FixedGamma,
    Probe,
    ProductBelow,
)

B, V, D = 3, 4, 2
PROBS = np.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.4, 0.5]])


def signal(step: int = 0, token=(0, 0, 0)) -> Signal:
    return Signal(jnp.int32(step), jnp.array(token), jnp.log(PROBS) + 3.0, jnp.zeros((B, D)))


def flow(hidden: np.ndarray, token=(0, 0, 0)) -> Signal:
    return Signal(jnp.int32(0), jnp.array(token), jnp.log(PROBS), jnp.asarray(hidden))


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
        rule = ConfidenceBelow(FixedGamma(jnp.asarray(gamma)))
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
    capped = AdaptiveLength(first=3, rise=2, fall=1, maximum=4)
    assert capped.observe(capped.init(B), outcome([3, 3, 3], [3, 2, 3])).tolist() == [4, 2, 4]


def test_any_of_stops_with_the_first_and_teaches_all():
    rule = AnyOf((ConfidenceBelow(FixedGamma(0.3)), AdaptiveLength(first=2, rise=1, fall=1)))
    state = rule.init(B)
    assert rule.stop(state, signal(0))[0].tolist() == [False, True, True]
    assert rule.stop(state, signal(1))[0].all()
    state = rule.observe(state, outcome([1, 1, 1], [1, 0, 1]))
    assert state[1].tolist() == [3, 1, 3]
    assert not AnyOf(()).stop((), signal(9))[0].any()


def moved(gamma: float, rate: float, drafted: int, accepted: int) -> tuple[float, float]:
    """One round of the update of Draft & Verify's paper, in plain Python."""
    if drafted == 0:
        return gamma, rate
    rate = 0.5 * rate + 0.5 * accepted / drafted
    aim = gamma + 0.01 if rate <= 0.9 else gamma - 0.01
    return 0.9 * gamma + (1 - 0.9) * aim, rate


ROUNDS = st.lists(st.tuples(*[st.integers(0, 4)] * B), min_size=1, max_size=8)


@settings(max_examples=40)
@given(drafted=ROUNDS, missed=ROUNDS)
@example([(4, 4, 3)] * 8, [(0, 1, 0)] * 8)
@example([(0, 4, 2)] * 5, [(0, 0, 2)] * 5)
def test_adaptive_gamma_follows_the_acceptance_rate(drafted, missed):
    """With the paper's constants; a round without drafts leaves γ and AR as they are."""
    rule = AdaptiveGamma()
    state, expected = rule.init(B), [(0.6, 0.0)] * B
    for row_drafted, row_missed in zip(drafted, missed, strict=False):
        accepted = [max(d - m, 0) for d, m in zip(row_drafted, row_missed, strict=True)]
        state = rule.observe(state, outcome(row_drafted, accepted))
        rounds = zip(expected, row_drafted, accepted, strict=True)
        expected = [moved(*before, d, a) for before, d, a in rounds]
    np.testing.assert_allclose(np.transpose(state), expected, rtol=1e-5)
    np.testing.assert_array_equal(rule.value(state), state[0])


def test_the_edge_of_adaptive_gamma():
    """AR = α counts as too low."""
    rule = AdaptiveGamma(0.6, 0.5, 0.0, 0.0, 0.1)
    state = rule.observe(rule.init(B), outcome([2, 4, 3], [1, 4, 3]))
    np.testing.assert_allclose(rule.value(state), [0.7, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("make", [ConfidenceBelow, ProductBelow])
def test_a_rule_compares_with_the_gamma_that_has_moved(make):
    gamma = AdaptiveGamma(jnp.array([0.6, 0.2, 0.6]), beta2=0.0, epsilon=0.2)
    rule = make(gamma)
    state = rule.init(B)
    verdicts = [rule.stop(state, signal())[0].tolist()]
    state = rule.observe(state, outcome([1, 2, 0], [0, 1, 0]))
    verdicts.append(rule.stop(state, signal())[0].tolist())
    # 0.7, 0.25 and 0.05 against γ of 0.6, 0.2, 0.6, then of 0.8, 0.4, 0.6.
    assert verdicts == [[False, False, True], [True, True, True]]


def test_product_runs_until_the_next_verification():
    """Each row multiplies its own tokens' probabilities; a verification, even of nothing, starts again from 1."""
    rule = ProductBelow(FixedGamma(jnp.array([0.3, 0.05, 0.3])))
    state, product = rule.init(B), np.ones(B)
    for token in [(0, 1, 3), (0, 2, 3), (0, 0, 1), (0, 0, 3)]:
        stopped, state = rule.stop(state, signal(0, token))
        product *= PROBS[range(B), token]
        assert stopped.tolist() == (product < [0.3, 0.05, 0.3]).tolist()
        np.testing.assert_allclose(jnp.exp(state[1]), product, rtol=1e-5)
    state = rule.observe(state, outcome([4, 0, 4], [4, 0, 1]))
    stopped, _ = rule.stop(state, signal(0, (0, 0, 3)))
    assert stopped.tolist() == [False, False, False]


def test_a_probe_sees_what_the_head_sees():
    """σ(v · norm(h) + b), with the norm's weight and ε; the token and its logits do not matter."""
    rng = np.random.default_rng(0)
    hidden, v, weight = rng.standard_normal((B, 6)) * 3, rng.standard_normal(6), rng.uniform(0.5, 2, 6)
    normed = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 0.1) * weight
    expected = 1 / (1 + np.exp(-(normed @ v - 0.4)))
    probe = Probe(jnp.asarray(v * weight), jnp.float32(-0.4), 0.1)
    for token in ((0, 0, 0), (1, 2, 3)):
        found = jnp.exp(probe.log_probability(flow(hidden, token)))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for gamma in expected:
            stopped, _ = ConfidenceBelow(FixedGamma(gamma + 1e-6), probe).stop(
                ConfidenceBelow(FixedGamma(gamma), probe).init(B), flow(hidden, token)
            )
            assert stopped.tolist() == (expected < gamma + 1e-6).tolist()
    rule = ProductBelow(FixedGamma(float(expected[0] ** 2.5)), probe)
    state, verdicts = rule.init(B), []
    for _ in range(3):
        stopped, state = rule.stop(state, flow(hidden))
        verdicts.append(bool(stopped[0]))
    assert verdicts == [False, False, True]
