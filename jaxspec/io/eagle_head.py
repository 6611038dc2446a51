"""EAGLE heads in the layouts in which they are published.

    yuhuili EAGLE      fc.*, layers.0.*; a Llama config of one layer                       often only `.bin`
    yuhuili EAGLE-3    fc, midlayer.*, norm, lm_head, d2t, t2d; `draft_vocab_size`         also SpecForge's, AngelSlim's
    speculators        as EAGLE-3 with layers.0.* for midlayer.*; EAGLE-1 with fusion_fc.* and transformer.*; the Llama
                       config is `transformer_layer_config`
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

from jaxspec.io.head_tensors import (
    Entry,
    Head,
    check_ids,
    check_tensors,
    leaves_of,
    refuse_left_out,
    renamed,
    with_rope_of_training,
)
from jaxspec.io.hf_config import config_from, errors_of, read_windows
from jaxspec.io.hf_layout import Source, sources_of
from jaxspec.io.hf_values import flag, section, whole
from jaxspec.io.messages import shown
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.eagle import HeadConfig, usual_taps
from jaxspec.model.llama import FINAL

# Where a config names what is tapped.
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_Q = "layers.0.self_attn.q_proj.weight"
# What EAGLE-3 calls its layer, and speculators the parts of EAGLE-1.
_PREFIXES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
# What an option of the config says is normed before fc.
_FEATURE_NORMS: Mapping[str, Literal["together", "each"]] = {"norm_before_fc": "together", "fc_norm": "each"}
# A tensor that only an option of the config gives a place.
_OPTIONS = {"input_norm.weight": "norm_before_fc", "fc_norm.0.weight": "fc_norm"}


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are an EAGLE head."""
    return {"fc.weight", _Q} <= {_plain(name) for name in names}


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """The head that these tensors are, checked to fit a target; errors as of `heads.read_head`."""
    # t2d only repeats what d2t says.
    refuse_left_out(directory, (name for name in found.left_out if _plain(name) != "t2d"), found)
    tensors = renamed(directory, found, _plain)
    kind: Literal["eagle", "eagle3"] = "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    with errors_of(directory / "config.json"):
        config = _config(directory, kind, content, tensors, target)
    leaves = tuple(entries(config))
    more = {"d2t", "t2d"} if kind == "eagle3" else set()
    check_tensors(directory, kind, leaves, tensors, more, _OPTIONS)
    ids = _ids(directory, config, tensors)
    return Head(config, leaves, tensors, target.vocab_size, ids, {"lm_head.weight"})


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
) -> HeadConfig:
    nested = section(content, "eagle_config")
    inner = next(
        (section(content, key) for key in ("transformer_layer_config", "model") if content.get(key)), content
    )
    values = {**nested, **inner, **content}
    block = config_from({"model_type": "llama", **inner})
    if block.vocab_size != target.vocab_size:
        raise ValueError(
            f"the head has a vocabulary of {block.vocab_size} tokens, the target of {target.vocab_size}; "
            "a head fits the model that it was trained for"
        )
    # Trainers give a Llama layer a window in the words of Qwen2, which a Llama by itself does not read.
    windows = read_windows("qwen2", inner) if flag(inner, "use_sliding_window") else block.sliding_windows
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
    if kind == "eagle3" and values.get("target_hidden_size") is not None:
        read_width = whole(values, "target_hidden_size")
    if read_width != target.hidden_size:
        raise ValueError(
            f"the head reads features of width {read_width}, the target's are of {target.hidden_size}; "
            "a head fits the model that it was trained for"
        )
    has_head, own_embedding = "lm_head.weight" in tensors, "embed_tokens.weight" in tensors
    if block.hidden_size != target.hidden_size and not (has_head and own_embedding):
        raise ValueError(
            "a head narrower than its target needs embed_tokens.weight and lm_head.weight of its own"
        )
    if kind == "eagle":
        head_size = target.vocab_size if has_head else None
        return HeadConfig(block, (FINAL,), kind, None, head_size, own_embedding, fc_bias="fc.bias" in tensors)
    norms = [norm for name, norm in _FEATURE_NORMS.items() if flag(values, name)]
    if len(norms) > 1:
        raise ValueError("norm_before_fc and fc_norm are both set; expected one of them at most")
    head_size = target.vocab_size
    if values.get("draft_vocab_size") is not None:
        head_size = whole(values, "draft_vocab_size", most=target.vocab_size)
    return HeadConfig(
        block,
        _taps(content, nested, target.num_layers),
        kind,
        read_width,
        head_size if has_head else None,
        own_embedding,
        fc_bias="fc.bias" in tensors,
        feature_norm=norms[0] if norms else "none",
        residual_is_normed=flag(values, "norm_before_residual"),
        output_is_normed=flag(values, "norm_output"),
    )


