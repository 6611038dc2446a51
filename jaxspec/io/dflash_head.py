"""Heads of DFlash as their authors and SpecForge publish them.

model.safetensors   fc.weight, hidden_norm.weight, layers.{l}.* of Qwen3, norm.weight, all perhaps behind `model.`
config.json         of a Qwen3 with as many layers, whatever `model_type` says; `block_size`; `dflash_config` with
                    `mask_token_id`, `target_layer_ids`

The target's embedding and head are the head's too. Which layers are tapped is said by the layers that are left,
0-based, as transformers lists hidden states: what leaves the last layer has been through the final norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.io.head_tensors import Entry, Head, check_tensors, leaves_of, refuse_left_out, renamed
from jaxspec.io.hf_config import config_from, errors_of
from jaxspec.io.hf_layout import Source, sources_of
from jaxspec.io.hf_values import section, whole
from jaxspec.io.messages import shown
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.dflash import DFlashConfig, usual_taps
from jaxspec.model.llama import FINAL, Tap

TAP_IDS = "target_layer_ids"
_OWN = {"fc": "fc.weight", "hidden_norm": "hidden_norm.weight"}
# Options of later heads that change what is computed, by what leaves it as it is.
_UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "final_logit_softcapping": (0,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "attention_mode": ("gqa", "mha"),
}


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are a head of DFlash: EAGLE's has its `hidden_norm` in its layer."""
    return {*_OWN.values(), "layers.0.self_attn.q_norm.weight"} <= {_plain(name) for name in names}


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """The head that these tensors are, checked to fit a target; errors as of `heads.read_head`."""
    refuse_left_out(directory, found.left_out, found)
    tensors = renamed(directory, found, _plain)
    with errors_of(directory / "config.json"):
        config = _config(content, target)
    leaves = tuple(entries(config))
    check_tensors(directory, config.kind, leaves, tensors)
    return Head(config, leaves, tensors, target.vocab_size)


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _config(content: Mapping[str, Any], target: LlamaConfig) -> DFlashConfig:
    values = {**content, **section(content, "dflash_config")}
    for name, usual in _UNCHANGED.items():
        if values.get(name) is not None and values[name] not in usual:
            raise ValueError(f"{name} is {shown(values[name])}; heads of DFlash with it are not supported")
    block = dataclasses.replace(config_from({**content, "model_type": "qwen3"}), tie_embeddings=False)
    types = content.get("layer_types")
    if block.sliding_windows or (isinstance(types, list) and "sliding_attention" in types):
        raise ValueError(
            "layer_types has sliding_attention; heads of DFlash that see a window only are not supported"
        )
    if (block.vocab_size, block.hidden_size) != (target.vocab_size, target.hidden_size):
        raise ValueError(
            f"the head is for a model of {block.vocab_size} tokens and width {block.hidden_size}, the target has "
            f"{target.vocab_size} and {target.hidden_size}; a head fits the model that it was trained for"
        )
    for name in ("block_size", "mask_token_id"):
        if values.get(name) is None:
            raise ValueError(f"{name} is missing; give the one that the head was trained with")
    mask_id = whole(values, "mask_token_id", 0, target.vocab_size - 1)
    return DFlashConfig(
        block, _taps(values, block, target.num_layers), whole(values, "block_size", 2), mask_id
    )


def _taps(values: Mapping[str, Any], block: LlamaConfig, num_layers: int) -> tuple[Tap, ...]:
    """What is tapped, as the layers that it enters."""
    ids = values.get(TAP_IDS)
    if ids is None:
        ids = [tap - 1 for tap in usual_taps(num_layers, block.num_layers)]
    if not isinstance(ids, list) or not ids or any(type(one) is not int for one in ids):
        raise ValueError(f"{TAP_IDS} is {shown(ids)}; expected a list of layers")
    if not all(0 <= one < num_layers for one in ids):
        raise ValueError(
            f"the head reads what leaves the layers {shown(ids)}, the target has {num_layers}, from 0 on"
        )
    return tuple(FINAL if one == num_layers - 1 else one + 1 for one in ids)


def entries(config: DFlashConfig) -> Iterator[Entry]:
    """Name, shape and sources of every leaf, in the order of the tree."""
    for leaf, shape in leaves_of(config.shapes):
        if leaf in _OWN:
            sources = [Source(_OWN[leaf], shape, shape)]
        else:
            theirs = sources_of(config.block, leaf, shape)
            sources = [dataclasses.replace(one, name=_plain(one.name)) for one in theirs]
        yield leaf, shape, sources
