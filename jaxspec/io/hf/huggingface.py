"""Finds Hugging Face models, reads them tensor by tensor, and writes them.

`io.hf.layout` maps their tensors to the leaves of jaxspec's parameters.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import mmap
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxspec.host import progress
from jaxspec.host.files import no_file, read_json, write_json
from jaxspec.host.messages import brief_errors
from jaxspec.io import tensors
from jaxspec.io.directories import foreign_weights, refuse_adapter, settled
from jaxspec.io.embedded import names_and_guess
from jaxspec.io.hf.config_json import (
    GENERATION,
    config_json,
    errors_of,
    generation_config_json,
    generation_defaults,
    read_config,
    read_trained_for,
    unapplied_settings,
)
from jaxspec.io.hf.layout import EMBED, HEAD, Layout, Source, leaves
from jaxspec.io.hf.names import missing, plainly_named, refuse_classifier
from jaxspec.io.tensors import Tensors
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params, is_shape, param_shapes
from jaxspec.model.quantisation import is_quantised
from jaxspec.model.sharding import filled

__all__ = [
    "assemble",
    "fetch_file",
    "generation_defaults",
    "load_params",
    "read_config",
    "read_trained_for",
    "resolve",
    "save",
    "stored_dtype",
    "unapplied_settings",
]

# The name of a repository on the hub.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Puts a leaf, given as its name and a host array, on its devices.
Place = Callable[[str, np.ndarray], jax.Array]
# The threads that read leaves ahead; NumPy and the system work without Python's lock.
_READERS = 4
# The sharding of each leaf by its name.
Shardings = Mapping[str, Sharding]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# Copies of the same weights in other layouts, which some repositories contain. Templates have a folder.
_LEFT_OUT = [*(f"*/{pattern}" for pattern in _PATTERNS if pattern != "*.jinja"), "consolidated*"]
_CONVERT = (
    "convert .bin weights with transformers: "
    "AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST, safe_serialization=True)"
)


def resolve(name: str | os.PathLike[str]) -> Path:
    """Returns the local path of a model: the directory `name`, or the model of that id from the Hugging Face hub.

    A model of the hub is a snapshot with safetensors or, without safetensors, the repository's only GGUF file.

    Raises:
      ValueError: the hub's model is not supported, or it has several GGUF files.
      FileNotFoundError: there is no such directory, and `name` is not a hub id ("owner/model") or the model cannot be
        fetched (unknown, private, no network).
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return settled(path)
    if path.is_file():
        raise FileNotFoundError(
            f"{text} is a file; give the directory that holds config.json and *.safetensors "
            f"({path.absolute().parent}?), or a .gguf file"
        )
    if not HUB_ID.fullmatch(text):
        raise FileNotFoundError(
            f"no directory {text!r}; give a model's directory, a hub id such as owner/model, or one of the "
            f"names {names_and_guess(text)}"
        )
    import huggingface_hub  # slow to import, and needed only here

    with on_hub(text):
        # A model that is not supported is refused before its weights are fetched.
        fetch = functools.partial(huggingface_hub.snapshot_download, text)
        found = Path(fetch(allow_patterns=["config.json"]))
        if (found / "config.json").is_file():
            read_config(found)
            found = Path(fetch(allow_patterns=_PATTERNS, ignore_patterns=_LEFT_OUT))
        missing, files = _missing_files(found), sorted(path.name for path in found.glob("*.gguf"))
        if missing:
            try:
                files = listed(text, missing)
            except FileNotFoundError:
                if not files:  # fetched earlier
                    raise
        files = [] if any(found.glob("*.safetensors")) else [one for one in files if one.endswith(".gguf")]
        if len(files) > 1:
            raise ValueError(f"it has {len(files)} GGUF files; give one, such as {text}:{files[0]}")
        if files:
            return Path(huggingface_hub.hf_hub_download(text, files[0]))
        if not (found / "config.json").is_file():
            refuse_adapter(Path(fetch(allow_patterns=["adapter_config.json"])))
        read_config(found)
        return found


