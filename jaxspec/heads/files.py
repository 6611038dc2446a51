"""Finds and reads heads in the layouts in which they are published.

The names of the tensors tell the head type; `jaxspec/heads/TYPE/files.py` describes its layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.heads import torch_file
from jaxspec.heads.kinds import known
from jaxspec.heads.padding import refitted
from jaxspec.heads.tensors import Entry, Head
from jaxspec.host.files import identity, read_json
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io import tensors
from jaxspec.io.directories import settled
from jaxspec.io.embedded import embedded_files
from jaxspec.io.hf import huggingface
from jaxspec.io.hf.config_json import errors_of
from jaxspec.io.hf.values import section
from jaxspec.io.methods.acceptance_file import NAME as ACCEPTANCE_NAME
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.head import HeadConfig

# Where a target's own heads lie beside it, each in a directory with the name of its method.
HEADS_NAME = "heads"
# Names that authors have given to the file of a head's tensors.
_SAFE = ("*_lm_head.safetensors", "adapter_model.safetensors")
_PICKLED = ("*_lm_head.pt", "pytorch_model.bin")


def head_name(kind: str) -> str:
    """The name of the config of a target's own head of this kind, in the directory of the target's files."""
    return f"{HEADS_NAME}/{kind}/config.json"


def embedded_head(kind: str, fingerprint: str, config: LlamaConfig) -> Path | None:
    """Returns the head of a type that is distributed with jaxspec for a target; None if there is none.

    A head that was trained for this target comes first. A head of a target with another fingerprint is returned if its
    shapes fit and its acceptance is recorded, so that it can be checked: another quantisation of a model has another
    fingerprint, and the same head drafts for it.

    Args:
      kind: the head type.
      fingerprint: the target's.
      config: its configuration.
    """
    other = None
    for path in embedded_files(f"{HEADS_NAME}/*/config.json"):
        head, status = path.parent, identity(path.parent)
        found, target = _described(head, status)
        if found != kind:
            continue
        if target == fingerprint:
            return head
        if other is None and (head / ACCEPTANCE_NAME).is_file() and _fits(head, status, config):
            other = head
    return other


@functools.cache
def _described(directory: Path, status: tuple[Any, ...]) -> tuple[Any, str | None]:
    """Returns a head's type and its target's fingerprint; `status` is the identity of its files."""
    return section(read_json(directory / "config.json"), "jaxspec").get("kind"), trained_for(directory)


@functools.cache
def _fits(directory: Path, status: tuple[Any, ...], target: LlamaConfig) -> bool:
    """Whether a head's tensors fit a target; `status` is the identity of its files."""
    try:
        read_head(directory, target)
    except ValueError:
        return False
    return True


def trained_for(directory: Path) -> str | None:
    """Returns the fingerprint of the model that a head was trained for; None if it is not recorded."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    with errors_of(path):
        target = section(read_json(path), "jaxspec").get("target")
        if target is not None and not isinstance(target, str):
            raise ValueError(f"jaxspec.target is {shown(target)}; expected the fingerprint of a model")
    return target


def resolve(name: str | os.PathLike[str]) -> Path:
    """The local files of a head: the directory `name` itself, or what the Hugging Face hub has by that id.

    Raises:
      FileNotFoundError: there is no such directory, and `name` is no hub id or the hub does not give it.
    """
    text = os.fspath(name)
    if text and Path(text).expanduser().is_dir():
        return settled(Path(text).expanduser())
    if not huggingface.HUB_ID.fullmatch(text):
        raise FileNotFoundError(
            f"no directory {text!r}; give a head's directory, or a hub id such as owner/head"
        )
    import huggingface_hub  # slow to import, and needed only here

    with huggingface.on_hub(text):
        # An adapter is fetched without the model in the same repository.
        found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", "adapter/*"]))
        if (adapter := _adapter(found)) != found:
            return adapter
        found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", "*.safetensors"]))
        if not any(found.glob("*.safetensors")):
            found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", *_PICKLED]))
            if not any(any(found.glob(name)) for name in _PICKLED):
                huggingface.listed(text, ["*.safetensors"])
    return found


@brief_errors()
def read_head(directory: str | os.PathLike[str], target: LlamaConfig, num_tokens: int | None = None) -> Head:
    """The head in a directory, checked to fit a target.

    Args:
      directory: where it is.
      target: the model that verifies; the head's own cache has its `kv_cache_dtype`.
      num_tokens: number of tokens of the target's tokenizer. A head with other rows than the target is fitted to it if
        the rows differ only beyond these tokens, see `head_rows`. None: such a head is refused.

    Raises:
      FileNotFoundError: there is no `config.json`, or no file of tensors.
      ValueError: it is no head that is known, or none for such a target, or a tensor is missing, of another shape or
        without a place; one line.
    """
    directory = Path(directory)
    directory = _adapter(directory)
    config = directory / "adapter_config.json"
    content: Mapping[str, Any] = read_json(config if config.is_file() else directory / "config.json")
    found = _open(directory)
    rows = target.vocab_size
    if num_tokens is not None:
        content, found, rows = refitted(content, found, rows, num_tokens)
    names = {*found, *found.left_out}
    format = next((kind.format for kind in known().values() if kind.format.recognises(names)), None)
    if format is None:
        if any(name.endswith("layers.0.self_attn.q_proj.weight") for name in names):
            raise ValueError(
                f"{directory} is a whole model, not a head; draft with it by method='draft-model'"
            )
        some = ", ".join(sorted(names)[:3])
        raise ValueError(
            f"{directory} is no head by its tensors ({some}, …); the known types are {', '.join(known())}"
        )
    head = format.read(directory, content, found, target)
    made: Any = head.config
    for name, value in vars(made).items():
        if isinstance(value, LlamaConfig):
            block = dataclasses.replace(value, kv_cache_dtype=target.kv_cache_dtype)
            made = dataclasses.replace(made, **{name: block})
    return dataclasses.replace(head, config=made, target=trained_for(directory), rows=rows)


def _adapter(directory: Path) -> Path:
    """Returns the directory `adapter` of a model that is published with one, else the directory itself."""
    inner = directory / "adapter"
    return inner if (inner / "adapter_config.json").is_file() else directory


def head_leaves(config: HeadConfig) -> list[Entry]:
    """Returns name, shape and sources of every leaf of a head, in the order of the tree `config.shapes`.

    `read_head` reads tensors of these names.
    """
    return list(known()[config.kind].format.entries(config))


def _open(directory: Path) -> Tensors:
    """The tensors of the safetensors files, else of a file of PyTorch."""
    for file in (file for pattern in _SAFE for file in directory.glob(pattern)):
        return tensors.read_tensors(file, integers=True)
    if any(directory.glob("*.safetensors")):
        return huggingface.open_tensors(directory, integers=True)
    for file in (file for pattern in _PICKLED for file in directory.glob(pattern)):
        return torch_file.read_torch(file)
    raise FileNotFoundError(
        f"{directory} has no tensors of a head; expected *.safetensors or one of {', '.join(_PICKLED)}"
    )
