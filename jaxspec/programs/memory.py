"""Checks that a model fits the memory of its device, before it is loaded."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import operator
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxspec.model import cache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import is_shape, num_params, param_shapes
from jaxspec.model.quantisation import is_multiplied
from jaxspec.programs import buckets

_GIB = 2**30


def needed_bytes(
    config: LlamaConfig, dtype: DTypeLike, batch_size: int, capacity: int, bits: int | None = None
) -> tuple[int, int]:
    """Returns the bytes of the weights and of the key/value cache of `batch_size` rows of `capacity` slots.

    `bits`: bits of quantised weights; None for weights of `dtype`.
    """
    dtype = np.dtype(dtype)
    weights = num_params(config) * dtype.itemsize
    if bits is not None:
        before, after = _quantised_bytes(config, dtype, bits)
        weights += after - before
    return weights, cache.size_bytes(config, batch_size, capacity, dtype)


def prefill_bytes(
    config: LlamaConfig, dtype: DTypeLike, batch_size: int, capacity: int, platform: str
) -> int:
    """Returns an upper estimate of the bytes of the temporaries of a prefill; 0 for a CPU, where they are few.

    These are the scores of a block in float32 and in `dtype`, the sums of attention, and the inner activations of an
    MLP, for the tokens of a chunk.
    """
    if platform == "cpu":
        return 0
    size = np.dtype(dtype).itemsize
    tokens = batch_size * min(buckets.prefill_chunk_size(capacity, platform), capacity)
    queries = tokens * config.num_heads
    slots = min(cache.block_on_accelerator(queries), capacity)
    attention = queries * (slots * (4 + size) + 8 * config.head_dim)
    return attention + tokens * 3 * config.intermediate_size * size


def _quantised_bytes(config: LlamaConfig, dtype: np.dtype, bits: int) -> tuple[int, int]:
    """Returns the bytes of the weights to be quantised, before and after quantisation."""
    leaves, _ = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    shapes = [shape for path, shape in leaves if is_multiplied(config, name(path))]
    numbers, scales = (sum(math.prod(shape[:end]) for shape in shapes) for end in (None, -1))
    return numbers * dtype.itemsize, numbers * bits // 8 + scales * dtype.itemsize


def free_bytes(device: jax.Device) -> int | None:
    """Returns the free memory of a device in bytes (for a CPU, of the machine); None if unknown."""
    if device.platform == "cpu":
        return _free_host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    free: int = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free


def _free_host_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # without /proc, the total memory is the best estimate
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def used_mappings() -> float:
    """Returns the number of memory mappings of this process ÷ the number that Linux allows; 0.0 on other systems.

    Each separately compiled part of a CPU program has mappings. A process that can get no more crashes.
    """
    try:
        with open("/proc/self/maps", "rb") as file:
            used = sum(1 for _ in file)
        return used / int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 0.0


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts that are generated together, for which a model needs memory.

    Attributes:
      config: the model.
      dtype: dtype of its weights, and of its cache if `kv_cache_dtype` is auto.
      batch_size: rows generated together.
      device: the model's device.
      bits: bits of quantised weights; None for weights of `dtype`.
      draft_bytes: bytes of a cache slot of a row in the drafter's own caches.
      adapter_bytes: bytes of the model's adapter.
      reach: slots that a round writes after the text.
    """

    config: LlamaConfig
    dtype: DTypeLike
    batch_size: int
    device: jax.Device
    bits: int | None = None
    draft_bytes: int = 0
    adapter_bytes: int = 0
    reach: int = 0

    @property
    def weights(self) -> int:
        """The bytes of the weights and of the adapter."""
        return needed_bytes(self.config, self.dtype, 1, 0, self.bits)[0] + self.adapter_bytes

    def slots(self, capacity: int) -> int:
        """Returns the bytes of the caches of `capacity` slots per row."""
        own = cache.size_bytes(self.config, 1, capacity, self.dtype)
        return self.batch_size * (own + self.draft_bytes * capacity)

    def prefill(self, capacity: int) -> int:
        """Returns `prefill_bytes` for caches of `capacity` slots per row."""
        return prefill_bytes(self.config, self.dtype, self.batch_size, capacity, self.device.platform)

    def beside(self, capacity: int, grown_from: int | None = None) -> int:
        """Returns the bytes beside the weights: of the caches, and of a prefill or of the growth of the caches.

        `grown_from`: the capacity from which they grow, 0 for none; None for that of texts of any length.
        """
        if grown_from is None:
            grown_from = buckets.before(capacity, self.device.platform)
        return self.slots(capacity) + max(self.slots(grown_from), self.prefill(capacity))

    def remedies(self, free: int, capacity: int, grown_from: int) -> str:
        """Returns the options with which the weights and the rest would fit `free` bytes."""
        needed = self.weights + self.beside(capacity, grown_from)
        small: dict[str, Any] = {"--weights int8": {"bits": 8}} if self.bits is None else {}
        if self.config.kv_cache_dtype == "auto":
            config = dataclasses.replace(self.config, kv_cache_dtype="int8")
            small["--kv-cache-dtype int8"] = {"config": config}

        def fits(*changes: dict[str, Any]) -> bool:
            changed = dataclasses.replace(self, **functools.reduce(operator.or_, changes, {}))
            return changed.weights + changed.beside(capacity, grown_from) <= free

        found = [words for words, change in small.items() if fits(change)]
        if not found and fits(*small.values()):
            found = [" ".join(small)]
        if self.device.platform != "cpu":
            parts = (2**n for n in range(1, 9) if self.config.num_heads % 2**n == 0)
            found += [f"--mesh model={n} ({n} devices)" for n in parts if needed <= n * free][:1]
        tiles = range(128, capacity, 128)
        longest = 128 * bisect.bisect_right(tiles, free - self.weights, key=self.beside) - self.reach
        # A cache has at least `START_CAPACITY` slots.
        found += [f"--max-model-len {longest}"] if longest >= buckets.START_CAPACITY else []
        if self.batch_size > 1:
            found.append("a smaller batch")
        return ", or ".join(found) or "a smaller model"


