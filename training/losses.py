"""Losses as pure functions of (params, batch, step): a sum over tokens and the weight it is to be divided by.

Sums, not means, so that accumulated micro-batches give exactly the gradient of one large batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params

# tokens, segments and positions, int32[B, T] each; see `training.data`.
Batch = Mapping[str, Any]
# (params, batch, step int32[]) -> sum of losses in nats, float32[], and the number of tokens in it, float32[]
Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, jax.Array]]


def layer_outputs(config: LlamaConfig, params: Params, batch: Batch, remat: bool = False) -> list[jax.Array]:
    """The residual stream after every layer, L arrays [B, T, D] before the final norm.

    Args:
      config: the model.
      params: its parameters.
      batch: packed documents; none attends to another.
      remat: whether the backward pass computes each layer anew instead of keeping its inner values.
    """
    hidden = llama.embed(params, batch["tokens"])
    outputs = []
    for layer, p in enumerate(params["layers"]):
        block = functools.partial(llama.run_block, config, window=config.window(layer))
        run = jax.checkpoint(block) if remat else block
        hidden = run(p, hidden, batch["positions"], batch["segments"])
        outputs.append(hidden)
    return outputs


def next_token_targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """What each position is to predict: int32[B, T], and whether it has anything to predict, bool[B, T].

    The last position of a segment has no target: what follows belongs to another document or to another
    window. Neither has padding, whose segment is 0.
    """
    tokens, segments = batch["tokens"], batch["segments"]
    following = jnp.roll(segments, -1, axis=1).at[:, -1].set(0)
    return jnp.roll(tokens, -1, axis=1), (segments == following) & (segments > 0)


def cross_entropy(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the masked positions of −log softmax(logits)[target], in nats, float32[].

    Args:
      logits: float32[B, T, V].
      targets: int32[B, T].
      mask: bool[B, T]; False positions count nothing.
    """
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0))


def next_token(config: LlamaConfig, remat: bool = False) -> Loss:
    """The ordinary language-model loss: cross-entropy of every next token within its document."""

    def loss(params: Params, batch: Batch, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        del step
        targets, mask = next_token_targets(batch)
        hidden = layer_outputs(config, params, batch, remat)[-1]
        total = cross_entropy(llama.logits(config, params, hidden), targets, mask)
        return total, jnp.sum(mask, dtype=jnp.float32)

    return loss
