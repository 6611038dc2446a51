"""A matrix with a low-rank adapter (LoRA, Hu et al. 2021) that applies to some of the rows of a pass."""

from __future__ import annotations

import jax
from flax import struct

from jaxspec.model.quantisation import Quantised


@struct.dataclass
class Adapted:
    """A weight [*O, I] of `numerics.linear`, and the adapters of its P parts side by side.

    A merged weight, such as that of queries, keys and values, consists of P matrices with an adapter each.

    Attributes:
      base: the weight, [*O, I], perhaps quantised.
      a: [P, r, I], the matrices that reduce the input to r numbers, one for each part.
      b: [*O, r], the matrices that expand them, in the places of their parts.
      rows: bool[T], the rows of the input [B, T, I] to which the adapters apply; the others get the base alone.
      axis: the axis of O along which the parts are placed, static.
      sizes: the sizes of the P parts along this axis, static.
      scale: the factor of the adapters' result, static.
    """

    base: jax.Array | Quantised
    a: jax.Array
    b: jax.Array
    rows: jax.Array
    axis: int = struct.field(pytree_node=False)
    sizes: tuple[int, ...] = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)
