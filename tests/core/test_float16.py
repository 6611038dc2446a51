"""float16, and devices without bfloat16 products: a float32 residual stream, and weights read in their own dtype."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.loading.loading import dtype_named
from jaxspec.measuring.accelerators import ACCELERATORS
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.numerics import SUMMED, SUMMED_ROWS, _summed, linear
from jaxspec.model.quantisation import quantised
from jaxspec.programs import compiler_options
from jaxspec.programs.executables import Executables
from jaxspec.sampling import Sampling
from tests import refused, tiny

HALF = jnp.float16
CONFIG = LlamaConfig(64, 128, 384, 3, 8, 4, 16, mlp_bias=True)
T, WIDE = 64, 3


def halves(tree):
    """The same tree with its float32 leaves in float16."""
    return jax.tree.map(lambda leaf: leaf.astype(HALF) if leaf.dtype == jnp.float32 else leaf, tree)


def with_a_large_channel(seed: int):
    """Parameters whose first token comes to 1e5 in one channel, through a unit above float16's range; and a text."""
    params = llama.init_params(CONFIG, jax.random.key(seed))
    tokens = jax.random.randint(jax.random.key(100 + seed), (1, T), 1, CONFIG.vocab_size).at[0, 0].set(0)
    params["embed"] = params["embed"].at[0].multiply(100)
    towards = params["embed"][0] / jnp.linalg.norm(params["embed"][0])
    mlp = params["layers"][0]["mlp"]
    size = CONFIG.hidden_size**0.5
    mlp["gate_up"] = mlp["gate_up"].at[:, 0].set(100 * towards)
    mlp["gate_up_bias"] = mlp["gate_up_bias"].at[0, 0].set(-60 * size)
    mlp["down"] = mlp["down"].at[:, 0].set(0).at[WIDE, 0].set(1e5 / (40 * size * 100 * size))
    return params, tokens


@jax.jit
def run(params, tokens):
    cache = kv.create(CONFIG, 1, T, params["embed"].dtype)
    return llama.forward(CONFIG, params, tokens, jnp.zeros(1, jnp.int32), cache)[:2]


def test_a_residual_above_the_range_of_float16_stays_finite():
    same = []
    for seed in range(6):
        params, tokens = with_a_large_channel(seed)
        wanted, stream = run(params, tokens)
        assert 8e4 < jnp.abs(stream[0, 0, WIDE]) < 1.2e5
        logits, stream = run(halves(params), tokens)
        assert stream.dtype == jnp.float32
        assert jnp.isfinite(logits).all()
        same.append(jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1))
    assert np.mean(same) >= 0.99


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_an_operand_and_a_result_above_the_range_of_float16(rows, bits):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 16)), jnp.float32).at[:, 3].set(3e5)
    weight = jnp.asarray(rng.normal(size=(2, 12, 16)), HALF)
    held = weight if bits is None else quantised(weight, bits)
    whole = np.asarray(held.whole() if bits else held, np.float64)
    wanted = np.tensordot(np.asarray(x, np.float64), whole, axes=(-1, -1))
    found = jax.jit(linear)(x, held)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=5e2)


def test_a_key_above_the_range_of_float16_is_seen_by_who_sees_its_slot():
    """It is stored as NaN, and its value as 0, so that it cannot spoil a row that does not see it."""
    layer = (jnp.zeros((1, 4, 4), HALF), jnp.zeros((1, 4, 4), HALF))
    new = jnp.full((1, 1, 1, 4), 1e5)
    keys, values = kv.write(layer, new, jnp.ones_like(new), jnp.zeros(1, jnp.int32), merged=True)
    assert jnp.isnan(keys[0, 0]).all()
    assert jnp.isfinite(values).all()


@pytest.mark.representatives("draft-model-probe-rejection", "eagle-tree-rejection")
@pytest.mark.parametrize("combination", tiny.families(), ids=str)
def test_every_loop_carries_a_float32_stream_beside_float16_weights(combination):
    """Traces the prefill and the rounds."""
    loop = tiny.loop(combination, Sampling(jnp.zeros(1)))

    def whole(weights):
        state, _ = dataclasses.replace(loop, weights=weights).begin([(1, 3, 1)], 4)
        return dataclasses.replace(loop, weights=weights).go_on(state)[1]

    emitted = jax.eval_shape(whole, halves(loop.weights))
    assert emitted.count.shape == (1,)


def lowered(rows: int, weight, platform: str, summed: bool):
    x = jnp.ones((rows, 48), jnp.float32)
    with SUMMED(summed):
        return jax.jit(linear).trace(x, weight).lower(lowering_platforms=(platform,))


