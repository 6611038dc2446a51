"""Heads written as they are published, with the name of their target: what `io.heads` reads, and other servers.

EAGLE-1 as yuhuili's, EAGLE-3 as yuhuili's and SpecForge's: `midlayer.*`, and `d2t` and `t2d` of a part of the
vocabulary. Medusa as vLLM reads it, or as its authors' last trainer writes heads without matrices of their own. Hydra
and Kangaroo as their authors'.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from jax.typing import DTypeLike

from jaxspec.io.eagle_head import TAP_IDS
from jaxspec.io.files import write_atomic, write_json
from jaxspec.io.heads import head_leaves
from jaxspec.io.hf_config import config_json
from jaxspec.model.eagle import HeadConfig
from jaxspec.model.hydra import HydraConfig
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.llama import FINAL, Params, is_shape
from jaxspec.model.medusa import MedusaConfig

# Those that are trained here.
WrittenHead = HeadConfig | MedusaConfig | HydraConfig | KangarooConfig
# What vLLM names otherwise than Medusa's authors.
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
_ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}


def write_head(
    directory: str | os.PathLike[str],
    head: WrittenHead,
    params: Params,
    target: str,
    ids: np.ndarray | None = None,
    dtype: DTypeLike = np.float32,
) -> int:
    """Writes a head's directory: `model.safetensors`, and a `config.json` that comes last.

    Args:
      directory: made if missing.
      head: what it is made of, with the target's vocabulary and width.
      params: its parameters, see `model.eagle` and its siblings.
      target: the fingerprint of its target, by which it is found again.
      ids: int32[V'], the tokens of EAGLE-3's own head, in the order of its rows; None for all.
      dtype: of the files.

    Returns:
      the size of the weights, bytes.

    Raises:
      ValueError: the parameters are not those of `head`, or `ids` are not as many as its head has rows.
    """
    directory = Path(directory)
    tree: Any = jax.tree.structure(head.shapes, is_leaf=is_shape)
    if jax.tree.structure(params) != tree:
        raise ValueError("the parameters have other leaves than the head; give those it was made for")
    if ids is not None and head.kind != "eagle3":
        raise ValueError(f"a head of {head.kind} has the vocabulary of its target; leave ids out")
    if isinstance(head, HeadConfig):
        rows = head.block.vocab_size if ids is None else len(ids)
        if head.head_size not in (None, rows):
            raise ValueError(
                f"ids are {rows} tokens, the head has {head.head_size} rows; give one of each row"
            )
    layer = "midlayer." if head.kind == "eagle3" else "layers.0."
    tensors: dict[str, np.ndarray] = {}
    for array, (leaf, shape, sources) in zip(jax.tree.leaves(params), head_leaves(head), strict=True):
        if array.shape != shape:
            raise ValueError(f"parameter {leaf} has shape {array.shape}, expected {shape} by the head")
        for source in sources:
            part = np.asarray(array).reshape(source.split)[source.index].reshape(source.shape)
            name = source.name
            if leaf.startswith("layers/0/"):
                name = layer + name.removeprefix("layers.0.")
            elif isinstance(head, MedusaConfig) and head.head_size is None:
                name = _BLOCK.sub(r"\1.\2.linear.", name)
            tensors[name] = np.ascontiguousarray(part.astype(dtype))
    content = _content(head, np.dtype(dtype).name)
    content.setdefault("jaxspec", {}).update(kind=head.kind, target=target)
    if ids is not None:
        tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(content["vocab_size"]), ids)
    directory.mkdir(parents=True, exist_ok=True)
    saved = safetensors.numpy.save(tensors, {"format": "pt"})
    write_atomic(directory / "model.safetensors", saved)
    write_json(directory / "config.json", content)
    return len(saved)


def _content(head: WrittenHead, dtype_name: str) -> dict[str, Any]:
    """What `config.json` says of a head, less its target."""
    if isinstance(head, MedusaConfig):
        own = {"medusa_num_heads": head.num_heads, "medusa_num_layers": head.num_layers, "dtype": dtype_name}
        if head.head_size is None:
            return own
        served = {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_fc_bias": head.bias}
        served |= {
            "num_heads": head.num_heads,
            "num_hidden_layers": head.num_layers,
            "hidden_size": head.width,
        }
        return {**own, **served, "vocab_size": head.head_size, "truncated_vocab_size": head.head_size}
    if isinstance(head, HydraConfig):
        return {
            "hydra_num_heads": head.num_heads,
            "hydra_num_layers": head.num_layers,
            "hydra_head_arch": "mlp" if head.prefix is None else "prefix-mlp",
            "grounded_heads": True,
            "dtype": dtype_name,
        }
    content = config_json(head.block, dtype_name)
    if isinstance(head, KangarooConfig):
        return content | {"jaxspec": {"exit_layer": head.exit_layer}}
    content["architectures"] = [_ARCHITECTURES[head.kind]]
    if head.kind == "eagle":
        return content | {"bias": head.fc_bias}
    taps = [tap for tap in head.taps if tap != FINAL]
    rows = head.block.vocab_size if head.head_size is None else head.head_size
    return content | {"draft_vocab_size": rows, TAP_IDS: taps, "jaxspec": {"taps": taps}}
