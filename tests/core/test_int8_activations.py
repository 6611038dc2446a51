"""Products with int8 activations: their error, their independence of other rows, and where they are used."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.io import checkpoint
from jaxspec.loading import int8
from jaxspec.loading.loading import place_params
from jaxspec.methods import LoadedModel
from jaxspec.model import calibration, llama, numerics
from jaxspec.model.numerics import linear
from jaxspec.model.quantisation import NUM_OUTLIERS, is_quantised, quantise, quantised, with_outliers
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from jaxspec.testing import contracts, reference
from jaxspec.testing.contracts import BUDGETS, FOUR, PROMPTS
from tests import tiny
from tests.commands import write_model, write_tokenizer

RNG = np.random.default_rng(3)


def weight_and_rows(rows=5, inputs=192, large=(7, 100)):
    """A weight in int8, and activations with a few large channels."""
    x = RNG.standard_normal((rows, inputs)).astype(np.float32)
    x[:, list(large)] *= 100
    plain = quantised(jnp.asarray(RNG.standard_normal((3, 40, inputs)), jnp.float32))
    return plain, with_outliers(plain, jnp.max(jnp.abs(jnp.asarray(x)), axis=0)), jnp.asarray(x)


def test_the_channels_with_the_largest_activations_are_computed_apart():
    plain, small, _ = weight_and_rows()
    channels = np.asarray(small.outliers.channels)
    assert len(channels) == NUM_OUTLIERS
    assert {7, 100} <= set(channels.tolist())
    np.testing.assert_array_equal(small.outliers.packed, plain.packed[..., channels])
    assert np.flatnonzero(np.asarray(small.outliers.rest) == 0).tolist() == channels.tolist()


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_the_error_is_that_of_rounding_activations(rows):
    """Half a step of the small channels' scale, for each input; the large channels hardly add to it."""
    _, small, x = weight_and_rows(rows)
    bias = jnp.asarray(RNG.standard_normal((3, 40)), jnp.float32)
    wide = np.float64(small.values()) * np.float64(small.scale)[..., None]
    exact = np.einsum("ri,oci->roc", np.float64(x), wide) + np.float64(bias)
    found = np.float64(jax.jit(linear)(x, small, bias))
    rest = np.abs(np.asarray(x) * np.asarray(small.outliers.rest))
    step = rest.max(axis=1) / 127 / 2
    large = np.abs(np.asarray(x)).max(axis=1) / 127 / 254 / 2
    bound = np.abs(wide).sum(axis=-1)[None] * (step + large)[:, None, None]
    assert (np.abs(found - exact) <= 1.01 * bound + 1e-4).all()
    # One scale for all channels would be far worse.
    assert np.abs(found - exact).max() < 0.1 * np.abs(x).max() / 127 * np.abs(wide).sum(axis=-1).max()


def test_a_row_does_not_depend_on_the_others():
    _, small, x = weight_and_rows(9)
    together = np.asarray(jax.jit(linear)(x, small))
    for count in (1, 2, 3, 8):
        for first in (0, 9 - count):
            part = np.asarray(jax.jit(linear)(x[first : first + count], small))
            np.testing.assert_array_equal(part, together[first : first + count])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes(dtype):
    """The product is in float32; only its result is rounded, even where an unscaled sum exceeds float16."""
    _, small, x = weight_and_rows()
    wide = jnp.float32(x.astype(dtype))
    found = linear(x.astype(dtype), small)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, linear(wide, small).astype(dtype))


def test_zeros_and_numbers_that_are_not_finite():
    _, small, x = weight_and_rows(4)
    x = x.at[1].set(0).at[2, 5].set(jnp.nan).at[3, 7].set(jnp.inf)
    found = np.asarray(linear(x, small))
    assert np.isfinite(found[0]).all()
    assert (found[1] == 0).all()
    assert not np.isfinite(found[2]).any()
    assert not np.isfinite(found[3]).any()


def test_some_output_channels_of_a_weight():
    _, small, x = weight_and_rows()
    np.testing.assert_array_equal(linear(x, small[1:]), linear(x, small)[:, 1:])


