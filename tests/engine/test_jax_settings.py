"""JAX's process-wide settings do not change a text, and a platform without a device gives one line."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LanguageModel, decoding
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.decoding import Parts
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.loading.loading import NoDevice, devices_of
from jaxspec.programs import jax_settings
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy, seed_key
from tests import refused, tiny

PROMPTS = [[0, 12, 9], [0, 3, 5, 5, 5]]
# Without `jax_settings`, each of these would change texts or raise an error.
CHANGED = {
    "jax_default_prng_impl": "rbg",
    "jax_enable_x64": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_threefry_partitionable": False,
    "jax_disable_jit": True,
}
DISTRIBUTIONS = {
    "greedy": {},
    "block": {"temperature": 1.0, "seed": [1, 2]},
    "coupled": {"temperature": 0.8, "top_p": 0.9, "seed": [1, 2], "acceptor": "coupled"},
}
METHODS = ("autoregressive", "ngram", "s2d", "draft-model", "eagle3")


@contextlib.contextmanager
def settings(**values):
    """Changes settings of the whole process, and so of every thread."""
    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def texts(name, distribution):
    """Returns the texts of a new model, which has compiled nothing yet."""
    config = tiny.config_of(name)
    lm = LanguageModel(tiny.engine_config(config), tiny.params(config))
    method = "ngram" if name == "ngram" else tiny.drafter_of(name)
    rows = lm.generate(
        PROMPTS, method=method, max_new_tokens=8, ignore_eos=True, **DISTRIBUTIONS[distribution]
    )
    return [row.tokens for row in rows]


# The texts with JAX's default settings.
usual = functools.cache(texts)


@pytest.mark.representatives("draft-model")
@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
def test_all_settings_at_once(number):
    """Each method is tested with one sampling distribution."""
    case = METHODS[number], tuple(DISTRIBUTIONS)[(number + 1) % 3]
    expected = usual(*case)
    with settings(**CHANGED):
        assert texts(*case) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_prng_impl", "unsafe_rbg"),
        ("jax_default_matmul_precision", "highest"),
        ("jax_debug_nans", True),
        ("jax_check_tracer_leaks", True),
    ],
)
def test_one_setting(name, value):
    """Plain decoding, sampled."""
    expected = usual("autoregressive", "block")
    with settings(**{name: value}):
        assert texts("autoregressive", "block") == expected


def test_what_a_caller_set_is_there_again(lm):
    """They are restored also between the pieces of a stream, when the caller's code runs."""
    with settings(jax_enable_x64=True):
        for _ in lm.stream([0, 12], max_new_tokens=3, ignore_eos=True):
            assert jnp.arange(2).dtype == jnp.int64
        assert jnp.arange(2).dtype == jnp.int64


def test_settings_of_a_command():
    """They apply to its threads too."""
    with settings(**CHANGED):
        jax_settings.keep_needed()
        found = {name: jax.config.values[name] for name in CHANGED}
    assert found == {
        "jax_default_prng_impl": "rbg",  # not needed, because each key names its own implementation
        "jax_enable_x64": False,
        "jax_numpy_rank_promotion": "allow",
        "jax_numpy_dtype_promotion": "standard",
        "jax_threefry_partitionable": True,
        "jax_disable_jit": False,
    }


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_of_another_kind(kind):
    """With these keys `jax.vmap` would draw equal numbers for all rows."""
    config, prompt = tiny.TARGET, jnp.ones((1, 8), jnp.int32)
    one = np.ones(1, np.int32)
    keys = jax.random.split(jax.random.key(0, impl=kind), 1)
    request = decoding.Request(prompt, one, 4 * one, one[:, None], keys)
    parts = Parts(AutoregressiveDrafter(), GreedyAcceptor(), Greedy())
    with refused(f"keys are of {kind}; make them with jaxspec.sampling.seed_key"):
        jax.eval_shape(
            lambda params, request: decoding.prefill(config, params, parts, request, chunk_size=8),
            Weights(tiny.params(), None),
            request,
        )
    assert jax.random.key_impl(seed_key(0)) == "threefry2x32"


@pytest.mark.parametrize(
    ("platforms", "error"),
    [
        ("cuda", AssertionError()),
        ("here", RuntimeError("Unable to start 'here': no. (set JAX_PLATFORMS='' to choose)\nmore")),
    ],
)
def test_platform_without_a_device(platforms, error, monkeypatch):
    def devices(kind):
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    with settings(jax_platforms=platforms), pytest.raises(NoDevice) as raised:
        devices_of(None)
    reason = "its plugin is missing" if platforms == "cuda" else "Unable to start 'here': no"
    assert str(raised.value) == (
        f"there is no device for JAX with JAX_PLATFORMS={platforms}: {reason}; install its plugin, such as "
        "jax[cuda13] or jax[tpu], or give another JAX_PLATFORMS"
    )
