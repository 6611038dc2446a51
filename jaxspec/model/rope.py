"""Rotary position embeddings (Su et al. 2021), with the scalings of Llama checkpoints."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxspec.model.config import LlamaConfig


def _frequencies(config: LlamaConfig, length: jax.Array) -> jax.Array:
    """Returns radians per position, [*length.shape or broadcastable, hd/2]; only dynamic scaling reads `length`."""
    dim, scaling = config.head_dim, config.rope_scaling
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    if scaling is not None and scaling.kind == "dynamic":
        original = config.max_position_embeddings
        seen = jnp.maximum(length, original).astype(jnp.float32)
        stretch = scaling.factor * seen / original - (scaling.factor - 1)
        base = config.rope_theta * stretch ** (dim / (dim - 2))
        return 1.0 / base[..., None] ** exponent
    plain = 1.0 / config.rope_theta**exponent
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    wavelength = 2 * math.pi / plain
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = jnp.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


@jax.named_scope("rope")
def tables(config: LlamaConfig, positions: jax.Array, rope_length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine, float32[B, T, hd/2] each, for positions int32[B, T] and rope_length int32[B].

    Dynamic scaling rotates the token at position p for a text of max(rope_length, p + 1) tokens, as a decoder
    with a cache does after a prefill of `rope_length` tokens.
    """
    length = jnp.maximum(rope_length[:, None], positions + 1)
    angles = positions[..., None].astype(jnp.float32) * _frequencies(config, length)
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("rope")
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B, T, ..., hd], its first half against its second as in Hugging Face checkpoints."""
    middle = (1,) * (x.ndim - 3)
    cos = cos.reshape(*cos.shape[:2], *middle, -1)
    sin = sin.reshape(*sin.shape[:2], *middle, -1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
