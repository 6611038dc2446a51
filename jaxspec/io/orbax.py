"""Models as Orbax checkpoints, for restarts and meshes: every process writes and reads its own part.

A directory contains Orbax's `params`, and `config.json` and `generation_config.json` as in a Hugging Face directory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.host.extras import require
from jaxspec.host.files import is_full, write_json
from jaxspec.io.hf.config_json import GENERATION, config_json, generation_config_json, read_config
from jaxspec.io.hf.huggingface import ORBAX_PARAMS as _PARAMS
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes, truncate
from jaxspec.model.sharding import without_copies

require("train", "orbax.checkpoint")
import orbax.checkpoint as ocp  # noqa: E402  after the check, whose error names the package to install


def save(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: Params,
    generation: Mapping[str, Any] | None = None,
    trained_for: TrainedFor = TrainedFor(),
) -> None:
    """Writes the parameters and, after them, the configuration; replaces an earlier save.

    Args:
      directory: created if missing.
      config: the model's configuration.
      params: its parameters.
      generation, trained_for: as in `huggingface.save`.

    Raises:
      ValueError: `config.model_type` cannot express the configuration.
      OSError: the disk is full.
    """
    directory = Path(directory).absolute()  # Orbax accepts only absolute paths
    content = config_json(config, jnp.dtype(params["embed"].dtype).name, trained_for)
    directory.mkdir(parents=True, exist_ok=True)
    with _full_disks(directory), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / _PARAMS, without_copies(config, params), force=True)
    write_json(directory / GENERATION, generation_config_json(config, generation))
    write_json(directory / "config.json", content)


@contextlib.contextmanager
def _full_disks(directory: Path) -> Iterator[None]:
    """Raises OSError for a full disk; Orbax itself logs a traceback per thread and raises another error."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        if is_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory)) from None
        raise
    finally:
        log.setLevel(level)


def restore(
    directory: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    shardings: Callable[[LlamaConfig], Params] | None = None,
    num_layers: int | None = None,
) -> tuple[LlamaConfig, Params]:
    """Reads a checkpoint of `save` directly to its devices.

    Args:
      directory: as given to `save`.
      dtype: dtype of the parameters; None for that of the checkpoint.
      shardings: maps the configuration to the tree of shardings, such as `partial(param_shardings, mesh)`. By default
        all parameters go to JAX's default device.
      num_layers: read only the first layers; None for all.

    Returns:
      The configuration and its parameters.

    Raises:
      FileNotFoundError: there is no such directory, or it contains no configuration or no parameters.
      ValueError: the parameters do not fit the configuration, or cannot be read.
    """
    directory = Path(directory).absolute()
    config = read_config(directory)
    if num_layers is not None:
        config = config.truncated(num_layers)
    if not (directory / _PARAMS).is_dir():
        raise FileNotFoundError(f"{directory} holds no Orbax checkpoint: {_PARAMS} is missing")
    local = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(directory / _PARAMS).item_metadata.tree
        except Exception as error:  # the storage layer raises errors of many types for a damaged checkpoint
            raise ValueError(f"{directory / _PARAMS} cannot be read: {_first_line(error)}") from None
        found = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(stored)}

        def target(
            path: Any, shape: tuple[int, ...], sharding: jax.sharding.Sharding
        ) -> jax.ShapeDtypeStruct:
            name = _name(path)
            got = found.pop(name, None)
            if got is None or tuple(got.shape) != shape:
                has = "is missing" if got is None else f"has shape {tuple(got.shape)}"
                raise ValueError(
                    f"{directory}: parameter {name} {has}, expected shape {shape} by config.json"
                )
            return jax.ShapeDtypeStruct(shape, dtype or got.dtype, sharding=sharding)

        shapes = param_shapes(config)
        placed = shardings(config) if shardings else jax.tree.map(lambda _: local, shapes, is_leaf=is_shape)
        targets = jax.tree.map_with_path(target, shapes, placed, is_leaf=is_shape)
        if num_layers is not None:
            unread = jax.tree.map(lambda _: ocp.PLACEHOLDER, stored["layers"][num_layers:])
            targets["layers"] += unread
            found = {name: leaf for name, leaf in found.items() if not name.startswith("layers/")}
        if found:
            raise ValueError(
                f"{directory}: parameter {min(found)} has no place in a model of this config.json"
            )
        try:
            return config, truncate(read_tree(directory / _PARAMS, targets), config.num_layers)
        except Exception as error:
            raise ValueError(f"{directory / _PARAMS} cannot be read: {_first_line(error)}") from None


def read_tree(directory: Path, wanted: Any) -> Any:
    """Reads a part of a tree that Orbax wrote, straight into its shards.

    The host holds at most about 1 GB at a time, or the largest array.

    Args:
      directory: Orbax's directory, absolute.
      wanted: a tree of `jax.ShapeDtypeStruct` with shardings. Keys of the stored tree that it lacks are not read, and
        leaves that are `ocp.PLACEHOLDER`.
    """
    args = ocp.args.PyTreeRestore(
        wanted, ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    sizes = [
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(wanted) if leaf is not ocp.PLACEHOLDER
    ]
    limit = 1 + max(sizes, default=0) // 10**9
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)) as reader:
        return reader.restore(directory, args=args)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
