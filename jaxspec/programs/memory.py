"""Checks that a model fits the memory of its device, before it is loaded."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
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


def check_fits(
    config: LlamaConfig,
    dtype: DTypeLike,
    batch_size: int,
    capacity: int,
    device: jax.Device,
    bits: int | None = None,
) -> None:
    """Refuses a model whose weights and cache do not fit a device; passes if its free memory is unknown.

    Args:
      config: the model's configuration.
      dtype: dtype of weights and cache.
      batch_size: rows generated together.
      capacity: cache slots per row.
      device: the model's device.
      bits: bits of quantised weights; None for weights of `dtype`.

    Raises:
      ValueError: the model does not fit; one line with the sizes in GiB and the options to change.
    """
    weights, slots = needed_bytes(config, dtype, batch_size, capacity, bits)
    prompts = prefill_bytes(config, dtype, batch_size, capacity, device.platform)
    free, needed = free_bytes(device), weights + slots + prompts
    if free is None or needed <= free:
        return
    name = np.dtype(dtype).name if bits is None else f"int{bits}"
    remedies = _Remedies(config, dtype, batch_size, slots // capacity // batch_size, device, bits)
    raise ValueError(
        f"the model does not fit: weights {weights / _GIB:.2f} GiB ({name}), cache {slots / _GIB:.2f} GiB "
        f"(batch {batch_size}, {capacity} tokens) and prefill {prompts / _GIB:.2f} GiB need {needed / _GIB:.2f} GiB, "
        f"{device} has {free / _GIB:.2f} GiB free; take {remedies.words(needed, free, capacity)}"
    )


@dataclasses.dataclass(frozen=True)
class _Remedies:
    """Finds the options with which a refused model or cache would fit.

    Args:
      config, dtype, batch_size, device, bits: as in `check_fits`.
      slot_bytes: bytes of a cache slot of a row, the drafter's included.
      reach: slots that a round writes after the text.
    """

    config: LlamaConfig
    dtype: DTypeLike
    batch_size: int
    slot_bytes: int
    device: jax.Device
    bits: int | None
    reach: int = 0

    def needed(self, capacity: int) -> int:
        """Returns the bytes beside the weights that texts of any length up to `capacity` need."""
        platform = self.device.platform
        grown_from = buckets.before(capacity, platform)
        prompts = prefill_bytes(self.config, self.dtype, self.batch_size, capacity, platform)
        size = self.batch_size * self.slot_bytes
        return size * capacity + max(size * grown_from, prompts)

    def words(self, needed: int, free: int, capacity: int) -> str:
        """Returns the options with which the weights and the rest, `needed` bytes, would fit `free` bytes."""
        weights = needed_bytes(self.config, self.dtype, 1, 0, self.bits)[0]
        found = []
        if self.bits is None:
            small = needed_bytes(self.config, self.dtype, 1, 0, bits=8)[0]
            found += ["--weights int8"] if needed - weights + small <= free else []
        if self.device.platform != "cpu":
            parts = (2**n for n in range(1, 9) if self.config.num_heads % 2**n == 0)
            found += [f"--mesh model={n} ({n} devices)" for n in parts if needed <= n * free][:1]
        tiles = range(128, capacity, 128)
        longest = 128 * bisect.bisect_right(tiles, free - weights, key=self.needed) - self.reach
        # A cache has at least `START_CAPACITY` slots.
        found += [f"--max-model-len {longest}"] if longest >= buckets.START_CAPACITY else []
        if self.batch_size > 1:
            found.append("a smaller batch")
        return ", or ".join(found) or "a smaller model"


def check_head_fits(num_weights: int, dtype: DTypeLike, device: jax.Device) -> None:
    """Refuses a head that does not fit beside a loaded model; see `check_fits`."""
    size, free = num_weights * np.dtype(dtype).itemsize, free_bytes(device)
    if free is not None and size > free:
        raise ValueError(
            f"the head does not fit: {size / _GIB:.2f} GiB ({np.dtype(dtype).name}), {device} has "
            f"{free / _GIB:.2f} GiB free; take a smaller dtype, or a method without a head"
        )


def check_copy_fits(
    config: LlamaConfig, dtype: DTypeLike, bits: int, capacity: int, device: jax.Device
) -> None:
    """Refuses a quantised copy of a loaded model if it and a cache of one row do not fit; see `check_fits`."""
    _, copy = _quantised_bytes(config, np.dtype(dtype), bits)
    size, free = copy + cache.size_bytes(config, 1, capacity, dtype), free_bytes(device)
    if free is not None and size > free:
        raise ValueError(
            f"the draft does not fit: a copy of the weights in int{bits} with its cache takes {size / _GIB:.2f} GiB, "
            f"{device} has {free / _GIB:.2f} GiB free; take fewer draft_bits, or another method"
        )


def check_cache_fits(
    config: LlamaConfig,
    dtype: DTypeLike,
    batch_size: int,
    capacity: int,
    device: jax.Device,
    bits: int | None,
    *,
    row_bytes: int,
    grown_from: int,
    reach: int,
) -> None:
    """Refuses a cache that does not fit beside a loaded model while prompts are fed or while it grows.

    Args:
      config, dtype, batch_size, capacity, device, bits: as in `check_fits`.
      row_bytes: bytes of the caches of one row, the drafter's included.
      grown_from: the capacity from which the cache grows to this one, when both exist; 0 if it does not grow.
      reach: slots that a round writes after the text.

    Raises:
      ValueError: the cache does not fit; one line with the sizes in GiB and the options with which it would fit.
    """
    slots, free = batch_size * row_bytes, free_bytes(device)
    prompts = prefill_bytes(config, dtype, batch_size, capacity, device.platform)
    growth = slots * grown_from // capacity
    more = max(prompts, growth)
    if free is None or slots + more <= free:
        return
    use = f"to grow from {grown_from} tokens" if growth > prompts else "for the prefill"
    weights = needed_bytes(config, dtype, 1, 0, bits)[0]
    remedies = _Remedies(config, dtype, batch_size, row_bytes // capacity, device, bits, reach)
    raise ValueError(
        f"the cache does not fit: {slots / _GIB:.2f} GiB (batch {batch_size}, {capacity} tokens) and "
        f"{more / _GIB:.2f} GiB {use}, {device} has {free / _GIB:.2f} GiB free; take "
        f"{remedies.words(weights + slots + more, weights + free, capacity)}"
    )


def check_prefixes_fit(size: int, device: jax.Device) -> None:
    """Refuses a number of bytes for kept prefixes that does not fit beside a loaded model; see `check_fits`."""
    free = free_bytes(device)
    if free is not None and size > free:
        raise ValueError(
            f"prefix_cache is {size / _GIB:.2f} GiB, {device} has {free / _GIB:.2f} GiB free; give fewer bytes"
        )


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
