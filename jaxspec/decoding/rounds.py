"""Rounds: draft, verify, accept, commit and observe, inside one compiled `lax.while_loop`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import verification
from jaxspec.allowed_tokens import Grammars
from jaxspec.decoding.records import DecodeState, Emitted, Parts, Stats, is_eos, put_rows
from jaxspec.model import cache as kv
from jaxspec.model.config import LlamaConfig
from jaxspec.model.tree import along
from jaxspec.protocol import Acceptance, Outcome, View, Weights
from jaxspec.sampling import fold_in, keys_at


def run_rounds(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    state: DecodeState,
    max_rounds: jax.Array,
    halt: jax.Array,
    *,
    window: int,
) -> tuple[DecodeState, Emitted]:
    """Runs rounds until every row is done, `max_rounds` ran, or the next one might not fit.

    Args:
      config: the target.
      params: all parameters.
      parts: the method.
      state: the state after the previous call; it may be donated.
      max_rounds: int32 scalar.
      halt: bool[B], rows to end before the first round, for instance after a stop string.
      window: W, the most tokens that a row can emit in this call, static, at least K + 1.

    Returns:
      The state and the emitted tokens.
    """
    if any(state.cache.most):
        kv.check_rows(parts.drafter.reach)
    state = dataclasses.replace(state, done=state.done | halt)
    batch, width = state.length.shape[0], parts.drafter.num_draft_tokens + 1
    first = state.length
    # Twice the number of verified draft tokens of a token's round, plus one if it was an accepted draft.
    flags = jnp.zeros((batch, window), jnp.int32)
    shape = batch, window, verification.report_size(config.vocab_size)
    reported_log_probs = None if parts.log_probs is None else jnp.zeros(shape, jnp.float32)

    def more(carry: tuple[Any, ...]) -> Any:
        rounds, state, *_ = carry
        fits = jnp.all(state.length + parts.drafter.reach <= state.capacity)
        reported = jnp.all(state.length - first + width <= window)
        return (rounds < max_rounds) & ~jnp.all(state.done) & fits & reported

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        rounds, state, flags, reported_log_probs = carry
        at = state.length - first
        state, outcome, token_log_probs = decode_round(config, params, parts, state)
        # A drafter that takes turns with others has buffers for their longest draft; its own may be shorter.
        accepted = jnp.arange(outcome.tokens.shape[1])[None] < outcome.accepted[:, None]
        flags = put_rows(flags, 2 * outcome.drafted[:, None] + accepted, at, outcome.count)
        if reported_log_probs is not None and token_log_probs is not None:
            of_tokens = token_log_probs[:, : outcome.tokens.shape[1]]
            reported_log_probs = put_rows(reported_log_probs, of_tokens, at, outcome.count)
        return rounds + 1, state, flags, reported_log_probs

    carry = (jnp.int32(0), state, flags, reported_log_probs)
    _, state, flags, reported_log_probs = jax.lax.while_loop(more, body, carry)
    columns = jnp.minimum(first[:, None] + jnp.arange(window)[None], state.capacity - 1)
    tokens = jnp.take_along_axis(state.tokens, columns, axis=1)
    count = state.length - first
    after = state.length, state.done, state.broken, state.stats
    emitted = Emitted(tokens, count, flags % 2 == 1, flags // 2, reported_log_probs, *after)
    return state, emitted


def decode_round(
    config: LlamaConfig, params: Weights, parts: Parts, state: DecodeState
) -> tuple[DecodeState, Outcome, jax.Array | None]:
    """Runs one round: draft, verify, accept, commit, observe.

    Returns:
      The state; the outcome, with the committed tokens; and their log-probabilities under the target's unfiltered
      distribution, float32[B, K + 1, 1 + 2N], or None if `parts.log_probs` is None; see `verification.report_of`.
    """
    live = ~state.done
    # The settings of finished rows must not cost the others time.
    parts = parts.for_live(live, state.grammar)
    # Randomness depends on the row and on its length alone: a text does not depend on its neighbours or on the calls.
    keys = fold_in(state.keys, state.length)
    # A round always commits one token after the accepted drafts, so a draft gets one token less than the budget.
    budget = jnp.where(live, state.limit - state.length - 1, 0)
    drafter, depth = parts.drafter, parts.drafter.num_draft_tokens
    # A coupled acceptor draws a token with the key that plain decoding uses at its position; the drafter draws with
    # the same keys, so that both draw the same token where their distributions agree.
    coupled = parts.acceptor.coupled
    draws = state.keys if coupled else None
    view = View(state.tokens, state.length, state.cache, budget, draws, parts.penalties)
    with jax.named_scope("draft"):  # these scopes are for a reader of the compiled program
        proposal, drafter_state, cache = drafter.propose(
            fold_in(keys, 0), params, state.drafter_state, view, parts.distribution
        )
    grammar = view.grammar
    states = None if grammar is None else grammar.walk(proposal.tokens, proposal.parents, depth)
    # A drafter may propose more than the budget of a row; the rest must not be counted or committed.
    proposal = verification.trimmed(proposal, budget, depth, states)
    # A tree has several drafts at one depth, so its keys go by position as well.
    by_place = coupled or proposal.parents is not None

    def own() -> jax.Array:
        return _of_places(state, depth) if by_place else fold_in(keys, 1)

    view = dataclasses.replace(view, cache=cache)
    widths, reports = parts.verify_widths, parts.reports
    inputs = verification.Inputs(
        config,
        params,
        drafter,
        parts.acceptor,
        parts.distribution,
        own,
        view,
        proposal,
        states,
        widths,
        reports,
    )
    # One pass of the target over the pending token and the drafts gives its distribution after each of them.
    with jax.named_scope("verify"):
        verified = verification.verify(inputs)
    acceptance, sound, ran = verified.acceptance, verified.sound, verified.ran

    # Accepted drafts and the token that the target draws after them, in the order of the text.
    tokens = verification.text_of(view, proposal.tokens, acceptance)
    # The text ends at the first end-of-text token, even if later drafts were accepted.
    column = jnp.arange(tokens.shape[1])[None]
    ended = is_eos(tokens, state.eos_ids)
    after = None
    if grammar is not None and states is not None:
        # It also ends where its grammar allows no other token.
        after = _states_after(grammar, states, acceptance, tokens.shape[1])
        ended |= grammar.ends(after)
    ended &= column <= acceptance.count[:, None]
    count = jnp.min(jnp.where(ended, column + 1, acceptance.count[:, None] + 1), axis=1)
    # Tokens after non-finite logits are meaningless; finished rows commit nothing.
    broken = live & (sound < count)
    count = jnp.where(live, jnp.minimum(count, sound), 0)
    # Accepted drafts after that point are in no count.
    accepted = jnp.minimum(acceptance.count, count)
    outcome = Outcome(
        tokens=tokens,
        count=count,
        drafted=verification.num_verified(proposal, depth, count, acceptance),
        accepted=accepted,
        aux_hidden_states=ran.aux_hidden_states,
        start=None if ran.aux_hidden_states is None else view.start,
        fed=None if ran.top_tokens is None else verification.fed(view.pending, proposal),
        top_tokens=ran.top_tokens,
        beside=ran.beside,
    )
    # The drafter sees the committed tokens: it brings its caches to the new length, and adapts γ or its counts.
    with jax.named_scope("absorb"):
        drafter_state = parts.drafter.observe(params, drafter_state, outcome)
    length = state.length + count
    state = dataclasses.replace(
        state,
        tokens=put_rows(state.tokens, tokens, state.length, count),
        length=length,
        done=state.done | broken | (live & jnp.any(ended, axis=1)) | (length >= state.limit),
        broken=state.broken | broken,
        grammar=state.grammar if after is None else jnp.where(count > 0, _last(after, count), state.grammar),
        cache=ran.cache,
        drafter_state=drafter_state,
        stats=_counted(state.stats, outcome),
    )
    return state, outcome, verified.log_probs


def _counted(stats: Stats, outcome: Outcome) -> Stats:
    """The counts after one more round."""
    bins = jnp.arange(stats.acceptance_histogram.shape[1])[None] == outcome.accepted[:, None]
    more = (outcome.count > 0)[:, None], outcome.drafted[:, None], bins & (outcome.drafted > 0)[:, None]
    return Stats(stats.counts + jnp.concatenate([one.astype(jnp.int32) for one in more], axis=1))


def _last(values: jax.Array, count: jax.Array) -> jax.Array:
    """Returns values[b, count[b] − 1], of values [B, T]."""
    return jnp.take_along_axis(values, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]


def _states_after(grammar: Grammars, states: jax.Array, acceptance: Acceptance, width: int) -> jax.Array:
    """Returns the states of the grammars after the accepted drafts and the token after them, int32[B, width]."""
    if acceptance.path is not None:
        states = along(states, acceptance.path)
    at = acceptance.count[:, None]
    last = grammar.step(jnp.take_along_axis(states, at, axis=1)[:, 0], acceptance.token)
    return jnp.where(jnp.arange(width) == at, last[:, None], jnp.roll(states[:, :width], -1, axis=1))


def _of_places(state: DecodeState, depth: int) -> jax.Array:
    """Returns the keys of plain decoding's rounds at the next positions of the text, [B, depth + 1]."""
    rounds = state.length[:, None] + jnp.arange(depth + 1)
    return keys_at(jnp.broadcast_to(state.keys[:, None], rounds.shape), rounds)
