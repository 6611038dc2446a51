"""Where arrays live on a mesh: logical axes, and the rules that map them to mesh axes.

A mesh has the axes `data` (rows of a batch) and `model` (heads, MLP width, vocabulary); either may be 1.
An axis that does not divide evenly is replicated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes

RULES = {"batch": "data", "kv_heads": "model", "heads": "model", "mlp": "model", "vocab": "model"}

_LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "norm": (None,),
    "qkv": ("kv_heads", None, None),
    "qkv_bias": ("kv_heads", None),
    "q_norm": (None,),
    "k_norm": (None,),
    "out": (None, "heads"),
    "out_bias": (None,),
    "gate_up": (None, "mlp", None),
    "gate_up_bias": (None, "mlp"),
    "down": (None, "mlp"),
    "down_bias": (None,),
}
_CACHE_AXES = ("batch", "kv_heads", None, None)


def placed(mesh: Mesh, logical: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array of this shape with these logical axes."""
    axes = []
    for name, size in zip(logical, shape, strict=True):
        axis = RULES.get(name) if name is not None else None
        axes.append(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*axes))


def param_shardings(mesh: Mesh, config: LlamaConfig) -> Params:
    """A sharding per parameter, in the tree of `llama.param_shapes`."""

    def leaf(path: Any, shape: tuple[int, ...]) -> NamedSharding:
        name = path[-1].key
        logical = _LOGICAL_AXES[name]
        # The product of `out` contracts over heads: it may only be cut where whole groups are.
        if name == "out" and config.num_kv_heads % mesh.shape.get("model", 1):
            logical = (None, None)
        return placed(mesh, logical, shape)

    shardings: Params = jax.tree.map_with_path(leaf, param_shapes(config), is_leaf=is_shape)
    return shardings


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """A sharding per array of a state: rows over `data`, a cache's heads over `model` too."""

    def rows(leaf: Any) -> Any:
        return placed(mesh, ("batch",) + (None,) * (leaf.ndim - 1), leaf.shape)

    def node(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return rows(node)
        layers: Any = [tuple(placed(mesh, _CACHE_AXES, x.shape) for x in pair) for pair in node.layers]
        return dataclasses.replace(node, layers=layers, rope_length=rows(node.rope_length))

    return jax.tree.map(node, state, is_leaf=lambda node: isinstance(node, KVCache))
