"""What a compiler is told of a program beside the program itself."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.model.quantised import is_quantised

# KiB of fast memory that one fusion may take, and the chips for which the compiler expects to gain by it: v5e and v5p.
_LIMIT_KIB = 65536
_CHIPS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p")


def compiler_options(args: Any) -> dict[str, str] | None:
    """The options for a program that takes such arguments; None for the compiler's own.

    On a TPU a product with an int8 weight makes bfloat16 of it in fast memory, and within the compiler's own limit it
    takes small parts of the weight at a time. With more memory it is expected to take fewer cycles. A program of
    bfloat16 weights is expected to take more, as less memory remains for weights that are read ahead; so is one of int8
    on a v6e (docs/measurements.md).

    Args:
      args: a tree of arrays, or of `jax.ShapeDtypeStruct`s; without a sharding they are on the default device.
    """
    leaves = jax.tree.leaves(args, is_leaf=is_quantised)
    if not any(map(is_quantised, leaves)):
        return None
    shardings = [one.sharding for one in jax.tree.leaves(args) if getattr(one, "sharding", None) is not None]
    (device, *_) = shardings[0].device_set if shardings else jax.devices()
    return {"xla_tpu_scoped_vmem_limit_kib": str(_LIMIT_KIB)} if device.device_kind in _CHIPS else None
