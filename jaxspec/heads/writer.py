"""Writes heads in the published layouts, which other servers also read, with the fingerprint of their target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxspec.heads.files import head_leaves
from jaxspec.heads.kinds import known
from jaxspec.host.files import write_json
from jaxspec.io.tensors import save
from jaxspec.model.head import HeadConfig
from jaxspec.model.llama import Params, is_shape


def write_head(
    directory: str | os.PathLike[str],
    head: HeadConfig,
    params: Params,
    target: str,
    ids: np.ndarray | None = None,
    dtype: DTypeLike = np.float32,
    layout: str | None = None,
    name: str | None = None,
) -> int:
    """Writes a head's directory: `model.safetensors`, then `config.json`.

    Args:
      directory: created if missing.
      head: the head's configuration, with the target's vocabulary and width.
      params: its parameters, see the module `network` of its type.
      target: the fingerprint of its target, by which the head is found.
      ids: int32[V'], the tokens of EAGLE-3's own head, in the order of its rows; None for all tokens.
      dtype: the dtype of the written tensors.
      layout: the layout of another trainer, of `kinds.Kind.layouts`; None for that of the head's authors.
      name: hub id or path of the target, for a layout that records it.

    Returns:
      The size of the weights, bytes.

    Raises:
      ValueError: the parameters do not fit `head`, or the length of `ids` is not the number of rows of its head,
        or the layout cannot express the head.
    """
    directory = Path(directory)
    tree: Any = jax.tree.structure(head.shapes, is_leaf=is_shape)
    if jax.tree.structure(params) != tree:
        raise ValueError("the parameters have other leaves than the head; give a matching pair")
    kind = known()[head.kind]
    writing = kind.writing if layout is None else kind.layouts[layout]
    if writing is None:
        raise ValueError(f"heads of {head.kind} are read, but not written")
    if ids is not None and writing.part is None:
        raise ValueError(f"a head of {head.kind} has the vocabulary of its target; leave ids out")
    tensors = {} if writing.part is None else writing.part(head, ids)
    for array, (leaf, shape, sources) in zip(jax.tree.leaves(params), head_leaves(head), strict=True):
        if array.shape != shape:
            raise ValueError(f"parameter {leaf} has shape {array.shape}, expected {shape} by the head")
        for source in sources:
            part = np.asarray(array).reshape(source.split)[source.index].reshape(source.shape)
            tensors[writing.published(head, source.name)] = part.astype(dtype)
    content = writing.content(head, np.dtype(dtype).name)
    if "speculators_config" in content:
        content["speculators_config"]["verifier"]["name_or_path"] = name
    content.setdefault("jaxspec", {}).update(kind=head.kind, target=target)
    directory.mkdir(parents=True, exist_ok=True)
    save(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", content)
    return sum(tensor.nbytes for tensor in tensors.values())
