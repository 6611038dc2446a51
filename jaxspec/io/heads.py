"""Heads in the layouts in which they are published, and in our own, which is theirs.

What a directory holds is told by the names of its tensors; `dflash_head`, `eagle_head`, `kangaroo_head`, `medusa_head`
and `hydra_head` say what they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.io import (
    dflash_head,
    eagle_head,
    huggingface,
    hydra_head,
    kangaroo_head,
    medusa_head,
    tensors,
    torch_file,
)
from jaxspec.io.directories import settled
from jaxspec.io.embedded import embedded_files
from jaxspec.io.files import read_json
from jaxspec.io.head_rows import refitted
from jaxspec.io.head_tensors import Entry, Head
from jaxspec.io.hf_config import errors_of
from jaxspec.io.hf_values import section
from jaxspec.io.messages import brief_errors, shown
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads import AnyHead

# Where a target's own heads lie beside it, each in a directory with the name of its method.
HEADS_NAME = "heads"
# Of two that recognise the same names the first one is right.
_KINDS = {
    "dflash": dflash_head,
    "eagle": eagle_head,
    "eagle3": eagle_head,
    "kangaroo": kangaroo_head,
    "hydra": hydra_head,
    "medusa": medusa_head,
}
# Names that authors have given to the file of a head's tensors.
_SAFE = ("medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
_PICKLED = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin")


def head_name(kind: str) -> str:
    """The name of the config of a target's own head of this kind, in the directory of the target's files."""
    return f"{HEADS_NAME}/{kind}/config.json"


def embedded_heads(target: str) -> dict[str, Path]:
    """Returns the heads that are distributed with jaxspec for the target with this fingerprint, by kind."""
    found: dict[str, Path] = {}
    for config in embedded_files(f"{HEADS_NAME}/*/config.json"):
        own = section(read_json(config), "jaxspec")
        if own.get("target") == target:
            found.setdefault(str(own.get("kind")), config.parent)
    return found


def resolve(name: str | os.PathLike[str]) -> Path:
    """The local files of a head: the directory `name` itself, or what the Hugging Face hub has by that id.

    Raises:
      FileNotFoundError: there is no such directory, and `name` is no hub id or the hub does not give it.
    """
    text = os.fspath(name)
    if text and Path(text).expanduser().is_dir():
        return settled(Path(text).expanduser())
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text):
        raise FileNotFoundError(
            f"no directory {text!r}; give a head's directory, or a hub id such as owner/head"
        )
    import huggingface_hub  # slow to import, and needed only here

    with huggingface.on_hub(text):
        found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", "*.safetensors"]))
        if not any(found.glob("*.safetensors")):
            found = Path(huggingface_hub.snapshot_download(text, allow_patterns=["*.json", *_PICKLED]))
    return found


@brief_errors()
def read_head(directory: str | os.PathLike[str], target: LlamaConfig, num_tokens: int | None = None) -> Head:
    """The head in a directory, checked to fit a target.

    Args:
      directory: where it is.
      target: the model that verifies.
      num_tokens: number of tokens of the target's tokenizer. A head with other rows than the target is fitted to it if
        the rows differ only beyond these tokens, see `head_rows`. None: such a head is refused.

    Raises:
      FileNotFoundError: there is no `config.json`, or no file of tensors.
      ValueError: it is no head that is known, or none for such a target, or a tensor is missing, of another shape or
        without a place; one line.
    """
    directory = Path(directory)
    content: Mapping[str, Any] = read_json(directory / "config.json")
    found = _open(directory)
    rows = target.vocab_size
    if num_tokens is not None:
        content, found, rows = refitted(content, found, rows, num_tokens)
    names = {*found, *found.left_out}
    kind = next((kind for kind in _KINDS.values() if kind.recognises(names)), None)
    if kind is None:
        if any(name.endswith("layers.0.self_attn.q_proj.weight") for name in names):
            raise ValueError(
                f"{directory} is a whole model, not a head; draft with it by method='draft-model'"
            )
        some = ", ".join(sorted(names)[:3])
        raise ValueError(
            f"{directory} is no head of EAGLE, DFlash, Kangaroo, Medusa or Hydra by its tensors ({some}, …)"
        )
    head: Head = kind.read(directory, content, found, target)
    with errors_of(directory / "config.json"):
        trained_for = section(content, "jaxspec").get("target")
        if trained_for is not None and not isinstance(trained_for, str):
            raise ValueError(f"jaxspec.target is {shown(trained_for)}; expected the fingerprint of a model")
    return dataclasses.replace(head, target=trained_for, rows=rows)


def head_leaves(config: AnyHead) -> list[Entry]:
    """Name, shape and sources of every leaf of a head, in the order of the tree `config.shapes`.

    Tensors of these names, and of repeated blocks as many as there are leaves, are read by `read_head`.
    """
    module: Any = _KINDS[config.kind]
    return list(module.entries(config))


def _open(directory: Path) -> Tensors:
    """The tensors of the safetensors files, else of a file of PyTorch."""
    for name in _SAFE:
        if (directory / name).is_file():
            return tensors.read(directory / name, integers=True)
    if not any(directory.glob("*.safetensors")):
        for name in _PICKLED:
            if (directory / name).is_file():
                return torch_file.read(directory / name)
        raise FileNotFoundError(
            f"{directory} has no tensors of a head; expected *.safetensors or one of {', '.join(_PICKLED)}"
        )
    return huggingface.open_tensors(directory, integers=True)
