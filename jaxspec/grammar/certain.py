"""The tokens with which a text must go on in the states of an automaton, whatever its tokens are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

# The bytes that are followed from a state; few tokens are longer.
_MOST = 64


def certain_tokens(
    class_of: np.ndarray, following: np.ndarray, final: np.ndarray, tokens: Sequence[bytes | None]
) -> np.ndarray:
    """Returns the longest token of the text that is certain after each state, [S] int32; −1 if nothing is.

    A text is certain if all texts that the automaton accepts from a state begin with it. It usually has several
    tokenisations; a model often prefers the one of long tokens.

    Args:
      class_of, following, final: `class_of`, `next` and `final` of a `TokenTable`.
      tokens: the bytes of each token; None or no bytes for a token without text.
    """
    texts, order, ids, ranks = _sorted(tuple(tokens))
    # The first and the last token of each class in the order of their bytes; all tokens between two share what they do.
    lowest, highest = np.full(following.shape[1], len(order)), np.full(following.shape[1], -1)
    np.minimum.at(lowest, class_of, ranks)
    np.maximum.at(highest, class_of, ranks)
    low = np.where(following >= 0, lowest, len(order)).min(axis=1)
    high = np.where(following >= 0, highest, -1).max(axis=1)
    # A token without bytes is the first of all, and has nothing in common with others.
    begins = [
        b"" if ends or last < 0 else _common(texts[order[first]], texts[order[last]])
        for ends, first, last in zip(final, low, high, strict=True)
    ]
    found = np.full(len(following), -1, np.int32)
    for state, begin in enumerate(begins):
        text, at = b"", state
        while begins[at] and len(text) < _MOST:
            text += begins[at]
            index = ids.get(begins[at])
            at = -1 if index is None else int(following[at, class_of[index]])
            if at < 0:  # the allowed tokens differ after these bytes
                break
        for size in range(len(text), len(begin) - 1, -1):
            index = ids.get(text[:size]) if size else None
            if index is not None and following[state, class_of[index]] >= 0:
                found[state] = index
                break
    return found


@functools.lru_cache(maxsize=2)
def _sorted(tokens: tuple[bytes | None, ...]) -> tuple[list[bytes], list[int], dict[bytes, int], np.ndarray]:
    """Returns the bytes of each token, the tokens in their order, the first token with some bytes, and the ranks."""
    texts = [bytes(text or b"") for text in tokens]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return texts, order, {text: index for index, text in reversed(list(enumerate(texts)))}, ranks


def _common(first: bytes, second: bytes) -> bytes:
    """Returns the longest common beginning."""
    size = min(len(first), len(second))
    return first[: next((place for place in range(size) if first[place] != second[place]), size)]
