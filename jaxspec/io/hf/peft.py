"""Low-rank adapters (LoRA) of a model in the layout of PEFT.

adapter_config.json         `r`, `lora_alpha`, `use_rslora`, and `rank_pattern` and `alpha_pattern`, which replace the
                            first two for the modules whose names they match
adapter_model.safetensors   base_model.model.model.layers.{l}.self_attn.{q,k,v,o}_proj.lora_{A,B}.weight,
                            base_model.model.model.layers.{l}.mlp.{gate,up,down}_proj.lora_{A,B}.weight
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.host.files import read_json
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io import tensors
from jaxspec.io.directories import ADAPTER
from jaxspec.io.hf.config_json import errors_of
from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.hf.huggingface import HUB_ID, listed, on_hub
from jaxspec.io.hf.layout import leaves
from jaxspec.io.hf.values import MAX_INT, flag, number, section, whole
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.lora import PARTS

PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"
# Options of PEFT that change what is computed, by the values that leave it as it is. Some ways to draw the initial
# adapter also change the model's weights.
_UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "use_qalora", "use_bdlora"), (False,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "layer_replication"), ([],)),
    "alora_invocation_tokens": (),
}


def check_unchanged(content: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """Refuses an adapter's options other than LoRA's own; `more`: further options, by what leaves them unused.

    Raises:
      ValueError: an option has a value that is not supported.
    """
    for name, usual in {**_UNCHANGED, **(more or {})}.items():
        if content.get(name) is not None and content[name] not in usual:
            raise ValueError(f"{name} is {shown(content[name])}; adapters with it are not supported")


@brief_errors()
def read_adapter(name: str | os.PathLike[str], config: LlamaConfig) -> Params:
    """Returns an adapter as host arrays in float32, in the tree of `model.lora.adapted`; its scale is in B.

    Args:
      name: the adapter's directory, or its id on the Hugging Face hub.
      config: the configuration of the model, which the adapter is checked to fit.

    Raises:
      FileNotFoundError: a file is missing, or the hub does not give the adapter.
      ValueError: the adapter is for another model, or has more than LoRA of the layers' matrices; one line.
    """
    directory = _resolve(os.fspath(name))
    content, found = read_json(directory / ADAPTER), tensors.read_tensors(directory / _WEIGHTS)
    with errors_of(directory):
        for tensor, numbers in found.items():
            tensors.check_finite(tensor, numbers)
        try:
            check_unchanged(content)
            return _read(content, found, config)
        except ValueError as error:
            base = content.get("base_model_name_or_path")
            raise ValueError(
                f"{error}; its model is {shown(base)}, with which peft's merge_and_unload() merges it"
            ) from None


def _resolve(name: str) -> Path:
    path = Path(name).expanduser()
    if HUB_ID.fullmatch(name) and not path.is_dir():
        import huggingface_hub  # slow to import, and needed only here

        with on_hub(name):
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=[ADAPTER, _WEIGHTS]))
            if missing := [file for file in (ADAPTER, _WEIGHTS) if not (path / file).is_file()]:
                listed(name, missing)
    for file in (ADAPTER, _WEIGHTS):
        if not (path / file).is_file():
            raise FileNotFoundError(
                f"{name} has no {file}; give the directory of an adapter as peft writes it, or a hub id"
            )
    return path


def _read(content: Mapping[str, Any], found: Tensors, config: LlamaConfig) -> Params:
    family = FAMILIES.get(config.model_type)
    if family is not None and (family.fused or family.interleaved):
        raise ValueError(
            f"adapters of {config.model_type} models are not supported: Llama's rows have another order"
        )
    layers: list[Params] = [{sublayer: {} for sublayer in PARTS} for _ in range(config.num_layers)]
    used: set[str] = set()
    for leaf, shape, sources in leaves(config):
        # Keys and values occur once for each copy.
        modules = {source.name.removesuffix(".weight"): source.shape[0] for source in sources}
        pairs = {
            module: _pair(content, found, module, (outputs, shape[-1])) for module, outputs in modules.items()
        }
        rank = max(len(pair[0]) for pair in pairs.values())
        _, *place = leaf.split("/")
        if not rank or len(place) < 3 or place[2] not in PARTS[place[1]]:
            continue
        used |= {_name(module, which) for module in pairs for which in "AB"}
        a = np.zeros((len(modules), rank, shape[-1]), np.float32)
        b = np.zeros((*shape[:-1], rank), np.float32)
        for source in sources:
            module = source.name.removesuffix(".weight")
            low, high = pairs[module]
            a[list(modules).index(module), : len(low)] = low
            part = b.reshape(*source.split[:-1], rank)[source.index]
            part[..., : len(low)] = high.reshape(*part.shape[:-1], len(low))
        layers[int(place[0])][place[1]] |= {f"{place[2]}_a": a, f"{place[2]}_b": b}
    for name in sorted({*found, *found.left_out} - used):
        raise ValueError(
            f"tensor {name} has no place among adapters of matrices in {config.num_layers} layers"
        )
    if not used:
        raise ValueError(f"{_WEIGHTS} has no tensors")
    return {"layers": layers}


def _pair(
    content: Mapping[str, Any], found: Tensors, module: str, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [r, I] and scaled B [O, r] of a module of this shape [O, I]; r is 0 if it has no adapter."""
    names = [_name(module, which) for which in "AB"]
    if not {*names} & {*found, *found.left_out}:
        return np.zeros((0, shape[1])), np.zeros((shape[0], 0))
    rank = whole(*_of_module(content, "r", "rank_pattern", module))
    alpha = number(*_of_module(content, "lora_alpha", "alpha_pattern", module), 0, MAX_INT)
    for name, expected in zip(names, [(rank, shape[1]), (shape[0], rank)], strict=True):
        has = found[name].shape if name in found else found.left_out.get(name, "missing")
        if has != expected:
            raise ValueError(
                f"tensor {name} is {has}, expected shape {expected} for this model and {ADAPTER}"
            )
    a, b = (found[name].astype(np.float32) for name in names)
    return a, b * (alpha / (rank**0.5 if flag(content, "use_rslora") else rank))


def _name(module: str, which: str) -> str:
    return f"{PREFIX}{module}.lora_{which}.weight"


def _of_module(
    content: Mapping[str, Any], key: str, patterns: str, module: str
) -> tuple[Mapping[str, Any], str]:
    """Returns where the value of a key is for a module: in `patterns`, by regular expressions, else in `content`."""
    found = section(content, patterns)
    try:
        match = next((one for one in found if re.match(rf"(.*\.)?({one})$", module)), None)
    except re.error as error:
        raise ValueError(f"{patterns} has a wrong regular expression ({error})") from None
    return ({key: content.get(key)}, key) if match is None else (found, match)
