"""Builds tokenizers from a GGUF file's metadata.

Byte-level BPE (`gpt2`) follows the pre-tokenizers of the models' own tokenizer.json files, which are also llama.cpp's.
SentencePiece BPE (`llama`) gives llama.cpp's ids: a space is put before every piece of text, also after special tokens.
transformers' `LlamaTokenizer` puts a space only at the beginning of a text, unless `legacy` is true, and not before a
text that begins with a space.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxspec.io.gguf.bounds import TEMPLATE
from jaxspec.io.gguf.container import GGUFFile, read_gguf, token_ids
from jaxspec.io.gguf.ends import END_TEXTS
from jaxspec.io.tokenizers.tokenizer_file import FileTokenizer, failures

_LIST = "tokenizer.ggml.tokens"
# The format's numbers of token types.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# Padding of the vocabulary to a round size, which the model's own tokenizer does not have.
_PADDING = re.compile(r"\[PAD\d+\]")
_SPACE = "▁"
# transformers' name of each special token, by llama.cpp's name.
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


@dataclasses.dataclass(frozen=True)
class _Split:
    """The pre-tokenizer of a byte-level BPE, which splits a text before the merges.

    Attributes:
      pattern: a regular expression; None for GPT-2's.
      digits: whether to split off every digit first.
      compose: whether to apply Unicode's NFC first.
      whole_words: whether a piece that is a token is used whole, without regard to the merges.
      bos: whether BOS is put before a text if the file does not specify it.
    """

    pattern: str | None = None
    digits: bool = False
    compose: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    bos=True,
)
_QWEN2 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    compose=True,
)
_TEKKEN = _Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    bos=True,
)
# llama.cpp's names (`src/llama-vocab.cpp`).
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "exaone4", "olmo"), _Split()),
    **dict.fromkeys(("smollm", "exaone", "refact"), _Split(digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_LLAMA3.pattern)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Whether a GGUF file contains a vocabulary, valid or not."""
    return _LIST in read_gguf(path).metadata


def build(path: str | os.PathLike[str]) -> FileTokenizer:
    """Returns the tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file has no vocabulary, an unsupported one, or a damaged one; one line.
    """
    file = read_gguf(path)
    return FileTokenizer(*_backend(file), _templates(file.metadata))


def save(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], transformers: Callable[[], Any]
) -> None:
    """Writes the tokenizer of a GGUF file as files of transformers, the template into tokenizer_config.json.

    Raises:
      ValueError, FileNotFoundError: as in `build`.
    """
    file = read_gguf(path)
    backend, named = _backend(file)
    loaded = transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_templates(file.metadata),
        clean_up_tokenization_spaces=False,
        **named,
    )
    loaded.save_pretrained(str(directory), save_jinja_files=False)


def _templates(metadata: dict[str, Any]) -> Any:
    """Returns the chat template of the metadata, or all by name if there are several; None if there is none."""
    default, prefix = metadata.get(TEMPLATE), f"{TEMPLATE}."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    return {"default": default, **named} if named and default else default


def _backend(file: GGUFFile) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer and its named special tokens, such as bos_token."""
    metadata = file.metadata
    if _LIST not in metadata:
        raise ValueError(f"{file.path} has no vocabulary; raw token ids can be used instead of text")
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{file.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    if kind == "gpt2" and pre not in _SPLITS:
        raise ValueError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_SPLITS)}"
        )
    with failures(f"{file.path}: its tokenizer is damaged"):
        backend = _byte_level(metadata, _SPLITS[pre]) if kind == "gpt2" else _sentencepiece(file)
        return backend, _add_special(file, backend, bos=kind == "llama" or _SPLITS[pre].bos)


def _byte_level(metadata: dict[str, Any], split: _Split) -> Tokenizer:
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=split.whole_words))
    steps: list[Any] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    # llama.cpp reads `add_space_prefix` only for SentencePiece.
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.compose:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    metadata = file.metadata
    vocabulary = _vocabulary(metadata)
    if "tokenizer.ggml.merges" in metadata:
        merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges(metadata, vocabulary)
    unknown = metadata["tokenizer.ggml.tokens"][token_ids(file)["unknown"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    # The normaliser is applied to each text between two special tokens, as in Llama 2's own tokenizer.json.
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    """Returns the ids by token, without padding."""
    tokens, types = metadata[_LIST], _types(metadata)
    return {
        token: index
        for index, token in enumerate(tokens)
        if types[index] != _UNUSED or not _PADDING.fullmatch(token)
    }


def _types(metadata: dict[str, Any]) -> np.ndarray:
    types: np.ndarray = metadata.get("tokenizer.ggml.token_type", np.full(len(metadata[_LIST]), _NORMAL))
    return types


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _merges(metadata: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges that are equivalent to SentencePiece's scores: pairs in the order of their token's score.

    If several pairs form one token, the pair with the longest left part comes first, as in transformers.
    """
    scores = metadata["tokenizer.ggml.scores"]
    found = []
    for token, index in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], -at, left, right))
    return [(left, right) for _, _, left, right in sorted(found, key=lambda pair: pair[:2])]


def _add_special(file: GGUFFile, backend: Tokenizer, bos: bool) -> dict[str, str]:
    """Adds the special tokens, and BOS and EOS around a text; returns the named special tokens."""
    metadata, ids = file.metadata, token_ids(file)
    tokens, types = metadata[_LIST], _types(metadata).tolist()
    named = {_NAMED[name]: tokens[index] for name, index in ids.items() if name in _NAMED}
    # These tokens are special whatever type the file gives them, as in llama.cpp.
    special = END_TEXTS | set(named.values())
    # A token of the vocabulary keeps its id.
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL or token in special)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) or token in special
        ]
    )
    around = [
        [named[_NAMED[name]]]
        if name in ids and metadata.get(f"tokenizer.ggml.add_{name}_token", usual)
        else []
        for name, usual in (("bos", bos), ("eos", False))
    ]
    if any(around):
        backend.post_processor = processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]],
            special_tokens=[(token, tokens.index(token)) for place in around for token in place],
        )
    return named
