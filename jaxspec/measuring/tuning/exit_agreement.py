"""Agreement of early exits with the whole model, layer by layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params


def exit_agreement(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    cache: KVCache,
    chunk_size: int,
) -> jax.Array:
    """Counts the positions where the exit after E layers and the whole model have the same top token, for every E.

    An exit applies the final norm and head to the state after E layers, as in LayerSkip (Elhoushi et al. 2024).
    On the model's own greedy text, the count shows how often a draft of the first E layers is right after a
    correct context. Layers pass through the head one at a time and positions in chunks, so that memory is
    bounded by [B, chunk_size, V].

    Args:
      config: the model.
      params: its parameters.
      tokens: int32[B, M], at positions start[b] + t; M is a multiple of `chunk_size`.
      start: int32[B]; start + M is at most the cache's capacity.
      count: int32[B], 1 … M, the number of positions of each row before the padding.
      cache: contains all positions below start[b].
      chunk_size: positions per pass, static.

    Returns:
      int32[B, L], the number of positions where the exit after l + 1 layers agrees; the last column is count[b].
    """

    def feed(carry: tuple[jax.Array, jax.Array, KVCache]) -> tuple[jax.Array, jax.Array, KVCache]:
        index, agreed, cache = carry
        begin = index * chunk_size
        fed = jax.lax.dynamic_slice_in_dim(tokens, begin, chunk_size, axis=1)
        states: list[jax.Array] = []
        _, cache = llama.run_layers(
            config,
            params,
            llama.embed(config, params, fed),
            start + begin,
            cache,
            watch=lambda _, y: states.append(y),
        )
        after_mlp = jnp.stack(states[1::2])
        chosen = jax.lax.map(
            lambda hidden: jnp.argmax(llama.logits(config, params, hidden), axis=-1), after_mlp
        )
        real = begin + jnp.arange(chunk_size)[None] < count[:, None]
        return index + 1, agreed + jnp.sum((chosen == chosen[-1]) & real, axis=-1, dtype=jnp.int32).T, cache

    agreed = jnp.zeros((tokens.shape[0], config.num_layers), jnp.int32)
    longest = jnp.max(count)
    _, agreed, _ = jax.lax.while_loop(
        lambda carry: carry[0] * chunk_size < longest, feed, (jnp.int32(0), agreed, cache)
    )
    return agreed
