"""Heads of DFlash as their authors, SpecForge, speculators and DeepSpec publish them.

model.safetensors   fc.weight, hidden_norm.weight, layers.{l}.* of Qwen3, norm.weight, all perhaps behind `model.`
config.json         of a Qwen3 with as many layers, whatever `model_type` says; `block_size`; `dflash_config` with
                    `mask_token_id`, `target_layer_ids`

The files of speculators also have `embed_tokens.weight` and `lm_head.weight`, which training does not change, and `d2t`
and `t2d` if the latter is over a part of the vocabulary. Their Qwen3 is `transformer_layer_config`, and
`aux_hidden_state_layer_ids` are the layers whose inputs the head reads. In a layer with a window the
block is causal unless `sliding_window_non_causal` is true; in one of the authors', unless `is_causal` is false.

DeepSpec's have `markov_rank` 0, the options at the top of `config.json`, and the first two of these tensors. Each row
of a block predicts the token after its own, as with `sample_from_anchor` of speculators.

The target's embedding and head are the head's too. `target_layer_ids` are the layers, from 0, whose outputs
the head reads. As in the hidden states of transformers, the output of the last layer is taken after the final norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.heads.dflash.network import DFlashConfig, usual_aux_layers
from jaxspec.heads.tensors import (
    Entry,
    Head,
    check_sizes,
    checked,
    draft_ids,
    leaves_of,
    llama_sources,
    refuse_left_out,
    renamed,
)
from jaxspec.host.messages import shown
from jaxspec.io.hf.config_json import config_from, config_json, errors_of
from jaxspec.io.hf.layout import Source
from jaxspec.io.hf.values import flag, section, whole, whole_or
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import FINAL, AuxLayer

AUX_LAYER_IDS = "target_layer_ids"
LAYERS, _IDS = "transformer_layer_config", "aux_hidden_state_layer_ids"
_NON_CAUSAL = "sliding_window_non_causal"
# The tensors that only speculators and DeepSpec write. Without `draft_vocab_size` they repeat what the target has.
OF_SPECULATORS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_OWN = {"fc": "fc.weight", "hidden_norm": "hidden_norm.weight"}
# Options of later heads that change what is computed, by what leaves it as it is.
_UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "final_logit_softcapping": (0,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "attention_mode": ("gqa", "mha"),
    "causal_head": (False,),
    "jetspec_config": (),
    "projector_type": ("dflash",),
    "logit_scale": (1,),
    "shift_label": (False,),
    "use_swa": (False,),
    "causal": (False,),
    "markov_head_type": ("vanilla",),
}


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are a head of DFlash: EAGLE's has its `hidden_norm` in its layer."""
    return {*_OWN.values(), "layers.0.self_attn.q_norm.weight"} <= {plain(name) for name in names}


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """Returns the head in these tensors, checked to fit a target; raises the errors of `heads.read_head`."""
    # DeepSpec writes a head of DFlash as one of DSpark of rank 0.
    of_deepspec = content.get("markov_rank") is not None

    def config(values: Mapping[str, Any]) -> DFlashConfig:
        if values.get("markov_rank"):
            raise ValueError("markov_rank is of heads of DSpark, whose tensors markov_head.* are missing")
        return config_of({**values, "sample_from_anchor": True} if of_deepspec else values, target)

    more = OF_SPECULATORS if of_deepspec or content.get(LAYERS) or content.get("draft_vocab_size") else ()
    return read_as(directory, content, found, target, config, entries, more, {"lm_head.weight"})


def read_as(
    directory: Path,
    content: Mapping[str, Any],
    found: Tensors,
    target: LlamaConfig,
    config_of: Callable[[Mapping[str, Any]], DFlashConfig],
    entries: Callable[[Any], Iterator[Entry]],
    more: Collection[str],
    by_token: Collection[str],
) -> Head:
    """Returns a head of DFlash or of a successor.

    Args:
      directory, content, found, target: the arguments of `read`.
      config_of: the config in the form of the authors → the head's.
      entries: the function `entries` of the head's module `files`.
      more: names of tensors that may be there beside those of the entries.
      by_token: see `Head`.
    """
    # t2d only repeats what d2t says.
    refuse_left_out(directory, (name for name in found.left_out if name != "t2d"), found)
    tensors = renamed(directory, found, plain)
    with errors_of(directory / "config.json"):
        config = config_of(_of_speculators(content) if content.get(LAYERS) else content)
    head = checked(directory, Head(config, tuple(entries(config)), tensors, target.vocab_size), more)
    ids = draft_ids(directory, config.head_size, target.vocab_size, tensors)
    return dataclasses.replace(head, ids=ids, by_token=by_token)


