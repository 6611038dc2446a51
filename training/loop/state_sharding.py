"""Divides parameters, optimiser state and the rows of a batch over the devices of a mesh.

The mesh has the same axes as in decoding. Along `model` a leaf is divided as in the decoder: by heads, MLP width and
vocabulary (tensor parallelism). Along `data`, which divides the rows of a batch, its largest remaining divisible axis
is divided too (fully sharded data parallelism, ZeRO stage 3; Rajbhandari et al. 2020): XLA gathers a layer's weights
where they are used and scatters their gradients. By default all devices are along `data`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxspec.io import checkpoint
from jaxspec.io.methods import method_files
from jaxspec.loading.loading import devices_of, resolve_mesh
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes
from jaxspec.model.quantisation import quantise
from jaxspec.model.sharding import left_whole, placed, put_on_mesh, shared_out, spread_config

AXES = ("data", "model")


def make_mesh(axes: str | None = None) -> Mesh:
    """Makes a mesh from a text such as data=2,model=4; None for all devices along `data`.

    Raises:
      ValueError: the text is not a mesh, or has more places than there are devices.
    """
    devices = devices_of(None)
    if axes is not None:
        mesh = resolve_mesh(axes, None)
        if mesh is not None:
            return mesh
        devices = devices[:1]
    return Mesh(np.array(devices).reshape(-1, 1), AXES)


def leaf_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Chooses the sharding of an array of a training state; replicated if no axis can be divided.

    Args:
      mesh: a mesh with the axes `data` and `model`.
      name: name of the parameter, or of the parameter to which the optimiser state belongs.
      shape: shape of the array.
    """
    spec = list(shared_out(mesh, name, shape) if mesh.shape["model"] > 1 else (None,) * len(shape))
    if "model" in spec or mesh.shape["model"] == 1:
        over: Any = "data"
        count = mesh.shape["data"]
    elif len(shape) > 1:  # the decoder does not divide it along `model`, so all devices share it
        over, count = AXES, mesh.size
    else:  # a vector is not worth gathering: its product with the stream would follow it, and be moved
        over, count = None, 1
    free = [axis for axis, size in enumerate(shape) if spec[axis] is None and size % count == 0]
    if count > 1 and any(shape[axis] for axis in free):
        spec[max(free, key=lambda axis: shape[axis])] = over
    return NamedSharding(mesh, PartitionSpec(*spec))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Chooses the sharding of each leaf of a training state (or of its shapes)."""

    def leaf(path: Any, array: Any) -> NamedSharding:
        names = [step.key for step in path if isinstance(step, jax.tree_util.DictKey)]
        return leaf_sharding(mesh, names[-1] if names else "", tuple(array.shape))

    return jax.tree.map_with_path(leaf, state)


def model_shardings(mesh: Mesh, config: LlamaConfig) -> Params:
    """Chooses the sharding of each parameter of a model."""
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), param_shapes(config), is_leaf=is_shape
    )
    shardings: Params = state_shardings(mesh, shapes)
    return shardings


def load_params(mesh: Mesh, source: Path, config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Reads a model's parameters straight into the shards of a training state.

    Args:
      mesh: the mesh of the state.
      source: a Hugging Face directory or a GGUF file.
      config: from `io.checkpoint.read_config`; one with fewer layers reads only the first layers.
      dtype: dtype of the parameters.

    Raises:
      ValueError: see `io.checkpoint.load_params`.
    """
    places = model_shardings(mesh, config)
    flat = jax.tree.leaves_with_path(places)
    shardings = {jax.tree_util.keystr(path, simple=True, separator="/"): place for path, place in flat}
    return checkpoint.load_params(source, config, dtype, shardings)


def load_target(
    mesh: Mesh, source: Path, config: LlamaConfig, weights: str, compute: str
) -> tuple[Params, str]:
    """Reads the parameters of a frozen model, see `load_params`; returns also its fingerprint before quantisation.

    Args:
      mesh, source, config: see `load_params`.
      weights: their dtype; `int8`: matrices with one scale per output channel; `auto`: `compute`.
      compute: dtype of the products, and of everything that int8 does not replace.
    """
    params = load_params(mesh, source, config, jnp.dtype(compute if weights in ("auto", "int8") else weights))
    fingerprint = method_files.fingerprint(config, params)
    if weights == "int8":
        params = make_sharded(mesh, functools.partial(quantise, config), params)
    return params, fingerprint


def placed_shapes(mesh: Mesh, shapes: Any) -> Any:
    """Adds its sharding on the mesh to each shape of a training state."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        state_shardings(mesh, shapes),
    )


def place_state(mesh: Mesh, state: Any) -> Any:
    """Places a training state on the devices of the mesh."""
    return put_on_mesh(state, state_shardings(mesh, state))


def make_sharded(mesh: Mesh, make: Callable[..., Any], *given: Any, donate: bool = False) -> Any:
    """Calls `make(*given)`, compiled so that each device makes only its shards of the resulting state.

    Args:
      mesh: the mesh of the state.
      make: a function of arrays.
      given: its arguments, on the mesh or on the host.
      donate: whether the result may take the memory of `given`, which then cannot be used any more.
    """
    return maker(mesh, make, *given, donate=donate)(*given)


def maker(mesh: Mesh, make: Callable[..., Any], *given: Any, donate: bool = False) -> Any:
    """Returns the jitted function that `make_sharded` calls; `given` are arrays or shapes."""
    shardings = state_shardings(mesh, jax.eval_shape(make, *given))
    donated = tuple(range(len(given))) if donate else ()
    return jax.jit(make, out_shardings=shardings, donate_argnums=donated)


def along_model(places: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of all places along `model`."""
    return Mesh(np.array(places).reshape(1, -1), AXES)


def decoding_mesh(config: LlamaConfig) -> Mesh | None:
    """Returns the mesh on which a large model decodes after or before training: this process's devices along `model`.

    None for a single device, or if they do not divide any part of the model.
    """
    here = [device for device in devices_of(None) if device.process_index == jax.process_index()]
    mesh = along_model(here)
    divided = not all(left_whole(mesh, spread_config(mesh, config)).values())
    return mesh if len(here) > 1 and divided else None


def place_batch(mesh: Mesh, batch: Any, rows_axis: int, strict: bool = True) -> Any:
    """Places a batch on the devices, its rows divided over `data`.

    Every process has the whole batch, and places its own rows.

    Raises:
      ValueError: the rows cannot be divided evenly; if not `strict`, all devices hold all of them instead.
    """
    count = mesh.shape["data"]

    def place(array: np.ndarray) -> jax.Array:
        if strict and array.shape[rows_axis] % count:
            raise ValueError(
                f"a batch of {array.shape[rows_axis]} rows cannot be divided over {count} devices; "
                f"give --batch a multiple of {count}"
            )
        array_on_mesh: jax.Array = put_on_mesh(array, _rows_sharding(mesh, array.shape, rows_axis))
        return array_on_mesh

    return jax.tree.map(place, batch)


def _rows_sharding(mesh: Mesh, shape: tuple[int, ...], rows_axis: int) -> NamedSharding:
    logical: list[str | None] = [None] * len(shape)
    logical[rows_axis] = "batch"
    return placed(mesh, tuple(logical), shape)
