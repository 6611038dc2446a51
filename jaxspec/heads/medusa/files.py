"""The heads of Medusa in the layouts in which they are published.

    medusa_lm_head.pt or .safetensors   {i}.{j}.linear.{weight,bias}, {i}.{r}.weight     Medusa-1, "v0.1"
    the same, of the last trainer       without {i}.{r}.weight: the heads read the target's head
    a whole model (Medusa-2)            the same behind `medusa_head.`, beside the model's own tensors
    vLLM                                blocks.{i}.layers.{j}.weight, lm_heads.{i}.weight, or one lm_head.weight where
                                        `original_lm_head`; `token_map`, the tokens of their rows

How many heads and blocks there are is told by the tensors: published configs say other numbers. The authors' code makes
the blocks of a head one module that it lists r times, so that the file has r copies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.heads.medusa.network import MedusaConfig
from jaxspec.heads.tensors import (
    Entry,
    Head,
    are_copies,
    check_ids,
    checked,
    leaves_of,
    refuse_left_out,
    renamed,
)
from jaxspec.host.messages import shown
from jaxspec.io.hf.config_json import errors_of
from jaxspec.io.hf.layout import Source
from jaxspec.io.hf.values import flag, whole, whole_or
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import MAX_LAYERS, LlamaConfig

_WHOLE = "medusa_head."
_AUTHORS = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
# Tensors with one row per token; `medusa_head.0.1.weight` is a matrix.
BY_TOKEN = r"(.*\.)?lm_heads\.\d+\.weight|(medusa_head\.|medusa_heads\.)?\d+\.\d+\.weight"
_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
_MATRIX = re.compile(r"lm_heads\.(\d+)\.weight")
_SHARED, _MAP = "lm_head.weight", "token_map"


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are heads of Medusa, perhaps beside a model."""
    return any(_plain(name) == "blocks.0.layers.0.weight" for name in names)


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """The heads that these tensors are, checked to fit a target; errors as of `heads.read_head`."""
    beside_a_model = any(name.startswith(_WHOLE) for name in (*found, *found.left_out))

    def plain(name: str) -> str | None:
        return _plain(name) if name.startswith(_WHOLE) or not beside_a_model else None

    refuse_left_out(directory, (name for name in found.left_out if plain(name) is not None), found)
    tensors = renamed(directory, found, plain)
    with errors_of(directory / "config.json"):
        shared = flag(content, "original_lm_head")
        if shared and "lm_heads.0.weight" in tensors:
            tensors.setdefault(_SHARED, tensors.pop("lm_heads.0.weight"))
        ids = _ids(directory, content, tensors, target.vocab_size)
        config = _config(content, tensors, target, ids, _places(found))
    leaves = tuple(entries(config))
    matrices = {source.name for _, _, sources in leaves for source in sources if "lm_head" in source.name}
    copies = {name for name in tensors if _BLOCK.fullmatch(name.replace("bias", "weight"))}
    more = {_MAP, *(copies if config.repeated else ())}
    return checked(directory, Head(config, leaves, tensors, target.vocab_size, ids, matrices), more)


def _plain(name: str) -> str:
    """The name of a tensor as vLLM has it."""
    match = _AUTHORS.fullmatch(name)
    if match is None:
        return name.removeprefix("model.").removeprefix("medusa_heads.")
    head, number, linear, what = match.groups()
    return f"blocks.{head}.layers.{number}.{what}" if linear else f"lm_heads.{head}.{what}"


def _places(found: Tensors) -> set[int]:
    """The numbers of the heads' own matrices in the authors' layout: each follows those of all blocks."""
    matches = map(_AUTHORS.fullmatch, found)
    return {int(match[2]) for match in matches if match and not match[3] and match[4] == "weight"}