def _of_speculators(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of speculators' `config.json` in the form of the authors."""
    ids = content.get(_IDS)
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise ValueError(f"{_IDS} is {shown(ids)}; expected a list of layers")
    left = [one - 1 for one in ids]
    return {**section(content, LAYERS), **content, "dflash_config": {AUX_LAYER_IDS: left}}


def plain(name: str) -> str:
    """Returns the name of a tensor without a prefix of its trainer."""
    return name.removeprefix("model.")


def config_of(content: Mapping[str, Any], target: LlamaConfig) -> DFlashConfig:
    """Returns the configuration of a head, checked to fit a target; raises ValueError."""
    values = {**content, **section(content, "dflash_config")}
    for name, usual in _UNCHANGED.items():
        if values.get(name) is not None and values[name] not in usual:
            raise ValueError(f"{name} is {shown(values[name])}; heads of DFlash with it are not supported")
    block = dataclasses.replace(config_from({**content, "model_type": "qwen3"}), tie_embeddings=False)
    causal, anchored = True, False
    if block.sliding_windows:
        # speculators counts a window from the block, the authors count it from each row.
        anchored = LAYERS in content or values.get(_NON_CAUSAL) is not None
        causal = not flag(values, _NON_CAUSAL) if anchored else values.get("is_causal") is None
        if not anchored and values.get("markov_rank") is not None:
            raise ValueError("layer_types has sliding_attention; heads of DeepSpec with it are not supported")
    check_sizes(block, target, "head")
    for name in ("block_size", "mask_token_id"):
        if values.get(name) is None:
            raise ValueError(f"{name} is missing; give the one that the head was trained with")
    mask_id = whole(values, "mask_token_id", 0, target.vocab_size - 1)
    size = whole_or(target.vocab_size, values, "draft_vocab_size", most=target.vocab_size)
    return DFlashConfig(
        block,
        _aux_layers(values, block, target.num_layers),
        whole(values, "block_size", 2),
        mask_id,
        None if size == target.vocab_size else size,
        int(not flag(values, "sample_from_anchor")),
        causal,
        anchored,
    )


def _aux_layers(values: Mapping[str, Any], block: LlamaConfig, num_layers: int) -> tuple[AuxLayer, ...]:
    """Returns the auxiliary layers of a head, as the layers whose inputs it reads."""
    ids = values.get(AUX_LAYER_IDS)
    if ids is None:
        ids = [layer - 1 for layer in usual_aux_layers(num_layers, block.num_layers)]
    if not isinstance(ids, list) or not ids or any(type(one) is not int for one in ids):
        raise ValueError(f"{AUX_LAYER_IDS} is {shown(ids)}; expected a list of layers")
    # The output before layer 0 is the embedding.
    if not all(-1 <= one < num_layers for one in ids):
        raise ValueError(
            f"the head reads the outputs of the layers {shown(ids)}, the target has layers 0 to {num_layers - 1}"
        )
    return tuple(FINAL if one == num_layers - 1 else one + 1 for one in ids)


def entries(config: DFlashConfig, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Entry]:
    """Name, shape and sources of every leaf, in the order of the tree; `more` are names of further leaves."""
    names = {**_OWN, **more}
    for leaf, shape in leaves_of(config.shapes):
        own = names.get(leaf)
        yield leaf, shape, [Source(own, shape, shape)] if own else llama_sources(config.block, leaf, shape)


def content(config: DFlashConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of `config.json`, without the target.

    Raises:
      ValueError: the head reads the output of the last layer, whose number only the target knows.
    """
    if FINAL in config.aux_layers:
        raise ValueError("a head that reads the output of the target's last layer is read, but not written")
    ids = [layer - 1 for layer in config.aux_layers if layer != FINAL]
    own = {"mask_token_id": config.mask_id, AUX_LAYER_IDS: ids}
    made = config_json(config.block, dtype_name) | {"architectures": ["DFlashDraftModel"]}
    if config.anchored_windows:
        made |= {_NON_CAUSAL: not config.causal_windows}
    elif not config.causal_windows:
        made |= {"is_causal": False}
    made |= {"block_size": config.block_size, "sample_from_anchor": not config.first, "dflash_config": own}
    return made if config.head_size is None else made | {"draft_vocab_size": config.head_size}
