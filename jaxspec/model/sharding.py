"""Sharding of arrays over a mesh: logical axes, and the rules that map them to mesh axes.

A mesh has the axes `data` (rows of a batch) and `model` (heads, MLP width, vocabulary); either may have size 1.
An array axis that does not divide evenly is replicated.

If `model` has more devices than there are key/value heads, each device holds a copy of one head for an equal part of
its query heads. `spread_config` computes the number of copies; `with_copies` or the loader makes them. Only the weights
of keys and values and the cache are copied.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes
from jaxspec.model.quantisation import shardings_for

RULES = {"batch": "data", "kv_heads": "model", "heads": "model", "mlp": "model", "vocab": "model"}

_LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "norm": (None,),
    "qkv": ("kv_heads", None, None),
    "qkv_bias": ("kv_heads", None),
    "q_norm": (None,),
    "k_norm": (None,),
    "wide_q_norm": (None, None),
    "wide_k_norm": (None, None),
    "post_norm": (None,),
    "out": (None, "heads"),
    "out_bias": (None,),
    "gate_up": (None, "mlp", None),
    "gate_up_bias": (None, "mlp"),
    "down": (None, "mlp"),
    "down_bias": (None,),
}
_CACHE_AXES = ("batch", "kv_heads", None, None)


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes of type Auto: the compiler chooses the shardings inside the loop."""
    return Mesh(mesh.devices, mesh.axis_names)


