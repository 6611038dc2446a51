"""Counts a model's tokens on texts, to rank them for drafts over a part of the vocabulary."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.files import ending, parse_json, read_text
from jaxspec.io.methods.vocabulary_file import Ranking

# Characters per call of the tokenizer, which needs many times their memory.
_PIECE = 2**16
# Empty messages; their encoding has only the tokens of the chat template.
_CONVERSATION = tuple({"role": role, "content": ""} for role in ("user", "assistant", "user"))


def encoded(lm: LanguageModel, paths: Sequence[str]) -> Iterator[list[int]]:
    """Yields the token ids of text files in pieces that end at line ends; uses only the strings of .jsonl records.

    Raises:
      FileNotFoundError, ValueError: a file is missing, empty or no text, or the model has no tokenizer.
    """
    for path in paths:
        text = read_text(path, "`data` must be text files")
        if ending(path) == ".jsonl":
            text = "\n".join(_texts_of_lines(path, text))
        if not text:
            raise ValueError(f"{path} is empty; `data` must be text files")
        begin = 0
        while begin < len(text):
            line_end = text.rfind("\n", begin, begin + _PIECE) + 1
            end = line_end if line_end and begin + _PIECE < len(text) else begin + _PIECE
            yield lm.encode(text[begin:end])
            begin = end


def _texts_of_lines(path: str, content: str) -> Iterator[str]:
    """Yields the strings in the records of a file, because a model does not write field names and escapes."""
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                yield from _texts(parse_json(line))
            except ValueError:
                raise ValueError(
                    f"{path}:{number} is not JSON; give one record a line, or plain text"
                ) from None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def always_there(lm: LanguageModel) -> list[int]:
    """The tokens that every draft vocabulary needs: end-of-text, special and chat template tokens."""
    found = {*lm.config.eos_token_ids}
    if lm.config.bos_token_id is not None:
        found.add(lm.config.bos_token_id)
    if lm.tokenizer is not None:
        found |= lm.tokenizer.special_ids
        with contextlib.suppress(ValueError):  # no chat template, or one that rejects this conversation
            found |= {*lm.encode(_CONVERSATION)}
    return sorted(token for token in found if token < lm.config.vocab_size)


def rank(
    lm: LanguageModel, texts: Iterable[Sequence[int]], size: int | None = None
) -> tuple[Ranking, np.ndarray]:
    """Ranks a model's tokens by their counts in texts.

    Args:
      lm: the model.
      texts: token ids.
      size: number of tokens to keep; None for all tokens that occur.

    Returns:
      The ranking, with ties in the order of ids; and the counts, int64[V].

    Raises:
      ValueError: the texts have no token, or fewer than `size` different tokens.
    """
    counts = np.zeros(lm.config.vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(np.asarray(text, np.int64), minlength=len(counts))
    total, always = int(counts.sum()), always_there(lm)
    if not total:
        raise ValueError("no token was counted; give data=FILE with text, or generate=True")
    others = counts.copy()
    others[always] = 0
    order = np.argsort(-others, kind="stable")
    ids = order[: np.count_nonzero(others)].tolist()
    if size is not None:
        if not max(1, len(always)) <= size <= len(always) + len(ids):
            raise ValueError(
                f"size is {size}; {len(always)} tokens are always needed and {len(ids)} others were counted: "
                f"give {max(1, len(always))} to {len(always) + len(ids)}, or count more text"
            )
        ids = ids[: size - len(always)]
    return Ranking(tuple(always), tuple(ids), total, len(counts)), counts


def held_out_coverage(
    lm: LanguageModel, texts: Sequence[tuple[str, Sequence[int]]]
) -> dict[str, dict[int, float]]:
    """The `coverage` of every second text of each kind by a ranking of the other texts; empty without any.

    Args:
      lm: the model.
      texts: the kind of each text, and its token ids.
    """
    places: Counter[str] = Counter()
    halves: tuple[list[tuple[str, Sequence[int]]], ...] = ([], [])
    for kind, ids in texts:
        if len(ids):
            halves[places[kind] % 2].append((kind, ids))
            places[kind] += 1
    if not all(halves):
        return {}
    ranking, _ = rank(lm, [ids for _, ids in halves[0]])
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in halves[1]):
        held = np.concatenate([ids for one, ids in halves[1] if one == kind])
        found[kind] = coverage(ranking, np.bincount(held, minlength=lm.config.vocab_size))
    return found


def coverage(ranking: Ranking, counts: np.ndarray) -> dict[int, float]:
    """The share of the counted tokens in the first N of a ranking, for N in powers of two and for all."""
    number = 2 ** (max(1, len(ranking.always)) - 1).bit_length()
    sizes = []
    while number < len(ranking):
        sizes.append(number)
        number *= 2
    return {size: float(counts[ranking.first(size)].sum() / counts.sum()) for size in (*sizes, len(ranking))}
