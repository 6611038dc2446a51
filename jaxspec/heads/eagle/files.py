"""EAGLE heads in the layouts in which they are published.

    yuhuili EAGLE      fc.*, layers.0.*; a Llama config of one layer                       often only `.bin`
    yuhuili EAGLE-3    fc, midlayer.*, norm, lm_head, d2t, t2d; `draft_vocab_size`         also SpecForge's, AngelSlim's
    speculators        as EAGLE-3 with layers.0.* for midlayer.*; EAGLE-1 with fusion_fc.* and transformer.*; the Llama
                       config is `transformer_layer_config`; P-EAGLE also has `mask_hidden` and `mask_token_id`
    DeepSpec           as EAGLE-3 with layers.0.* of a Qwen3; `target_layer_ids`
    vLLM               either, all names perhaps behind `model.`; a Llama config perhaps under `model`

A head's RoPE, widths and ε come from its own config, not from the target's. Absent keys have the defaults of
transformers. One exception: the EAGLE authors' code ignores `rope_theta` with linear and dynamic scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.heads.eagle.network import EagleConfig, usual_aux_layers
from jaxspec.heads.tensors import (
    Entry,
    Head,
    checked,
    draft_ids,
    leaves_of,
    llama_sources,
    read_block,
    refuse_left_out,
    renamed,
    with_rope_of_training,
)
from jaxspec.host.messages import shown
from jaxspec.io.hf.config_json import config_json, errors_of
from jaxspec.io.hf.families import FAMILIES
from jaxspec.io.hf.layout import Source
from jaxspec.io.hf.values import flag, section, whole, whole_or
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL

# The key of a config that lists the auxiliary layers.
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# The keys of a config that name the mask token of P-EAGLE: of speculators, and of vLLM.
_MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")
_Q = "layers.0.self_attn.q_proj.weight"
_ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
# What EAGLE-3 calls its layer, and speculators the parts of EAGLE-1.
_PREFIXES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
# What an option of the config says is normed before fc.
_FEATURE_NORMS: Mapping[str, Literal["together", "each"]] = {"norm_before_fc": "together", "fc_norm": "each"}
# A tensor that only an option of the config gives a place.
_OPTIONS = {
    "input_norm.weight": "norm_before_fc",
    "fc_norm.0.weight": "fc_norm",
    "mask_hidden": "mask_token_id",
}


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are an EAGLE head."""
    return {"fc.weight", _Q} <= {_plain(name) for name in names}


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """Returns the head in these tensors, checked to fit a target; raises the errors of `heads.read_head`."""
    # t2d only repeats what d2t says.
    refuse_left_out(directory, (name for name in found.left_out if _plain(name) != "t2d"), found)
    tensors = renamed(directory, found, _plain)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
    kind: Literal["eagle", "eagle3"] = "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    with errors_of(directory / "config.json"):
        config = _config(directory, kind, content, tensors, target)
    more = {"d2t", "t2d"} if kind == "eagle3" else set()
    head = checked(
        directory, Head(config, tuple(entries(config)), tensors, target.vocab_size), more, _OPTIONS
    )
    ids = draft_ids(directory, config.head_size, target.vocab_size, tensors)
    return dataclasses.replace(head, ids=ids, by_token={"lm_head.weight"})


def _plain(name: str) -> str:
    """The name of a tensor in the layout that has the fewest words of its own."""
    name = name.removeprefix("model.")
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _config(
    directory: Path,
    kind: Literal["eagle", "eagle3"],
    content: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    target: LlamaConfig,
) -> EagleConfig:
    nested = section(content, "eagle_config")
    inner = next(
        (section(content, key) for key in ("transformer_layer_config", "model") if content.get(key)), content
    )
    values = {**nested, **inner, **content}
    block = read_block(inner)
    if block.vocab_size != target.vocab_size:
        raise ValueError(
            f"the head has a vocabulary of {block.vocab_size} tokens, the target of {target.vocab_size}; "
            "a head fits the model that it was trained for"
        )
    # Trainers give a Llama layer a window in the words of Qwen2, which a Llama by itself does not read.
    slides = flag(inner, "use_sliding_window")
    windows = FAMILIES["qwen2"].read(inner)["sliding_windows"] if slides else block.sliding_windows
    block = dataclasses.replace(block, tie_embeddings=False, sliding_windows=windows)
    if inner.get("qkv_bias") is not None:
        block = dataclasses.replace(block, qkv_bias=flag(inner, "qkv_bias"))
    scaling = block.rope_scaling if inner.get("rope_scaling") else None
    other_trainer = (
        section(content, "jaxspec").get("kind") is not None or "transformer_layer_config" in content
    )
    if scaling is not None and scaling.kind in ("linear", "dynamic") and not other_trainer:
        block = with_rope_of_training(
            directory, block, scaling, f"EAGLE's training code with {scaling.kind} scaling"
        )
    read_width = block.hidden_size
    if kind == "eagle3":
        read_width = whole_or(read_width, values, "target_hidden_size")
    if read_width != target.hidden_size:
        raise ValueError(
            f"the head reads auxiliary hidden states of width {read_width}, the target's are of {target.hidden_size}; "
            "a head fits the model that it was trained for"
        )
    has_head, own_embedding = "lm_head.weight" in tensors, "embed_tokens.weight" in tensors
    if block.hidden_size != target.hidden_size and not (has_head and own_embedding):
        raise ValueError(
            "a head narrower than its target needs embed_tokens.weight and lm_head.weight of its own"
        )
    if kind == "eagle":
        head_size = target.vocab_size if has_head else None
        return EagleConfig(
            block, (FINAL,), kind, None, head_size, own_embedding, fc_bias="fc.bias" in tensors
        )
    norms = [norm for name, norm in _FEATURE_NORMS.items() if flag(values, name)]
    if len(norms) > 1:
        raise ValueError("norm_before_fc and fc_norm are both set; expected one of them at most")
    head_size = whole_or(target.vocab_size, values, "draft_vocab_size", most=target.vocab_size)
    return EagleConfig(
        block,
        _aux_layers(content, nested, target.num_layers),
        kind,
        read_width,
        head_size if has_head else None,
        own_embedding,
        fc_bias="fc.bias" in tensors,
        aux_norm=norms[0] if norms else "none",
        residual_is_normed=flag(values, "norm_before_residual"),
        output_is_normed=flag(values, "norm_output"),
        mask_id=_mask_id(values, target.vocab_size),
    )


