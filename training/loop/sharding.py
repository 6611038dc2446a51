"""Fully sharded data parallelism: parameters, optimiser state and rows of the batch divided over all devices.

Every leaf is cut along its largest axis that the number of devices divides (ZeRO stage 3; Rajbhandari et al.
2020); XLA gathers a layer's weights where they are used and scatters their gradients. On one device nothing
changes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def make_mesh() -> Mesh:
    """Makes a mesh of all devices in a row."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def leaf_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Chooses how an array of a training state is divided: along its largest axis that can be, else not at all."""
    count = mesh.shape[AXIS]
    fitting = [axis for axis, size in enumerate(shape) if size % count == 0 and size >= count]
    spec: list[str | None] = [None] * len(shape)
    if fitting and count > 1:
        spec[max(fitting, key=lambda axis: shape[axis])] = AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Chooses the sharding of each leaf of a training state (or of its shapes)."""
    return jax.tree.map(lambda leaf: leaf_sharding(mesh, leaf.shape), state)


def placed_shapes(mesh: Mesh, shapes: Any) -> Any:
    """Adds to each shape of a training state where its array belongs on the mesh."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        state_shardings(mesh, shapes),
    )


def place_state(mesh: Mesh, state: Any) -> Any:
    """Puts a training state onto the devices of the mesh."""
    return jax.device_put(state, state_shardings(mesh, state))


def place_batch(mesh: Mesh, batch: Any, rows_axis: int) -> Any:
    """Puts a batch on the devices, its rows divided over them.

    Raises:
      ValueError: the rows cannot be divided evenly.
    """
    count = mesh.shape[AXIS]

    def place(array: np.ndarray) -> jax.Array:
        if array.shape[rows_axis] % count:
            raise ValueError(
                f"a batch of {array.shape[rows_axis]} rows cannot be divided over {count} devices; "
                f"give --batch a multiple of {count}"
            )
        spec = [None] * rows_axis + [AXIS]
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, batch)
