"""Where a training lives on a mesh: parameters, optimiser state and rows of the batch divided over all devices.

A mesh has the axes of decoding. Along `model` a leaf is cut as the decoder cuts it: by heads, MLP width and
vocabulary (tensor parallelism). Along `data`, over which the rows of a batch are divided, it is cut once more, along
its largest axis that is left and can be (fully sharded data parallelism, ZeRO stage 3; Rajbhandari et al. 2020): XLA
gathers a layer's weights where they are used and scatters their gradients. By default all devices stand along `data`.
On one device nothing changes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.engine.loading import devices_of, resolve_mesh
from jaxspec.model.sharding import placed, put, shared_out

AXES = ("data", "model")


def make_mesh(axes: str | None = None) -> Mesh:
    """Makes a mesh from how it is written, such as data=2,model=4; None for all devices along `data`.

    Raises:
      ValueError: it is no mesh, or has more places than there are devices.
    """
    devices = devices_of(None)
    if axes is not None:
        mesh = resolve_mesh(axes, None)
        if mesh is not None:
            return mesh
        devices = devices[:1]
    return Mesh(np.array(devices).reshape(-1, 1), AXES)


def leaf_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Chooses how an array of a training state is divided; not at all where nothing can be.

    Args:
      mesh: with the axes `data` and `model`.
      name: of a parameter, or of what the optimiser keeps of it.
      shape: of the array.
    """
    spec = list(shared_out(mesh, name, shape) if mesh.shape["model"] > 1 else (None,) * len(shape))
    if "model" in spec or mesh.shape["model"] == 1:
        over: Any = "data"
        count = mesh.shape["data"]
    elif len(shape) > 1:  # what the decoder does not cut along model is divided over all places alike
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
        return leaf_sharding(mesh, str(getattr(path[-1], "key", "")) if path else "", tuple(array.shape))

    return jax.tree.map_with_path(leaf, state)


def placed_shapes(mesh: Mesh, shapes: Any) -> Any:
    """Adds to each shape of a training state where its array belongs on the mesh."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        state_shardings(mesh, shapes),
    )


def place_state(mesh: Mesh, state: Any) -> Any:
    """Puts a training state onto the devices of the mesh."""
    return put(state, state_shardings(mesh, state))


def place_batch(mesh: Mesh, batch: Any, rows_axis: int) -> Any:
    """Puts a batch on the devices, its rows divided over `data`; of several processes each has the whole batch, and
    takes its own rows.

    Raises:
      ValueError: the rows cannot be divided evenly.
    """
    count = mesh.shape["data"]

    def place(array: np.ndarray) -> jax.Array:
        if array.shape[rows_axis] % count:
            raise ValueError(
                f"a batch of {array.shape[rows_axis]} rows cannot be divided over {count} devices; "
                f"give --batch a multiple of {count}"
            )
        array_on_mesh: jax.Array = put(array, _rows_sharding(mesh, array.shape, rows_axis))
        return array_on_mesh

    return jax.tree.map(place, batch)


def batch_shapes(mesh: Mesh, rows: int, window: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of a step with one micro-batch, [1, B, T], as shapes that lie where `place_batch` puts them.

    Examples:
      >>> mesh = jax.sharding.AbstractMesh((4, 1), AXES)
      >>> batch_shapes(mesh, 8, 32)["tokens"].sharding.shard_shape((1, 8, 32))
      (1, 2, 32)
    """
    shape = (1, rows, window)
    place = _rows_sharding(mesh, shape, 1)
    dtypes = {"tokens": np.int32, "segments": np.int32, "positions": np.int32, "learn": np.bool_}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in dtypes.items()}


def _rows_sharding(mesh: Mesh, shape: tuple[int, ...], rows_axis: int) -> NamedSharding:
    logical: list[str | None] = [None] * len(shape)
    logical[rows_axis] = "batch"
    return placed(mesh, tuple(logical), shape)
