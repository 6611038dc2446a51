"""Chooses compiler options, the default dtype and the form of products by the device."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxspec.model.numerics import LOOPED, MESH, SUMMED
from jaxspec.model.quantisation import is_quantised

# The limit of fast memory for one fusion, in KiB, and the chips on which the compiler estimates a gain: v5e and v5p.
_LIMIT_KIB = 65536
_CHIPS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p")
# The operations that a GPU starts as one graph, without the host: the defaults of XLA in jaxlib 0.10, and the loops and
# branches of rounds.
_COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"


def compiler_options(args: Any) -> dict[str, str] | None:
    """Returns the compiler options for a program with these arguments; None for the compiler's defaults.

    On a GPU, loops and branches are part of a command buffer, a graph of kernels that starts as a whole
    (docs/laboratory.md), unless XLA_FLAGS says otherwise.

    On a TPU, a product converts an int8 weight to bfloat16 in fast memory, and the default limit allows only small
    parts of the weight at a time. The compiler estimates fewer cycles with a higher limit. It estimates more cycles for
    bfloat16 weights, because less memory remains for weights that are read ahead, and for int8 weights on a v6e
    (docs/laboratory.md).

    Args:
      args: a tree of arrays or `jax.ShapeDtypeStruct`s. Leaves without a sharding are on the default device.
    """
    device = _devices(args)[0]
    if device.platform in ("gpu", "cuda"):
        name = "xla_gpu_enable_command_buffer"
        return None if name in os.environ.get("XLA_FLAGS", "") else {name: _COMMAND_BUFFER}
    quantised = any(map(is_quantised, jax.tree.leaves(args, is_leaf=is_quantised)))
    limit = {"xla_tpu_scoped_vmem_limit_kib": str(_LIMIT_KIB)}
    return limit if quantised and device.device_kind in _CHIPS else None


@contextlib.contextmanager
def tracing(args: Any) -> Iterator[None]:
    """Enters the context in which a program is traced, which sets `numerics.SUMMED`, `MESH` and `LOOPED`.

    A CUDA device without bfloat16 products sums products of a few rows, which is faster there. On a CPU, the time to
    compile and load a program follows its number of instructions, so equal layers are a loop.

    Args:
      args: the arguments of the program, as in `compiler_options`.
    """
    shardings = (getattr(one, "sharding", None) for one in jax.tree.leaves(args))
    mesh = next((one.mesh for one in shardings if isinstance(one, NamedSharding)), None)
    device = _devices(args)[0]
    looped = device.platform == "cpu" and mesh is None
    with SUMMED(not has_bfloat16(device)), MESH(mesh), LOOPED(looped):
        yield


def has_bfloat16(device: jax.Device) -> bool:
    """Returns whether a device multiplies bfloat16 numbers: every device but CUDA's below compute capability 8.0.

    There XLA would write weights and caches as float32 in each step; float16 has hardware.

    Examples:
      >>> has_bfloat16(jax.devices("cpu")[0])
      True
    """
    capability = _capability(device)
    return capability is None or capability >= 8


def _capability(device: jax.Device) -> int | None:
    """Returns the major number of a CUDA device's compute capability; None for other devices."""
    found = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    return None if found is None else int(found[1])


def _devices(args: Any) -> list[jax.Device]:
    """Returns the devices of the first of these arguments that has any, by default JAX's first."""
    shardings = [one.sharding for one in jax.tree.leaves(args) if getattr(one, "sharding", None) is not None]
    return list(shardings[0].device_set) if shardings else jax.devices()[:1]