def _config(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
    ids: np.ndarray | None,
    places: set[int],
) -> MedusaConfig:
    blocks = [(int(match[1]), int(match[2])) for name in tensors if (match := _BLOCK.fullmatch(name))]
    heads, numbers = ({one[part] for one in blocks} for part in (0, 1))
    num_heads, stored = len(heads), len(numbers)
    if max(heads) >= num_heads or max(numbers) >= stored:
        raise ValueError(
            f"the file has blocks {shown(sorted(numbers))} of heads {shown(sorted(heads))}; expected all numbers from "
            "0 on"
        )
    width = next(iter(tensors["blocks.0.layers.0.weight"].shape[-1:]), 0)
    if width != target.hidden_size:
        raise ValueError(
            f"the heads read vectors of width {width}, the target's are of {target.hidden_size}; heads fit the model "
            "that they were trained for"
        )
    num_layers = _num_layers(content, stored, places)
    bias = "blocks.0.layers.0.bias" in tensors
    whats = ("weight", "bias") if bias else ("weight",)
    groups = [
        [f"blocks.{head}.layers.{number}.{what}" for number in range(stored)]
        for head in range(num_heads)
        for what in whats
    ]
    complete = all(name in tensors for group in groups for name in group)
    own_heads = any(_MATRIX.fullmatch(name) for name in tensors)
    own_head = own_heads or _SHARED in tensors
    if ids is not None and not own_head:
        raise ValueError(f"the file has {_MAP}, and neither {_SHARED} nor lm_heads that it is of")
    head_size = (target.vocab_size if ids is None else len(ids)) if own_head else None
    repeated = complete and are_copies(tensors, groups)
    return MedusaConfig(width, num_heads, num_layers, repeated, bias, head_size, own_heads)


def _num_layers(content: Mapping[str, Any], stored: int, places: set[int]) -> int:
    """Returns the number of blocks of a head, of which the file has `stored`."""
    # A file without the copies of a tensor has one block. Its matrix, or else the config, gives the number of blocks.
    if places:
        num_layers = max(places)
        if len(places) > 1 or not (num_layers == stored or MAX_LAYERS >= num_layers > stored == 1):
            raise ValueError(
                f"the file has {stored} blocks a head, and matrices behind {shown(sorted(places))}; expected all "
                "behind the last block"
            )
        return num_layers
    if stored == 1 and content.get("medusa_num_layers") is not None:
        return whole(content, "medusa_num_layers", most=MAX_LAYERS)
    if content.get("model_type") == "medusa":
        meant = whole_or(stored, content, "num_hidden_layers", most=MAX_LAYERS)
        if meant > stored:
            raise ValueError(
                f"num_hidden_layers is {meant}, and the file has {stored} blocks a head; expected all of them"
            )
    return stored


def _ids(
    directory: Path, content: Mapping[str, Any], tensors: Mapping[str, np.ndarray], size: int
) -> np.ndarray | None:
    """The tokens of the heads' own rows; None for all."""
    count = whole_or(size, content, "truncated_vocab_size", most=size)
    if count == size:
        return None
    if _MAP not in tensors:
        raise ValueError(f"{_MAP} is missing: which of {size} tokens the {count} rows of the heads are")
    ids = tensors[_MAP]
    if ids.shape != (count,) or ids.dtype.kind != "i":
        raise ValueError(f"tensor {_MAP} is {ids.dtype}{ids.shape}, expected int64({count},)")
    return check_ids(directory, ids, size, _MAP)


def entries(config: MedusaConfig) -> Iterator[Entry]:
    """Name, as vLLM has it, shape and sources of every leaf, in the order of the tree."""
    for leaf, shape in leaves_of(config.shapes):
        what = leaf.split("/")
        if leaf == "head":
            name = _SHARED
        elif what[-1] == "head":
            name = f"lm_heads.{what[1]}.weight"
        else:
            name = f"blocks.{what[1]}.layers.{what[3]}.{'bias' if what[-1] == 'bias' else 'weight'}"
        yield leaf, shape, [Source(name, shape, shape)]


def content(config: MedusaConfig, dtype_name: str) -> dict[str, Any]:
    """Returns `config.json`, without the target: vLLM's if the heads have matrices, else the authors'."""
    own = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "dtype": dtype_name}
    if config.head_size is None:
        return own
    return {
        **own,
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_fc_bias": config.bias,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.width,
        "vocab_size": config.head_size,
        "truncated_vocab_size": config.head_size,
    }


def published(config: MedusaConfig, name: str) -> str:
    """Returns the name of a tensor: vLLM's if the heads have matrices, else the authors'."""
    return name if config.head_size is not None else _VLLM.sub(r"\1.\2.linear.", name)
