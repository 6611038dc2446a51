"""From a directory or a GGUF file to arrays on a device or a mesh."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.io import checkpoint, processes
from jaxspec.io.embedded import embedded_model, embedded_names
from jaxspec.io.mesh_text import parse_mesh
from jaxspec.io.messages import shown
from jaxspec.io.method_files import Sampled, sampled_rows
from jaxspec.io.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantised import is_multiplied, quantised, sharding_of
from jaxspec.model.sharding import RULES, automatic, left_whole, param_shardings, put, spread_config

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# What weights may be held as beside what is computed in, and the bits of it.
WEIGHTS = {"int8": 8}


def find_model(model: str | os.PathLike[str] | None) -> Path:
    """The directory or GGUF file of a model: itself, an embedded one by its name, or what a hub id names.

    Raises:
      FileNotFoundError, ValueError: there is none; see `io.checkpoint.resolve`.
    """
    if model is None:
        return embedded_model()
    name = os.fspath(model)
    if name in embedded_names() and not Path(name).exists():
        return embedded_model(name)
    return checkpoint.resolve(name)


def resolve_placement(
    dtype: str | None, device: str | None, mesh: Mesh | None = None
) -> tuple[jax.Device, np.dtype]:
    """The device and dtype that these names, or their absence, mean; see `load`.

    Raises:
      ValueError: no such device or dtype.
    """
    here = jax.local_devices(backend=devices_of(device)[0].platform) if mesh is None else mesh.devices.flat
    place = here[0]
    name = dtype or ("float32" if place.platform == "cpu" else "bfloat16")
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; give one of {', '.join(DTYPES)}")
    return place, np.dtype(DTYPES[name])


def resolve_weights(weights: str | None) -> int | None:
    """The bits of the weights that are meant; None for those of the dtype.

    Raises:
      ValueError: no such weights.
    """
    if weights is None:
        return None
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ValueError(
            f"unknown weights {shown(weights)}; give {' or '.join(WEIGHTS)}, or leave it out for those of dtype"
        )
    return WEIGHTS[weights]


class NoDevice(ValueError):
    """JAX finds no device of the requested kind."""


def devices_of(device: str | None) -> list[jax.Device]:
    """The devices of this kind, or of JAX's default one.

    Raises:
      NoDevice: there are none; one line, which names `JAX_PLATFORMS` if that restricts the kinds.
    """
    try:
        return jax.devices(device)
    except (RuntimeError, AssertionError) as error:  # JAX asserts that each platform has a plugin
        reason = (str(error).strip() or "its plugin is missing").splitlines()[0]
        reason = reason.partition(" (set JAX_PLATFORMS")[0].rstrip(".")[:140]
        if platforms := jax.config.jax_platforms:  # type: ignore[attr-defined]
            raise NoDevice(
                f"there is no device {device or 'for JAX'} with JAX_PLATFORMS={platforms}: {reason}; install its "
                "plugin, such as jax[cuda13] or jax[tpu], or give another JAX_PLATFORMS"
            ) from None
        raise NoDevice(f"there is no device {device or 'for JAX'}: {reason}") from None


def resolve_mesh(mesh: Mesh | str | None, device: str | None) -> Mesh | None:
    """The mesh that is given, or written out, over the first devices of this kind; None where that is one device.

    Raises:
      ValueError: it is none, or has more places than there are devices.
    """
    if isinstance(mesh, str):
        axes, devices = parse_mesh(mesh), devices_of(device)
        places = math.prod(axes.values())
        if places > len(devices):
            raise ValueError(
                f"mesh is {shown(mesh)}, which has {places} places, and JAX sees {len(devices)} "
                f"{devices[0].platform} device{'s' if len(devices) > 1 else ''}; give data × model of at most that"
            )
        if processes.several() and places != len(devices):
            raise ValueError(
                f"mesh is {shown(mesh)}, which has {places} places, and the {jax.process_count()} processes have "
                f"{len(devices)} devices, all of which take part; give data × model of just that"
            )
        if places == 1:
            return None
        return Mesh(np.array(devices[:places]).reshape(tuple(axes.values())), tuple(axes))
    if mesh is None:
        return None
    check_mesh(mesh)
    return automatic(mesh)


def check_mesh(mesh: Any) -> None:
    """Refuses what is no mesh, and axes that no array would be spread over.

    Raises:
      ValueError: an axis is called neither `data` nor `model`.
    """
    names = getattr(mesh, "axis_names", None)
    if names is None:
        raise ValueError(
            f"mesh is {type(mesh).__name__}; give data=2,model=4 or the like, or a jax.sharding.Mesh with these axes"
        )
    if not set(names) <= set(RULES.values()):
        raise ValueError(
            f"mesh has the axes {', '.join(map(str, names))}; name them data (rows) and model (heads)"
        )


def fit_to_mesh(mesh: Mesh, config: LlamaConfig, name: str, *, target: bool = True) -> LlamaConfig:
    """The configuration as a mesh holds it; warns of what does not divide, so that each device has it whole.

    Args:
      mesh: over which the model will be spread.
      config: as it was read.
      name: of the model, for messages.
      target: whether it is refused where nothing divides; a draft is small.

    Raises:
      ValueError: it is, and there is nothing to spread along `model`.
    """
    config = spread_config(mesh, config)
    found = left_whole(mesh, config)
    whole = [words for words, is_whole in found.items() if is_whole]
    places = f"mesh has {mesh.shape.get('model', 1)} places along model"
    if target and len(whole) == len(found):
        raise ValueError(
            f"{places}, and {name} could be spread over none of them: they divide neither {', nor '.join(whole)}; give "
            "a number that divides one of these"
        )
    if whole:
        message = f"{places}, which do not divide {' and '.join(whole)} of {name}; each device has the whole of that"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return config


def find_tokenizer(directory: Path, chat_template: str | os.PathLike[str] | None = None) -> Tokenizer | None:
    """The tokenizer of a directory or GGUF file; None if it has none and nothing was asked of it."""
    if chat_template is None and not has_tokenizer(directory):
        return None
    return load_tokenizer(directory, Path(chat_template) if chat_template else None)


def unlisted_end(tokenizer: Tokenizer, config: LlamaConfig) -> str | None:
    """Returns a warning if the tokenizer's end token does not end a text: the model may continue after its answer."""
    token = tokenizer.special_tokens.get("eos_token")
    index = None if token is None else tokenizer.special_id(token)
    if index is None or index in config.eos_token_ids:
        return None
    listed = ", ".join(map(str, config.eos_token_ids[:8])) or "none"
    return (
        f"the tokenizer's end token {shown(token)} ({index}) is not among the model's end tokens ({listed}): texts "
        f"go on past it; give stop={shown(token)}, or add it to eos_token_id in generation_config.json"
    )


def place_params(
    directory: Path,
    config: LlamaConfig,
    dtype: np.dtype,
    device: jax.Device,
    mesh: Mesh | None,
    bits: int | None = None,
) -> tuple[Params, Sampled | None]:
    """A model's parameters, read leaf by leaf to where they belong.

    With `bits`, each matrix is quantised there before the next is read: of what is not quantised there is never more
    than one leaf. The second result is then what was read of each leaf for the model's fingerprint, else None.
    """
    flat: list[Any] = []
    if mesh is not None:
        flat, _ = jax.tree.flatten_with_path(param_shardings(mesh, config))
    shardings = {jax.tree_util.keystr(path, simple=True, separator="/"): sharding for path, sharding in flat}
    sampled: dict[str, list[np.ndarray]] = {}

    def place(name: str, host: np.ndarray) -> Any:
        leaf = put(host, shardings.get(name, device))
        if bits is None:
            return leaf
        sampled[name] = sampled_rows(host)
        if not is_multiplied(config, name):
            return leaf
        small = quantised(leaf, bits)
        return small if mesh is None else put(small, sharding_of(shardings[name], host.ndim, bits))

    params = checkpoint.load_params(directory, config, dtype, place)
    return params, sampled if bits is not None else None
