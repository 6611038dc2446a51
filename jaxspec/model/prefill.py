"""Prompts through the model: right-padded, in chunks, so that one program serves every length in bounded memory."""

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
from jaxspec.model.llama import Params, Tap
from jaxspec.model.numerics import cosine

# (what has been absorbed, features [B, T, F] at positions start[b] + t, the token after each int32[B, T], start
# int32[B], how many count int32[B]) -> what has been absorbed
Absorb = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], Any]


def run_prompts(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    cache: KVCache,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Feeds right-padded prompts in chunks, so that memory is bounded by the chunk.

    The number of chunks follows the longest prompt at run time: one executable serves every length. Where
    the caller makes no use of the similarities, the compiler leaves them out.

    Args:
      config: the model.
      params: its parameters.
      tokens: int32[B, N], N a multiple of `chunk_size` and at most the cache's capacity.
      length: int32[B], tokens of each prompt, at least 1.
      cache: to be filled from slot 0.
      chunk_size: how many positions are fed at once, static.

    Returns:
      hidden [B, D] of each row's last token, before the final norm.
      similarities float32[B, L, 2]: of each attention (0) and MLP (1) sublayer, the mean over the prompt's
        positions of the cosine between the residual stream before its norm and after its addition.
      the cache.
    """
    state = start_prefill(config, params, length, cache)
    stop = (jnp.max(length) + chunk_size - 1) // chunk_size
    state = feed(config, params, tokens, length, state, jnp.int32(0), stop, chunk_size)
    return state.hidden, state.similarities / length[:, None, None], state.cache


@struct.dataclass
class Prefilling:
    """Prompts of which some chunks have been fed.

    Attributes:
      hidden: [B, D], of each row's last token, before the final norm, once it has been fed.
      similarities: float32[B, L, 2], see `run_prompts`, summed over the positions fed.
      cache: holds the positions fed; None where it goes its own way.
      feature: [B, F], the features of each row's last token, as `hidden`; None without taps.
      absorbed: what was made of the features before it; None without taps, or where it goes its own way.
    """

    hidden: jax.Array
    similarities: jax.Array
    cache: Any
    feature: jax.Array | None = None
    absorbed: Any = None


def start_prefill(
    config: LlamaConfig,
    params: Params,
    length: jax.Array,
    cache: KVCache,
    taps: tuple[Tap, ...] = (),
    absorbed: Any = None,
) -> Prefilling:
    """Prompts of length int32[B] of which nothing has been fed, and a cache to be filled from slot 0.

    `absorbed`: what `absorb` of `feed` is to begin with.
    """
    cache = dataclasses.replace(cache, rope_length=length)
    last = jnp.zeros((length.shape[0], config.hidden_size), params["embed"].dtype)
    similarities = jnp.zeros((length.shape[0], config.num_layers, 2), jnp.float32)
    return Prefilling(last, similarities, cache, jnp.tile(last, len(taps)) if taps else None, absorbed)


def feed(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    state: Prefilling,
    first: jax.Array,
    stop: jax.Array,
    chunk_size: int,
    taps: tuple[Tap, ...] = (),
    absorb: Absorb | None = None,
) -> Prefilling:
    """Feeds the chunks from number `first` up to number `stop`, int32 scalars; see `run_prompts`.

    What a chunk computes does not depend on how many are fed in one call. With `taps`, `absorb` is handed the features
    of each chunk with the prompt's tokens after them; those of a prompt's last token, which the next token is yet to
    follow, stay in the state.
    """
    batch = tokens.shape[0]
    following = jnp.roll(tokens, -1, axis=1) if taps else tokens

    def feed_piece(carry: tuple[jax.Array, Prefilling]) -> tuple[jax.Array, Prefilling]:
        index, state = carry
        begin = index * chunk_size
        fed = jax.lax.dynamic_slice_in_dim(tokens, begin, chunk_size, axis=1)
        start = jnp.full(batch, begin, jnp.int32)
        cosines: list[jax.Array] = []
        watch = lambda x, y: cosines.append(cosine(x, y))  # noqa: E731
        hidden, features, cache = llama.run_tapped(
            config, params, llama.embed(params, fed), start, state.cache, taps, watch=watch
        )
        real = begin + jnp.arange(chunk_size)[None] < length[:, None]
        of_piece = jnp.stack([jnp.sum(c, axis=1, where=real) for c in cosines], axis=1)
        sums = state.similarities + of_piece.reshape(state.similarities.shape)
        offset = length - 1 - begin

        def last(of_piece: jax.Array, before: jax.Array) -> jax.Array:
            at = jnp.clip(offset, 0, chunk_size - 1)[:, None, None]
            here = jnp.take_along_axis(of_piece, at, axis=1)[:, 0]
            return jnp.where(((offset >= 0) & (offset < chunk_size))[:, None], here, before)

        feature, absorbed = state.feature, state.absorbed
        if features is not None and feature is not None and absorb is not None:
            after = jax.lax.dynamic_slice_in_dim(following, begin, chunk_size, axis=1)
            absorbed = absorb(absorbed, features, after, start, jnp.clip(offset, 0, chunk_size))
            feature = last(features, feature)
        return index + 1, Prefilling(last(hidden, state.hidden), sums, cache, feature, absorbed)

    return jax.lax.while_loop(lambda carry: carry[0] < stop, feed_piece, (first, state))[1]
