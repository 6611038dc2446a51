"""A matrix with a low-rank adapter (LoRA, Hu et al. 2021) that applies to some of the rows of a pass, or to all."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from jaxspec.model.config import LlamaConfig
from jaxspec.model.quantisation import Quantised

# The matrices of a layer that may have adapters, by sublayer: the number of their parts, which have an adapter each.
PARTS = {"attention": {"qkv": 3, "out": 1}, "mlp": {"gate_up": 2, "down": 1}}


@struct.dataclass
class Adapted:
    """A weight [*O, I] of `numerics.linear`, and the adapters of its P parts side by side.

    A merged weight, such as that of queries, keys and values, consists of P matrices with an adapter each.

    Attributes:
      base: the weight, [*O, I], perhaps quantised, or itself adapted.
      a: [P, r, I], the matrices that reduce the input to r numbers, one for each part.
      b: [*O, r], the matrices that expand them, in the places of their parts.
      rows: bool[T], the rows of the input [B, T, I] to which the adapters apply; the others get the base alone. None:
        the adapters apply to all rows.
      axis: the axis of O along which the parts are placed, static.
      sizes: the sizes of the P parts along this axis, static.
      scale: the factor of the adapters' result, static.
    """

    base: jax.Array | Quantised | Adapted
    a: jax.Array
    b: jax.Array
    rows: jax.Array | None
    axis: int = struct.field(pytree_node=False)
    sizes: tuple[int, ...] = struct.field(pytree_node=False)
    scale: float = struct.field(pytree_node=False)


def adapted(
    config: LlamaConfig, params: Any, own: Any, rows: jax.Array | None = None, scale: float = 1.0
) -> dict[str, Any]:
    """Returns a model's parameters with adapters.

    Args:
      config, params: the model, perhaps quantised.
      own: the adapters, a tree with `layers[l][sublayer]["M_a"]` and `"M_b"` for each matrix M of `PARTS` that has one,
        of the shapes of `Adapted`. Keys and values have `config.kv_copies` copies.
      rows, scale: as in `Adapted`.
    """
    group, hd = config.group_size, config.head_dim
    # By matrix: the axis along which its parts are placed, and their sizes.
    places = {"qkv": (1, (group * hd, hd, hd)), "gate_up": (0, (1, 1))}

    def with_own(sublayer: Any, mine: Any) -> Any:
        found = dict(sublayer)
        for name in (leaf.removesuffix("_a") for leaf in mine if leaf.endswith("_a")):
            b = mine[f"{name}_b"]
            axis, sizes = places.get(name, (0, (b.shape[0],)))
            found[name] = Adapted(sublayer[name], mine[f"{name}_a"], b, rows, axis, sizes, scale)
        return found

    layers = [
        {name: with_own(sublayer, mine[name]) for name, sublayer in layer.items()}
        for layer, mine in zip(params["layers"], own["layers"], strict=True)
    ]
    return {**params, "layers": layers}


def unadapted(params: Any) -> tuple[Any, list[Adapted]]:
    """Returns the parameters without adapters, and the matrices that have some."""

    def is_adapted(node: Any) -> bool:
        return isinstance(node, Adapted)

    base = jax.tree.map(lambda node: node.base if is_adapted(node) else node, params, is_leaf=is_adapted)
    return base, list(filter(is_adapted, jax.tree.leaves(params, is_leaf=is_adapted)))
