"""The records of the loop, and the writes to single rows of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.model import cache as kv
from jaxspec.model.cache import KVCache
from jaxspec.penalties import Penalties
from jaxspec.protocol import Acceptor, Drafter, State, kinds_of
from jaxspec.sampling import Distribution

# Up to this size of a row, `put_rows` writes all of it: a GPU needs one kernel in place of three. In a wide row a CPU
# would take longer than for the few elements.
NARROW = 256


@struct.dataclass
class Parts:
    """The parts of a method.

    Attributes:
      drafter, acceptor, distribution: the parts of the loop; `distribution` is the sampling distribution.
      one_width: whether every verification has the drafter's largest width, static. True on platforms where
        `model.control.narrowest` compiles only that width, so that the others are not traced.
      penalties: changes of the target's logits that depend on the text before a position; None for none.
      log_probs: int32[B], 1 for the rows whose tokens have reported log-probabilities, 2 for those that report the
        likeliest tokens too, and 0 for the others; None for no row.
      kinds: the classes of the parts, see `protocol.kinds_of`; always set here.
    """

    drafter: Drafter
    acceptor: Acceptor
    distribution: Distribution
    one_width: bool = struct.field(pytree_node=False, default=False)
    penalties: Penalties | None = None
    log_probs: jax.Array | None = None
    kinds: tuple[type, ...] = struct.field(pytree_node=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", kinds_of((self.drafter, self.acceptor, self.distribution)))

    def for_live(self, live: jax.Array, state: jax.Array) -> Parts:
        """Returns the parts for a round with the grammars in these states, int32[B].

        Rows that are not live, bool[B], are greedy, without grammar, and report nothing.
        """
        log_probs = None if self.log_probs is None else self.log_probs * live
        penalties = None if self.penalties is None else self.penalties.for_live(live, state)
        distribution = self.distribution.for_live(live)
        return dataclasses.replace(self, distribution=distribution, penalties=penalties, log_probs=log_probs)

    @property
    def reports(self) -> jax.Array | None:
        """The largest of `log_probs`, int32[]; None if that is None."""
        return None if self.log_probs is None else jnp.max(self.log_probs)

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The numbers of rows for which a verification is compiled, rising."""
        widths = self.drafter.verify_widths
        return widths[-1:] if self.one_width else widths


@struct.dataclass
class Request:
    """The request of a batch of rows.

    Attributes:
      tokens: int32[B, N], prompts padded on the right; N is the initial capacity.
      length: int32[B], tokens of each prompt, at least 1.
      limit: int32[B], tokens of prompt and output together, above `length`.
      eos_ids: int32[B, E], tokens that end a row; −1 for none.
      keys: [B], a PRNG key per row, from `sampling.seed_key`; each row has independent randomness.
      start: int32[B], below `length`, the first position to feed. A `Caches` holds those before. None for 0.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    eos_ids: jax.Array
    keys: jax.Array
    start: jax.Array | None = None


@struct.dataclass
class Caches:
    """The caches of earlier texts, from which texts with the same beginnings continue.

    Attributes:
      cache: the target's KV cache; the slots from `Request.start` on are meaningless.
      absorbed: the result of `Drafter.absorbed` for the texts; None for nothing.
    """

    cache: KVCache
    absorbed: Any = None


@struct.dataclass
class Stats:
    """Counts per row since its prefill, without tokens after the end of text or beyond the budget.

    Attributes:
      counts: int32[B, K + 3], the rounds, the draft tokens and the histogram side by side, so that a GPU updates them
        by one kernel; [K + 3] for a single row.

    Examples:
      >>> stats = Stats(jnp.array([[5, 9, 1, 0, 2]]))  # in 3 of 5 rounds, 0, 2 and 2 tokens were accepted
      >>> int(stats.num_rounds[0]), int(stats.num_drafts[0]), int(stats.num_accepted_tokens[0])
      (5, 3, 4)
    """

    counts: jax.Array

    @property
    def num_rounds(self) -> jax.Array:
        """Target passes after the prefill, int32[B]."""
        return self.counts[..., 0]

    @property
    def num_draft_tokens(self) -> jax.Array:
        """Draft tokens that were verified, int32[B]."""
        return self.counts[..., 1]

    @property
    def acceptance_histogram(self) -> jax.Array:
        """Rounds with draft tokens by how many of them were accepted, int32[B, K + 1]."""
        return self.counts[..., 2:]

    @property
    def num_drafts(self) -> jax.Array:
        """Rounds that had at least one draft token, int32[B]."""
        return self.acceptance_histogram.sum(axis=-1)

    @property
    def num_accepted_tokens(self) -> jax.Array:
        """Draft tokens that were accepted, int32[B]."""
        histogram = self.acceptance_histogram
        return (histogram * np.arange(histogram.shape[-1])).sum(axis=-1)


@struct.dataclass
class DecodeState:
    """The state of the loop. The batch axis is the first axis of every leaf, except in KV caches.

    Attributes:
      tokens: int32[B, N], prompt and output; N is the capacity.
      length: int32[B], the number of committed tokens.
      limit, eos_ids, keys: as in `Request`.
      done: bool[B], whether a row is finished; a finished row does not change.
      broken: bool[B], rows that ended because their next logits were not finite.
      grammar: int32[B], the state of each row's grammar after its text; 0 without one.
      cache: the KV cache of the target.
      drafter_state: the state of the drafter.
      stats: the counts.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    eos_ids: jax.Array
    keys: jax.Array
    done: jax.Array
    broken: jax.Array
    grammar: jax.Array
    cache: KVCache
    drafter_state: State
    stats: Stats

    @property
    def capacity(self) -> int:
        """N, the largest number of tokens of a row."""
        return self.tokens.shape[1]


