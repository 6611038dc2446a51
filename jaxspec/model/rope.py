"""Rotary position embeddings (Su et al. 2021), with the scalings of Llama checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.config import LayerType, LlamaConfig, RopeScaling


class Tables(NamedTuple):
    """The rotations of tokens in layers of one type.

    Attributes:
      cos, sin: float32[B, T, r/2] for r rotated coordinates; None for no rotation.
      query_factor: float32[B, T], by which queries are multiplied; None for 1.
    """

    cos: jax.Array | None
    sin: jax.Array | None
    query_factor: jax.Array | None = None


def _frequencies(config: LlamaConfig, of: LayerType, length: jax.Array) -> jax.Array:
    """Returns radians per position, [*length.shape or broadcastable, r/2]; `dynamic` and `longrope` read `length`."""
    dim, scaling = config.rotary_dim or config.head_dim, of.rope_scaling
    assert of.rope_theta is not None
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    if scaling is not None and scaling.kind == "dynamic":
        original = config.max_position_embeddings
        seen = jnp.maximum(length, original).astype(jnp.float32)
        stretch = scaling.factor * seen / original - (scaling.factor - 1)
        base = of.rope_theta * stretch ** (dim / (dim - 2))
        return 1.0 / base[..., None] ** exponent
    plain = 1.0 / of.rope_theta**exponent
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    original = scaling.original_max_position_embeddings
    if scaling.kind == "longrope":
        short, long = (
            plain / jnp.array(factors) for factors in (scaling.short_factors, scaling.long_factors)
        )
        return jnp.where((length > original)[..., None], long, short)
    if scaling.kind == "yarn":
        keep = jnp.asarray(_kept_by_yarn(of.rope_theta, scaling, dim))
    else:
        wavelength = 2 * math.pi / plain
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _kept_by_yarn(theta: float, scaling: RopeScaling, dim: int) -> np.ndarray:
    """Returns the share of each frequency that YaRN (Peng et al. 2023, section 3.2) keeps, float32[r/2]."""

    def index(rotations: float) -> float:
        """Returns the index of the frequency with this number of rotations in the original length."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2) - low) / (high - low if high != low else 0.001)
    kept: np.ndarray = 1 - np.clip(ramp, 0, 1)
    return kept.astype(np.float32)


@jax.named_scope("rope")
def tables(config: LlamaConfig, of: LayerType, positions: jax.Array, rope_length: jax.Array) -> Tables:
    """Returns the rotations in layers of a type, for positions int32[B, T] and rope_length int32[B].

    Dynamic scaling and LongRoPE rotate the token at position p for a text of max(rope_length, p + 1) tokens, as a
    decoder with a cache does after a prefill of `rope_length` tokens.
    """
    scaling, factor = of.rope_scaling, None
    if of.rope_theta is None:
        return Tables(None, None)
    length = jnp.maximum(rope_length[:, None], positions + 1)
    angles = positions[..., None].astype(jnp.float32) * _frequencies(config, of, length)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is not None and scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    if scaling is not None and scaling.query_beta:
        times = positions // scaling.original_max_position_embeddings
        factor = 1 + scaling.query_beta * jnp.log1p(times.astype(jnp.float32))
    return Tables(cos, sin, factor)


@jax.named_scope("rope")
def rotate(x: jax.Array, turns: Tables) -> jax.Array:
    """Rotates x [B, T, ..., hd], its first half against its second as in Hugging Face checkpoints.

    If fewer coordinates are rotated, they are the first ones, and the others pass.
    """
    if turns.cos is None or turns.sin is None:
        return x
    middle, half = (1,) * (x.ndim - 3), turns.cos.shape[-1]
    cos = turns.cos.reshape(*turns.cos.shape[:2], *middle, -1)
    sin = turns.sin.reshape(*turns.sin.shape[:2], *middle, -1)
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.concatenate(parts + ([rest] if rest.shape[-1] else []), axis=-1)
    return turned.astype(x.dtype)
