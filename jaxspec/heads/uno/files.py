"""Adapters of Uno, in the layout of PEFT.

adapter_model.safetensors   base_model.model.model.layers.{l}.self_attn.{q,k,v,o}_proj.lora_{A,B}.weight,
                            base_model.model.model.layers.{l}.mlp.{gate,up,down}_proj.lora_{A,B}.weight
adapter_config.json         `r`, `lora_alpha`, `use_rslora`

Noise tokens are drawn from [1, `mask_token_id`), which is in the config.json beside the adapter or in the directory
above it. An adapter that jaxspec has trained has the names `model.safetensors` and `config.json`, and its noise tokens
in `"jaxspec": {"noise": [FIRST, END]}`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.heads.tensors import Entry, Head, checked, leaves_of, refuse_left_out
from jaxspec.heads.uno.network import UnoConfig
from jaxspec.host.files import read_json
from jaxspec.host.messages import shown
from jaxspec.io.hf import peft
from jaxspec.io.hf.config_json import errors_of
from jaxspec.io.hf.layout import Source, sources_of
from jaxspec.io.hf.values import section, whole
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig

_LAYER = re.compile(re.escape(peft.PREFIX) + r"model\.layers\.(\d+)\.self_attn\.q_proj\.lora_A\.weight")
# Further options of PEFT, by what leaves them unused.
_UNUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}


def recognises(names: Collection[str]) -> bool:
    """Returns whether tensors of these names are an adapter of a Llama."""
    return any(map(_LAYER.fullmatch, names))


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """Returns the adapter, checked to fit a target; raises as `heads.files.read_head` does."""
    refuse_left_out(directory, found.left_out, found)
    _refuse_another(directory, found, target)
    with errors_of(directory):
        config = _config(directory, content, target)
    return checked(directory, Head(config, tuple(entries(config)), found, target.vocab_size))


def _refuse_another(directory: Path, found: Tensors, target: LlamaConfig) -> None:
    """Refuses an adapter of a model with other layers."""
    layers = {int(match[1]): name for name in found if (match := _LAYER.fullmatch(name))}
    num_layers, width = len(layers), found[next(iter(layers.values()))].shape[-1]
    if (num_layers, width) != (target.num_layers, target.hidden_size):
        raise ValueError(
            f"{directory}: the adapter is for a model of {num_layers} layers and width {width}, the target has "
            f"{target.num_layers} and {target.hidden_size}; give an adapter that was trained for this model"
        )


def _config(directory: Path, content: Mapping[str, Any], target: LlamaConfig) -> UnoConfig:
    peft.check_unchanged(content, _UNUSED)
    rank, alpha = whole(content, "r", 1), content.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ValueError(f"lora_alpha is {shown(alpha)}; expected a number")
    if content.get("use_rslora"):
        alpha *= rank**0.5
    return UnoConfig(target, rank, float(alpha), _noise(directory, content, target))


def _noise(directory: Path, content: Mapping[str, Any], target: LlamaConfig) -> tuple[int, int]:
    noise = section(content, "jaxspec").get("noise")
    if noise is None:
        masks = [content, *(read_json(one) for one in _models(directory))]
        mask = next((one["mask_token_id"] for one in masks if one.get("mask_token_id") is not None), None)
        noise = [1, target.vocab_size if mask is None else mask]
    if not isinstance(noise, list) or [type(one) for one in noise] != [int, int]:
        raise ValueError(f"the noise tokens are {shown(noise)}; expected the first and the end, two numbers")
    if not 0 <= noise[0] < noise[1] <= target.vocab_size:
        raise ValueError(
            f"the noise tokens are {noise[0]} to {noise[1] - 1}; expected tokens of the target, 0 to "
            f"{target.vocab_size - 1}"
        )
    return noise[0], noise[1]


def _models(directory: Path) -> Iterator[Path]:
    """Yields the configs of models beside an adapter or in the directory above it."""
    for place in (directory, directory.parent):
        if (place / "config.json").is_file():
            yield place / "config.json"


def entries(config: UnoConfig) -> Iterator[Entry]:
    """Yields name, shape and sources of every leaf, in the order of the tree `config.shapes`."""
    for leaf, shape in leaves_of(config.shapes):
        matrix, which = leaf[:-2], leaf[-1]
        # The parts of `b` have the places of their matrices in the target's leaf; those of `a` come one after another.
        # Each matrix of Llama has adapters, also where a family stores several together.
        parts = sources_of(
            dataclasses.replace(config.target, model_type="llama"), matrix, (*shape[:-1], config.rank)
        )
        names = [
            f"{peft.PREFIX}{one.name.removesuffix('weight')}lora_{which.upper()}.weight" for one in parts
        ]
        if which == "b":
            sources = [dataclasses.replace(one, name=name) for one, name in zip(parts, names, strict=True)]
        else:
            cuts = [(slice(number, number + 1),) for number in range(len(names))]
            sources = [Source(name, shape[1:], shape, cut) for name, cut in zip(names, cuts, strict=True)]
        yield leaf, shape, sources


def content(config: UnoConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`, without the target."""
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
        "dtype": dtype_name,
        "jaxspec": {"noise": list(config.noise)},
    }