Rows = TypeVar("Rows", DecodeState, Caches)


@struct.dataclass
class Emitted:
    """The tokens that a call committed. A copy, because the next call overwrites the state.

    Attributes:
      tokens: int32[B, W].
      count: int32[B], the number of valid tokens.
      drafted: bool[B, W], whether a token was an accepted draft.
      proposed: int32[B, W], the number of draft tokens that were verified in the token's round.
      log_probs: float32[B, W, 1 + 2N] under the target's unfiltered distribution at temperature 1, see
        `verification.report_of`; meaningless in rows that do not report them; or None.
      length: int32[B], committed tokens, prompt included.
      done, broken: bool[B], as in `DecodeState`.
      stats: counts since each row's prefill.
    """

    tokens: jax.Array
    count: jax.Array
    drafted: jax.Array
    proposed: jax.Array
    log_probs: jax.Array | None
    length: jax.Array
    done: jax.Array
    broken: jax.Array
    stats: Stats


def insert(state: Rows, row: jax.Array, others: Rows, which: jax.Array | int = 0) -> Rows:
    """Replaces row `row` by row `which` of `others`, int32 scalars (same method, and for states the same capacity)."""

    def put(full: Any, new: Any) -> Any:
        if isinstance(full, KVCache):
            return kv.insert(full, row, new, which)
        return full.at[row].set(new[which])

    replaced: Rows = jax.tree.map(put, state, others, is_leaf=lambda node: isinstance(node, KVCache))
    return replaced


def take_row(caches: Caches, row: jax.Array, slots: int) -> Caches:
    """Returns the caches of row `row`, an int32 scalar, with its first `slots` slots, static."""

    def cut(node: Any) -> Any:
        if isinstance(node, KVCache):
            return kv.take_row(node, row, slots)
        return jax.lax.dynamic_slice_in_dim(node, row, 1)

    taken: Caches = jax.tree.map(cut, caches, is_leaf=lambda node: isinstance(node, KVCache))
    return taken


def grow(state: Any, capacity: int) -> Any:
    """Returns a `DecodeState` or `Caches` with a capacity of `capacity` tokens per row, in all caches."""

    def enlarge(node: Any) -> Any:
        return kv.grow(node, capacity) if isinstance(node, KVCache) else node

    state = jax.tree.map(enlarge, state, is_leaf=lambda node: isinstance(node, KVCache))
    if not isinstance(state, DecodeState):
        return state
    extra = capacity - state.capacity
    return dataclasses.replace(state, tokens=jnp.pad(state.tokens, ((0, 0), (0, extra))))


def resize(state: DecodeState, batch: int) -> DecodeState:
    """Returns the first `batch` rows of a state, static; if it has fewer, the new rows are done."""

    def cut_or_pad(node: Any) -> Any:
        if isinstance(node, KVCache):
            return kv.resize(node, batch)
        # New rows are copies of the last one, whose numbers are valid.
        return node[jnp.minimum(jnp.arange(batch), len(node) - 1)]

    resized: DecodeState = jax.tree.map(cut_or_pad, state, is_leaf=lambda node: isinstance(node, KVCache))
    new = jnp.arange(batch) >= len(state.length)
    return dataclasses.replace(resized, done=resized.done | new, length=jnp.where(new, 1, resized.length))


def put_rows(buffer: jax.Array, values: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Returns buffer [B, N, ...] with values[b, :count[b]] written at buffer[b, start[b]:]."""
    (batch, width), size = values.shape[:2], buffer.shape[1]
    if size <= NARROW and values.ndim == 2:
        offset = jnp.arange(size)[None] - start[:, None]
        taken = jnp.take_along_axis(values, jnp.clip(offset, 0, width - 1), axis=1)
        return jnp.where((offset >= 0) & (offset < count[:, None]), taken, buffer)
    offset = jnp.arange(width)[None]
    columns = jnp.where(offset < count[:, None], start[:, None] + offset, size)
    return buffer.at[jnp.arange(batch)[:, None], columns].set(values, mode="drop")


def is_eos(tokens: jax.Array, eos_ids: jax.Array) -> jax.Array:
    """Returns whether tokens [B, T] are among ids [B, E] of their row, bool[B, T]."""
    return jnp.any(tokens[:, :, None] == eos_ids[:, None, :], axis=-1)
