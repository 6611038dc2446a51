"""The choice of skipped sublayers by dynamic programming over depth, and the base of drafters that repeat it."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.drafting.chain_drafter import ChainState, keep_rows
from jaxspec.drafting.masked_drafter import MaskedDrafter
from jaxspec.model import cache as kv
from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig, Scores
from jaxspec.model.control import once
from jaxspec.model.llama import Params
from jaxspec.model.numerics import cosine
from jaxspec.protocol import Prefill, Proposal, View, Weights
from jaxspec.sampling import Distribution


class Paths(NamedTuple):
    """Paths through the model by the weight that they save, 0 to R − 1, and what they compute for T tokens.

    Attributes:
      hidden: [B, R, T, D], the residual streams after the last layer. Row 0 is the full model's.
      reached: bool[B, R], whether there is such a path.
      runs: bool[B, R, N], the items that run.
      fitted: bool[B, T], the tokens that exist.
    """

    hidden: jax.Array
    reached: jax.Array
    runs: jax.Array
    fitted: jax.Array

    def mean(self, values: jax.Array) -> jax.Array:
        """Returns the mean of values [B, R, T] over the tokens, float32[B, R]."""
        return _mean(values, self.fitted)


def _mean(values: jax.Array, fitted: jax.Array) -> jax.Array:
    total = jnp.sum(jnp.where(fitted[:, None], values, 0.0), axis=-1)
    return total / jnp.maximum(jnp.sum(fitted, axis=-1), 1)[:, None]


def find_paths(
    config: LlamaConfig,
    params: Params,
    view: View,
    num_tokens: int,
    weights: jax.Array,
    num_rows: int,
    budget: jax.Array | int | None = None,
    least_cosine: jax.Array | float = -jnp.inf,
) -> Paths:
    """Finds the skipped items that change the residual streams of the last cached tokens least, for each saved weight.

    State (i, j) holds the streams after the first i items with weight j saved. It is either state (i − 1, j − weight),
    where item i is skipped, or state (i − 1, j) after item i: the one with the larger mean cosine similarity to the
    full model's streams. Only one path is kept per state, so the result is approximate. All j of an item are computed
    in one pass, in which each token reads the full model's keys and values from the cache.

    Args:
      config: the target.
      params: its parameters.
      view: the committed tokens, and the target's cache, which is only read.
      num_tokens: T, the last tokens in the cache, those before the pending one.
      weights: int32[B, N], of N = L items, the layers, or N = 2 L, the sublayers; 0 for an item that always runs.
      num_rows: R, 1 more than the largest weight that is saved, static.
      budget: int32[B], the largest weight that is saved in each row; None for R − 1.
      least_cosine: states with a smaller mean cosine are dropped.
    """
    batch, length = len(weights), 2 * config.num_layers // weights.shape[1]
    positions = view.start[:, None] + jnp.arange(-num_tokens, 0)
    fitted, positions = positions >= 0, jnp.maximum(positions, 0)
    embedded = llama.embed(config, params, jnp.take_along_axis(view.tokens, positions, axis=1))
    hidden = jnp.broadcast_to(embedded[:, None], (batch, num_rows, *embedded.shape[1:]))
    last, positions = positions[:, -1], jnp.tile(positions, (1, num_rows))
    saved = jnp.arange(num_rows)
    affordable = saved <= (num_rows if budget is None else jnp.asarray(budget)[..., None])
    reached, before, left_out = jnp.broadcast_to(saved == 0, (batch, num_rows)), hidden, []
    for number in range(2 * config.num_layers):
        layer, mlp = divmod(number, 2)
        p, flat = params["layers"][layer], hidden.reshape(batch, -1, hidden.shape[-1])
        if mlp:
            flat = llama.mlp(config, p["mlp"], flat)
        else:
            of, slots = config.layer_type(layer), view.cache.layers[layer]
            places = view.cache.held(layer, last) if view.cache.is_ring(slots[0]) else None
            read = functools.partial(
                _read, slots, positions, of.window, view.cache.merged, config.scores, places
            )
            turns = rope.tables(config, of, positions, view.cache.rope_length)
            flat, _ = llama.attention_sublayer(config, p["attention"], flat, turns, read)
        hidden = flat.reshape(hidden.shape)
        if (number + 1) % length:
            continue
        weight = weights[:, number // length, None]
        origin = jnp.maximum(saved - weight, 0)
        kept = jnp.take_along_axis(before, origin[..., None, None], axis=1)
        possible = (
            (weight > 0) & (saved >= weight) & affordable & jnp.take_along_axis(reached, origin, axis=1)
        )
        near_kept, near = (_mean(cosine(of, hidden[:, :1]), fitted) for of in (kept, hidden))
        leaves_out = possible & ((near_kept > near) | ~reached)
        enough = jnp.where(leaves_out, near_kept, near) >= least_cosine
        reached = (reached | leaves_out) & (enough | (saved == 0))
        before = hidden = jnp.where(leaves_out[..., None, None], kept, hidden)
        left_out.append(leaves_out)

    # Trace the choices back from each saved weight after the last item.
    def back(j: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        leaves_out, weight = item
        here = jnp.take_along_axis(leaves_out, j, axis=1)
        return j - here * weight[:, None], ~here

    ends = jnp.broadcast_to(saved, (batch, num_rows))
    _, runs = jax.lax.scan(back, ends, (jnp.stack(left_out), weights.T), reverse=True)
    return Paths(hidden, reached, jnp.moveaxis(runs, 0, -1), fitted)


def _read(
    slots: kv.Layer,
    positions: jax.Array,
    window: int | None,
    merged: bool,
    scores: Scores,
    places: jax.Array | None,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    nothing: None,
) -> tuple[jax.Array, None]:
    """Attends to the slots of a layer without writing keys and values, see `llama.Attend`."""
    del keys, values
    return kv.attend(queries, slots, positions, window, merged, None, places, scores=scores), nothing


class Chosen(NamedTuple):
    """The last choice of each row.

    Attributes:
      plan: bool[B, L, 2], True for the sublayers that run.
      length: int32[B], the most tokens of a draft.
      rounds: int32[B], rounds drafted since the prompt.
    """

    plan: jax.Array
    length: jax.Array
    rounds: jax.Array


class KnapsackDrafter(MaskedDrafter):
    """A base for drafters that choose skipped sublayers before the first round and every `refresh` rounds.

    A choice reads the last tokens and the cache only. Rows with equal masks draft together. A subclass adds `choose`.

    Attributes:
      refresh: rounds between two choices, at least 1.
    """

    refresh: jax.Array | int

    def choose(self, params: Weights, view: View) -> tuple[jax.Array, jax.Array]:
        """Returns the sublayers that run, bool[B, L, 2], and the most tokens of a draft, int32[B]."""
        raise NotImplementedError

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with a mask that skips nothing as `own`."""
        batch = len(view.length)
        plan = jnp.ones((batch, self.config.num_layers, 2), bool)
        own = Chosen(plan, jnp.full(batch, self.num_draft_tokens, jnp.int32), jnp.zeros(batch, jnp.int32))
        return super().init(params, view, prefill)._replace(own=own)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Chooses sublayers in the rows where it is due, then drafts in the target's cache."""
        own, live = state.own, view.budget > 0
        due = live & (own.rounds % self.refresh == 0)

        def choose(chosen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kept: tuple[jax.Array, jax.Array] = keep_rows(due, self.choose(params, view), chosen)
            return kept

        # Most rounds skip the choice, which costs as much as a verification.
        plan, length = once(jnp.any(due), choose, (own.plan, own.length))
        state = state._replace(own=Chosen(plan, length, own.rounds + live))
        view = dataclasses.replace(view, budget=jnp.minimum(view.budget, length))
        return self.draft_under(plan, keys, params, state, view, distribution)
