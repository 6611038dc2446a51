"""The distributions against a slow twin that filters step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sampling import Greedy, Sampling
from tests import tiny

B, T, V = 4, 2, 11
log_probs = jax.jit(lambda distribution, logits: distribution.log_probs(logits))
rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        st.sampled_from([0, 1, 2, 5, V, 100]),
        st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    ),
    min_size=B,
    max_size=B,
)


def distribution_of(numbers, use=("top_k", "top_p", "min_p")) -> Sampling:
    temperature, *filters = (np.array(column) for column in zip(*numbers, strict=True))
    types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    given_ = {name: jnp.asarray(f.astype(types[name])) for name, f in zip(types, filters, strict=True)}
    return Sampling(jnp.asarray(temperature, jnp.float32), **{name: given_[name] for name in use})


@settings(max_examples=60)
@given(numbers=rows, seed=st.integers(0, 10_000))
def test_filters_as_the_slow_twin(numbers, seed):
    """Each row with its own numbers, every position alike."""
    logits = 2 * np.random.default_rng(seed).standard_normal((B, T, V)).astype(np.float32)
    found = np.exp(np.asarray(log_probs(distribution_of(numbers), logits)))
    for row in range(B):
        for position in range(T):
            expected = tiny.warp(logits[row, position], *numbers[row])
            np.testing.assert_allclose(found[row, position], expected, atol=1e-5)


@pytest.mark.parametrize("use", [(), ("top_k",), ("top_p",), ("min_p",)])
def test_a_filter_left_out_is_one_that_is_off(use):
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    on = {"top_k": 3, "top_p": 0.6, "min_p": 0.2}
    numbers = [(0.7, *(on[name] if name in use else off[name] for name in off))] * B
    logits = np.random.default_rng(0).standard_normal((B, V)).astype(np.float32)
    np.testing.assert_allclose(
        log_probs(distribution_of(numbers, use), logits),
        log_probs(distribution_of(numbers), logits),
        atol=1e-6,
    )


def test_ties():
    """Greedy takes the first of equals; top-k keeps equals together."""
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0, 1.0]])
    assert Greedy().draw(None, logits)[0].tolist() == [1]
    assert jnp.exp(Greedy().log_probs(logits)).tolist() == [[0, 1, 0, 0, 0]]
    distribution = Sampling(jnp.zeros(1))
    assert jnp.exp(distribution.log_probs(logits)).tolist() == [[0, 1, 0, 0, 0]]
    distribution = Sampling(jnp.ones(1), top_k=jnp.array([3]))
    assert (jnp.exp(distribution.log_probs(logits)) > 0).tolist() == [[False, True, True, True, True]]


def test_greedy_draws_a_point_mass():
    logits = np.random.default_rng(0).standard_normal((B, V)).astype(np.float32)
    tokens, distributions = Greedy().draw(None, jnp.asarray(logits))
    assert distributions is None
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == logits.argmax(axis=-1).tolist()


def test_draws_follow_the_distribution_they_come_with():
    count = 20_000
    logits = np.random.default_rng(1).standard_normal(V).astype(np.float32)
    numbers = (0.8, 6, 0.95, 0.02)
    distribution = distribution_of([numbers] * count)
    keys = jax.random.split(jax.random.key(0), count)
    tokens, distributions = jax.jit(lambda distribution, keys, logits: distribution.draw(keys, logits))(
        distribution, keys, jnp.tile(jnp.asarray(logits), (count, 1))
    )
    expected = tiny.warp(logits, *numbers)
    np.testing.assert_allclose(jnp.exp(distributions[0]), expected, atol=1e-5)
    assert tiny.chi_square(tokens.tolist(), {i: p for i, p in enumerate(expected) if p > 0}) > 1e-3


def test_a_tiny_temperature_is_nearly_greedy():
    """Numbers too large for float32 do not become NaN."""
    logits = 50 * np.random.default_rng(2).standard_normal((2, V)).astype(np.float32)
    distribution = distribution_of([(1e-37, 5, 1e-6, 0.1)] * 2)
    np.testing.assert_array_equal(np.exp(distribution.log_probs(logits)), np.eye(V)[logits.argmax(axis=-1)])


def test_other_numbers_do_not_recompile():
    function = jax.jit(lambda distribution, logits: distribution.log_probs(logits))
    logits = jnp.zeros((B, V))
    for temperature, top_k in [(0.0, 0), (0.5, 3), (1.5, 7)]:
        function(distribution_of([(temperature, top_k, 0.9, 0.1)] * B), logits)
    assert function._cache_size() == 1
