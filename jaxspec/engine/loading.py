"""From a directory or a GGUF file to arrays on a device or a mesh."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.io import checkpoint
from jaxspec.io.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.sharding import param_shardings

# The embedded model that serves where none is named.
EMBEDDED = "large"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def embedded_model(name: str = EMBEDDED) -> Path:
    """The directory of a model that comes with jaxspec.

    Raises:
      FileNotFoundError: no model of this name comes with it.
    """
    here = _embedded(name)
    if here is None:
        raise FileNotFoundError(f"no model {name!r} comes with this installation; install jaxspec again")
    return here


def find_model(model: str | os.PathLike | None) -> Path:
    """The directory or GGUF file of a model: itself, an embedded one by its name, or what a hub id names.

    Raises:
      FileNotFoundError, ValueError: there is none; see `io.checkpoint.resolve`.
    """
    if model is None:
        return embedded_model()
    name = os.fspath(model)
    embedded = None if Path(name).exists() or not re.fullmatch(r"[\w-]+", name) else _embedded(name)
    return embedded or checkpoint.resolve(name)


def _embedded(name: str) -> Path | None:
    package = Path(__file__).parents[1]
    for parent in (package, package.parent):  # a wheel, a checkout
        if (parent / "checkpoints" / name / "config.json").is_file():
            return parent / "checkpoints" / name
    return None


def resolve_placement(
    dtype: str | None, device: str | None, mesh: Mesh | None = None
) -> tuple[jax.Device, np.dtype]:
    """The device and dtype that these names, or their absence, mean; see `load`.

    Raises:
      ValueError: no such device or dtype.
    """
    try:
        place = jax.devices(device)[0] if mesh is None else mesh.devices.flat[0]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no device {device or 'for JAX'}: {reason}") from None
    name = dtype or ("float32" if place.platform == "cpu" else "bfloat16")
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; give one of {', '.join(DTYPES)}")
    return place, np.dtype(DTYPES[name])


def find_tokenizer(directory: Path, chat_template: str | os.PathLike | None = None) -> Tokenizer | None:
    """The tokenizer of a directory or GGUF file; None if it has none and nothing was asked of it."""
    if chat_template is None and not has_tokenizer(directory):
        return None
    return load_tokenizer(directory, Path(chat_template) if chat_template else None)


def place_params(
    directory: Path, config: LlamaConfig, dtype: np.dtype, device: jax.Device, mesh: Mesh | None
) -> Params:
    if mesh is None:
        return checkpoint.load_params(
            directory, config, dtype, lambda name, host: jax.device_put(host, device)
        )
    flat, _ = jax.tree.flatten_with_path(param_shardings(mesh, config))
    shardings = {jax.tree_util.keystr(path, simple=True, separator="/"): sharding for path, sharding in flat}
    return checkpoint.load_params(
        directory, config, dtype, lambda name, host: jax.device_put(host, shardings[name])
    )
