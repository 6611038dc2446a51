"""Self-speculation that chooses skipped layers during the text, by dynamic programming: CLaSp (Chen et al. 2025)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.aux_drafter import latest
from jaxspec.drafting.chain_drafter import ChainState, keep_rows
from jaxspec.drafting.masked_drafter import MaskedDrafter
from jaxspec.model import cache as kv
from jaxspec.model import llama, rope
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig, Scores
from jaxspec.model.control import once
from jaxspec.model.llama import Params
from jaxspec.model.numerics import cosine
from jaxspec.protocol import Outcome, Prefill, Proposal, StopRule, View, Weights
from jaxspec.sampling import Distribution
from jaxspec.stopping import AdaptiveGamma, ConfidenceBelow


class Chosen(NamedTuple):
    """The mask of each row, and the inputs of the next choice.

    Attributes:
      plan: bool[B, L, 2], True for the sublayers that run.
      streams: [B, L + 1, D], the residual stream of the last token in the cache: the input of each layer and the
        output of the last.
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
    """Chooses the skipped layers that change the residual stream of one token least, by dynamic programming over depth.

    State (i, j) is the stream after the first i layers with j of them skipped. It is either state (i − 1, j − 1), where
    layer i is skipped, or state (i − 1, j) after layer i: the one with the larger cosine similarity to the full model's
    stream. Only one stream is kept per state, so the result is approximate. All j of a layer are computed in one pass,
    with the keys and values in the cache, which already contains the token.

    Args:
      config: the target.
      params: its parameters.
      streams: [B, L + 1, D], see `Chosen`.
      position: int32[B], the token's position.
      cache: the target's cache, which is only read.
      num_skipped: M, the number of skipped layers, 1 to L − 1.

    Returns:
      bool[B, L, 2], equal for attention and MLP of a layer; L − M layers run.
    """
    batch, rows = len(position), num_skipped + 1
    positions = jnp.broadcast_to(position[:, None], (batch, rows))
    # Row j is the state with j layers skipped.
    hidden = jnp.broadcast_to(streams[:, :1], (batch, rows, streams.shape[-1]))
    left_out = []
    for layer, slots in enumerate(cache.layers):
        of, p = config.layer_type(layer), params["layers"][layer]
        places = cache.held(layer, position) if cache.is_ring(cache.layers[layer][0]) else None
        read = functools.partial(_read, slots, positions, of.window, cache.merged, config.scores, places)
        turns = rope.tables(config, of, positions, cache.rope_length)
        attended, _ = llama.attention_sublayer(config, p["attention"], hidden, turns, read)
        ran = llama.mlp(config, p["mlp"], attended)
        kept = jnp.roll(hidden, 1, axis=1)
        true = streams[:, layer + 1, None]
        nearer = cosine(kept, true) > cosine(ran, true)
        skipped = jnp.arange(rows)
        # At most all layers so far can be skipped: row j > layer has skipped every one. Row 0 skips none.
        leaves_out = (nearer | (skipped > layer)) & (skipped > 0)
        hidden = jnp.where(leaves_out[..., None], kept, ran)
        left_out.append(leaves_out)

    # Trace the choices back from M skipped layers after the last layer.
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


@struct.dataclass
class CLaSpDrafter(MaskedDrafter):
    """The target drafts for itself without the layers that changed its last verified token least.

    `choose_layers` chooses the layers before the first round and every `refresh` rounds, at the cost of about one pass
    of the model over M + 1 tokens. Rows with equal masks draft together.

    Attributes:
      config: the target.
      num_skipped: M, the number of skipped layers, static.
      refresh: rounds between two choices, at least 1.
      rule: when to stop before K tokens.
      num_draft_tokens: K.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    num_skipped: int = struct.field(pytree_node=False)
    refresh: jax.Array | int = 16
    rule: StopRule = ConfidenceBelow(AdaptiveGamma())
    num_draft_tokens: int = struct.field(pytree_node=False, default=12)

    @property
    def aux_layers(self) -> tuple[llama.AuxLayer, ...]:
        """The input of every layer and the output of the last."""
        return tuple(range(self.config.num_layers + 1))

    def begin(self, params: Weights, length: jax.Array, capacity: int, merged: bool) -> jax.Array:
        """Returns zeros in place of the streams of a last token, [B, L + 1, D]."""
        shape = (len(length), self.config.num_layers + 1, self.config.hidden_size)
        return jnp.zeros(shape, llama.stream_of(params.target))

    def absorb(
        self,
        params: Weights,
        state: jax.Array,
        aux_hidden_states: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array,
    ) -> jax.Array:
        """Returns the streams of the last of the count[b] tokens."""
        return latest(aux_hidden_states, count, state.reshape(len(state), -1)).reshape(state.shape)

    def init(self, params: Weights, view: View, prefill: Prefill) -> ChainState:
        """Returns the rule's state, with a mask that skips nothing and the prompt's last streams as `own`."""
        batch = len(view.length)
        plan = jnp.ones((batch, self.config.num_layers, 2), bool)
        own = Chosen(plan, prefill.absorbed, jnp.zeros(batch, jnp.int32))
        return super().init(params, view, prefill)._replace(own=own)

    def absorbed(self, state: ChainState) -> jax.Array:
        """Returns the streams of the last token, which the next ones replace."""
        streams: jax.Array = state.own.streams
        return streams

    def propose(
        self, keys: jax.Array, params: Weights, state: ChainState, view: View, distribution: Distribution
    ) -> tuple[Proposal, ChainState, KVCache]:
        """Chooses the layers in the rows where it is due, then drafts in the target's cache."""
        own, live = state.own, view.budget > 0
        due = live & (own.rounds % self.refresh == 0)

        def choose(plan: jax.Array) -> jax.Array:
            # The pending token is not in the cache yet; the one before it is. It would be −1 in an empty row.
            position = jnp.maximum(view.start - 1, 0)
            found = choose_layers(
                self.config, params.target, own.streams, position, view.cache, self.num_skipped
            )
            chosen: jax.Array = keep_rows(due, found, plan)
            return chosen

        # Most rounds skip the choice, which costs as much as a verification.
        plan = once(jnp.any(due), choose, own.plan)
        state = state._replace(own=own._replace(plan=plan, rounds=own.rounds + live))
        return self.draft_under(plan, keys, params, state, view, distribution)

    def observe(self, params: Weights, state: ChainState, outcome: Outcome) -> ChainState:
        """Keeps the streams of the last committed token in the cache, if given, and updates the stop rule."""
        if outcome.aux_hidden_states is None:
            return super().observe(params, state, outcome)
        assert outcome.start is not None
        own = state.own
        streams = self.absorb(
            params, own.streams, outcome.aux_hidden_states, outcome.tokens, outcome.start, outcome.count
        )
        return super().observe(params, state._replace(own=own._replace(streams=streams)), outcome)
