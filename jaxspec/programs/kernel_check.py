"""Compares the kernels of `model.gpu_kernels` with XLA's programs on a device, before their first use."""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.model import llama, rope
from jaxspec.model.config import LlamaConfig
from jaxspec.model.numerics import ATTENTION, KERNELS, PRODUCTS, added_linear, normed_linear, stream_dtype
from jaxspec.model.quantisation import quantised

_LOG = logging.getLogger(__name__)
# The kernel's error may exceed XLA's by this factor: rounding varies between two programs of the same precision.
MARGIN = 1.05
# Rows of the compared products: one of each way in which `gpu_kernels.product` computes them.
_ROWS = (1, 4, 5, 16)
# Input and output channels. The second input is no multiple of a power of two.
_WIDTH, _INNER, _EPS = 512, 1400, 1e-5
# Slots of the caches that attention reads.
_SLOTS = 1024
# The verdicts of this process by device kind, dtype and whether some weights are int8.
_VERDICTS: dict[tuple[str, str, bool], frozenset[str]] = {}
_LOCK = threading.Lock()


def passed(device: jax.Device, dtype: str, int8: bool) -> frozenset[str]:
    """Returns the kernels that a CUDA device may use for weights of a dtype.

    A kernel passes if its error against a float32 program is at most that of XLA's program in the dtype, within
    `MARGIN`. It fails if it cannot be compiled. The first call for a kind of device, a dtype and a kind of weight
    compares; the verdict holds for the process. A device that is not attached, for which `jaxspec compile` compiles,
    uses every kernel.

    Args:
      device: a CUDA device from compute capability 8.0 on.
      dtype: bfloat16 or float16.
      int8: whether some weights are int8.
    """
    if not _is_attached(device):
        return frozenset(CHECKS)
    key = device.device_kind, dtype, int8
    with _LOCK:
        if key not in _VERDICTS:
            _VERDICTS[key] = frozenset(name for name in CHECKS if _passes(name, device, dtype, int8))
        return _VERDICTS[key]


def _is_attached(device: jax.Device) -> bool:
    try:
        return device in jax.local_devices(backend=device.platform)
    except RuntimeError:  # there is no device of this platform
        return False


def _passes(name: str, device: jax.Device, dtype: str, int8: bool) -> bool:
    try:
        with jax.default_device(device):
            own, xlas = errors(name, dtype, int8)
    except Exception as error:  # of Pallas, Triton or XLA
        _LOG.warning("the kernels of %s are not used: %s", name, str(error).strip().partition("\n")[0])
        return False
    good = own <= MARGIN * xlas  # False for NaN
    verb = "are" if good else "are not"
    _LOG.log(
        logging.INFO if good else logging.WARNING,
        f"the kernels of {name} {verb} used: their error is {own:.2e}, that of XLA's programs is {xlas:.2e}",
    )
    return good


def errors(
    name: str, dtype: DTypeLike, int8: bool, more: frozenset[str] = frozenset()
) -> tuple[float, float]:
    """Returns the largest error of any result with kernels, and of any result without, against a float32 program.

    An error is a root mean square, divided by that of the result.

    Args:
      name: the kernels that are compared, as in `numerics.KERNELS`.
      dtype: the dtype of the weights.
      int8: whether to use int8 weights, with scales in `dtype`.
      more: further names for `numerics.KERNELS`.
    """
    inputs, function = CHECKS[name](jnp.dtype(dtype), int8)
    wide = jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, inputs
    )
    results = []
    for names, given in (({name} | more, inputs), (frozenset(), inputs), (frozenset(), wide)):
        with KERNELS(frozenset(names)):
            results.append([np.asarray(one, np.float64) for one in jax.jit(function)(*given)])
    *compared, reference = results
    own, xlas = (
        max(
            float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))) for a, b in zip(one, reference, strict=True)
        )
        for one in compared
    )
    return own, xlas


def _products(dtype: Any, int8: bool) -> tuple[Any, Any]:
    """Returns an MLP sublayer of each number of rows, as the arguments of a function and the function."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        whole = jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)
        return quantised(whole) if int8 else whole

    weights = weight(2, _INNER, _WIDTH), weight(_WIDTH, _INNER)
    norm, bias = (jnp.asarray(rng.uniform(0.5, 1.5, size), dtype) for size in (_WIDTH, _INNER))
    rows = [jnp.asarray(rng.normal(size=(1, n, _WIDTH)), stream_dtype(dtype)) for n in _ROWS]

    def function(weights: Any, norm: Any, bias: Any, rows: Any) -> list[Any]:
        gate_up, down = weights
        both, results = jnp.stack([bias, bias]), []
        for x in rows:
            inner = normed_linear(x, norm, _EPS, gate_up, both, gate="silu")
            results += [inner, added_linear(x, inner, down)]
        return results

    return (weights, norm, bias, rows), function


def _attention(dtype: Any, int8: bool) -> tuple[Any, Any]:
    """Returns the attention of two rows of different lengths, with each number of tokens, for two sizes of heads."""
    rng = np.random.default_rng(0)
    starts, configs = jnp.array([_SLOTS - 16, 70]), [LlamaConfig(2, 2, 2, 1, 8, 2, hd) for hd in (64, 128)]

    def drawn(kind: Any, *shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), kind)

    layers = [tuple(drawn(dtype, 4, _SLOTS, one.head_dim) for _ in range(2)) for one in configs]
    tokens = [[drawn(stream_dtype(dtype), 2, n, 2, 6, one.head_dim) for n in _ROWS] for one in configs]

    def function(layers: Any, tokens: Any) -> list[Any]:
        results = []
        for config, layer, each in zip(configs, layers, tokens, strict=True):
            for qkv in each:
                slots = starts[:, None] + jnp.arange(qkv.shape[1])
                tables = rope.tables(config, config.layer_type(0), slots, jnp.zeros(2, jnp.int32))
                window = 100 if qkv.shape[1] == _ROWS[1] else None
                attend = llama.Cached(starts, slots, window, merged=True)
                results += jax.tree.leaves(llama.attended(config, {}, qkv, tables, attend, layer))
        return results

    return (layers, tokens), function


# The comparisons by kernels: of a dtype, and of whether weights are int8.
CHECKS = {PRODUCTS: _products, ATTENTION: _attention}
