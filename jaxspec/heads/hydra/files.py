"""The heads of Hydra and Hydra++ as their authors publish them.

    hydra_lm_head.pt   hydra_mlp.{i}.{j}.linear.*, hydra_mlp.{i}.{j}.res_connection.* of the first block,
                       hydra_lm_head.{i}.{weight,bias}
    Hydra++            the same between Dropouts, which have numbers: blocks at odd j, hydra_lm_head.{i}.1.*; and
                       prefix_embeding_layer.{layers.0.*,norm.weight} (as they spell it), a layer of the target's shape

How many heads and blocks there are is told by the tensors; blocks after the first are one module, listed several times.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.heads.hydra.network import HydraConfig
from jaxspec.heads.tensors import Entry, Head, are_copies, checked, leaves_of, llama_sources, refuse_left_out
from jaxspec.host.messages import shown
from jaxspec.io.hf.config_json import errors_of
from jaxspec.io.hf.layout import Source
from jaxspec.io.hf.values import flag, whole_or
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import MAX_LAYERS, LlamaConfig
from jaxspec.model.llama import FINAL, AuxLayer

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_MATRIX = re.compile(r"hydra_lm_head\.(\d+)\.(\d+\.)?weight")
# Tensors with one row per token.
BY_TOKEN = r"hydra_lm_head\.\d+\.(\d+\.)?(weight|bias)"
_PREFIX = "prefix_embeding_layer."
# Copies of the target's embedding, and in a prefix that reads vectors nothing at all.
_UNUSED = {"input_embed_fn.weight", f"{_PREFIX}embed_tokens.weight"}
_PARTS = {
    "linear": "linear.weight",
    "bias": "linear.bias",
    "residual": "res_connection.weight",
    "residual_bias": "res_connection.bias",
}


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are heads of Hydra."""
    return any(_BLOCK.fullmatch(name) for name in names)


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """The heads that these tensors are, checked to fit a target; errors as of `heads.read_head`."""
    refuse_left_out(directory, set(found.left_out) - _UNUSED, found)
    blocks: dict[int, list[int]] = {}
    for head, number in sorted(
        (int(match[1]), int(match[2])) for name in found if (match := _BLOCK.fullmatch(name))
    ):
        blocks.setdefault(head, []).append(number)
    with errors_of(directory / "config.json"):
        config = _config(content, found, blocks, target)
    matrices = {int(match[1]): match[2] or "" for name in found if (match := _MATRIX.fullmatch(name))}
    leaves = tuple(_entries(config, blocks, matrices))
    copies = {
        f"hydra_mlp.{head}.{number}.linear.{what}"
        for head, numbers in blocks.items()
        for number in numbers[2:]
        for what in ("weight", "bias")
    }
    more = _UNUSED | (copies if config.repeated else set())
    return checked(directory, Head(config, leaves, found, target.vocab_size), more)


def _config(
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    blocks: Mapping[int, list[int]],
    target: LlamaConfig,
) -> HydraConfig:
    if content.get("grounded_heads") is not None and not flag(content, "grounded_heads"):
        raise ValueError(
            "grounded_heads is false; heads that do not read what was drafted before them are not supported"
        )
    behind = whole_or(0, content, "hidden_state_offset", least=0, most=target.num_layers)
    aux_layers: tuple[AuxLayer, ...] = (target.num_layers - behind if behind else FINAL,)
    if sorted(blocks) != list(range(len(blocks))) or len({len(one) for one in blocks.values()}) != 1:
        raise ValueError(
            f"the file has blocks {dict(blocks)} by head; expected heads from 0 on, of as many blocks each"
        )
    groups = [
        [f"hydra_mlp.{head}.{number}.linear.{what}" for number in numbers[1:]]
        for head, numbers in blocks.items()
        for what in ("weight", "bias")
    ]
    there = all(name in tensors for group in groups for name in group)
    repeated = there and are_copies(tensors, (group for group in groups if group))
    # A stored layer that a prefix is made of has the target's shape: the authors copy its config.
    prefix = target.truncated(1) if any(name.startswith(f"{_PREFIX}layers.") for name in tensors) else None
    arch = content.get("hydra_head_arch")
    if prefix is None and isinstance(arch, str) and arch.startswith("prefix"):
        raise ValueError(f"hydra_head_arch is {shown(arch)}, and the file has no {_PREFIX}layers.0 of it")
    width, num_layers = target.hidden_size, len(blocks[0])
    # Who saves tensors without their copies has two blocks, and in its config how many they stand for.
    if num_layers <= 2:
        meant = whole_or(num_layers, content, "hydra_num_layers", most=MAX_LAYERS)
        if num_layers == 1 < meant:
            raise ValueError(
                f"hydra_num_layers is {meant}, and the file has one block a head; expected the first and at least one "
                "of those after it"
            )
        num_layers = max(num_layers, meant)
    return HydraConfig(width, target.vocab_size, len(blocks), num_layers, repeated, prefix, aux_layers)


def entries(config: HydraConfig) -> Iterator[Entry]:
    """Name, as the authors' code has it, shape and sources of every leaf, in the order of the tree."""
    # With a prefix there is a Dropout before each block and each matrix.
    places = range(1, 2 * config.num_layers, 2) if config.prefix else range(config.num_layers)
    heads = range(config.num_heads)
    behind = "1." if config.prefix else ""
    return _entries(config, {head: list(places) for head in heads}, dict.fromkeys(heads, behind))


def _entries(
    config: HydraConfig, blocks: Mapping[int, list[int]], matrices: Mapping[int, str]
) -> Iterator[Entry]:
    """The same, of a file with blocks at these places, and matrices that stand behind these numbers."""
    for leaf, shape in leaves_of(config.shapes):
        if leaf.startswith("prefix/"):
            assert config.prefix is not None
            sources = llama_sources(config.prefix, leaf.removeprefix("prefix/"), shape, _PREFIX)
        else:
            _, head, *rest = leaf.split("/")
            if rest[0] == "blocks":
                name = f"hydra_mlp.{head}.{blocks[int(head)][int(rest[1])]}.{_PARTS[rest[2]]}"
            else:
                what = "bias" if rest[0] == "head_bias" else "weight"
                name = f"hydra_lm_head.{head}.{matrices.get(int(head), '')}{what}"
            sources = [Source(name, shape, shape)]
        yield leaf, shape, sources


def content(config: HydraConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`, without the target."""
    return {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "mlp" if config.prefix is None else "prefix-mlp",
        "grounded_heads": True,
        "dtype": dtype_name,
    }