def placed(mesh: Mesh, logical: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of an array of this shape with these logical axes."""
    axes = []
    for name, size in zip(logical, shape, strict=True):
        axis = RULES.get(name) if name is not None else None
        axes.append(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*axes))


def shared_out(mesh: Mesh, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Returns the mesh axis, or None, of each axis of the parameter of this name; all None for other arrays."""
    logical = _LOGICAL_AXES.get(name, ())
    if len(logical) != len(shape):
        return (None,) * len(shape)
    spec: tuple[str | None, ...] = tuple(placed(mesh, logical, shape).spec)
    return spec


def param_shardings(mesh: Mesh, config: LlamaConfig) -> Params:
    """Returns a sharding per parameter, in the tree of `llama.param_shapes`."""

    def leaf(path: Any, shape: tuple[int, ...]) -> NamedSharding:
        name = path[-1].key
        logical = _LOGICAL_AXES[name]
        # `out` contracts over heads, so it is divided only if the groups of `qkv` are.
        if name == "out" and config.held_kv_heads % mesh.shape.get("model", 1):
            logical = (None, None)
        return placed(mesh, logical, shape)

    shardings: Params = jax.tree.map_with_path(leaf, param_shapes(config), is_leaf=is_shape)
    return shardings


def spread_config(mesh: Mesh, config: LlamaConfig) -> LlamaConfig:
    """Returns the configuration with the number of copies of each key/value head that the axis `model` requires.

    If the query heads do not divide equally, there is one copy, and each device computes the whole attention.
    """
    places = mesh.shape.get("model", 1)
    copies = places // math.gcd(places, config.num_kv_heads)
    fits = config.plain.group_size % copies == 0
    return dataclasses.replace(config, kv_copies=copies if fits else 1)


def left_whole(mesh: Mesh, config: LlamaConfig) -> dict[str, bool]:
    """Returns whether each dimension that should be divided along `model` is replicated, by its name in messages."""
    places = mesh.shape.get("model", 1)
    heads = f"the {config.num_heads} query heads of {config.num_kv_heads} key/value heads"
    sizes = {
        heads: config.held_kv_heads,
        f"the MLP's width {config.intermediate_size}": config.intermediate_size,
        f"the vocabulary of {config.vocab_size}": config.vocab_size,
    }
    return {words: size % places > 0 for words, size in sizes.items()}


def with_copies(config: LlamaConfig, params: Params) -> Params:
    """Returns parameters with `config.kv_copies` copies of each key/value head, from parameters with one."""
    group = config.plain.group_size

    def copied(leaf: jax.Array) -> jax.Array:
        heads = leaf.reshape(config.num_kv_heads, 1, group + 2, config.head_dim, *leaf.shape[2:])
        shape = (config.num_kv_heads, config.kv_copies, config.group_size, *heads.shape[3:])
        queries = heads[:, :, :group].reshape(shape)
        others = jnp.repeat(heads[:, :, group:], config.kv_copies, axis=1)
        return _grouped(config.held_kv_heads, queries, others)

    return _attentions(config, params, copied)


def spread(mesh: Mesh, config: LlamaConfig, params: Params) -> tuple[LlamaConfig, Params]:
    """Shards a model in memory, with one copy of each key/value head, as `load` does; returns config and parameters."""
    config = spread_config(mesh, config)
    params = with_copies(config, params)
    shardings = shardings_for(param_shardings(automatic(mesh), config), params)
    placed: Params = put_on_mesh(params, shardings)
    return config, placed


def without_copies(config: LlamaConfig, params: Params) -> Params:
    """Returns parameters with one copy of each key/value head; the inverse of `with_copies`."""
    group = config.group_size

    def once(leaf: jax.Array) -> jax.Array:
        shape = (config.num_kv_heads, config.kv_copies, group + 2, config.head_dim, *leaf.shape[2:])
        heads = leaf.reshape(shape)
        queries = heads[:, :, :group].reshape(config.num_kv_heads, 1, -1, *shape[3:])
        return _grouped(config.num_kv_heads, queries, heads[:, :1, group:])

    return _attentions(config, params, once)


def _grouped(num_heads: int, queries: jax.Array, others: jax.Array) -> jax.Array:
    """Joins queries, and keys with values, [KV, copies, ·, hd, ...] to a leaf as in `llama.param_shapes`."""
    joined = jnp.concatenate([queries, others], axis=2)
    return joined.reshape(num_heads, -1, *joined.shape[4:])


def _attentions(config: LlamaConfig, params: Params, change: Callable[[jax.Array], jax.Array]) -> Params:
    """Returns the parameters with `change` applied to the leaves of key/value heads, if there are copies."""
    if config.kv_copies == 1:
        return params

    def leaf(path: Any, array: jax.Array) -> jax.Array:
        # The whole path, because a quantised weight has two leaves below its name.
        names = {getattr(key, "key", None) for key in path}
        return change(array) if names & {"qkv", "qkv_bias", "qkv_b"} else array

    changed: Params = jax.tree.map_with_path(leaf, params)
    return changed


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Returns a sharding per array of a state: rows over `data`, and heads of a cache over `model`."""

    def rows(leaf: Any) -> Any:
        return placed(mesh, ("batch",) + (None,) * (leaf.ndim - 1), leaf.shape)

    def node(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return rows(node)
        layers: Any = [tuple(placed(mesh, _CACHE_AXES, x.shape) for x in pair) for pair in node.layers]
        return dataclasses.replace(node, layers=layers, rope_length=rows(node.rope_length))

    return jax.tree.map(node, state, is_leaf=lambda node: isinstance(node, KVCache))


def put_on_mesh(tree: Any, where: Any) -> Any:
    """Works as `jax.device_put`; on a mesh of several processes each process fills its own devices.

    Args:
      tree: arrays, equal in all processes; this is not checked.
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


def filled(
    where: Sharding, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Returns an array that is read shard by shard to its devices: the host holds one shard at a time.

    Args:
      where: the sharding. Each process reads only the shards of its own devices.
      shape: shape of the array.
      read: returns the host array of an index, in the dtype of the result; not called again for a replica of a shard.
    """
    indices = where.addressable_devices_indices_map(shape)
    shards, host, held = [], None, ""
    for device in sorted(
        indices, key=lambda device: str(indices[device])
    ):  # replicas of a shard are neighbours
        index = indices[device]
        index = (slice(None),) * len(shape) if index is None else index
        if host is None or str(index) != held:
            host, held = read(index), str(index)
        # Transfers are asynchronous; without waiting, host copies accumulate.
        shards.append(jax.block_until_ready(jax.device_put(host, device)))
        # JAX releases the host arrays of finished transfers at a garbage collection, such as this cheap one.
        gc.collect(0)
    return jax.make_array_from_single_device_arrays(shape, where, shards)


def local(device: jax.Device) -> jax.Device:
    """Returns `device`, the first of a mesh, if it belongs to this process, else the first device that does."""
    return device if device.process_index == jax.process_index() else jax.local_devices()[0]


def fetched(tree: Any) -> Any:
    """Works as `jax.device_get`; on a mesh of several processes each process gets the whole arrays.

    All processes must call this function in the same order.
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
