"""The loop: prefill, then rounds of draft, verify, accept, commit, observe, inside one compiled call.

Row b has `length[b]` committed tokens. Caches hold the first length − 1 of them; the last is pending and is
fed by the next forward pass. A round feeds (pending, K drafts) and commits 1 to K + 1 tokens. The condition
for running a round at all is length + K + 1 ≤ capacity (more, if the drafter reaches farther), in every row,
finished ones too: no write ever reaches past the end.

Everything here is pure and knows no method by name; `engine` compiles it and decides when to call what.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import verification
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model import prefill as prompts
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.penalties import Penalties
from jaxspec.protocol import (
    Acceptor,
    Drafter,
    Outcome,
    Prefill,
    State,
    View,
    Weights,
    kinds_of,
    rising_widths,
)
from jaxspec.sampling import Law, drawn_by, is_finite


@struct.dataclass
class Parts:
    """What a method is made of.

    Attributes:
      drafter, acceptor, law: the parts.
      one_width: whether every verification has the drafter's widest width, static: for the platforms of which
        `model.control.narrowest` compiles no other, so that the others are not traced for nothing.
      longest: int32 scalar, the most tokens of a draft if that changes from call to call; None for always K.
      penalties: changes of the target's logits that follow from the text before a position; None for none.
      kinds: their classes, see `protocol.kinds_of`; set here, whatever is given.
    """

    drafter: Drafter
    acceptor: Acceptor
    law: Law
    one_width: bool = struct.field(pytree_node=False, default=False)
    longest: jax.Array | None = None
    penalties: Penalties | None = None
    kinds: tuple[type, ...] = struct.field(pytree_node=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", kinds_of((self.drafter, self.acceptor, self.law)))

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The numbers of rows for which a verification is compiled, rising."""
        widths = self.drafter.verify_widths
        if self.one_width:
            return widths[-1:]
        # A draft that ends early by `longest` has no use for the others' rows.
        return widths if self.longest is None or self.drafter.drafts_trees else rising_widths(widths[-1] - 1)


@struct.dataclass
class Request:
    """What a batch of rows asks for.

    Attributes:
      tokens: int32[B, N], prompts padded on the right; N is the capacity to start with.
      length: int32[B], tokens of each prompt, at least 1.
      limit: int32[B], tokens of prompt and output together, above `length`.
      eos_ids: int32[B, E], tokens that end a row; −1 for none.
      keys: [B], a PRNG key per row, from `sampling.seed_key`; each row has independent randomness.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    eos_ids: jax.Array
    keys: jax.Array


@struct.dataclass
class Stats:
    """Counts per row since its prefill; tokens past end-of-text or budget are not in them.

    Attributes:
      num_rounds: int32[B], target passes after the prefill.
      num_drafts: int32[B], rounds that had at least one draft token.
      num_draft_tokens, num_accepted_tokens: int32[B].
      acceptance_histogram: int32[B, K + 1], drafting rounds by how many tokens were accepted.
    """

    num_rounds: jax.Array
    num_drafts: jax.Array
    num_draft_tokens: jax.Array
    num_accepted_tokens: jax.Array
    acceptance_histogram: jax.Array


@struct.dataclass
class DecodeState:
    """The loop's state. Every leaf leads with the batch axis, KV caches aside.

    Attributes:
      tokens: int32[B, N], prompt and output; N is the capacity.
      length: int32[B], how many are committed.
      limit, eos_ids, keys: as in `Request`.
      done: bool[B], finished rows are frozen.
      broken: bool[B], rows that ended because their next logits were not finite.
      cache: the target's.
      drafter_state: the drafter's own.
      stats: counts.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    eos_ids: jax.Array
    keys: jax.Array
    done: jax.Array
    broken: jax.Array
    cache: KVCache
    drafter_state: State
    stats: Stats

    @property
    def capacity(self) -> int:
        """N, the most tokens a row can hold."""
        return self.tokens.shape[1]


