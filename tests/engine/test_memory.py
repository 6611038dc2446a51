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

LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=131072)
CHIP = types.SimpleNamespace(platform="tpu")
GIB = 2**30


def test_a_model_fits_or_is_refused(monkeypatch):
    # 2 × 2 GiB of weights in float32, and a little.
    config = LlamaConfig(2**17, 2**12, 12, 3, 4, 2, 2)
    device = jax.devices("cpu")[0]
    assert memory.free_bytes(device) > 0
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * GIB)
    memory.check_fits(config, jnp.float32, 1, 2**20, device)
    # The embedding of 2 GiB is not quantised, and a machine has one CPU.
    says = (
        r"weights 4\.0.* cache 3\.00 GiB.*has 5\.00 GiB free; take --max-model-len (\d+), or a smaller batch$"
    )
    with pytest.raises(ValueError, match=says) as error:
        memory.check_fits(config, jnp.float32, 32, 2**20, device)
    assert "\n" not in str(error.value)
    longest = int(re.search(r"len (\d+)", str(error.value))[1])
    memory.check_fits(config, jnp.float32, 32, longest, device)
    with pytest.raises(ValueError, match="does not fit"):
        memory.check_fits(config, jnp.float32, 32, 2 * longest, device)
    memory.check_fits(config, jnp.bfloat16, 32, 2**20, device)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.check_fits(config, jnp.float32, 2**20, 2**20, device)


def refused(free, capacity, grown_from=0, bits=None, batch=1):
    """Returns the refusal of caches of an 8b on a chip with this many GiB beside the weights; "" if they fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda device: int(free * GIB))
        try:
            memory.check_cache_fits(
                *(LLAMA_8B, jnp.bfloat16, batch, capacity, CHIP, bits),
                row_bytes=cache.size_bytes(LLAMA_8B, 1, capacity, jnp.bfloat16),
                grown_from=grown_from,
                reach=1,
            )
        except ValueError as error:
            return str(error)
    return ""


def test_a_prefill_and_the_growth_of_a_cache_need_memory():
    """A cache of 32k slots has 4 GiB, one of 8k has 1 GiB; a chunk needs less than .1 GiB."""
    assert "4.00 GiB (batch 1, 32768 tokens) and 0.08 GiB for the prefill" in refused(4.01, 32768)
    assert refused(4.1, 32768) == ""
    assert "and 1.00 GiB to grow from 8192 tokens" in refused(4.9, 32768, 8192)
    assert refused(5.01, 32768, 8192) == ""


def test_a_model_needs_memory_for_its_prefill(monkeypatch):
    weights, slots = memory.needed_bytes(LLAMA_8B, jnp.bfloat16, 1, 32768)
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + slots + GIB // 100)
    with pytest.raises(ValueError, match=r"cache 4\.00 GiB .* and prefill 0\.08 GiB need 19\.0"):
        memory.check_fits(LLAMA_8B, jnp.bfloat16, 1, 32768, CHIP)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_refusal_names_what_would_fit(bits):
    """Every option that it names does fit, and a longer context does not."""
    weights, small = (memory.needed_bytes(LLAMA_8B, jnp.bfloat16, 1, 0, of)[0] / GIB for of in (bits, 8))
    line = refused(5.0, 65536, 16384, bits)
    assert ("take --weights int8, or" in line) == (bits is None)
    assert (refused(5.0 + weights - small, 65536, 16384, 8) == "") == (bits is None)
    assert "--mesh model=2 (2 devices)" in line
    slots = int(re.search(r"--max-model-len (\d+)$", line)[1]) + 1
    assert refused(5.0, slots, buckets.before(slots, "tpu")) == ""
    assert refused(5.0, slots + 128, buckets.before(slots + 128, "tpu")) != ""
    assert refused(5.0, 65536, bits=bits, batch=4).endswith("a smaller batch")
    assert refused(0.001, 512, bits=8).endswith("take --mesh model=2 (2 devices)")


def test_a_refusal_names_nothing_that_would_not_fit(monkeypatch):
    """Half of the weights in int8 do not fit, nor a part on any number of devices; an odd number of heads is whole."""
    odd = dataclasses.replace(LLAMA_8B, num_heads=33, num_kv_heads=3)
    monkeypatch.setattr(memory, "free_bytes", lambda device: GIB)
    with pytest.raises(ValueError, match=r"; take a smaller model$"):
        memory.check_fits(odd, jnp.bfloat16, 1, 512, CHIP)