def _taps(content: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """What is tapped, as the layers that it enters.

    vLLM and speculators name these; SpecForge, SGLang and NVIDIA, in `eagle_config`, the layers that it leaves, one
    less. A list that begins with 1 came from there too: what it leaves of three layers by default is 1, L÷2 − 1, L − 4.
    """
    own = section(content, "jaxspec").get("taps")
    ids = own or content.get(TAP_IDS) or nested.get(TAP_IDS)
    leaves = not own and (not content.get(TAP_IDS) or (isinstance(ids, list) and ids[:1] == [1]))
    if not ids:
        taps: tuple[Any, ...] = usual_taps(num_layers)
    elif isinstance(ids, list) and all(type(one) is int for one in ids):
        taps = tuple(one + leaves for one in ids)
    else:
        raise ValueError(f"{TAP_IDS} is {shown(ids)}; expected a list of layers")
    if not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(f"the head reads what enters the layers {taps}, the target has {num_layers}")
    return taps


def entries(config: HeadConfig) -> Iterator[Entry]:
    """Name, shape and sources of every leaf of a head, in the order of the tree."""
    own = {
        "fc": "fc.weight",
        "fc_bias": "fc.bias",
        "layers/0/attention/embed_norm": "layers.0.input_layernorm.weight",
        "layers/0/attention/norm": "layers.0.hidden_norm.weight",
    }
    one_norm = config.feature_norm == "together"
    for leaf, shape in leaves_of(config.shapes):
        if leaf.startswith("fc_norms/"):
            name = "input_norm.weight" if one_norm else f"fc_norm.{leaf.split('/')[1]}.weight"
            sources = [Source(name, shape, shape)]
        elif leaf in own:
            sources = [Source(own[leaf], shape, shape)]
        else:
            theirs = sources_of(config.block, leaf, shape)
            sources = [dataclasses.replace(one, name=one.name.removeprefix("model.")) for one in theirs]
        yield leaf, shape, sources


def _ids(directory: Path, config: HeadConfig, tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The tokens of a head's own vocabulary: `d2t` is what must be added to the number of a row."""
    size = config.block.vocab_size
    rows = size if config.head_size is None else config.head_size
    if "d2t" not in tensors:
        if rows != size:
            raise ValueError(
                f"{directory}: tensor d2t is missing: which of {size} tokens the {rows} rows of lm_head are"
            )
        return None
    offsets = tensors["d2t"]
    if offsets.shape != (rows,) or offsets.dtype.kind != "i":
        raise ValueError(
            f"{directory}: tensor d2t is {offsets.dtype}{offsets.shape}, expected int64({rows},)"
        )
    ids = check_ids(directory, np.arange(rows) + offsets, size, "row + d2t", "; is d2t an offset here?")
    known = tensors.get("t2d")
    if known is not None and (
        known.shape != (size,) or not np.array_equal(np.flatnonzero(known), np.sort(ids))
    ):
        raise ValueError(f"{directory}: t2d marks other tokens than row + d2t names; save the head again")
    return ids