WEIGHTS = {
    "float16": jnp.ones((64, 48), HALF),
    "int8": quantised(jnp.ones((64, 48), HALF)),
    "int4": quantised(jnp.ones((64, 48), HALF), 4),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_few_rows_are_summed_where_the_device_asks_for_it(weight):
    for rows in (1, 5, SUMMED_ROWS):
        text = lowered(rows, weight, "cuda", True).as_text()
        assert "dot_general" not in text
        assert text.count("stablehlo.reduce(") == rows
        assert "dot_general" in lowered(rows, weight, "cuda", False).as_text()
        on_cpu = [lowered(rows, weight, "cpu", summed).compile().as_text() for summed in (True, False)]
        # Without the numbers of names and the lines of the source.
        one, other = (
            re.sub(r", metadata=.*|\.\d+|#.*", "", text.partition("\nFileNames")[0]) for text in on_cpu
        )
        assert one == other
    assert "dot_general" in lowered(SUMMED_ROWS + 1, weight, "cuda", True).as_text()


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16, jnp.int8])
def test_a_sum_is_the_product(dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 16)).astype(np.float32)
    weight = jnp.asarray(4 * rng.normal(size=(3, 4, 16)), dtype)
    wanted = np.tensordot(x.astype(np.float64), np.asarray(weight, np.float64), axes=(-1, -1))
    np.testing.assert_allclose(_summed(jnp.asarray(x), weight, jnp.float32), wanted, rtol=1e-5, atol=1e-5)


def test_few_queries_of_an_int8_cache_are_summed(monkeypatch):
    """The sums are the products; on a CPU and for more queries they are products."""
    rng, group = np.random.default_rng(0), 4
    config = LlamaConfig(8, 64, 8, 1, 2 * group, 2, 8, kv_cache_dtype="int8")
    layer = kv.create(config, 1, 16, HALF).layers[0]
    keys, values = (jnp.asarray(rng.normal(size=(1, 16, 2, 8)), jnp.float32) for _ in range(2))
    layer = kv.write(layer, keys, values, jnp.zeros(1, jnp.int32), merged=True)

    def attend(queries, layer):
        positions = 10 + jnp.arange(queries.shape[1])[None]
        return kv.attend(queries, layer, positions, None, merged=True)

    for length, products in ((1, 0), (kv.SUMMED_QUERIES // group, 0), (3, 2)):
        queries = jnp.asarray(rng.normal(size=(1, length, 2, group, 8)), jnp.float32)
        wanted = attend(queries, layer)
        with SUMMED(True):
            lowered = jax.jit(attend).trace(queries, layer).lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("dot_general") == products
            with monkeypatch.context() as patch:
                patch.setattr(
                    *(jax.lax, "platform_dependent"),
                    lambda *given, default, cuda=None, **_: (cuda or default)(*given),
                )
                found = attend(queries, layer)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


def device(platform: str = "gpu", capability: str | None = None):
    return types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="a device")


DEVICES = {
    "t4": (device(capability="7.5"), "float16"),
    "v100": (device(capability="7.0"), "float16"),
    "a100": (device(capability="8.0"), "bfloat16"),
    "b200": (device(capability="10.0"), "bfloat16"),
    "amd": (device(capability="gfx90a"), "bfloat16"),
    "tpu": (device("tpu"), "bfloat16"),
    "cpu": (device("cpu"), "float32"),
}


@pytest.mark.parametrize(("where", "usual"), DEVICES.values(), ids=DEVICES)
def test_the_dtype_and_the_products_of_a_device(where, usual):
    assert dtype_named(None, where) == dtype_named("auto", where) == jnp.dtype(usual)
    leaf = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=[where]), dtype=usual)
    with compiler_options.tracing({"w": leaf}):
        assert SUMMED.value == (usual == "float16")


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_words_of_a_dtype(word, dtype):
    assert str(jaxspec.load("small", dtype=word, compilation_cache=False).params["embed"].dtype) == dtype
    with refused("unknown dtype 'fp8'; give one of auto, float32"):
        jaxspec.load("small", dtype="fp8", compilation_cache=False)


def test_a_program_is_traced_with_the_products_of_its_device(monkeypatch):
    def seen(x):
        return x + (1 if SUMMED.value else 0)

    assert Executables().call(jax.jit(seen), jnp.zeros(())) == 0
    monkeypatch.setattr(compiler_options, "has_bfloat16", lambda device: False)
    assert Executables().call(jax.jit(seen), jnp.zeros(())) == 1


def test_the_cards_without_bfloat16():
    assert {name for name, card in ACCELERATORS.items() if card.dtype == "float16"} == {"t4", "v100"}