def _missing_files(directory: Path) -> list[str]:
    """Returns the files of a model that its directory lacks."""
    names, index = [_SINGLE], directory / _INDEX
    if index.is_file() and not (directory / _SINGLE).is_file():
        shards = read_json(index).get("weight_map")
        names = (
            sorted({name for name in shards.values() if _is_file_name(name)})
            if isinstance(shards, dict)
            else []
        )
    return [name for name in ("config.json", *names) if not (directory / name).is_file()]


def fetch_file(repository: str, name: str) -> Path:
    """Returns the local copy of one file of a hub repository.

    Raises:
      FileNotFoundError: the file cannot be fetched.
    """
    import huggingface_hub

    with on_hub(f"{repository}:{name}"):
        return Path(huggingface_hub.hf_hub_download(repository, name))


def listed(repository: str, missing: Sequence[str]) -> list[str]:
    """Returns the files of a repository, of which the cache lacks those in `missing`.

    Raises:
      FileNotFoundError: the hub does not answer, or is not to be asked.
    """
    import huggingface_hub

    try:
        return sorted(huggingface_hub.list_repo_files(repository))
    except Exception as error:
        raise FileNotFoundError(_absent(error, missing)) from None


@contextmanager
def on_hub(name: str) -> Iterator[None]:
    """Converts the errors of the hub, the network and the cache to one line with `name`.

    The hub's bars are shown where progress is, in place of its line.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = not (progress.is_shown() or are_progress_bars_disabled())
    try:
        if silenced:
            disable_progress_bars()
        with progress.hidden():
            yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:
        failed = f"no directory {name}, and the Hugging Face hub did not give a model of that name"
        raise FileNotFoundError(f"{failed}: {_remedy(error, name.partition(':')[0])}") from None
    finally:
        if silenced:
            enable_progress_bars()


def _remedy(error: Exception, repository: str) -> str:
    """Returns what a user can do about an error of the hub, or the first line of an unknown error."""
    from huggingface_hub import constants, errors

    address = f"{constants.ENDPOINT}/{repository}"
    # huggingface_hub 2 names the first files that a snapshot lacks, and counts the others.
    named = re.search(r"missing \((.+?)(?:, \.\.\. \((\d+) more\))?\)\. ", str(error))
    lacking = [*named[1].split(", "), *[""] * int(named[2] or 0)] if named else []
    remedies = {
        errors.GatedRepoError: f"it is gated; accept the licence at {address}, then run `hf auth login`",
        errors.RepositoryNotFoundError: f"{address} is private or does not exist; check it, or run `hf auth login`",
        errors.LocalEntryNotFoundError: _absent(error, lacking),
        errors.OfflineModeIsEnabled: _absent(error),
        errors.EntryNotFoundError: f"there is no such file; {address}/tree/main has the files",
    }
    return next((remedy for kind, remedy in remedies.items() if isinstance(error, kind)), _first_line(error))


def _absent(error: Exception, files: Sequence[str] = ()) -> str:
    """Returns a line for a model or files of it that are not in the cache, while the hub does not answer."""
    from huggingface_hub import constants

    away = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no connection ({_first_line(error)})"
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    names = f"{', '.join(files[:3])}{more} {'are' if len(files) > 1 else 'is'}" if files else "it is"
    return f"{away}, and {names} not in the cache; give a directory, or go online"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")


@brief_errors()
def open_tensors(directory: Path, integers: bool = False) -> Tensors:
    """Returns the tensors of a directory's safetensors files, mapped, not read; `integers` as in `read_tensors`.

    Raises:
      ValueError: there are none, or a file is missing or not in the format; one line.
    """
    if (directory / _SINGLE).is_file():
        return tensors.read_tensors(directory / _SINGLE, integers)
    if not (directory / _INDEX).is_file():
        for name in (_SINGLE, _INDEX):
            if (directory / name).is_symlink():
                raise ValueError(f"{no_file(directory / name)}; fetch it again")
        if any(directory.glob("*.safetensors")):
            raise ValueError(
                f"{directory} has neither {_SINGLE} nor {_INDEX}; its *.safetensors have other names"
            )
        others = foreign_weights(directory)
        only = f", only {others[0]}" if others else ""
        raise ValueError(f"{directory} has no *.safetensors weights{only}; {_CONVERT}")
    files = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(_is_file_name(name) for name in files.values()):
        raise ValueError(
            f"{directory / _INDEX} has no weight_map from names of tensors to names of files; save the model again"
        )
    found = Tensors()
    for name in sorted(set(files.values())):
        if not (directory / name).is_file():
            raise ValueError(f"{directory / name} is missing, though {_INDEX} names it; fetch it again")
        found.add(tensors.read_tensors(directory / name, integers))
    return found


def _is_file_name(name: Any) -> bool:
    """Whether the name is a file name without a directory."""
    return isinstance(name, str) and name == Path(name).name and len(name) < 256 and name.isprintable()


def stored_dtype(directory: str | os.PathLike[str]) -> np.dtype:
    """Returns the stored dtype of a directory's weights: that of the embedding.

    Raises:
      ValueError: as in `load_params`.
    """
    found = plainly_named(Path(directory), open_tensors(Path(directory)))
    if EMBED not in found:
        raise ValueError(f"{directory}: {missing(EMBED, found)}")
    return found[EMBED].dtype


def _check(directory: Path, config: LlamaConfig, found: Tensors) -> None:
    """Refuses weights that do not fit `config`, before any of them is read."""
    refuse_classifier(directory, found)
    used = set()
    for _, _, sources in leaves(config):
        for source in sources:
            used.add(source.name)
            if source.name not in found:
                hint = "; is tie_word_embeddings missing in config.json?" if source.name == HEAD else ""
                problem = missing(source.name, found)
                raise ValueError(f"{directory}: {problem}, expected shape {source.shape}{hint}")
            if found[source.name].shape != source.shape:
                raise ValueError(
                    f"{directory}: tensor {source.name} has shape {found[source.name].shape}, "
                    f"expected {source.shape} by config.json"
                )
    layer, surplus, own = re.compile(r"model\.layers\.(\d+)\."), [], directory / "config.json"
    # `config` may have only the first of the model's layers.
    declared = read_json(own).get("num_hidden_layers") if own.is_file() else None
    num_layers = declared if type(declared) is int else config.num_layers
    for name in sorted(set(found) - used):
        match = layer.match(name)
        if "rotary_emb" in name:
            continue
        # An additional tensor of a used layer would change the layer's computation.
        if match and int(match[1]) < config.num_layers:
            raise ValueError(
                f"{directory}: tensor {name} has no place in a {config.model_type} of this config.json"
            )
        if int(match[1]) >= num_layers if match else name.endswith(".bias"):
            surplus.append(name)
    warn_of_surplus(directory, surplus, f"config.json has {num_layers} layers")
    head, embed = found.get(HEAD), found[EMBED]
    if config.tie_embeddings and head is not None and not np.array_equal(head, embed):
        raise ValueError(
            f"{directory}: {HEAD} differs from the embedding although config.json ties them; "
            "set tie_word_embeddings to false"
        )


def warn_of_surplus(path: Path, names: Sequence[str], expected: str) -> None:
    """Warns in one line of tensors that the model does not use, and that its metadata does not describe."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{path}: tensor {names[0]}{more} not used: {expected}; check that the weights belong to it",
            RuntimeWarning,
            stacklevel=2,
        )


