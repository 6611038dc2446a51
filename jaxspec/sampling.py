"""Sampling distributions over the next token.

The loop passes the same distribution to the drafter and the acceptor, so that drafts and target logits are warped
alike.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.control import run_if

# Temperatures below it mean greedy, as in vLLM: such a distribution has one token, and smaller ones are 0 in float32.
MIN_TEMPERATURE = 1e-5


def is_greedy(temperature: float) -> bool:
    """Returns whether a temperature means greedy text: it is below `MIN_TEMPERATURE`.

    Examples:
      >>> is_greedy(0.0), is_greedy(1e-6), is_greedy(1e-5)
      (True, True, False)
    """
    return temperature < MIN_TEMPERATURE


class Distribution(Protocol):
    """The sampling distribution: maps logits to a distribution over the next token.

    `log_probs`: logits [B, ..., V] → normalised log-probabilities, float32, −inf where impossible.
    `draw`: per-row keys [B] and logits [B, V] → tokens int32[B], and the log-probabilities [B, V] they were
    drawn from, or None if the token is deterministic given the logits (a point mass).
    `drawing`: whether some row is sampled; a Python bool if that is static.
    `for_live`: the distribution with greedy rows where `live`, bool[B], is False.

    Examples:
      >>> distribution: Distribution = Greedy()
      >>> distribution.log_probs(jnp.array([[0.0, 2.0]])).tolist()
      [[-inf, 0.0]]
    """

    def log_probs(self, logits: jax.Array) -> jax.Array: ...

    def draw(self, keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]: ...

    @property
    def drawing(self) -> bool | jax.Array: ...

    def for_live(self, live: jax.Array) -> Distribution: ...


@jax.named_scope("sampling")
def is_finite(logits: jax.Array) -> jax.Array:
    """Returns whether logits [..., V] define a distribution, bool[...]: no NaN or +inf, and not all −inf.

    Examples:
      >>> is_finite(jnp.array([[0.0, 1.0], [jnp.nan, 1.0]])).tolist()
      [True, False]
    """
    return jnp.isfinite(jnp.max(logits, axis=-1))


def _point_mass(logits: jax.Array) -> jax.Array:
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)


def _nearest(distance: jax.Array, weight: jax.Array, most: jax.Array) -> jax.Array:
    """Returns a mask bool[..., V] of the tokens for which the total weight of all nearer tokens is below `most`.

    The nearest token always stays, and ties stay together. The cutoff distance is found bit by bit with 31 sums, which
    is many times faster than a sort of the vocabulary.

    Args:
      distance: float32[..., V], at least +0: read as integers, such numbers keep their order.
      weight: float32[..., V], at least 0.
      most: float32, broadcastable to [..., 1]; inf keeps all.
    """
    rank = jax.lax.bitcast_convert_type(distance, jnp.int32)

    def narrow(bit: jax.Array, farthest: jax.Array) -> jax.Array:
        farther = farthest | (1 << (30 - bit))
        nearer = jnp.sum(jnp.where(rank < farther, weight, 0.0), axis=-1, keepdims=True)
        return jnp.where(nearer < most, farther, farthest)

    bits = 31
    with jax.named_scope(f"trips_{bits}"):  # for a reader of the compiled program
        last = jax.lax.fori_loop(0, bits, narrow, jnp.zeros((*rank.shape[:-1], 1), jnp.int32))
    stays: jax.Array = rank <= last
    return stays


@struct.dataclass
class Greedy:
    """Always gives the most likely token; the first of equals. For loops that only decode greedily.

    Examples:
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> tokens, log_probs = Greedy().draw(keys, jnp.array([[0.0, 2.0, 1.0]]))
      >>> tokens.tolist(), log_probs
      ([1], None)
    """

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Returns 0 for the most likely token and −inf elsewhere, [B, ..., V]."""
        return _point_mass(logits)

    def draw(self, keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, None]:
        """Returns the most likely token, int32[B], and None; the keys are not used."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None

    @property
    def drawing(self) -> bool:
        """Returns False: no row is sampled."""
        return False

    def for_live(self, live: jax.Array) -> Greedy:
        """Returns the distribution itself."""
        return self


@struct.dataclass
class Sampling:
    """Applies temperature, then top-k, top-p and min-p, each on the output of the previous filter, as in transformers.

    Every number is per row, so rows that differ share a program. A filter that no row uses takes no time; one that is
    None is not compiled.

    Attributes:
      temperature: float32[B]; a row with 0 is greedy.
      top_k: int32[B], how many of the most likely tokens stay; 0 for all. Ties stay together.
      top_p: float32[B], the smallest set of tokens that reaches this probability stays; 1 for all.
      min_p: float32[B], tokens below this fraction of the largest probability go; 0 for none.

    Examples:
      >>> distribution = Sampling(temperature=jnp.array([0.8]), top_k=jnp.array([1]))
      >>> distribution.log_probs(jnp.array([[0.0, 2.0, 1.0]])).tolist()
      [[-inf, 0.0, -inf]]
    """

    temperature: jax.Array
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Returns the warped log-probabilities, float32[B, ..., V]."""

        def per_row(number: jax.Array) -> jax.Array:
            return number.reshape(-1, *(1,) * (logits.ndim - 1))

        logits = logits.astype(jnp.float32)
        temperature = per_row(self.temperature)
        # Distances from the largest: a small temperature then reaches inf, never a difference of two.
        distance = jnp.max(logits, axis=-1, keepdims=True) - logits
        distance = distance / jnp.where(temperature > 0, temperature, 1.0)
        warped = -distance
        drawn = temperature > 0

        def keep_likeliest(warped: jax.Array) -> jax.Array:
            most = jnp.where(top_k > 0, top_k, jnp.inf)
            return jnp.where(_nearest(distance, jnp.ones_like(distance), most), warped, -jnp.inf)

        def keep_nucleus(warped: jax.Array) -> jax.Array:
            most = jnp.where(top_p < 1, top_p, jnp.inf)
            return jnp.where(_nearest(distance, jax.nn.softmax(warped, axis=-1), most), warped, -jnp.inf)

        # Each filter runs only if a sampled row uses it.
        if self.top_k is not None:
            top_k = per_row(self.top_k)
            warped = run_if(jnp.any(drawn & (top_k > 0)), keep_likeliest, warped)
        if self.top_p is not None:
            top_p = per_row(self.top_p)
            warped = run_if(jnp.any(drawn & (top_p < 1)), keep_nucleus, warped)
        if self.min_p is not None:
            floor = jnp.max(warped, axis=-1, keepdims=True) + jnp.log(per_row(self.min_p))
            warped = jnp.where(warped >= floor, warped, -jnp.inf)
        return jnp.where(drawn, jax.nn.log_softmax(warped, axis=-1), _point_mass(logits))

    def draw(self, keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens int32[B] and the distribution they were drawn from, float32[B, V]."""
        log_probs = self.log_probs(logits)
        return categorical(keys, log_probs), log_probs

    @property
    def drawing(self) -> jax.Array:
        """Returns whether some row is sampled, bool[]."""
        return jnp.any(self.temperature > 0)

    def for_live(self, live: jax.Array) -> Sampling:
        """Returns the distribution in which rows that are not live, bool[B], are greedy, so that they take no time."""
        return dataclasses.replace(self, temperature=jnp.where(live, self.temperature, 0.0))


def seed_key(seed: int | jax.Array) -> jax.Array:
    """Returns the key of a seed, always of threefry2x32, for any `jax_default_prng_impl`.

    With the other implementations, rbg and unsafe_rbg, `jax.vmap` draws every row with the first row's key.

    Examples:
      >>> jax.random.key_impl(seed_key(3))
      'threefry2x32'
    """
    return jax.random.key(seed, impl="threefry2x32")


def categorical(keys: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Draws one token per row, int32[B], from (unnormalised) log-probabilities [B, V], each row with its own key.

    Examples:
      >>> keys = jax.random.split(jax.random.key(0), 2)
      >>> categorical(keys, jnp.array([[0.0, -jnp.inf], [-jnp.inf, 0.0]])).tolist()
      [0, 1]
    """
    return jax.vmap(jax.random.categorical)(keys, log_probs).astype(jnp.int32)


def keys_at(keys: jax.Array, length: jax.Array) -> jax.Array:
    """Returns the keys of plain decoding's rounds that begin with `length` int32[B] committed tokens, [B].

    `keys`: [B], one of each row. They depend only on the row and the position of the token that the round commits.

    Examples:
      >>> keys_at(jax.random.split(jax.random.key(0), 2), jnp.array([3, 5])).shape
      (2,)
    """
    return fold_in(fold_in(keys, length), 1)


def drawn_by(keys: jax.Array) -> jax.Array:
    """Returns the keys that draw the target's tokens at positions of the text, from the positions' keys [...].

    Examples:
      >>> drawn_by(jax.random.split(jax.random.key(0), (2, 3))).shape
      (2, 3)
    """
    return fold_in(keys, 1)


def fold_in(keys: jax.Array, data: jax.Array | int) -> jax.Array:
    """Returns a key for each key [...] and a number, or for each key and its own number.

    Examples:
      >>> fold_in(jax.random.split(jax.random.key(0), 2), 3).shape
      (2,)
    """
    flat = jnp.broadcast_to(jnp.asarray(data), keys.shape).ravel()
    return jax.vmap(jax.random.fold_in)(keys.ravel(), flat).reshape(keys.shape)
