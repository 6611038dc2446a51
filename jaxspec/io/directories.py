"""Directories that resemble those of a model or a head: the hub's cache, adapters, weights of other frameworks."""

from __future__ import annotations

import re
from pathlib import Path

from jaxspec.host.files import read_json
from jaxspec.host.messages import shown

ADAPTER = "adapter_config.json"
_FOREIGN = (".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx")
# The name of a repository's directory in the hub's cache.
_REPOSITORY = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def settled(directory: Path) -> Path:
    """Returns the directory that contains the files: the given one, or the snapshot in a directory of the hub's cache.

    Args:
      directory: an existing directory.

    Raises:
      ValueError: it is a cache without a snapshot, with several snapshots of which none is the main one, or of several
        models; or it contains an adapter. The message tells the user what to do.
    """
    if any(directory.glob("*.safetensors")) or (directory / "config.json").exists():
        refuse_adapter(directory)
        return directory
    if directory.name == "snapshots":
        directory = directory.parent
    if (directory / "snapshots").is_dir():
        directory = _snapshot(directory)
    repositories = sorted(one.name for one in directory.glob("models--*--*"))
    if repositories:
        owner_and_name = _REPOSITORY.fullmatch(repositories[0])
        example = "/".join(owner_and_name.groups()) if owner_and_name else "owner/model"
        raise ValueError(
            f"{directory} is a cache of the hub with {len(repositories)} models; give the hub id of one, such as "
            f"{example}"
        )
    refuse_adapter(directory)
    return directory


def refuse_adapter(directory: Path) -> None:
    """Refuses a directory with an adapter, whose weights have no meaning without another model's weights.

    Raises:
      ValueError: it contains an adapter; the message names the other model.
    """
    weights = {path.name for path in directory.glob("*.safetensors")}
    if not (directory / ADAPTER).is_file() or weights - {"adapter_model.safetensors"}:
        return
    content = read_json(directory / ADAPTER)
    kind, base = content.get("peft_type"), content.get("base_model_name_or_path")
    named = "a LoRA adapter" if kind in ("LORA", None) else f"an adapter ({shown(kind)})"
    raise ValueError(
        f"{directory} is {named} for the model {shown(base)}, not a model; give that model, and this directory as its "
        "adapter"
    )


def foreign_weights(directory: Path) -> list[str]:
    """Returns the names of the files in a directory with weights in other formats."""
    return sorted(path.name for path in directory.iterdir() if path.suffix in _FOREIGN)


def _snapshot(folder: Path) -> Path:
    """Returns the snapshot in a repository's directory of the hub's cache: the only one, or the main one."""
    found = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"{folder} is a folder of the hub's cache without any snapshot; download the model again"
        )
    main = folder / "refs" / "main"
    commit = main.read_bytes()[:100].decode(errors="replace").strip() if main.is_file() else ""
    named = [path for path in found if path.name == commit]
    if named:
        return named[0]
    raise ValueError(
        f"{folder} is a folder of the hub's cache with {len(found)} snapshots; give one of them, such as {found[0]}"
    )
