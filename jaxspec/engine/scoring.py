"""The log-probabilities of given texts, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.host.messages import shown
from jaxspec.model.llama import Params
from jaxspec.model.sharding import fetched
from jaxspec.programs import buckets, compiled
from jaxspec.programs.compiled import Loop
from jaxspec.requests.reading import is_text_or_ids
from jaxspec.requests.results import Score

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

# The most positions per chunk: each has the logits of the whole vocabulary.
_MAX_CHUNK = 64


def scores(
    loop: Loop, params: Params, texts: Sequence[tuple[int, Sequence[int]]], max_batch: int
) -> list[Score]:
    """Returns the scores of texts.

    Args:
      loop: the loop of the model.
      params: its parameters.
      texts: for each text the first position to score, at least 1, and its tokens.
      max_batch: the number of rows that are fed at once; a batch is filled up with short texts.
    """
    found: list[Score | None] = [None] * len(texts)
    # Texts of about the same length share a batch.
    order = sorted(range(len(texts)), key=lambda index: len(texts[index][1]))
    rows = min(max_batch, buckets.bucket(len(texts), 1))
    for begin in range(0, len(order), rows):
        batch = order[begin : begin + rows]
        longest = len(texts[batch[-1]][1])
        capacity = buckets.bucket(longest)
        tokens = np.zeros((rows, capacity), np.int32)
        length, first = np.full(rows, 2, np.int32), np.full(rows, capacity, np.int32)
        for row, index in enumerate(batch):
            first[row], own = texts[index]
            tokens[row, : len(own)], length[row] = own, len(own)
        arrays = loop.put((tokens, length, first))
        chunk_size = min(buckets.prefill_chunk_size(capacity, loop.platform), _MAX_CHUNK, capacity)
        static = {"config": loop.config, "chunk_size": chunk_size, "merged": loop.mesh is None}
        numbers = fetched(loop.executables.call(compiled.score, params, *arrays, **static))
        for row, index in enumerate(batch):
            scored = slice(first[row], length[row])
            log_probs, top_tokens, top_log_probs = (one[row, scored].tolist() for one in numbers)
            found[index] = Score(list(texts[index][1][scored]), log_probs, top_tokens, top_log_probs)
    return [score for score in found if score is not None]


def context_and_whole(
    model: LanguageModel, index: int, context: Any, continuation: Any
) -> tuple[int, list[int]]:
    """Returns the number of tokens of a context, and its tokens with those of its continuation."""
    if not (is_text_or_ids(context) and is_text_or_ids(continuation)):
        raise ValueError(f"contexts[{index}] or its continuation is messages; give texts or token ids")
    if isinstance(context, str) != isinstance(continuation, str):
        raise ValueError(
            f"contexts[{index}] is {shown(context)} and its continuation {shown(continuation)}; give both as "
            "texts or both as token ids"
        )
    if isinstance(context, str):
        own, tokens = model.encode(context), model.encode(context + continuation)
        size = len(own)
        if tokens[:size] != own:
            end, rest = shown(context[-20:]), shown(continuation[:20])
            raise ValueError(
                f"contexts[{index}] ends inside a token of the whole text, between {end} and {rest}; divide the "
                "text elsewhere, in most vocabularies before a space, or give token ids"
            )
    else:
        size, tokens = len(context), [*context, *continuation]
    if not 0 < size < len(tokens):
        raise ValueError(
            f"contexts[{index}] has {size} tokens, {len(tokens)} with its continuation; give at least one token "
            "each"
        )
    outside = next((token for token in tokens if not 0 <= token < model.config.vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"token id {outside} of contexts[{index}] or its continuation is outside the vocabulary; ids are "
            f"from 0 to {model.config.vocab_size - 1}"
        )
    if len(tokens) > model.config.context_length + 1:
        raise ValueError(
            f"contexts[{index}] and its continuation have {len(tokens)} tokens, the model's context is "
            f"{model.config.context_length}; shorten the context"
        )
    return size, tokens
