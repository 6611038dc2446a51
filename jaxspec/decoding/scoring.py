"""Scoring: the log-probabilities of given tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.decoding.records import put_rows
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model import prefill as prompts
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.verification import log_probs_of

# The log-probabilities float32[B, N] of tokens, the most likely tokens int32[B, N], and their log-probabilities.
Scores = tuple[jax.Array, jax.Array, jax.Array]


def score(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    first: jax.Array,
    *,
    chunk_size: int,
    merged: bool = True,
) -> Scores:
    """Feeds texts, and scores their tokens given the tokens before.

    Args:
      config: the model.
      params: its parameters.
      tokens: int32[B, N], texts padded on the right, N a multiple of `chunk_size`.
      length: int32[B], the tokens of each text, at least 2. The last one is scored, and does not influence anything.
      first: int32[B], the first position to score, from 1 to length − 1. The head runs only where it is needed.
      chunk_size: positions fed at once, static.
      merged: the layout of the cache, static, see `model.cache`.

    Returns:
      The log-probability of each token, float32[B, N], the most likely token in its place, int32[B, N], and that one's
      log-probability, float32[B, N]. The entries before `first` and from `length` on are meaningless.
    """
    batch, capacity = tokens.shape
    cache = kv.create(config, batch, capacity, params["embed"].dtype, merged)

    def absorb(
        scores: Scores, hidden: jax.Array, following: jax.Array, begin: jax.Array, count: jax.Array
    ) -> Scores:
        def compute(scores: Scores) -> Scores:
            logits = llama.logits(config, params, hidden)
            top = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            both = log_probs_of(logits, jnp.stack([following, top], axis=-1))
            new = both[..., 0], top, both[..., 1]
            log_probs, top_tokens, top_log_probs = (
                put_rows(old, values, begin + 1, count) for old, values in zip(scores, new, strict=True)
            )
            return log_probs, top_tokens, top_log_probs

        wanted = jnp.any((count > 0) & (begin + count >= first))
        scored: Scores = jax.lax.cond(wanted, compute, lambda scores: scores, scores)
        return scored

    zeros = jnp.zeros((batch, capacity), jnp.float32)
    nothing = zeros, jnp.zeros((batch, capacity), jnp.int32), zeros
    aux_layers = (config.num_layers,)
    state = prompts.start_prefill(config, params, length - 1, cache, aux_layers, nothing)
    stop = prompts.num_chunks(length - 1, None, chunk_size)
    numbers = jnp.int32(0), stop, chunk_size
    state = prompts.feed(config, params, tokens, length, state, *numbers, aux_layers, absorb)
    scores: Scores = state.absorbed
    return scores