@struct.dataclass
class Emitted:
    """What a call committed: small, and apart from the state, which the next call overwrites.

    Attributes:
      tokens: int32[B, W].
      count: int32[B], how many of them.
      drafted: bool[B, W], whether a token was an accepted draft.
      proposed: int32[B, W], how many draft tokens were verified in the round that a token comes from.
      log_probs: float32[B, W] under the target's raw law (temperature 1, no filter), or None.
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


def prefill(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    request: Request,
    *,
    chunk_size: int,
    merged: bool = True,
    log_probs: bool = False,
) -> tuple[DecodeState, Emitted]:
    """Feeds the prompts; leaves each row's first token pending.

    The same as `start_prefill`, `feed` of every chunk, and `end_prefill`.

    Args:
      config: the target.
      params: all parameters.
      parts: the method.
      request: the rows; their N is the capacity.
      chunk_size: positions fed at once, static, a divisor of N.
      merged: the cache's layout, static, see `model.cache`.
      log_probs: whether to report them, static.

    Returns:
      The state, and what was emitted (one token per row; none where the logits are not finite).
    """
    stop = (jnp.max(request.length) + chunk_size - 1) // chunk_size
    tapped = tapped_drafter(parts)
    fed = start_prefill(config, params, request, tapped, merged=merged)
    fed = feed(config, params, request, fed, jnp.int32(0), stop, tapped, chunk_size=chunk_size)
    return end_prefill(config, params, parts, request, fed, chunk_size=chunk_size, log_probs=log_probs)


def tapped_drafter(parts: Parts) -> Drafter | None:
    """The drafter, if the prompts' pass has something for it on the way; None for most."""
    return parts.drafter if parts.drafter.taps else None


def start_prefill(
    config: LlamaConfig,
    params: Weights,
    request: Request,
    tapped: Drafter | None = None,
    *,
    merged: bool = True,
) -> prompts.Prefilling:
    """Prompts of which nothing has been fed.

    `tapped`: see `tapped_drafter`; `merged`: the cache's layout, static, see `model.cache`.
    """
    batch, capacity = request.tokens.shape
    cache = kv.create(config, batch, capacity, params.target["embed"].dtype, merged)
    if tapped is None:
        return prompts.start_prefill(config, params.target, request.length, cache)
    absorbed = tapped.begin(params, request.length, capacity, merged)
    return prompts.start_prefill(config, params.target, request.length, cache, tapped.taps, absorbed)


def feed(
    config: LlamaConfig,
    params: Weights,
    request: Request,
    fed: prompts.Prefilling,
    first: jax.Array,
    stop: jax.Array,
    tapped: Drafter | None = None,
    *,
    chunk_size: int,
) -> prompts.Prefilling:
    """Feeds the chunks of the prompts from number `first` up to number `stop`, int32 scalars; see `prefill`."""
    arguments = (config, params.target, request.tokens, request.length, fed, first, stop, chunk_size)
    if tapped is None:
        return prompts.feed(*arguments)
    return prompts.feed(*arguments, tapped.taps, functools.partial(tapped.absorb, params))


def _check_keys(keys: jax.Array) -> None:
    """Refuses keys with which `jax.vmap` would draw equal numbers for all rows."""
    kind = jax.random.key_impl(keys)
    if kind != "threefry2x32":
        raise ValueError(f"keys are of {kind}; make them with jaxspec.sampling.seed_key, of threefry2x32")


