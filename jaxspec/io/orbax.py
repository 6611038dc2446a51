"""Models as Orbax checkpoints: for restarts and meshes, where every process writes and reads its own part.

A directory holds `params`, Orbax's, and beside it `config.json` and `generation_config.json` as in a Hugging Face
directory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.io.extras import require
from jaxspec.io.files import is_full, write_json
from jaxspec.io.hf_config import GENERATION, config_json, generation_json, read_config
from jaxspec.io.huggingface import ORBAX_PARAMS as _PARAMS
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes
from jaxspec.model.sharding import without_copies

require("train", "orbax.checkpoint")
import orbax.checkpoint as ocp  # noqa: E402  after the check, whose error says what to install


def save(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: Params,
    generation: Mapping[str, Any] | None = None,
    exits: Sequence[int] = (),
) -> None:
    """Writes the parameters and, once they are whole, the configuration; replaces an earlier save.

    Args:
      directory: made if missing.
      config: of the model.
      params: its parameters.
      generation, exits: as in `huggingface.save`.

    Raises:
      ValueError: `config.model_type` cannot express the configuration.
      OSError: the disk is full.
    """
    directory = Path(directory).absolute()  # Orbax takes no other
    content = config_json(config, jnp.dtype(params["embed"].dtype).name, exits)
    directory.mkdir(parents=True, exist_ok=True)
    with _full_disks(directory), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / _PARAMS, without_copies(config, params), force=True)
    write_json(directory / GENERATION, generation_json(config, generation))
    write_json(directory / "config.json", content)


@contextlib.contextmanager
def _full_disks(directory: Path) -> Iterator[None]:
    """Raises Python's error for a full disk. Orbax itself logs a traceback per thread and raises another error."""
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
) -> tuple[LlamaConfig, Params]:
    """Reads what `save` wrote, straight to where it belongs.

    Args:
      directory: as given to `save`.
      dtype: of the parameters; None for that of the checkpoint.
      shardings: makes the tree of shardings of the configuration that was read, as
        `partial(param_shardings, mesh)` does. By default all goes to JAX's default device.

    Returns:
      the configuration and its parameters.

    Raises:
      FileNotFoundError: no such directory, no configuration or no parameters in it.
      ValueError: the parameters are not those of the configuration, or cannot be read.
    """
    directory = Path(directory).absolute()
    config = read_config(directory)
    if not (directory / _PARAMS).is_dir():
        raise FileNotFoundError(f"{directory} holds no Orbax checkpoint: {_PARAMS} is missing")
    local = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(directory / _PARAMS).item_metadata.tree
        except Exception as error:  # whatever the storage layer raises for a damaged checkpoint
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
        if found:
            raise ValueError(
                f"{directory}: parameter {min(found)} has no place in a model of this config.json"
            )
        try:
            return config, checkpointer.restore(directory / _PARAMS, targets)
        except Exception as error:
            raise ValueError(f"{directory / _PARAMS} cannot be read: {_first_line(error)}") from None


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
