"""The memory check counts weights, caches and the prefill; a refusal names the options that would fit."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest

from jaxspec.model import cache
from jaxspec.model.config import LlamaConfig
from jaxspec.programs import buckets, memory
from tests import refused

LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=131072)
CHIP = types.SimpleNamespace(platform="tpu")
GIB = 2**30


def test_a_model_fits_or_is_refused(monkeypatch):
    # 2 × 2 GiB of weights in float32, and a little.
    config = LlamaConfig(2**17, 2**12, 12, 3, 4, 2, 2)
    device = jax.devices("cpu")[0]
    assert memory.free_bytes(device) > 0
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * GIB)
    one, many = (memory.Texts(config, jnp.float32, batch, device) for batch in (1, 32))
    memory.check_fits(one, 2**20)
    # The embedding of 2 GiB is not quantised, and a machine has one CPU.
    says = (
        r"weights 4\.0.* cache 3\.00 GiB.* prefill 0\.00 MiB.*has 5\.00 GiB free; "
        r"take --weights int8 --kv-cache-dtype int8, or --max-model-len (\d+), or a smaller batch$"
    )
    with refused(says) as error:
        memory.check_fits(many, 2**20)
    longest = int(re.search(r"len (\d+)", str(error.value))[1])
    memory.check_fits(many, longest)
    with refused("does not fit"):
        memory.check_fits(many, 2 * longest)
    memory.check_fits(dataclasses.replace(many, dtype=jnp.bfloat16), 2**20)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.check_fits(dataclasses.replace(many, batch_size=2**20), 2**20)


def refusal(free, capacity, grown_from=0, bits=None, batch=1, kv_cache_dtype="auto", config=LLAMA_8B):
    """Returns the refusal of caches of an 8b on a chip with this many GiB beside the weights; "" if they fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda device: int(free * GIB))
        try:
            config = dataclasses.replace(config, kv_cache_dtype=kv_cache_dtype)
            texts = memory.Texts(config, jnp.bfloat16, batch, CHIP, bits, reach=1)
            memory.check_cache_fits(texts, capacity, grown_from)
        except ValueError as error:
            return str(error)
    return ""


def test_a_prefill_and_the_growth_of_a_cache_need_memory():
    """A cache of 32k slots has 4 GiB, one of 8k has 1 GiB; a chunk needs less than .1 GiB."""
    assert "4.00 GiB (batch 1, 32768 tokens) and 0.08 GiB for the prefill" in refusal(4.01, 32768)
    assert refusal(4.1, 32768) == ""
    assert "and 1.00 GiB to grow from 8192 tokens" in refusal(4.9, 32768, 8192)
    assert refusal(5.01, 32768, 8192) == ""


def test_a_model_needs_memory_for_its_prefill(monkeypatch):
    weights, slots = memory.needed_bytes(LLAMA_8B, jnp.bfloat16, 1, 32768)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + slots + GIB // 100)
    with refused(r"cache 4\.00 GiB .* and prefill 0\.08 GiB need 19\.0"):
        memory.check_fits(memory.Texts(LLAMA_8B, jnp.bfloat16, 1, CHIP), 32768)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_refusal_names_what_would_fit(bits):
    """Every option that it names does fit, and a longer context does not."""
    weights, small = (memory.needed_bytes(LLAMA_8B, jnp.bfloat16, 1, 0, of)[0] / GIB for of in (bits, 8))
    line = refusal(5.0, 65536, 16384, bits)
    assert ("take --weights int8, or" in line) == (bits is None)
    assert (refusal(5.0 + weights - small, 65536, 16384, 8) == "") == (bits is None)
    assert "--mesh model=2 (2 devices)" in line
    slots = int(re.search(r"--max-model-len (\d+)$", line)[1]) + 1
    assert refusal(5.0, slots, buckets.before(slots, "tpu")) == ""
    assert refusal(5.0, slots + 128, buckets.before(slots + 128, "tpu")) != ""
    assert refusal(5.0, 65536, bits=bits, batch=4).endswith("a smaller batch")
    assert refusal(0.001, 512, bits=8).endswith("has 1.02 MiB free; take --mesh model=2 (2 devices)")


def test_a_refusal_names_an_int8_cache():
    """Alone, or with int8 weights if neither is enough; not if the cache is in int8."""
    assert "take --weights int8, or --kv-cache-dtype int8, or --mesh" in refusal(8.0, 65536)
    assert refusal(8.0, 65536, kv_cache_dtype="int8") == ""
    weights, small = (memory.needed_bytes(LLAMA_8B, jnp.bfloat16, 1, 0, of)[0] / GIB for of in (None, 8))
    assert "take --weights int8 --kv-cache-dtype int8, or --mesh" in refusal(4.0, 131072)
    assert refusal(4.0 + weights - small, 131072, bits=8, kv_cache_dtype="int8") == ""
    line = refusal(8.0, 131072, bits=8, kv_cache_dtype="int8")
    assert "8.12 GiB (batch 1, 131072 tokens)" in line
    assert "take --mesh" in line


def test_a_cache_has_the_bytes_that_are_counted():
    """Slots of a head of 128 dimensions have 256 bytes in bfloat16, and 130 in int8."""
    for kv_cache_dtype, size in (("auto", 256), ("int8", 130)):
        config = dataclasses.replace(LLAMA_8B, kv_cache_dtype=kv_cache_dtype)
        layers = jax.eval_shape(lambda: cache.create(config, 2, 512, jnp.bfloat16)).layers  # noqa: B023
        assert memory.size_bytes(layers) == cache.size_bytes(config, 2, 512, jnp.bfloat16)
        assert cache.size_bytes(config, 2, 512, jnp.bfloat16) == 2 * 2 * 512 * 32 * 8 * size


def test_a_layer_with_a_window_needs_memory_for_its_window():
    """27 of the 32 layers see 1,024 positions and have 1,664 places."""
    config = dataclasses.replace(
        LLAMA_8B, sliding_windows=tuple(None if i % 6 == 5 else 1024 for i in range(32))
    )
    slot = 2 * 8 * 128 * 2
    assert cache.size_bytes(config, 3, 131072, jnp.bfloat16) == 3 * slot * (5 * 131072 + 27 * 1664)
    assert cache.size_bytes(config, 3, 1024, jnp.bfloat16) == 3 * slot * 32 * 1024
    line = refusal(2.0, 131072, 65536, config=config)
    slots = int(re.search(r"--max-model-len (\d+)", line)[1]) + 1
    assert refusal(2.0, slots, buckets.before(slots, "tpu"), config=config) == ""
    assert refusal(2.0, slots + 128, buckets.before(slots + 128, "tpu"), config=config) != ""


def test_a_refusal_names_nothing_that_would_not_fit(monkeypatch):
    """Half of the weights in int8 do not fit, nor a part on any number of devices; an odd number of heads is whole."""
    odd = dataclasses.replace(LLAMA_8B, num_heads=33, num_kv_heads=3)
    monkeypatch.setattr(memory, "free_bytes", lambda device: GIB)
    with refused(r"; take a smaller model$"):
        memory.check_fits(memory.Texts(odd, jnp.bfloat16, 1, CHIP), 512)