def end_prefill(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    request: Request,
    fed: prompts.Prefilling,
    *,
    chunk_size: int,
    log_probs: bool = False,
) -> tuple[DecodeState, Emitted]:
    """Draws the first tokens after prompts that have been fed whole; see `prefill`."""
    _check_keys(request.keys)
    batch, hidden, cache = request.tokens.shape[0], fed.hidden, fed.cache
    similarities = fed.similarities / request.length[:, None, None]
    logits = llama.logits(config, params.target, hidden)
    judged = logits
    if parts.penalties is not None:
        judged = parts.penalties.apply(logits[:, None], request.tokens, request.length)[:, 0]
    sound = is_finite(judged)
    token, _ = parts.law.draw(_fold_in(request.keys, request.length), judged)
    count = sound.astype(jnp.int32)
    length = request.length + count
    done = ~sound | _is_eos(token[:, None], request.eos_ids)[:, 0] | (length >= request.limit)
    tokens = _put_rows(request.tokens, token[:, None], request.length, count)
    view = View(tokens, length, cache, jnp.where(done, 0, request.limit - length - 1))
    fed = dataclasses.replace(fed, similarities=similarities)
    zero = jnp.zeros(batch, jnp.int32)
    histogram = jnp.zeros((batch, parts.drafter.num_draft_tokens + 1), jnp.int32)
    state = DecodeState(
        tokens=tokens,
        length=length,
        limit=request.limit,
        eos_ids=request.eos_ids,
        keys=request.keys,
        done=done,
        broken=~sound,
        cache=cache,
        drafter_state=_begun(params, parts, fed, view, request.length, chunk_size),
        stats=Stats(zero, zero, zero, zero, histogram),
    )
    emitted = Emitted(
        tokens=token[:, None],
        count=count,
        drafted=jnp.zeros((batch, 1), bool),
        proposed=jnp.zeros((batch, 1), jnp.int32),
        log_probs=verification.log_probs_of(logits[:, None], token[:, None]) if log_probs else None,
        length=length,
        done=done,
        broken=state.broken,
        stats=state.stats,
    )
    return state, emitted


def take_up(
    config: LlamaConfig, params: Weights, parts: Parts, state: DecodeState, *, chunk_size: int
) -> State:
    """The drafter's state after a text for which others have drafted so far, as if it had been there from the start.

    A drafter with taps is fed the whole text by one more pass of the target, in a cache of that pass's own; one with a
    cache of its own feeds that. What only a prompt's pass gives (`Prefill.hidden`, `similarities`) is zero.

    Args:
      config: the target.
      params: all parameters.
      parts: the method that goes on.
      state: of the text; what it holds as `drafter_state` is another drafter's.
      chunk_size: positions fed at once, static, a divisor of the capacity.
    """
    batch, length = state.length.shape[0], state.length - 1
    view = View(
        state.tokens, state.length, state.cache, jnp.where(state.done, 0, state.limit - state.length - 1)
    )
    request = Request(state.tokens, length, state.limit, state.eos_ids, state.keys)
    tapped = tapped_drafter(parts)
    if tapped is None:
        hidden = jnp.zeros((batch, config.hidden_size), params.target["embed"].dtype)
        fed = prompts.Prefilling(hidden, jnp.zeros((batch, config.num_layers, 2)), state.cache)
    else:
        fed = start_prefill(config, params, request, tapped, merged=state.cache.merged)
        stop = (jnp.max(length) + chunk_size - 1) // chunk_size
        fed = feed(config, params, request, fed, jnp.int32(0), stop, tapped, chunk_size=chunk_size)
    return _begun(params, parts, fed, view, length, chunk_size)


def _begun(
    params: Weights, parts: Parts, fed: prompts.Prefilling, view: View, length: jax.Array, chunk_size: int
) -> State:
    """The drafter's state after texts of which int32[B] `length` tokens were fed, the pending one not among them."""
    absorbed, tapped = fed.absorbed, tapped_drafter(parts)
    if tapped is not None and fed.feature is not None:
        last, pending = fed.feature[:, None], view.pending[:, None]
        absorbed = tapped.absorb(params, absorbed, last, pending, length - 1, view.length - length)
    return parts.drafter.init(params, view, Prefill(fed.hidden, fed.similarities, chunk_size, absorbed))


