"""Weights in int8: correct rounding, loading one by one, and lossless decoding with every method."""

from __future__ import annotations

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.heads.writer import write_head
from jaxspec.io.hf import huggingface
from jaxspec.loading import int8, loading
from jaxspec.measuring.line_log import LineLog
from jaxspec.measuring.tuning.mask_search import _header
from jaxspec.measuring.tuning.tuning_options import SearchOptions
from jaxspec.model import llama
from jaxspec.model.numerics import linear
from jaxspec.model.quantisation import is_quantised, quantise, quantised
from jaxspec.model.sharding import with_copies, without_copies
from jaxspec.programs import memory
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from jaxspec.testing import contracts, reference
from jaxspec.testing.contracts import BUDGETS, FOUR, PROMPTS
from tests import gguf_files, refused, tiny

BITS = (8, 4)


@pytest.fixture(autouse=True)
def _float32_activations(monkeypatch):
    """Models are loaded as on a machine without a fast int8 kernel; `test_int8_activations` has the other form."""
    monkeypatch.setattr(int8, "is_faster", lambda: False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", BITS)
def test_a_weight_is_rounded_by_output_channel(bits, dtype):
    noise = np.random.default_rng(1).standard_normal((2, 3, 16))
    noise[1, 2] = 0
    weight = jnp.asarray(noise * [[[1e-2], [1], [50]]], dtype)
    small = quantised(weight, bits)
    assert (small.shape, small.dtype, small.scale.shape) == (weight.shape, dtype, (2, 3))
    assert small.packed.dtype == (jnp.int8 if bits == 8 else jnp.uint8)
    assert small.packed.size * 8 == weight.size * bits
    values, scale = np.asarray(small.values(), np.float64), np.asarray(small.scale, np.float64)
    error = np.abs(values * scale[..., None] - np.asarray(weight, np.float64))
    # Half a step; slightly more for the largest if the scale was rounded down.
    assert (error <= 0.51 * scale[..., None] * (np.abs(np.asarray(weight, np.float64)) > 0)).all()
    assert np.abs(values).max(axis=-1)[:, :2].min() == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bits", BITS)
def test_a_product_with_a_quantised_weight(bits, rows, dtype):
    """It equals the product with the dequantised weight, even if the unscaled sum exceeds the range of float16."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(100 * rng.standard_normal((1, rows, 64)), dtype)
    small = quantised(jnp.asarray(1e-2 * rng.standard_normal((2, 5, 64)), dtype), bits)
    bias = jnp.asarray(rng.standard_normal((2, 5)), dtype)
    expected = np.einsum("...i,oci->...oc", np.float64(x), np.float64(small.values()))
    expected = expected * np.float64(small.scale) + np.float64(bias)
    for out in (None, jnp.float32):
        found = linear(x, small, bias, out)
        assert found.dtype == (out or dtype)
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.float64(found), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_quantised(tied):
    """Matrices are quantised, and an embedding that is also the head; embedded rows are then the quantised ones."""
    config = dataclasses.replace(tiny.TARGET, tie_embeddings=tied)
    params = reference.random_params(config, 3)
    small = quantise(config, jax.tree.map(jnp.asarray, params))
    assert is_quantised(small["embed"]) == tied
    assert tied or is_quantised(small["head"])
    for layer in small["layers"]:
        kept = {name for part in layer.values() for name, leaf in part.items() if not is_quantised(leaf)}
        assert kept == {"norm"}
    embedded = llama.embed(config, small, jnp.array([[3, 4]]))
    wide = reference.as_float64(small)
    np.testing.assert_allclose(embedded[0], wide["embed"][[3, 4]], rtol=1e-6)
    hidden = jnp.ones((1, 1, config.hidden_size))
    found, expected = (llama.logits(config, one, hidden) for one in (small, jax.tree.map(jnp.float32, wide)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


DRAFTERS = ["autoregressive", "ngram", "layerskip", "asd", "draft-verify", "s2d", "draft-model", "quantised"]
DRAFTERS += ["eagle3", "medusa-tree"]


def loop_in_int8(combination, distribution=None, config=None):
    loop = tiny.loop(combination, distribution, config)
    small = quantise(loop.config, loop.weights.target)
    return dataclasses.replace(loop, weights=Weights(small, loop.weights.drafter))


@pytest.mark.representatives("layerskip-auto", "eagle3-int8")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_method_writes_the_text_of_plain_decoding(drafter, kv_cache_dtype):
    check_text(drafter, dataclasses.replace(tiny.config_of(drafter), kv_cache_dtype=kv_cache_dtype))


def check_text(drafter, config):
    """With the same weights in int8; the slow decoder computes in float64 with the dequantised weights."""
    rule = "confidence" if tiny.DRAFTERS[drafter].has_rule else "-"
    loop = loop_in_int8(tiny.Combination(drafter, rule, "greedy"), Greedy(), config)
    texts = loop.texts(PROMPTS, BUDGETS)
    wide = reference.as_float64(loop.weights.target)
    for prompt, budget, text in zip(PROMPTS, BUDGETS, texts, strict=True):
        assert text == reference.greedy(loop.config, wide, prompt, budget)


@pytest.mark.full
@pytest.mark.representatives("gemma-layerskip", "olmo-draft-model")
@pytest.mark.parametrize("drafter", ["layerskip", "draft-model", "medusa-tree"])
@pytest.mark.parametrize("block", ["gemma", "olmo", "granite"])
def test_blocks_of_families_in_int8_write_the_text_of_plain_decoding(block, drafter):
    """With weights and cache in int8."""
    config = dataclasses.replace(tiny.with_block(block, tiny.config_of(drafter)), kv_cache_dtype="int8")
    check_text(drafter, config)


@pytest.mark.full
def test_sampled_text_follows_the_distribution_of_the_int8_weights(monkeypatch):
    plain = contracts.params
    monkeypatch.setattr(contracts, "params", lambda config: quantise(config, plain(config)))
    combination = tiny.Combination("quantised", "confidence", "block")
    contracts.check_sampled_distribution(lambda distribution: loop_in_int8(combination, distribution, FOUR))


def test_copies_of_heads_are_quantised_with_them():
    config = dataclasses.replace(tiny.TARGET, num_heads=8, kv_copies=2)
    plain = quantise(config.plain, tiny.params(config.plain))
    copied = with_copies(config, plain)
    once = quantise(config, with_copies(config, tiny.params(config.plain)))
    jax.tree.map(np.testing.assert_array_equal, copied, once)
    jax.tree.map(np.testing.assert_array_equal, without_copies(config, copied), plain)


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def stored(request, tmp_path_factory):
    """A model's files in either format."""
    directory = tmp_path_factory.mktemp("int8")
    config = dataclasses.replace(tiny.TARGET, max_position_embeddings=64)
    if request.param == "safetensors":
        huggingface.save(directory, config, tiny.params())
        return directory
    return gguf_files.write(directory / "model.gguf", config, tiny.params())


@pytest.fixture
def quick_collections():
    """Excludes live objects from garbage collections, each of which takes a second in a long run."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
def test_weights_are_quantised_while_loading(stored, monkeypatch):
    """At most one matrix and the embedding are in memory unquantised; the model's fingerprint does not change."""
    plain = jaxspec.load(stored, compilation_cache=False)
    expected = quantise(plain.config, plain.params)
    shapes = {one.shape for one in jax.tree.leaves(expected, is_leaf=is_quantised) if is_quantised(one)}

    def as_they_were():
        gc.collect()
        return sum(one.shape in shapes and one.dtype == jnp.float32 for one in jax.live_arrays())

    before, most = as_they_were(), []

    def watched(leaf, bits):
        most.append(as_they_were() - before)
        return quantised(leaf, bits)

    monkeypatch.setattr(loading, "quantised", watched)
    small = jaxspec.load(stored, weights="int8", compilation_cache=False)
    assert len(most) == 1 + 4 * plain.config.num_layers
    assert max(most) == 2
    jax.tree.map(np.testing.assert_array_equal, small.params, expected)
    assert small.fingerprint == plain.fingerprint
    assert small.loaded.until(1).fingerprint == plain.loaded.until(1).fingerprint
    assert (small.weights, plain.weights, small.dtype) == ("int8", None, "float32")
    assert "float32, int8 weights, on" in repr(small)


def test_memory_is_asked_for_what_is_held(stored, monkeypatch):
    """The request equals the bytes of the parameters, plus the copy for a quantised draft."""
    small = jaxspec.load(stored, weights="int8", compilation_cache=False)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(small.params))
    assert memory.needed_bytes(small.config, np.float32, 1, 8, bits=8)[0] == size
    plain = jaxspec.load(stored, compilation_cache=False)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3000)
    with refused("the draft does not fit: a copy of the weights in int4 with its cache"):
        plain.generate([3, 4], method="quantised", draft_bits=4)


