"""Where arrays live on a mesh: logical axes, and the rules that map them to mesh axes.

A mesh has the axes `data` (rows of a batch) and `model` (heads, MLP width, vocabulary); either may be 1.
An axis that does not divide evenly is replicated.

Where there are more places along `model` than key/value heads, each place holds one of these and an equal part of its
query heads: `spread_config` says how many copies of each head that takes, and parameters are loaded, or made by
`with_copies`, so. A copy costs its part of the keys' and values' weights and of the cache; all else is held once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes
from jaxspec.model.quantised import shardings_for

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


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto: the loop leaves the spreading of what it computes to the compiler."""
    return Mesh(mesh.devices, mesh.axis_names)


def placed(mesh: Mesh, logical: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array of this shape with these logical axes."""
    axes = []
    for name, size in zip(logical, shape, strict=True):
        axis = RULES.get(name) if name is not None else None
        axes.append(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*axes))


def shared_out(mesh: Mesh, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The mesh's axis, or None, by which each axis of a parameter of this name is cut; all None for other arrays."""
    logical = _LOGICAL_AXES.get(name, ())
    if len(logical) != len(shape):
        return (None,) * len(shape)
    spec: tuple[str | None, ...] = tuple(placed(mesh, logical, shape).spec)
    return spec


def param_shardings(mesh: Mesh, config: LlamaConfig) -> Params:
    """A sharding per parameter, in the tree of `llama.param_shapes`."""

    def leaf(path: Any, shape: tuple[int, ...]) -> NamedSharding:
        name = path[-1].key
        logical = _LOGICAL_AXES[name]
        # The product of `out` contracts over heads: it may only be cut where whole groups are.
        if name == "out" and config.held_kv_heads % mesh.shape.get("model", 1):
            logical = (None, None)
        return placed(mesh, logical, shape)

    shardings: Params = jax.tree.map_with_path(leaf, param_shapes(config), is_leaf=is_shape)
    return shardings


def spread_config(mesh: Mesh, config: LlamaConfig) -> LlamaConfig:
    """The configuration with as many copies of each key/value head as the places along `model` take.

    Where query heads do not share out equally, there are none, and each device has the attention whole.

    Examples:
      >>> mesh = jax.sharding.AbstractMesh((1, 8), ("data", "model"))
      >>> model = LlamaConfig(64, 32, 48, 1, num_heads=8, num_kv_heads=2, head_dim=4)
      >>> spread_config(mesh, model).kv_copies
      4
    """
    places = mesh.shape.get("model", 1)
    copies = places // math.gcd(places, config.num_kv_heads)
    fits = config.plain.group_size % copies == 0
    return dataclasses.replace(config, kv_copies=copies if fits else 1)


def left_whole(mesh: Mesh, config: LlamaConfig) -> dict[str, bool]:
    """What a mesh should spread along `model`, by its words for a message, and whether each device has it whole."""
    places = mesh.shape.get("model", 1)
    heads = f"the {config.num_heads} query heads of {config.num_kv_heads} key/value heads"
    sizes = {
        heads: config.held_kv_heads,
        f"the MLP's width {config.intermediate_size}": config.intermediate_size,
        f"the vocabulary of {config.vocab_size}": config.vocab_size,
    }
    return {words: size % places > 0 for words, size in sizes.items()}


def with_copies(config: LlamaConfig, params: Params) -> Params:
    """Parameters as `config` holds them, of such with each key/value head once; `param_shardings` says where to."""
    group = config.plain.group_size

    def copied(leaf: jax.Array) -> jax.Array:
        heads = leaf.reshape(config.num_kv_heads, 1, group + 2, config.head_dim, *leaf.shape[2:])
        shape = (config.num_kv_heads, config.kv_copies, config.group_size, *heads.shape[3:])
        queries = heads[:, :, :group].reshape(shape)
        others = jnp.repeat(heads[:, :, group:], config.kv_copies, axis=1)
        return _grouped(config.held_kv_heads, queries, others)

    return _attentions(config, params, copied)


def spread(mesh: Mesh, config: LlamaConfig, params: Params) -> tuple[LlamaConfig, Params]:
    """A model made in memory, each key/value head once, spread over a mesh as `load` would: what it is, and where.

    Examples:
      >>> from jaxspec.model.llama import init_params
      >>> config = LlamaConfig(64, 32, 48, 1, num_heads=8, num_kv_heads=2, head_dim=4)
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> config, params = spread(mesh, config, init_params(config, jax.random.key(0)))
      >>> config.kv_copies, params["layers"][0]["attention"]["qkv"].sharding.spec
      (1, P('model', None, None))
    """
    config = spread_config(mesh, config)
    params = with_copies(config, params)
    shardings = shardings_for(param_shardings(automatic(mesh), config), params)
    placed: Params = put(params, shardings)
    return config, placed


def without_copies(config: LlamaConfig, params: Params) -> Params:
    """Parameters with each key/value head once, of such as `config` holds them; the way back from `with_copies`."""
    group = config.group_size

    def once(leaf: jax.Array) -> jax.Array:
        shape = (config.num_kv_heads, config.kv_copies, group + 2, config.head_dim, *leaf.shape[2:])
        heads = leaf.reshape(shape)
        queries = heads[:, :, :group].reshape(config.num_kv_heads, 1, -1, *shape[3:])
        return _grouped(config.num_kv_heads, queries, heads[:, :1, group:])

    return _attentions(config, params, once)


def _grouped(num_heads: int, queries: jax.Array, others: jax.Array) -> jax.Array:
    """The leaf of these heads [KV, copies, ·, hd, ...]: of each key/value head its queries, its key and its value."""
    joined = jnp.concatenate([queries, others], axis=2)
    return joined.reshape(num_heads, -1, *joined.shape[4:])


def _attentions(config: LlamaConfig, params: Params, change: Callable[[jax.Array], jax.Array]) -> Params:
    """The parameters with the leaves changed that hold key/value heads, where there are copies of these."""
    if config.kv_copies == 1:
        return params

    def leaf(path: Any, array: jax.Array) -> jax.Array:
        names = {getattr(key, "key", None) for key in path}  # a quantised leaf is two arrays
        return change(array) if names & {"qkv", "qkv_bias"} else array

    changed: Params = jax.tree.map_with_path(leaf, params)
    return changed


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


def put(tree: Any, where: Any) -> Any:
    """As `jax.device_put`, and on a mesh of several processes each of them fills its own devices.

    Args:
      tree: arrays, the same in each process; nothing is sent between them to find out.
      where: a device, a sharding, or a tree of shardings.
    """
    wheres = jax.tree.leaves(where)
    if all(isinstance(one, jax.Device) or one.is_fully_addressable for one in wheres):
        return jax.device_put(tree, where)
    return jax.tree.map(_put_leaf, tree, jax.tree.broadcast(where, tree))


def _put_leaf(leaf: Any, where: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            moved: jax.Array = jax.device_put(leaf, where)
            return moved
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _put_leaf(jax.random.key_data(leaf), where)
            keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return keys
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def local(device: jax.Device) -> jax.Device:
    """Where a process makes what is then put on a mesh: the mesh's first device, if it is of this process, else the
    first that is."""
    return device if device.process_index == jax.process_index() else jax.local_devices()[0]


def fetched(tree: Any) -> Any:
    """As `jax.device_get`, and on a mesh of several processes each of them gets the whole arrays.

    Every process must call this, at the same place.
    """
    leaves, structure = jax.tree.flatten(tree)
    cut = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _readable(leaf)]
    if cut:
        whole = multihost_utils.process_allgather([leaves[at] for at in cut], tiled=True)
        for at, array in zip(cut, whole, strict=True):
            leaves[at] = array
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def _readable(leaf: jax.Array) -> bool:
    return leaf.is_fully_addressable or leaf.is_fully_replicated
