"""Self-speculation whose skipped layers follow the text, by dynamic programming: CLaSp (Chen et al. 2025)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.chain import ChainState, keep_rows
from jaxspec.drafting.masked import MaskedChain
from jaxspec.drafting.tapped import latest
from jaxspec.model import cache as kv
from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import once
from jaxspec.model.llama import Params
from jaxspec.model.numerics import cosine, rms_norm
from jaxspec.protocol import Outcome, Prefill, Proposal, StopRule, View, Weights
from jaxspec.sampling import Law
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow


class Chosen(NamedTuple):
    """What a row drafts with, and what the next choice is made from.

    Attributes:
      plan: bool[B, L, 2], True for the sublayers that run.
      streams: [B, L + 1, D], the residual stream of the last token whose keys and values are in the cache: what entered
        each layer, and what left the last one.
      rounds: int32[B], rounds drafted since the prompt.
    """

    plan: jax.Array
    streams: jax.Array
    rounds: jax.Array


def choose_layers(
    config: LlamaConfig,
    params: Params,
    streams: jax.Array,
    position: jax.Array,
    cache: KVCache,
    num_skipped: int,
) -> jax.Array:
    """The layers whose absence changes the residual stream of one token least, by dynamic programming over depth.

    After layer i with j layers left out, of two streams the one nearer to the whole model's by cosine is kept: that of
    i − 1 layers and j − 1 left out, as it is, or that of i − 1 layers and j left out, after layer i. Only one stream is
    kept of each (i, j), so the result is good, not the best there is. All j of a layer are computed in one pass; keys
    and values are those of the cache, in which the token already is.

    Args:
      config: the target.
      params: its parameters.
      streams: [B, L + 1, D], see `Chosen`.
      position: int32[B], of the token.
      cache: the target's, which is only read.
      num_skipped: M, how many layers to leave out, 1 to L − 1.

    Returns:
      bool[B, L, 2], the same for attention and MLP of a layer; L − M layers run.
    """
    batch, rows = len(position), num_skipped + 1
    positions = jnp.broadcast_to(position[:, None], (batch, rows))
    tables = rope.tables(config, positions, cache.rope_length)
    # Row j: with j layers left out.
    hidden = jnp.broadcast_to(streams[:, :1], (batch, rows, streams.shape[-1]))
    left_out = []
    for layer, slots in enumerate(cache.layers):
        read = functools.partial(_read, slots, positions, config.window(layer), cache.merged)
        ran = _layer(config, params["layers"][layer], hidden, tables, read)
        kept = jnp.roll(hidden, 1, axis=1)
        true = streams[:, layer + 1, None]
        nearer = cosine(kept, true) > cosine(ran, true)
        skipped = jnp.arange(rows)
        # Of the layers so far no more can be left out than there are; as many means all.
        leaves_out = (nearer | (skipped > layer)) & (skipped > 0)
        hidden = jnp.where(leaves_out[..., None], kept, ran)
        left_out.append(leaves_out)

    def back(j: jax.Array, leaves_out: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = jnp.take_along_axis(leaves_out, j[:, None], axis=1)[:, 0]
        return j - here, ~here

    last = jnp.full(batch, num_skipped, jnp.int32)
    _, runs = jax.lax.scan(back, last, jnp.stack(left_out), reverse=True)
    return jnp.broadcast_to(runs.T[..., None], (batch, config.num_layers, 2))


def _read(
    slots: kv.Layer,
    positions: jax.Array,
    window: int | None,
    merged: bool,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    nothing: None,
) -> tuple[jax.Array, None]:
    """Attention that reads the slots of a layer and writes none, see `llama.Attend`."""
    del keys, values
    return kv.attend(queries, slots, positions, window, merged), nothing


def _layer(
    config: LlamaConfig,
    p: Params,
    hidden: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    attend: llama.Attend,
) -> jax.Array:
    normed = rms_norm(hidden, p["attention"]["norm"], config.rms_norm_eps)
    write, _ = llama.attention(config, p["attention"], normed, tables, attend, None)
    return llama.mlp(config, p["mlp"], hidden + write)


@struct.dataclass
class CLaSp(MaskedChain):
    """The target drafts for itself without the layers that mattered least for the last token that it verified.

    The layers are chosen from that token's residual stream by `choose_layers`, before the first round and every
    `refresh` rounds; that costs about one pass of the model over M + 1 tokens. Rows of equal mask draft together.

    Attributes:
      config: the target.
      num_skipped: M, how many layers a draft leaves out, static.
      refresh: rounds from one choice to the next, at least 1.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    num_skipped: int = struct.field(pytree_node=False)
    refresh: jax.Array | int = 16
    rule: StopRule = ConfidenceBelow(AdaptiveGamma())
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)

    @property
    def taps(self) -> tuple[llama.Tap, ...]:
        """What enters every layer, and what leaves the last one."""
        return tuple(range(self.config.num_layers + 1))

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> jax.Array:
        """Returns the streams of no token, [B, L + 1, D]."""
        shape = (len(length), self.config.num_layers + 1, self.config.hidden_size)
        return jnp.zeros(shape, params.target["embed"].dtype)

    def absorb(
        self,
        params: Weights,
        state: jax.Array,
        features: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        """Keeps the streams of the last of the tokens, count[b] of them."""
        return latest(features, count, state.reshape(len(state), -1)).reshape(state.shape)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Of its own, a mask that leaves nothing out until there is a choice, and the prompt's last streams."""
        batch = len(view.length)
        plan = jnp.ones((batch, self.config.num_layers, 2), bool)
        own = Chosen(plan, prefill.absorbed, jnp.zeros(batch, jnp.int32))
        return super().init(params, view, prefill)._replace(own=own)

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, law: Law
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Drafts in the target's cache; chooses the layers first where it is time to."""
        own, live = state.own, view.room > 0
        due = live & (own.rounds % self.refresh == 0)

        def choose(plan: jax.Array) -> jax.Array:
            position = jnp.maximum(view.start - 1, 0)  # below 0 in a row that ended before it began
            found = choose_layers(
                self.config, params.target, own.streams, position, view.cache, self.num_skipped
            )
            chosen: jax.Array = keep_rows(due, found, plan)
            return chosen

        plan = once(jnp.any(due), choose, own.plan)
        state = state._replace(own=own._replace(plan=plan, rounds=own.rounds + live))
        return self.draft_under(plan, keys, params, state, view, law)

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Keeps the streams of the last token that was verified, and lets the stop rule learn."""
        assert outcome.features is not None, "the loop must hand over what is tapped"
        assert outcome.start is not None
        own = state.own
        streams = self.absorb(
            params, own.streams, outcome.features, outcome.tokens, outcome.start, outcome.count
        )
        return super().observe(params, state._replace(own=own._replace(streams=streams)), outcome)
