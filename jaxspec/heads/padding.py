"""Fits heads that were saved with another number of rows than their target, if the rows differ in padding only.

The models of a family share one tokenizer, but pad their embeddings to different numbers of rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.heads.kinds import known
from jaxspec.io.tensors import Tensors

# Tensors with one row per token, in every published layout.
_LLAMA = r"(.*\.)?(embed_tokens\.weight|lm_head\.weight|t2d)"
# Tensors that map the rows of a head over a part of the vocabulary to token ids.
_VOCABULARY_MAPS = ("d2t", "token_map")
_SIZES = ("vocab_size", "draft_vocab_size", "truncated_vocab_size")
_NESTED = ("transformer_layer_config", "model")


@functools.cache
def _by_token() -> re.Pattern[str]:
    """Returns an expression of the names of tensors with one row per token."""
    return re.compile("|".join([_LLAMA, *(kind.by_token for kind in known().values() if kind.by_token)]))


def refitted(
    content: Mapping[str, Any], found: Tensors, size: int, num_tokens: int
) -> tuple[Mapping[str, Any], Tensors, int]:
    """Returns a head's config and tensors with `size` rows, and the number of rows that the head itself has.

    Rows beyond `size` are cut, and missing rows are zero. Nothing changes if the head already has `size` rows, or if
    either number is smaller than the tokenizer's: then the vocabularies differ in more than padding.

    Args:
      content: the head's `config.json`.
      found: the head's tensors.
      size: V, the number of the target's rows.
      num_tokens: the number of tokens of the target's tokenizer.
    """
    rows = _rows(content, found)
    # A map with an entry for every row may reorder the rows, so the last ones need not be padding.
    named = any(len(tensor) == rows for name, tensor in found.items() if _is_map(name) and tensor.ndim)
    if rows is None or rows == size or min(rows, size) < num_tokens or named:
        return content, found, size
    fitted = Tensors()
    fitted.left_out = found.left_out
    for name, tensor in found.items():
        by_token = _by_token().fullmatch(name) and tensor.shape[:1] == (rows,)
        fitted[name] = _resized(tensor, size) if by_token else tensor
    return _with_rows(content, rows, size), fitted, min(rows, size)


def _rows(content: Mapping[str, Any], found: Tensors) -> int | None:
    """Returns the number of rows that the head was saved with; None if it cannot be determined."""
    nested = (content[key] for key in _NESTED if isinstance(content.get(key), Mapping))
    saved = (one.get("vocab_size") for one in (*nested, content))
    declared: int | None = next((size for size in saved if type(size) is int), None)
    part = any(map(_is_map, found))
    sizes = [len(tensor) for name, tensor in found.items() if _by_token().fullmatch(name) and tensor.ndim]
    if declared is not None and (part or not sizes or declared in sizes):
        return declared
    return None if part else max(sizes, default=None)


def _is_map(name: str) -> bool:
    return name.rpartition(".")[2] in _VOCABULARY_MAPS


def _with_rows(content: Mapping[str, Any], rows: int, size: int) -> Mapping[str, Any]:
    changed = {
        key: _with_rows(content[key], rows, size) for key in _NESTED if isinstance(content.get(key), Mapping)
    }
    return {**content, **changed} | {key: size for key in _SIZES if content.get(key) == rows}


def _resized(tensor: np.ndarray, size: int) -> np.ndarray:
    if len(tensor) >= size:
        return tensor[:size]
    return np.concatenate([tensor, np.zeros((size - len(tensor), *tensor.shape[1:]), tensor.dtype)])