def load_params(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    dtype: DTypeLike,
    place: Place | Shardings | None = None,
) -> Params:
    """Reads the parameters of a model leaf by leaf: the host holds a few leaves, or one shard, beside the result.

    Args:
      directory: contains `model.safetensors`, or shards and their index.
      config: from `read_config`; one with fewer layers reads only the first layers.
      dtype: dtype of the parameters, for any dtype of the files.
      place: puts a leaf on its devices, e.g. sharded over a mesh. Its arguments are the leaf's name joined by `/`, such
        as `layers/0/attention/qkv`, and the host array in `dtype`, which it may keep. Or the shardings by these names:
        then each shard is read straight to its device. By default the array goes to JAX's default device.

    Raises:
      ValueError: a tensor is missing, truncated or has another shape, or there are no safetensors; one line.
    """
    directory = Path(directory)
    found = plainly_named(directory, open_tensors(directory))
    _check(directory, config, found)
    with errors_of(directory):
        return assemble(config, np.dtype(dtype), lambda source: found[source.name], place)


def assemble(
    config: LlamaConfig,
    dtype: np.dtype,
    fetch: Callable[[Source], np.ndarray],
    place: Place | Shardings | None = None,
    layout: Layout | None = None,
) -> Params:
    """Returns parameters assembled leaf by leaf from tensors that are fetched one at a time; see `load_params`.

    Args:
      config: the model's configuration.
      dtype: dtype of the parameters.
      fetch: returns a tensor of any dtype, with its source's shape; called in several threads.
      place: as in `load_params`.
      layout: as in `layout.sources_of`.
    """
    placed = place_leaves(leaves(config, layout), dtype, fetch, place)
    params: Params = jax.tree.unflatten(_structure(config), placed)
    return params


