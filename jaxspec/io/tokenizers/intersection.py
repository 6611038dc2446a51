"""The tokens that two tokenizers share, for a draft of another vocabulary.

In token-level intersection (Timor et al. 2025) a draft token that the target lacks has probability 0. The draft's
distribution is then over the target's tokens, so acceptance does not change. A draft is fed one token of its own for
each of the target's, also for one that it lacks, so that both caches have the same positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxspec.io.tokenizers.tokenizer import Tokenizer


class Intersection(NamedTuple):
    """The shared tokens of a target and a draft.

    Attributes:
      shared: int32[N, 2], the ids of each shared token in target and draft; those of the target rise.
      fed: int32[V], the draft's token that is fed in the place of each of the target's V ids.
    """

    shared: np.ndarray
    fed: np.ndarray


def intersection(target: Tokenizer, draft: Tokenizer, size: int, draft_size: int) -> Intersection:
    """Returns the shared tokens: those with the same bytes, and special tokens with the same role or text.

    A token that only the target has is replaced by the draft's longest token with which it ends.

    Args:
      target: the target's tokenizer.
      draft: the draft's.
      size: V, the number of rows of the target's head.
      draft_size: the same of the draft.
    """
    own: dict[bytes | str, int] = {}
    for meaning, index in draft.meanings():
        if index < draft_size:
            own.setdefault(meaning, index)
    fed: dict[int, int] = {}
    back: dict[int, int] = {}
    others: dict[int, bytes] = {}
    for meaning, index in target.meanings():
        if index >= size:
            continue
        if (same := own.get(meaning)) is not None:
            fed.setdefault(index, same)
            back.setdefault(same, index)
        elif isinstance(meaning, bytes):
            others[index] = meaning
    table = np.full(size, own.get("unk_token", own.get("eos_token", 0)), np.int32)
    for index, text in others.items():
        ends = (own[text[start:]] for start in range(1, len(text)) if text[start:] in own)
        table[index] = next(ends, table[index])
    table[[*fed]] = [*fed.values()]
    # A token may have several meanings; each draft token stands for one of the target's.
    pairs = sorted((index, same) for index, same in fed.items() if back[same] == index)
    return Intersection(np.array(pairs, np.int32).reshape(-1, 2), table)
