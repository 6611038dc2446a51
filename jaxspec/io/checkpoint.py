"""Finds and reads a model's files in either format: a Hugging Face directory or a GGUF file.

`io.tokenizers.tokenizer` reads their tokenizers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.host.messages import brief_errors
from jaxspec.io.directories import settled
from jaxspec.io.gguf import gguf
from jaxspec.io.gguf.container import SUFFIX, is_gguf
from jaxspec.io.hf import huggingface
from jaxspec.io.hf.huggingface import Place, Shardings
from jaxspec.io.trained_for import TrainedFor
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params

_HUB_FILE = re.compile(rf"([\w-][\w.-]*/[\w-][\w.-]*):([^:]+{re.escape(SUFFIX)})")


@brief_errors()
def resolve(name: str | os.PathLike[str]) -> Path:
    """Returns the local path of a model: a GGUF file, or a directory for the functions below.

    Args:
      name: a `.gguf` file; a directory in Hugging Face's layout, or with one `.gguf` file as its only weights; a hub id
        (`owner/model`) of either; or `owner/model:FILE.gguf`.

    Raises:
      ValueError: there are several GGUF files to choose from, or the hub's model is not supported.
      FileNotFoundError: there is no such file or directory, and no such model on the hub.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if is_gguf(path):
        return path
    on_hub = None if path.exists() else _HUB_FILE.fullmatch(text)
    if on_hub:
        return huggingface.fetch_file(*on_hub.groups())
    if path.suffix == SUFFIX and not path.exists():
        raise FileNotFoundError(
            f"no file {text}; give a model's .gguf file, or owner/model:FILE.gguf of the hub"
        )
    if not text or not path.is_dir():
        return huggingface.resolve(text)
    path = settled(path)
    return _only_gguf(path) or path


def _only_gguf(directory: Path) -> Path | None:
    """Returns the GGUF file of a directory without other weights; None if there is none."""
    if any(directory.glob("*.safetensors")):
        return None
    files = sorted(directory.glob("*" + SUFFIX))
    if len(files) > 1:
        raise ValueError(
            f"{directory} holds {len(files)} GGUF files; give one of them: {', '.join(f.name for f in files)}"
        )
    return files[0] if files else None


def directory_of(path: Path) -> Path:
    """Returns the directory for the files of a model's methods: the model's, or that of its GGUF file."""
    return path.parent if is_gguf(path) else path


@brief_errors()
def read_config(path: Path) -> LlamaConfig:
    """See `huggingface.read_config` and `gguf.read_config`."""
    return gguf.read_config(path) if is_gguf(path) else huggingface.read_config(path)


@brief_errors()
def read_trained_for(path: Path, config: LlamaConfig) -> TrainedFor:
    """See `huggingface.read_trained_for`; a GGUF file does not record it."""
    return TrainedFor() if is_gguf(path) else huggingface.read_trained_for(path, config)


@brief_errors()
def generation_defaults(path: Path) -> dict[str, Any]:
    """See `huggingface.generation_defaults`; a GGUF file has none."""
    return {} if is_gguf(path) else huggingface.generation_defaults(path)


@brief_errors()
def unapplied_settings(path: Path) -> list[str]:
    """See `huggingface.unapplied_settings`; a GGUF file has none."""
    return [] if is_gguf(path) else huggingface.unapplied_settings(path)


@brief_errors()
def stored_dtype(path: Path) -> np.dtype:
    """See `huggingface.stored_dtype` and `gguf.stored_dtype`."""
    return gguf.stored_dtype(path) if is_gguf(path) else huggingface.stored_dtype(path)


@brief_errors()
def load_params(
    path: Path, config: LlamaConfig, dtype: Any, place: Place | Shardings | None = None
) -> Params:
    """See `huggingface.load_params` and `gguf.load_params`."""
    load = gguf.load_params if is_gguf(path) else huggingface.load_params
    return load(path, config, dtype, place)