def run_rounds(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    state: DecodeState,
    max_rounds: jax.Array,
    halt: jax.Array,
    *,
    window: int,
    log_probs: bool = False,
) -> tuple[DecodeState, Emitted]:
    """Runs rounds until every row is done, `max_rounds` ran, or the next one might not fit.

    Args:
      config: the target.
      params: all parameters.
      parts: the method.
      state: as the call before left it; made to be donated.
      max_rounds: int32 scalar.
      halt: bool[B], rows to end before the first round (a stop string was seen, say).
      window: W, the most tokens a row can emit in this call, static, at least K + 1.
      log_probs: whether to report them, static.

    Returns:
      The state and what was emitted.
    """
    state = dataclasses.replace(state, done=state.done | halt)
    batch, width = state.length.shape[0], parts.drafter.num_draft_tokens + 1
    first = state.length
    drafted, proposed = jnp.zeros((batch, window), bool), jnp.zeros((batch, window), jnp.int32)
    reported_log_probs = jnp.zeros((batch, window), jnp.float32) if log_probs else None

    def more(carry: tuple[Any, ...]) -> Any:
        rounds, state, *_ = carry
        fits = jnp.all(state.length + parts.drafter.reach <= state.capacity)
        reported = jnp.all(state.length - first + width <= window)
        return (rounds < max_rounds) & ~jnp.all(state.done) & fits & reported

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        rounds, state, drafted, proposed, reported_log_probs = carry
        at = state.length - first
        state, outcome, token_log_probs = decode_round(config, params, parts, state, log_probs=log_probs)
        # What takes turns with others has room for their tokens, and yields fewer.
        accepted = jnp.arange(outcome.tokens.shape[1])[None] < outcome.accepted[:, None]
        drafted = _put_rows(drafted, accepted, at, outcome.count)
        verified = jnp.broadcast_to(outcome.drafted[:, None], accepted.shape)
        proposed = _put_rows(proposed, verified, at, outcome.count)
        if reported_log_probs is not None and token_log_probs is not None:
            of_tokens = token_log_probs[:, : outcome.tokens.shape[1]]
            reported_log_probs = _put_rows(reported_log_probs, of_tokens, at, outcome.count)
        return rounds + 1, state, drafted, proposed, reported_log_probs

    carry = (jnp.int32(0), state, drafted, proposed, reported_log_probs)
    _, state, drafted, proposed, reported_log_probs = jax.lax.while_loop(more, body, carry)
    columns = jnp.minimum(first[:, None] + jnp.arange(window)[None], state.capacity - 1)
    tokens = jnp.take_along_axis(state.tokens, columns, axis=1)
    count = state.length - first
    emitted = Emitted(
        tokens,
        count,
        drafted,
        proposed,
        reported_log_probs,
        state.length,
        state.done,
        state.broken,
        state.stats,
    )
    return state, emitted


def decode_round(
    config: LlamaConfig, params: Weights, parts: Parts, state: DecodeState, *, log_probs: bool = False
) -> tuple[DecodeState, Outcome, jax.Array | None]:
    """Draft, verify, accept, commit, observe: the state, what was committed, and its raw log-probabilities.

    The log-probabilities are float32[B, K + 1], or None if not asked for.
    """
    live = ~state.done
    keys = _fold_in(state.keys, state.length)
    # The token after the drafts is always committed, so the last of the budget is never a draft's.
    room = jnp.where(live, state.limit - state.length - 1, 0)
    if parts.longest is not None:
        room = jnp.minimum(room, parts.longest)
    drafter, depth = parts.drafter, parts.drafter.num_draft_tokens
    coupled = parts.acceptor.coupled
    draws = drawn_by(_of_places(state, depth)) if coupled else None
    view = View(state.tokens, state.length, state.cache, room, draws, parts.penalties)
    with jax.named_scope("draft"):  # these scopes are for a reader of the compiled program
        proposal, drafter_state, cache = drafter.propose(
            _fold_in(keys, 0), params, state.drafter_state, view, parts.law
        )
    proposal = verification.trimmed(proposal, room, depth)
    by_place = coupled or proposal.parents is not None
    own = _of_places(state, depth) if by_place else _fold_in(keys, 1)
    view = dataclasses.replace(view, cache=cache)
    with jax.named_scope("verify"):
        verified = verification.verify(
            config,
            params,
            drafter,
            parts.acceptor,
            parts.law,
            own,
            view,
            proposal,
            parts.verify_widths,
            log_probs,
        )
    acceptance, sound, features = verified.acceptance, verified.sound, verified.features

    tokens = verification.with_next(
        verification.accepted_tokens(view, proposal.tokens, acceptance), acceptance
    )
    column = jnp.arange(tokens.shape[1])[None]
    ended = _is_eos(tokens, state.eos_ids) & (column <= acceptance.count[:, None])
    count = jnp.min(jnp.where(ended, column + 1, acceptance.count[:, None] + 1), axis=1)
    broken = live & (sound < count)
    count = jnp.where(live, jnp.minimum(count, sound), 0)
    # An end-of-text among the accepted drafts cuts what was drafted after it out of every count; so do logits
    # that are not finite.
    accepted = jnp.minimum(acceptance.count, count)
    outcome = Outcome(
        tokens=tokens,
        count=count,
        drafted=verification.num_verified(proposal, depth, count, acceptance),
        accepted=accepted,
        features=features,
        start=None if features is None else view.start,
        fed=None if verified.likely is None else verification.fed(view.pending, proposal),
        likely=verified.likely,
    )
    with jax.named_scope("absorb"):
        drafter_state = parts.drafter.observe(params, drafter_state, outcome)
    length = state.length + count
    state = dataclasses.replace(
        state,
        tokens=_put_rows(state.tokens, tokens, state.length, count),
        length=length,
        done=state.done | broken | (live & jnp.any(ended, axis=1)) | (length >= state.limit),
        broken=state.broken | broken,
        cache=verified.cache,
        drafter_state=drafter_state,
        stats=_counted(state.stats, outcome),
    )
    return state, outcome, verified.log_probs


