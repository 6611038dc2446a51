"""Heads of DSpark as DeepSpec and speculators publish them.

model.safetensors   as of DFlash; markov_head.markov_w1.weight, markov_head.markov_w2.weight,
                    confidence_head.proj.weight, confidence_head.proj.bias; DeepSpec also has copies of the target's
                    embed_tokens.weight and lm_head.weight, which training does not change
config.json         of DeepSpec: a Qwen3 with `block_size`, `mask_token_id`, `target_layer_ids` (the layers whose
                    outputs the head reads, −1 for the embedding), `markov_rank`, `enable_confidence_head`,
                    `confidence_head_with_markov`
                    of speculators: the same options; the Qwen3 is `transformer_layer_config`, and
                    `aux_hidden_state_layer_ids` are the layers whose inputs the head reads

Row k of a block predicts the token after its own, or, where `sample_from_anchor` is false, its own. The default is true
for DeepSpec. Early files of speculators do not have the option, and their rows predict their own tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxspec.heads.dflash import files as dflash
from jaxspec.heads.dspark.network import DSparkConfig
from jaxspec.heads.tensors import Entry, Head
from jaxspec.io.hf.values import flag, whole
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig

_OWN = {
    "markov_in": "markov_head.markov_w1.weight",
    "markov_out": "markov_head.markov_w2.weight",
    "confidence": "confidence_head.proj.weight",
    "confidence_bias": "confidence_head.proj.bias",
}
BY_TOKEN = r"(model\.)?markov_head\.markov_w[12]\.weight"
_FLAGS = ("enable_confidence_head", "confidence_head_with_markov")


def recognises(names: Collection[str]) -> bool:
    """Whether tensors of these names are a head of DSpark."""
    return dflash.recognises(names) and _OWN["markov_in"] in map(dflash.plain, names)


def read(directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
    """Returns the head in these tensors, checked to fit a target; raises the errors of `heads.read_head`."""

    def config(values: Mapping[str, Any]) -> DSparkConfig:
        nested = bool(content.get(dflash.LAYERS))
        usual = {**dict.fromkeys(_FLAGS, nested), "sample_from_anchor": not nested, "markov_rank": 256}
        values = {**usual, **values}
        enabled, both = (flag(values, name) for name in _FLAGS)
        confidence: Literal["none", "hidden", "both"] = (
            "none" if not enabled else "both" if both else "hidden"
        )
        base = dflash.config_of(values, target)
        return DSparkConfig(**vars(base), rank=whole(values, "markov_rank"), confidence=confidence)

    by_token = {"lm_head.weight", _OWN["markov_out"]}
    return dflash.read_as(directory, content, found, target, config, entries, dflash.OF_SPECULATORS, by_token)


def entries(config: DSparkConfig) -> Iterator[Entry]:
    """Name, shape and sources of every leaf, in the order of the tree."""
    return dflash.entries(config, _OWN)


def content(config: DSparkConfig, dtype_name: str) -> dict[str, Any]:
    """Returns the content of `config.json` in DeepSpec's layout, without the target."""
    made = dflash.content(config, dtype_name)
    return {**made, **made.pop("dflash_config"), "architectures": ["Qwen3DSparkModel"]} | {
        "markov_rank": config.rank,
        "markov_head_type": "vanilla",
        **dict(zip(_FLAGS, (config.confidence != "none", config.confidence == "both"), strict=True)),
    }