def place_leaves(
    entries: Iterable[tuple[str, tuple[int, ...], list[Source]]],
    dtype: np.dtype,
    fetch: Callable[[Source], np.ndarray],
    place: Place | Shardings | None = None,
) -> list[jax.Array]:
    """Returns leaves, in order, assembled from tensors that threads fetch a few leaves ahead; see `assemble`.

    Args:
      entries: name, shape and sources of each leaf, as from `io.hf.layout.leaves`.
      dtype, fetch, place: as in `assemble`.
    """
    if isinstance(place, Mapping):
        return [_filled(place[leaf], shape, dtype, sources, fetch) for leaf, shape, sources in entries]
    placed = []

    def fill(host: np.ndarray, sources: list[Source]) -> np.ndarray:
        for source in sources:
            part = host.reshape(source.split)[source.index]
            tensors.copy_finite(source.name, source.part(fetch(source)).reshape(part.shape), part)
        return host

    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        reading: deque[tuple[str, concurrent.futures.Future[np.ndarray]]] = deque()

        def take() -> None:
            leaf, filled = reading.popleft()
            host = filled.result()
            array = jax.device_put(host) if place is None else place(leaf, host)
            # Transfers are asynchronous; without waiting, host copies of many leaves would accumulate.
            placed.append(jax.block_until_ready(array))

        try:
            for leaf, shape, sources in entries:
                reading.append((leaf, readers.submit(fill, _empty(shape, dtype), sources)))
                if len(reading) > _READERS:
                    take()
            while reading:
                take()
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    return placed


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array in pages of its own: aligned, so that a CPU device takes it without a copy.

    NumPy would ask for huge pages, which the system may have to make free first.
    """
    count = math.prod(shape)
    if sys.platform == "win32" or not count:
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


def _filled(
    where: Sharding,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sources: Iterable[Source],
    fetch: Callable[[Source], np.ndarray],
) -> jax.Array:
    """Returns a leaf that is read shard by shard; its tensors, if they are not mapped, are released at the end."""
    parts = [(source, source.part(fetch(source))) for source in sources]
    return filled(where, shape, functools.partial(_shard, shape, dtype, parts))


def _shard(
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: Iterable[tuple[Source, np.ndarray]],
    index: tuple[slice, ...],
) -> np.ndarray:
    """Returns the part of a leaf at `index`, from the leaf's sources and their tensors, without the whole leaf."""
    wanted = [range(size)[one] for size, one in zip(shape, index, strict=True)]
    host = np.empty([len(rows) for rows in wanted], dtype)
    for source, tensor in parts:
        covered = _covered(shape, source)
        there, here = [], []
        for rows, cover in zip(wanted, covered, strict=True):
            # The source's rows that are wanted: those from the first position at or after each bound.
            first, last = (
                min(len(cover), max(0, -(-(bound - cover.start) // cover.step)))
                for bound in (rows.start, rows.stop)
            )
            there.append(slice(first, last))
            begin = cover.start + first * cover.step - rows.start
            here.append(slice(begin, begin + (last - first) * cover.step, cover.step))
        if all(rows.start < rows.stop for rows in there):
            numbers = tensor.reshape([len(cover) for cover in covered])[tuple(there)]
            tensors.copy_finite(source.name, numbers, host[tuple(here)])
    return host


def _covered(shape: tuple[int, ...], source: Source) -> list[range]:
    """Returns the positions along each axis of a leaf that a source fills, at equal distances."""
    covered, split = [], list(source.split)
    index = [*source.index, *[slice(None)] * (len(split) - len(source.index))]
    for size in shape:
        sizes, cuts = [split.pop(0)], [index.pop(0)]
        while math.prod(sizes) < size:
            sizes.append(split.pop(0))
            cuts.append(index.pop(0))
        found = np.arange(size).reshape(sizes)[tuple(cuts)].ravel()
        step = int(found[1] - found[0]) if len(found) > 1 else 1
        covered.append(range(int(found[0]), int(found[-1]) + 1, step))
    return covered


def _structure(config: LlamaConfig) -> Any:
    return jax.tree.structure(param_shapes(config), is_leaf=is_shape)


def save(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: Params,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
    generation: Mapping[str, Any] | None = None,
    trained_for: TrainedFor = TrainedFor(),
) -> None:
    """Writes a directory that `load_params` and transformers read: config, generation config, safetensors.

    Each file is written whole or not at all, the configuration last. Weights of an earlier save are removed.

    Args:
      directory: created if missing.
      config: the model's configuration.
      params: its parameters.
      dtype: dtype of the files; None for that of the embedding.
      max_shard_bytes: a larger model is split into several files with an index.
      generation: sampling defaults for `generation_config.json`, as from `generation_defaults`.
      trained_for: what the model was trained for, as from `read_trained_for`.

    Raises:
      ValueError: the parameters do not fit `config`, or `config.model_type` cannot express it.
    """
    directory = Path(directory)
    if any(is_quantised(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_quantised)):
        raise ValueError("the parameters are quantised; give those they were made of, loaded without weights")
    dtype = np.dtype(params["embed"].dtype if dtype is None else dtype)
    if jax.tree.structure(params) != _structure(config):
        raise ValueError("the parameters have other leaves than the configuration; give a matching pair")
    placed: dict[str, list[tuple[Any, Source]]] = {}
    for array, (leaf, shape, sources) in zip(jax.tree.leaves(params), leaves(config), strict=True):
        if array.shape != shape:
            raise ValueError(
                f"parameter {leaf} has shape {array.shape}, expected {shape} by the configuration"
            )
        for source in sources:
            placed.setdefault(source.name, []).append((array, source))
    content = config_json(config, dtype.name, trained_for)  # refused before anything is written

    def fetch(name: str) -> np.ndarray:
        tensor = np.empty(placed[name][0][1].shape, dtype)
        for array, source in placed[name]:
            part = source.part(tensor)
            part[...] = np.asarray(array).reshape(source.split)[source.index].reshape(part.shape)
        return tensor

    directory.mkdir(parents=True, exist_ok=True)
    shapes = {name: parts[0][1].shape for name, parts in placed.items()}
    shards = _shards(shapes, dtype, max_shard_bytes)
    files = [_SINGLE]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shapes in zip(files, shards, strict=True):
        tensors.write_tensors(directory / file, shapes, fetch, dtype)
    if len(shards) > 1:
        total = sum(int(np.prod(shape)) for shapes in shards for shape in shapes.values()) * dtype.itemsize
        weight_map = {name: file for file, shapes in zip(files, shards, strict=True) for name in shapes}
        write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(_INDEX)
    stale = {_SINGLE, _INDEX} | {path.name for path in directory.glob("model-*-of-*.safetensors")}
    for name in stale - set(files):
        (directory / name).unlink(missing_ok=True)
    write_json(directory / GENERATION, generation_config_json(config, generation))
    write_json(directory / "config.json", content)


def _shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, limit: int
) -> list[dict[str, tuple[int, ...]]]:
    """Splits tensors, in order, into files of at most `limit` bytes; a larger tensor gets a file of its own."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards
