"""Checks the vocabulary in a GGUF file: the number of its tokens, their lengths, and the types of its numbers.

A tokenizer's cost grows with the square of a token's length, and an invalid text would fail far from its cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.host.messages import shown

# The key of the chat template. Others have the same key with a dot and their name after it.
TEMPLATE = "tokenizer.chat_template"
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
# The maximum number of characters of each text.
_TEXTS = {"tokenizer.ggml.model": 100, "tokenizer.ggml.pre": 100, TEMPLATE: 1_000_000}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_MAX_TOKENS = 2**22
_MAX_TOKEN_BYTES = 1000
# All tokens together may have the constant plus this average per token. The tokens of models have 4 to 10 bytes each.
_MAX_BYTES, _MAX_AVERAGE_BYTES = 1_000_000, 64
# Arrays with one number for each token, and the NumPy kinds of their numbers.
_BY_TOKEN = {"tokenizer.ggml.scores": "f", "tokenizer.ggml.token_type": "iu"}


def check_vocabulary(metadata: Mapping[str, Any]) -> None:
    """Refuses tokenizer metadata of another type than the format defines, or outside its bounds.

    Args:
      metadata: the metadata of a file; absent keys are not checked.

    Raises:
      ValueError: a value is outside its bounds; the message begins with its key.
    """
    templates = {key: _TEXTS[TEMPLATE] for key in metadata if key.startswith(f"{TEMPLATE}.")}
    for key, most in (_TEXTS | templates).items():
        value = metadata.get(key, "")
        if not isinstance(value, str):
            raise ValueError(f"{key} is {shown(value)}, expected a text")
        if len(value) > most:
            raise ValueError(f"{key} has {len(value)} characters, expected at most {most}")
    for name in _FLAGS:
        value = metadata.get(f"tokenizer.ggml.{name}", False)
        if not isinstance(value, (bool, int)):
            raise ValueError(f"tokenizer.ggml.{name} is {shown(value)}, expected true or false")
    tokens = _texts(metadata, _TOKENS, _MAX_TOKEN_BYTES)
    # A merge consists of two tokens and a space between them.
    _texts(metadata, _MERGES, 2 * _MAX_TOKEN_BYTES + 1)
    for key, kinds in _BY_TOKEN.items():
        _check_numbers(metadata, key, kinds, len(tokens))


def _texts(metadata: Mapping[str, Any], key: str, most: int) -> list[str]:
    values = metadata.get(key, [])
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise ValueError(f"{key} is {shown(values)}, expected a list of texts")
    if len(values) > _MAX_TOKENS:
        raise ValueError(f"{key} has {len(values)} entries, expected at most {_MAX_TOKENS}")
    sizes = [len(one.encode()) for one in values]
    longest = max(sizes, default=0)
    if longest > most:
        raise ValueError(
            f"{key} has an entry of {longest} bytes, number {sizes.index(longest)}; expected at most {most}"
        )
    total = _MAX_BYTES + _MAX_AVERAGE_BYTES * len(values)
    if sum(sizes) > total:
        raise ValueError(f"{key} has {sum(sizes)} bytes, expected at most {total} of {len(values)} entries")
    return values


def _check_numbers(metadata: Mapping[str, Any], key: str, kinds: str, count: int) -> None:
    values = metadata.get(key)
    if values is None:
        return
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        raise ValueError(f"{key} is {shown(values)}, expected a list of numbers")
    if len(values) != count:
        raise ValueError(f"{key} has {len(values)} entries, expected {count}, one for each token")
    if np.isnan(values).any():
        raise ValueError(f"{key} is nan for token {int(np.isnan(values).argmax())}, expected a number")
