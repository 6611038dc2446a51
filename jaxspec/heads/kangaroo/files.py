"""Kangaroo's adapters as their authors save them.

pytorch_model.bin   layers.{l}.self_attn.{q,k,v,o}_proj, layers.{l}.input_layernorm, norm
config.json         of a Llama of one layer, whose MLP is not there; ours says `jaxspec: {"exit_layer": E}` too

The authors' code uses the base 10,000 for the rotary embedding, for any config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.heads.kangaroo.network import KangarooConfig
from jaxspec.heads.tensors import (
    Entry,
    Head,
    check_sizes,
    checked,
    leaves_of,
    llama_sources,
    read_block,
    refuse_left_out,
    with_rope_of_training,
)
from jaxspec.io.hf.config_json import config_json, errors_of
from jaxspec.io.hf.values import section, whole
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig

_LAYER = "layers.0."


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are an adapter: a layer without an MLP, and no embedding."""
    there = f"{_LAYER}self_attn.q_proj.weight" in names and f"{_LAYER}input_layernorm.weight" in names
    return there and not any(name.startswith((f"{_LAYER}mlp.", "embed_tokens.")) for name in names)


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """The adapter that these tensors are, checked to fit a target; errors as of `heads.read_head`."""
    refuse_left_out(directory, found.left_out, found)
    with errors_of(directory / "config.json"):
        block = read_block(content)
        own = section(content, "jaxspec")
        if own.get("kind") is None:
            block = with_rope_of_training(directory, block, None, "Kangaroo's training code")
        exit_layer = None
        if own.get("exit_layer") is not None:
            exit_layer = whole(own, "exit_layer", most=max(1, target.num_layers - 1))
        check_sizes(block, target, "adapter")
    config = KangarooConfig(block, exit_layer)
    return checked(directory, Head(config, tuple(entries(config)), found, target.vocab_size))


def entries(config: KangarooConfig) -> Iterator[Entry]:
    """Name, shape and sources of every leaf, in the order of the tree."""
    for leaf, shape in leaves_of(config.shapes):
        yield leaf, shape, llama_sources(config.block, leaf, shape)


def content(config: KangarooConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`, without the target."""
    return config_json(config.block, dtype_name) | {"jaxspec": {"exit_layer": config.exit_layer}}
