"""EAGLE heads written as they are published, with the name of their target: what `io.heads` reads, and other servers.

EAGLE-1 as yuhuili's, EAGLE-3 as yuhuili's and SpecForge's: `midlayer.*`, and `d2t` and `t2d` of a part of the
vocabulary.
"""

from __future__ import annotations

import os
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
from jaxspec.model.eagle import HeadConfig, param_shapes
from jaxspec.model.llama import FINAL, Params, is_shape

_ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}


def write_head(
    directory: str | os.PathLike[str],
    head: HeadConfig,
    params: Params,
    target: str,
    ids: np.ndarray | None = None,
    dtype: DTypeLike = np.float32,
) -> int:
    """Writes a head's directory: `model.safetensors`, and a `config.json` that comes last.

    Args:
      directory: made if missing.
      head: what it is made of, with the target's vocabulary and width.
      params: its parameters, see `model.eagle`.
      target: the fingerprint of its target, by which it is found again.
      ids: int32[V'], the tokens of its own head, in the order of its rows; None for all.
      dtype: of the files.

    Returns:
      the size of the weights, bytes.

    Raises:
      ValueError: the parameters are not those of `head`, or `ids` are not as many as its head has rows.
    """
    directory = Path(directory)
    tree: Any = jax.tree.structure(param_shapes(head), is_leaf=is_shape)
    if jax.tree.structure(params) != tree:
        raise ValueError("the parameters have other leaves than the head; give those it was made for")
    rows = head.block.vocab_size if ids is None else len(ids)
    if head.head_size not in (None, rows):
        raise ValueError(f"ids are {rows} tokens, the head has {head.head_size} rows; give one of each row")
    layer = "midlayer." if head.kind == "eagle3" else "layers.0."
    tensors: dict[str, np.ndarray] = {}
    for array, (leaf, shape, sources) in zip(jax.tree.leaves(params), head_leaves(head), strict=True):
        if array.shape != shape:
            raise ValueError(f"parameter {leaf} has shape {array.shape}, expected {shape} by the head")
        for source in sources:
            part = np.asarray(array).reshape(source.split)[source.index].reshape(source.shape)
            name = (
                layer + source.name.removeprefix("layers.0.") if leaf.startswith("layers/0/") else source.name
            )
            tensors[name] = np.ascontiguousarray(part.astype(dtype))
    content = config_json(head.block, np.dtype(dtype).name)
    content["architectures"] = [_ARCHITECTURES[head.kind]]
    content["jaxspec"] = {"kind": head.kind, "target": target}
    if head.kind == "eagle":
        content["bias"] = head.fc_bias
    else:
        content["draft_vocab_size"] = rows
        content[TAP_IDS] = content["jaxspec"]["taps"] = [tap for tap in head.taps if tap != FINAL]
    if ids is not None:
        tensors["d2t"] = ids.astype(np.int64) - np.arange(rows)
        tensors["t2d"] = np.isin(np.arange(head.block.vocab_size), ids)
    directory.mkdir(parents=True, exist_ok=True)
    saved = safetensors.numpy.save(tensors, {"format": "pt"})
    write_atomic(directory / "model.safetensors", saved)
    write_json(directory / "config.json", content)
    return len(saved)