def test_what_was_measured_with_other_weights_is_not_gone_on_with(stored, tmp_path):
    """The fingerprint and the dtype are the same, the figures are not."""
    plain, small = (jaxspec.load(stored, weights=held, compilation_cache=False) for held in (None, "int8"))
    path, options = tmp_path / "log.jsonl", SearchOptions(trials=1)
    LineLog(path, _header(plain, [[3, 4]], options), of="search")
    with refused("its dtype is 'float32', now 'float32, int8 weights'"):
        LineLog(path, _header(small, [[3, 4]], options), of="search")


def test_an_int8_cache_is_that_of_the_model_and_of_its_drafts(stored, tmp_path):
    """With the same files of methods; its measured costs are others."""
    small = jaxspec.load(stored, kv_cache_dtype="int8", compilation_cache=False)
    plain = jaxspec.load(stored, compilation_cache=False)
    head = tiny.eagle_head(plain.config)
    write_head(tmp_path, head, tiny.head_params(head), plain.fingerprint)
    for lm, kv_cache_dtype in ((plain, "auto"), (small, "int8")):
        draft, head = lm.drafts.load(str(stored)), lm.drafts.load_head(tmp_path, lm.loaded)
        found = lm.config, draft.config, head.config.block, lm.loaded.exact.config, lm.loaded.until(1).config
        assert {one.kv_cache_dtype for one in found} == {kv_cache_dtype}
    assert small.precision == "float32, int8 cache"
    assert small.fingerprint == plain.fingerprint


def test_one_line_for_what_cannot_be(stored, tmp_path):
    with refused("unknown weights 'int3'; give int8, or leave it out"):
        jaxspec.load(stored, weights="int3", compilation_cache=False)
    with refused("kv_cache_dtype is 'fp8'; give auto or int8"):
        jaxspec.load(stored, kv_cache_dtype="fp8", compilation_cache=False)
    small = jaxspec.load(stored, weights="int8", compilation_cache=False)
    with refused(r"draft_bits is 8, but the weights of .* are int8 already; give fewer"):
        small.generate([3, 4], method="quantised", draft_bits=8)
    with refused("the parameters are quantised; give those they were made of"):
        huggingface.save(tmp_path / "out", small.config, small.params)