def insert(
    state: DecodeState, row: jax.Array, others: DecodeState, which: jax.Array | int = 0
) -> DecodeState:
    """Replaces row `row` by row `which` of `others`, int32 scalars (same method, same capacity)."""

    def put(full: Any, new: Any) -> Any:
        if isinstance(full, KVCache):
            return kv.insert(full, row, new, which)
        return full.at[row].set(new[which])

    replaced: DecodeState = jax.tree.map(put, state, others, is_leaf=lambda node: isinstance(node, KVCache))
    return replaced


def grow(state: DecodeState, capacity: int) -> DecodeState:
    """The same state with room for `capacity` tokens a row, in every cache."""

    def enlarge(node: Any) -> Any:
        return kv.grow(node, capacity) if isinstance(node, KVCache) else node

    state = jax.tree.map(enlarge, state, is_leaf=lambda node: isinstance(node, KVCache))
    extra = capacity - state.capacity
    return dataclasses.replace(state, tokens=jnp.pad(state.tokens, ((0, 0), (0, extra))))


def _counted(stats: Stats, outcome: Outcome) -> Stats:
    """The counts after one more round."""
    drew = (outcome.drafted > 0).astype(jnp.int32)
    bins = jnp.arange(stats.acceptance_histogram.shape[1])[None] == outcome.accepted[:, None]
    return Stats(
        num_rounds=stats.num_rounds + (outcome.count > 0),
        num_drafts=stats.num_drafts + drew,
        num_draft_tokens=stats.num_draft_tokens + outcome.drafted,
        num_accepted_tokens=stats.num_accepted_tokens + outcome.accepted,
        acceptance_histogram=stats.acceptance_histogram + bins * drew[:, None],
    )


def _of_places(state: DecodeState, depth: int) -> jax.Array:
    """Returns the keys of plain decoding's rounds at the next positions of the text, [B, depth + 1]."""
    rounds = state.length[:, None] + jnp.arange(depth + 1)
    return jax.vmap(lambda length: _fold_in(_fold_in(state.keys, length), 1), 1, 1)(rounds)


def _fold_in(keys: jax.Array, data: jax.Array | int) -> jax.Array:
    """A key per row from keys [B] and a number, one for all or one a row."""
    data = jnp.broadcast_to(jnp.asarray(data), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, data)


def _is_eos(tokens: jax.Array, eos_ids: jax.Array) -> jax.Array:
    """bool[B, T] for tokens [B, T] and ids [B, E]."""
    return jnp.any(tokens[:, :, None] == eos_ids[:, None, :], axis=-1)


def _put_rows(buffer: jax.Array, values: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Writes values[b, :count[b]] into buffer[b, start[b]:]; the rest of [B, N] stays."""
    batch, width = values.shape
    offset = jnp.arange(width)[None]
    columns = jnp.where(offset < count[:, None], start[:, None] + offset, buffer.shape[1])
    return buffer.at[jnp.arange(batch)[:, None], columns].set(values, mode="drop")
