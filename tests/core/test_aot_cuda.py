"""What the H100's own compiler makes of every method, without an H100: no cache copied, and how many kernels."""

from __future__ import annotations

import importlib.util

import pytest

from tests.core.test_aot import METHODS, L, compiled
from tests.core.test_aot import environment as environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra aot-cuda"
    ),
]
# A mask that is data, where one that is compiled is usual on a GPU.
TRACED = {f"{name} traced": {"static": False} for name in ("asd", "draft-verify")}
EVERY = METHODS | TRACED


@pytest.mark.parametrize("name", EVERY)
def test_no_cache_and_no_weight_is_copied(name):
    found = compiled("h100", name.split()[0], EVERY[name])
    assert found["fits"]
    assert found["cache_copies"] == found["weight_copies"] == 0
    assert found["collectives"] == {}
    assert found["kernels_per_layer"] * L < found["kernels_per_round"]


@pytest.mark.parametrize("topology", ["h100", "h200", "a100", "l4"])
def test_the_kernels_of_a_layer(topology):
    assert compiled(topology, "autoregressive", {})["kernels_per_layer"] <= 17


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("drafted", [2, 8, 15])
def test_a_verification_reads_weights_as_they_are(drafted, bits):
    """Up to 16 rows."""
    found = compiled("h100", "ngram", {"num_draft_tokens": drafted}, bits, "wide")
    assert found["weight_copies"] == found["dequantised_weights"] == found["cache_copies"] == 0


def test_the_kernels_of_a_tree():
    """A layer has at most 17 kernels and two that move its path; a round has at most 44 others."""
    found = compiled("h100", "token-recycling", {"tree": "64x8"})
    assert found["kernels_per_layer"] <= 17
    assert found["kernels_per_round"] <= (17 + 2) * L + 44


def test_plain_decoding_on_several_gpus():
    """Two exchanges a layer; what is gathered is the largest logits alone, and not the embedding."""
    found = compiled("h100:2", "autoregressive", {})
    assert found["collectives"]["all-reduce"] >= 2 * L
    assert found["collectives"]["all-gather"] == 1
    assert found["temporary_bytes_per_device"] < 2**20


@pytest.mark.parametrize(("topology", "dtype"), [("h100", "bfloat16"), ("t4", "float16")])
def test_an_int8_cache_is_read_as_it_is(topology, dtype):
    found = compiled(topology, "autoregressive", {}, dtype=dtype, kv_cache_dtype="int8")
    assert found["cache_copies"] == 0


@pytest.mark.parametrize("bits", [None, 8])
def test_a_t4_reads_weights_as_they_are(bits):
    """Without bfloat16 products: no weight and no cache is written as float32."""
    found = compiled("t4", "autoregressive", {}, bits, "wide", "float16")
    assert found["weight_copies"] == found["cache_copies"] == found["dequantised_weights"] == 0
    assert found["temporary_bytes_per_device"] < 2**23
