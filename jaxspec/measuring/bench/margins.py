"""First differences of greedy texts, and their logit margins: most are near ties that rounding decides."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.prefill import run_prompts
from jaxspec.model.sharding import fetched
from jaxspec.programs.buckets import bucket, prefill_chunk_size


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first position at which two texts differ, in tokens from 0; None for equal texts.

    Examples:
      >>> first_difference([3, 4, 5], [3, 5, 5]), first_difference([3], [3, 4]), first_difference([3], [3])
      (1, 1, None)
    """
    pairs = enumerate(zip(one, other, strict=False))
    at = next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
    return None if len(one) == len(other) == at else at


def margin(lm: LanguageModel, context: Sequence[int], token: int, other: int) -> float:
    """The difference between the logits of two tokens after a context.

    The logits come from one prefill, not from the rounds that chose the tokens.

    Args:
      lm: the model.
      context: token ids, at least one.
      token, other: token ids.

    Examples:
      >>> from jaxspec.testing import language_model
      >>> lm = language_model()
      >>> token = lm.generate([3, 4], max_new_tokens=1, temperature=0).tokens[0]
      >>> margin(lm, [3, 4], token, (token + 1) % 13) > 0, margin(lm, [3, 4], token, token)
      (True, 0.0)
    """
    chunk_size = prefill_chunk_size(len(context), lm.platform)
    capacity = bucket(len(context))
    tokens = np.zeros((1, capacity), np.int32)
    tokens[0, : len(context)] = context
    logits = fetched(
        _next_logits(lm.config, chunk_size, lm.params, tokens, np.array([len(context)], np.int32))
    )
    return float(logits[token] - logits[other])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_logits(
    config: LlamaConfig, chunk_size: int, params: llama.Params, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    cache = kv.create(config, 1, tokens.shape[1], params["embed"].dtype)
    hidden, _, _ = run_prompts(config, params, tokens, length, cache, chunk_size)
    return llama.logits(config, params, hidden)[0]