def check_fits(texts: Texts, capacity: int) -> None:
    """Refuses a model whose weights and caches do not fit its device; passes if the free memory is unknown.

    Args:
      texts: the model, its device and its texts.
      capacity: cache slots per row.

    Raises:
      ValueError: the model does not fit; one line with the sizes and the options to change.
    """
    weights, slots, prompts = texts.weights, texts.slots(capacity), texts.prefill(capacity)
    free, needed = free_bytes(texts.device), weights + slots + prompts
    if free is None or needed <= free:
        return
    name = np.dtype(texts.dtype).name if texts.bits is None else f"int{texts.bits}"
    raise ValueError(
        f"the model does not fit: weights {_size(weights)} ({name}), cache {_size(slots)} (batch {texts.batch_size}, "
        f"{capacity} tokens) and prefill {_size(prompts)} need {_size(needed)}, {texts.device} has {_size(free)} free; "
        f"take {texts.remedies(free, capacity, 0)}"
    )


def check_cache_fits(texts: Texts, capacity: int, grown_from: int) -> None:
    """Refuses caches that do not fit beside a loaded model while prompts are fed or while they grow.

    Args:
      texts: the model, its device and its texts.
      capacity: cache slots per row.
      grown_from: the capacity from which the caches grow to this one, when both exist; 0 if they do not grow.

    Raises:
      ValueError: the caches do not fit; one line with the sizes and the options with which they would fit.
    """
    slots, growth, free = texts.slots(capacity), texts.slots(grown_from), free_bytes(texts.device)
    more = texts.beside(capacity, grown_from) - slots
    if free is None or slots + more <= free:
        return
    use = f"to grow from {grown_from} tokens" if growth > texts.prefill(capacity) else "for the prefill"
    remedies = texts.remedies(texts.weights + free, capacity, grown_from)
    raise ValueError(
        f"the cache does not fit: {_size(slots)} (batch {texts.batch_size}, {capacity} tokens) and {_size(more)} "
        f"{use}, {texts.device} has {_size(free)} free; take {remedies}"
    )


def _size(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**20:.2f} MiB"


def check_head_fits(num_weights: int, dtype: DTypeLike, device: jax.Device) -> None:
    """Refuses a head that does not fit beside a loaded model; see `check_fits`."""
    size, free = num_weights * np.dtype(dtype).itemsize, free_bytes(device)
    if free is not None and size > free:
        raise ValueError(
            f"the head does not fit: {_size(size)} ({np.dtype(dtype).name}), {device} has "
            f"{_size(free)} free; take a smaller dtype, or a method without a head"
        )


def check_copy_fits(
    config: LlamaConfig, dtype: DTypeLike, bits: int, capacity: int, device: jax.Device
) -> None:
    """Refuses a quantised copy of a loaded model if it and a cache of one row do not fit; see `check_fits`."""
    _, copy = _quantised_bytes(config, np.dtype(dtype), bits)
    size, free = copy + cache.size_bytes(config, 1, capacity, dtype), free_bytes(device)
    if free is not None and size > free:
        raise ValueError(
            f"the draft does not fit: a copy of the weights in int{bits} with its cache takes {_size(size)}, "
            f"{device} has {_size(free)} free; take fewer draft_bits, or another method"
        )


def check_prefixes_fit(size: int, device: jax.Device) -> None:
    """Refuses a number of bytes for kept prefixes that does not fit beside a loaded model; see `check_fits`."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise ValueError(f"prefix_cache is {_size(size)}, {device} has {_size(free)} free; give fewer bytes")


def size_bytes(tree: Any) -> int:
    """Returns the bytes of arrays of such shapes."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def is_free(size: int, device: jax.Device) -> bool:
    """Whether a device has that many free bytes; True if its free memory is unknown."""
    free = free_bytes(device)
    return free is None or size <= free


def fits(tree: Any, device: jax.Device) -> bool:
    """Whether arrays of such shapes fit the free memory of a device; True if it is unknown."""
    return is_free(size_bytes(tree), device)
