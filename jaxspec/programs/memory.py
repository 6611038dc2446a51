"""Checks that a model fits the memory of its device, before it is loaded."""

from __future__ import annotations

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
    free = free_bytes(device)
    if free is None or weights + slots <= free:
        return
    name = np.dtype(dtype).name if bits is None else f"int{bits}"
    raise ValueError(
        f"the model does not fit: weights {weights / _GIB:.2f} GiB ({name}) and cache {slots / _GIB:.2f} GiB "
        f"(batch {batch_size}, {capacity} tokens) need {(weights + slots) / _GIB:.2f} GiB, {device} has "
        f"{free / _GIB:.2f} GiB free; take a smaller dtype, batch or context"
    )


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


def check_cache_fits(row_bytes: int, batch_size: int, capacity: int, device: jax.Device) -> None:
    """Refuses a cache of `row_bytes` per row that does not fit beside a loaded model; see `check_fits`."""
    slots, free = batch_size * row_bytes, free_bytes(device)
    if free is not None and slots > free:
        raise ValueError(
            f"the cache does not fit: {slots / _GIB:.2f} GiB (batch {batch_size}, {capacity} tokens), {device} has "
            f"{free / _GIB:.2f} GiB free; take a smaller batch or fewer tokens"
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