def _mask_id(values: Mapping[str, Any], vocab_size: int) -> int | None:
    """Returns the mask token of P-EAGLE; None for other heads."""
    given = (name for name in _MASK_IDS if values.get(name) is not None)
    return next((whole(values, name, 0, vocab_size - 1) for name in given), None)


def _aux_layers(content: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the auxiliary layers of a head, as the layers whose inputs it reads.

    vLLM and speculators list these. SpecForge, SGLang and NVIDIA list, in `eagle_config`, the layers whose outputs are
    read, which are one less, and DeepSpec in `target_layer_ids`. A list that begins with 1 is of this second form too:
    its default is 1, L÷2 − 1, L − 4.
    """
    own = section(content, "jaxspec").get("taps")
    ids = own or content.get(AUX_LAYER_IDS) or nested.get(AUX_LAYER_IDS) or content.get("target_layer_ids")
    leaves = not own and (not content.get(AUX_LAYER_IDS) or (isinstance(ids, list) and ids[:1] == [1]))
    if not ids:
        aux_layers: tuple[Any, ...] = usual_aux_layers(num_layers)
    elif isinstance(ids, list) and all(type(one) is int for one in ids):
        aux_layers = tuple(one + leaves for one in ids)
    else:
        raise ValueError(f"{AUX_LAYER_IDS} is {shown(ids)}; expected a list of layers")
    if not all(0 <= layer <= num_layers for layer in aux_layers):
        raise ValueError(f"the head reads the inputs of the layers {aux_layers}, the target has {num_layers}")
    return aux_layers


def entries(config: EagleConfig) -> Iterator[Entry]:
    """Name, shape and sources of every leaf of a head, in the order of the tree."""
    own = {
        "fc": "fc.weight",
        "fc_bias": "fc.bias",
        "mask_hidden": "mask_hidden",
        "layers/0/attention/embed_norm": "layers.0.input_layernorm.weight",
        "layers/0/attention/norm": "layers.0.hidden_norm.weight",
    }
    one_norm = config.aux_norm == "together"
    for leaf, shape in leaves_of(config.shapes):
        if leaf.startswith("fc_norms/"):
            name = "input_norm.weight" if one_norm else f"fc_norm.{leaf.split('/')[1]}.weight"
            sources = [Source(name, shape, shape)]
        elif leaf in own:
            sources = [Source(own[leaf], shape, shape)]
        else:
            sources = llama_sources(config.block, leaf, shape)
        yield leaf, shape, sources


def content(config: EagleConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`, as yuhuili's and SpecForge's, without the target."""
    made = _of_block(config, dtype_name) | {"architectures": [_ARCHITECTURES[config.kind]]}
    if config.kind == "eagle":
        return made | {"bias": config.fc_bias}
    return made | _of_eagle3(config)


def _of_block(config: EagleConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the keys of the head's layers. A Llama layer with biases of queries, keys and values has `qkv_bias`."""
    block = config.block
    both = block.output_bias if block.model_type == "llama" else block.qkv_bias
    made = config_json(dataclasses.replace(block, qkv_bias=both), dtype_name)
    return made if block.qkv_bias == both else made | {"qkv_bias": block.qkv_bias}


def _of_eagle3(config: EagleConfig) -> dict[str, Any]:
    """Returns the keys of `config.json` that are not those of a Llama; options that are off are left out."""
    aux_layers = [layer for layer in config.aux_layers if layer != FINAL]
    width = None if config.target_width == config.block.hidden_size else config.target_width
    options: dict[str, Any] = {name: norm == config.aux_norm for name, norm in _FEATURE_NORMS.items()}
    options |= {"norm_before_residual": config.residual_is_normed, "norm_output": config.output_is_normed}
    options |= {"mask_token_id": config.mask_id, "target_hidden_size": width}
    return {name: one for name, one in options.items() if one is not None and one is not False} | {
        "draft_vocab_size": config.block.vocab_size if config.head_size is None else config.head_size,
        AUX_LAYER_IDS: aux_layers,
        "jaxspec": {"taps": aux_layers},
    }


def specforge(config: EagleConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of SpecForge's `config.json`, which lists the layers whose outputs the head reads.

    Raises:
      ValueError: the head reads the embedding, which is no layer's output, or norms its residual stream.
    """
    made = content(config, dtype_name)
    outputs = [layer - 1 for layer in made.pop(AUX_LAYER_IDS)]
    if -1 in outputs or config.residual_is_normed:
        raise ValueError(
            "SpecForge's layout has no head that reads the embedding (auxiliary layer 0) or norms its residual stream"
        )
    return made | {"eagle_config": {AUX_LAYER_IDS: outputs, "use_aux_hidden_state": True}}


def speculators(config: EagleConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of speculators' `config.json`, without the verifier's name."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": _of_block(config, dtype_name),
        "target_hidden_size": None,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name,
        **_of_eagle3(config),
    }


def published(config: EagleConfig, name: str) -> str:
    """Returns the name of a tensor in the files of EAGLE-3."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
