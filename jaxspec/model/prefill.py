"""Prefill: right-padded prompts in chunks, so that one program runs every length in bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import AuxLayer, Params
from jaxspec.model.numerics import cosine

# (drafter state, auxiliary hidden states [B, T, F] at positions start[b] + t, the token after each int32[B, T], start
# int32[B], the number of valid ones int32[B]) -> drafter state
Absorb = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], Any]


def run_prompts(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    cache: KVCache,
    chunk_size: int,
    start: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, KVCache, jax.Array]:
    """Feeds right-padded prompts in chunks.

    The longest prompt decides the number of chunks at run time. If the caller does not use the means, the compiler
    removes them.

    Args:
      config: the model.
      params: its parameters.
      tokens: int32[B, N], N at least `chunk_size` and at most the cache's capacity.
      length: int32[B], the tokens of each prompt, at least 1.
      cache: filled from slot start[b] on; it holds the positions before.
      chunk_size: positions per chunk, static.
      start: int32[B], the position of each row's first token to feed, below `length`; None for 0.

    Returns:
      hidden [B, D] of each row's last token, before the final norm.
      similarities float32[B, L, 2] of the attention (0) and MLP (1) sublayers: the cosine between the residual
        stream before the sublayer's norm and after its addition, averaged over the positions fed.
      the cache.
      vectors float32[B, D]: the hidden states after the final norm, averaged over the positions fed.
    """
    state = start_prefill(config, params, length, cache)
    stop = num_chunks(length, start, chunk_size)
    state = feed(config, params, tokens, length, state, jnp.int32(0), stop, chunk_size, start=start)
    state = state.averaged(length, start)
    return state.hidden, state.similarities, state.cache, state.vectors


def num_fed(length: jax.Array, start: jax.Array | None) -> jax.Array:
    """Returns the number of tokens that a prefill feeds in each row, int32[B]; see `run_prompts`."""
    return length if start is None else length - start


def num_chunks(length: jax.Array, start: jax.Array | None, chunk_size: int) -> jax.Array:
    """Returns the number of chunks of a prefill, an int32 scalar: the row with the most tokens to feed decides."""
    return (jnp.max(num_fed(length, start)) + chunk_size - 1) // chunk_size


@struct.dataclass
class Prefilling:
    """The state of a prefill between chunks.

    Attributes:
      hidden: [B, D], of each row's last token, before the final norm; valid once that token has been fed.
      similarities, vectors: float32[B, L, 2] and float32[B, D], see `run_prompts`, summed over the positions fed.
      cache: contains the positions fed; None if the caller passes it separately.
      aux_hidden_state: [B, F], the auxiliary hidden states of each row's last token; None without auxiliary layers.
      absorbed: the drafter's state after the tokens before it. Without auxiliary layers, the part of an earlier text's
        state with which the drafter continues, see `protocol.Prefill`. None for nothing, or if passed separately.
    """

    hidden: jax.Array
    similarities: jax.Array
    vectors: jax.Array
    cache: Any
    aux_hidden_state: jax.Array | None = None
    absorbed: Any = None

    def averaged(self, length: jax.Array, start: jax.Array | None) -> Prefilling:
        """Returns the state after the last chunk with means in place of the sums; see `run_prompts`."""
        count = num_fed(length, start)
        means = self.similarities / count[:, None, None], self.vectors / count[:, None]
        return dataclasses.replace(self, similarities=means[0], vectors=means[1])


def start_prefill(
    config: LlamaConfig,
    params: Params,
    length: jax.Array,
    cache: KVCache,
    aux_layers: tuple[AuxLayer, ...] = (),
    absorbed: Any = None,
) -> Prefilling:
    """Returns the state before the first chunk of prompts of length int32[B].

    `absorbed` is the drafter's initial state, see `absorb` of `feed`.
    """
    cache = dataclasses.replace(cache, rope_length=length)
    last = jnp.zeros((length.shape[0], config.hidden_size), llama.stream_of(params))
    similarities = jnp.zeros((length.shape[0], config.num_layers, 2), jnp.float32)
    vectors = jnp.zeros(last.shape, jnp.float32)
    aux_hidden_state = jnp.tile(last, len(aux_layers)) if aux_layers else None
    return Prefilling(last, similarities, vectors, cache, aux_hidden_state, absorbed)


def feed(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    state: Prefilling,
    first: jax.Array,
    stop: jax.Array,
    chunk_size: int,
    aux_layers: tuple[AuxLayer, ...] = (),
    absorb: Absorb | None = None,
    start: jax.Array | None = None,
) -> Prefilling:
    """Feeds the chunks `first` to `stop` − 1, int32 scalars, of each row's tokens from `start` on; see `run_prompts`.

    The result of a chunk does not depend on the number of chunks per call. With `aux_layers`, `absorb` is called on the
    auxiliary hidden states of each chunk and the prompt tokens that follow them. Those of a prompt's last token stay in
    the state, because the token after it does not exist yet.
    """
    batch = tokens.shape[0]
    # A head reads each hidden state together with the token after it.
    following = jnp.roll(tokens, -1, axis=1) if aux_layers else tokens

    # A chunk must not reach past the last slot. It then begins earlier, and feeds some tokens again. In a row whose
    # prompt has ended it must not reach far behind the prompt, because a ring would drop slots for padding.
    last_begin = jnp.minimum(length, tokens.shape[1] - chunk_size)

    def feed_piece(carry: tuple[jax.Array, Prefilling]) -> tuple[jax.Array, Prefilling]:
        index, state = carry
        new = jnp.full(batch, index * chunk_size, jnp.int32) + (0 if start is None else start)
        begin = jnp.minimum(new, last_begin)
        columns = begin[:, None] + jnp.arange(chunk_size)
        fed = jnp.take_along_axis(tokens, columns, axis=1)
        hidden, aux_hidden_states, cache, cosines = llama.run_with_aux(
            config, params, llama.embed(config, params, fed), begin, state.cache, aux_layers, watch=cosine
        )
        assert cosines is not None
        # Padding must not count in the means, and no token twice.
        real = (columns < length[:, None]) & (columns >= new[:, None])
        sums = state.similarities + jnp.moveaxis(jnp.sum(cosines, axis=-1, where=real), -1, 0)
        normed = llama.final_norm(config, params, hidden).astype(jnp.float32)
        vectors = state.vectors + jnp.sum(normed, axis=1, where=real[..., None])
        offset = length - 1 - begin  # of each row's last token, within this chunk or not

        def last(of_piece: jax.Array, before: jax.Array) -> jax.Array:
            at = jnp.clip(offset, 0, chunk_size - 1)[:, None, None]
            here = jnp.take_along_axis(of_piece, at, axis=1)[:, 0]
            return jnp.where(((offset >= 0) & (offset < chunk_size))[:, None], here, before)

        aux_hidden_state, absorbed = state.aux_hidden_state, state.absorbed
        if aux_hidden_states is not None and aux_hidden_state is not None and absorb is not None:
            after = jnp.take_along_axis(following, columns, axis=1)
            absorbed = absorb(absorbed, aux_hidden_states, after, begin, jnp.clip(offset, 0, chunk_size))
            aux_hidden_state = last(aux_hidden_states, aux_hidden_state)
        ended = last(hidden, state.hidden)
        return index + 1, Prefilling(ended, sums, vectors, cache, aux_hidden_state, absorbed)

    return jax.lax.while_loop(lambda carry: carry[0] < stop, feed_piece, (first, state))[1]