@pytest.mark.parametrize("tied", [True, False])
def test_calibration_finds_the_inputs_of_every_matrix(tied):
    """Against a forward pass in which the matrices' inputs are recorded."""
    config = dataclasses.replace(tiny.TARGET, tie_embeddings=tied)
    params = quantise(config, jax.tree.map(jnp.asarray, reference.random_params(config, 3)))
    tokens = jnp.asarray([[3, 4, 1, 5]])
    seen: list[np.ndarray] = []

    def recording(x, weight, *given, **more):
        if is_quantised(weight):
            seen.append(np.abs(np.asarray(x)).reshape(-1, x.shape[-1]).max(axis=0))
        return linear(x, weight, *given, **more)

    with jax.disable_jit(), pytest.MonkeyPatch.context() as patch:
        for module in (numerics, llama):
            patch.setattr(module, "linear", recording)
        cache = llama.kv.create(config, 1, 8, jnp.float32, True)
        llama.forward(config, params, tokens, jnp.zeros(1, jnp.int32), cache)
    found = calibration.largest_inputs(config, params, tokens)
    names = [
        (part, name)
        for part, name in (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down"))
    ]
    head = found["embed" if tied else "head"]
    expected = [layer[part][name] for layer in found["layers"] for part, name in names] + [head]
    assert len(seen) == len(expected)
    for one, other in zip(seen, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    made = calibration.calibrated(config, params, tokens[0])
    leaves = [leaf for leaf in jax.tree.leaves(made, is_leaf=is_quantised) if is_quantised(leaf)]
    assert all(leaf.outliers is not None for leaf in leaves)
    assert len(leaves) == 4 * config.num_layers + 1


def loop_in_int8(combination, distribution=None, config=None):
    loop = tiny.loop(combination, distribution, config)
    small = quantise(loop.config, loop.weights.target)
    made = calibration.calibrated(loop.config, small, jnp.arange(6) % loop.config.vocab_size)
    return dataclasses.replace(loop, weights=Weights(made, loop.weights.drafter))


@pytest.mark.full
@pytest.mark.representatives("layerskip-vocab", "eagle3", "medusa-tree")
@pytest.mark.parametrize(
    "drafter", ["ngram", "layerskip-vocab", "draft-model-vocab", "eagle3", "medusa-tree"]
)
def test_every_method_writes_the_text_of_plain_decoding(drafter):
    """Verification of several rows, in a batch, equals plain decoding of one row each."""
    rule = "confidence" if tiny.DRAFTERS[drafter].has_rule else "-"
    plain = loop_in_int8(tiny.Combination("autoregressive", "-", "greedy"), Greedy(), tiny.config_of(drafter))
    loop = loop_in_int8(tiny.Combination(drafter, rule, "greedy"), Greedy())
    assert loop.texts(PROMPTS, BUDGETS) == plain.texts(PROMPTS, BUDGETS)


@pytest.mark.full
def test_sampled_text_follows_the_distribution_of_plain_decoding(monkeypatch):
    """χ² against the enumerated distribution of the weights, whose rounding of activations is far below the noise."""
    plain = contracts.params
    monkeypatch.setattr(contracts, "params", lambda config: quantise(config, plain(config)))
    combination = tiny.Combination("layerskip", "confidence", "block")
    contracts.check_sampled_distribution(lambda one: loop_in_int8(combination, one, FOUR))


@pytest.fixture
def stored(tmp_path):
    write_tokenizer(write_model(tmp_path / "model"))
    return tmp_path / "model"


def checked(monkeypatch, tmp_path, faster):
    """Counts the checks of the machine, which find `faster`."""
    calls = []
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(int8, "_measure", lambda: calls.append(1) or faster)
    int8.is_faster.cache_clear()
    return calls


def test_the_machine_is_checked_once(monkeypatch, tmp_path):
    calls = checked(monkeypatch, tmp_path, True)
    assert int8.is_faster()
    (path,) = (tmp_path / "cache" / "int8").iterdir()
    int8.is_faster.cache_clear()
    assert int8.is_faster()
    assert len(calls) == 1
    assert json.loads(path.read_text())["value"] is True
    for damage in ("", "[1]", '{"a": 3}', "{"):
        path.write_text(damage)
        int8.is_faster.cache_clear()
        assert int8.is_faster()
    assert len(calls) == 5
    assert json.loads(path.read_text())["value"] is True
    int8.is_faster.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("faster", [True, False])
def test_a_model_is_loaded_in_the_faster_form(monkeypatch, tmp_path, stored, faster, recwarn):
    checked(monkeypatch, tmp_path, faster)
    lm = jaxspec.load(stored, weights="int8", compilation_cache=False)
    int8.is_faster.cache_clear()
    leaves = [leaf for leaf in jax.tree.leaves(lm.params, is_leaf=is_quantised) if is_quantised(leaf)]
    assert all((leaf.outliers is not None) == faster for leaf in leaves)
    told = [str(one.message) for one in recwarn if "int8 products are slower" in str(one.message)]
    assert len(told) == (0 if faster else 1)
    assert lm.precision == f"float32, int8 weights{' and activations' if faster else ''}"
    lm.drafter("draft-model", draft=stored)
    ((*_, draft),) = lm.drafts._loaded.values()
    assert draft.rounds_activations == faster
    if not faster:  # the usual int8 weights
        return
    prompts = [[3, 4, 3, 4], [7], [*range(2, 40)]]
    plain = [row.tokens for row in lm.generate(prompts, method="autoregressive", max_new_tokens=12)]
    for options in (
        {"method": "layerskip", "exit_layer": 1},
        {"method": "draft-model", "draft": stored},
    ):
        rows = lm.generate(prompts, max_new_tokens=12, **options)
        assert [row.tokens for row in rows] == plain, options


def test_only_weights_are_int8_on_a_mesh_and_on_accelerators(monkeypatch, tmp_path, stored):
    checked(monkeypatch, tmp_path, True)
    config = checkpoint.read_config(stored)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("model",))
    params, _ = place_params(stored, config, np.dtype("float32"), jax.devices("cpu")[0], mesh, 8)
    assert not LoadedModel(config, params).rounds_activations
    accelerator = types.SimpleNamespace(platform="tpu")
    assert int8.for_device(config, params, accelerator) is params
