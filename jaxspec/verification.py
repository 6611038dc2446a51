"""Verifies a proposal with one pass of the target: it accepts a prefix of a chain or a path of a tree.

Every function takes and returns arrays of B rows; K = `drafter.num_draft_tokens`, the most tokens accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.acceptance import GreedyAcceptor
from jaxspec.model import cache as kv
from jaxspec.model import llama, tree
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import either, narrowest
from jaxspec.model.numerics import sums, widened
from jaxspec.model.tree import Tree
from jaxspec.protocol import (
    Acceptance,
    Acceptor,
    Drafter,
    Proposal,
    View,
    Weights,
)
from jaxspec.sampling import Distribution, Greedy, is_finite, seed_key
from jaxspec.tree_acceptance import reject, walk


class Verified(NamedTuple):
    """The result of a verification.

    Attributes:
      cache: the target's, with the accepted tokens in the slots of their positions.
      acceptance: the accepted tokens.
      sound: int32[B], number of leading positions with finite logits; later tokens are invalid.
      log_probs: float32[B, K + 1] of the accepted tokens and the next one under the unmodified logits, or None.
      aux_hidden_states: as `Outcome.aux_hidden_states`.
      top_tokens: as `Outcome.top_tokens`.
      ridden: as `Outcome.ridden`.
    """

    cache: KVCache
    acceptance: Acceptance
    sound: jax.Array
    log_probs: jax.Array | None
    aux_hidden_states: jax.Array | None
    top_tokens: jax.Array | None
    ridden: jax.Array | None = None


def verify(
    config: LlamaConfig,
    params: Weights,
    drafter: Drafter,
    acceptor: Acceptor,
    distribution: Distribution,
    keys: Callable[[], jax.Array],
    view: View,
    proposal: Proposal,
    widths: tuple[int, ...],
    log_probs: bool | jax.Array | None,
) -> Verified:
    """Runs the target over the pending token and the drafts, in the smallest of `widths` that holds the longest draft.

    Args:
      config, params, drafter, acceptor, distribution: the method, on the target.
      keys: returns [B] for a chain; [B, K + 1], a key for each position of the text, for a tree or a coupled acceptor.
      view: the rows.
      proposal: the draft tokens within the budget, see `trimmed`.
      widths: compiled numbers of rows, rising, static; the last one is the number of nodes + 1.
      log_probs: whether to report them, bool[]; None for never.
    """
    pending, start, depth = view.pending, view.start, drafter.num_draft_tokens
    batch, full = pending.shape[0], drafter.num_nodes + 1
    aux_layers, num_top_tokens = drafter.aux_layers, drafter.num_top_tokens
    whole = None if proposal.parents is None else Tree.of(proposal.parents, depth)
    # The number of rows that the draft has run already: that of the pending token, or none.
    done = 0 if proposal.pending_hidden is None else 1
    assert not (done and aux_layers), "auxiliary hidden states of the pending token need its row"
    riders = drafter.riders(params, view, proposal)
    assert riders is None or (widths == (full,) and whole is None and not done), "riders follow a whole chain"

    def run(width: int, cache: KVCache) -> Verified:
        # Only the rows of this width are fed; the others hold no draft.
        drawn_from = None if proposal.log_probs is None else proposal.log_probs[:, : width - 1]
        kept = dataclasses.replace(
            proposal,
            tokens=proposal.tokens[:, : width - 1],
            log_probs=drawn_from,
            exit_hidden=None,
            pending_hidden=None,
        )
        branches = None if whole is None else whole.rows(0, width)
        # An early-exit draft has already run the first layers on these tokens: continue from its hidden states.
        if proposal.exit_hidden is None:
            fed = rows_of(pending, kept.tokens)[:, done:]
            hidden = llama.embed(params.target, fed if branches is None else jnp.maximum(fed, 0))
        else:
            hidden = proposal.exit_hidden[:, :width]
        weights, fresh = params.target, None if whole is None else whole.rows(done, width - done)
        if riders is not None:
            hidden = jnp.concatenate([hidden, llama.embed(weights, riders.tokens)], axis=1)
            weights, fresh = riders.params, Tree.of(riders.shape, riders.shape.depth)
        rest = range(proposal.exit_layer, config.num_layers)
        aux_hidden_states = None
        if width > done:
            hidden, aux_hidden_states, cache = llama.run_with_aux(
                config, weights, hidden, start + done, cache, aux_layers, layers=rest, tree=fresh
            )
        hidden, ridden = hidden[:, : width - done], None if riders is None else hidden[:, width:]
        if proposal.pending_hidden is not None:
            hidden = jnp.concatenate([proposal.pending_hidden, hidden], axis=1)
        if aux_hidden_states is not None and branches is None:
            aux_hidden_states = widened(aux_hidden_states, full)
        logits = llama.logits(config, params.target, hidden)
        likely = widened(jax.lax.top_k(logits, num_top_tokens)[1], full) if num_top_tokens else None
        with jax.named_scope("sampling"):
            acceptance, finite = _judged(acceptor, distribution, keys, view, kept, branches, depth, logits)
        tokens, path = kept.tokens, acceptance.path
        if path is not None:
            # From here on, arrays follow the accepted path instead of the nodes.
            finite = tree.along(finite, path)
            aux_hidden_states = None if aux_hidden_states is None else tree.along(aux_hidden_states, path)
            tokens = accepted_tokens(view, tokens, acceptance)

        def reported() -> jax.Array:
            along = logits if path is None else tree.along(logits, path)
            return widened(log_probs_of(along, with_next(tokens, acceptance), config.exact), depth + 1)

        token_log_probs = None if log_probs is None else either(log_probs, reported, lambda: no_log_probs)
        sound = _leading(finite)
        return Verified(cache, acceptance, sound, token_log_probs, aux_hidden_states, likely, ridden)

    def compacted(verified: Verified) -> Verified:
        if (path := verified.acceptance.path) is None:
            return verified
        place = jnp.arange(depth + 1)
        # The path's keys and values move to the slots of their positions; rejected slots are overwritten later.
        path = jnp.where(place <= verified.acceptance.count[:, None], path, place)
        return verified._replace(cache=kv.move(verified.cache, start, path, full))

    no_log_probs = jnp.zeros((batch, depth + 1), jnp.float32)
    if widths == (full,):
        return compacted(run(full, view.cache))
    needed = jnp.max(proposal.count) + 1
    nothing = jnp.zeros(batch, jnp.int32)
    no_path = None if whole is None else jnp.zeros((batch, depth + 1), jnp.int32)
    no_aux_hidden_states = None
    if aux_layers:
        width_of_aux_layers = len(aux_layers) * config.hidden_size
        no_aux_hidden_states = jnp.zeros(
            (batch, depth + 1, width_of_aux_layers), params.target["embed"].dtype
        )
    no_likely = jnp.zeros((batch, full, num_top_tokens), jnp.int32) if num_top_tokens else None
    nowhere = Acceptance(nothing, nothing, no_path)
    nothing_reported = None if log_probs is None else no_log_probs
    carry = Verified(view.cache, nowhere, nothing, nothing_reported, no_aux_hidden_states, no_likely)
    verified = narrowest(widths, needed, lambda width, carry: run(width, carry.cache), carry, "verify")
    return compacted(verified)


def _judged(
    acceptor: Acceptor,
    distribution: Distribution,
    keys: Callable[[], jax.Array],
    view: View,
    proposal: Proposal,
    branches: Tree | None,
    depth: int,
    logits: jax.Array,
) -> tuple[Acceptance, jax.Array]:
    """Returns the accepted tokens, and where the logits are finite, bool[B, R].

    Args:
      acceptor, distribution, keys, view, proposal: as in `verify`.
      branches: the R rows of the tree; None for a chain.
      depth: K, the most tokens accepted.
      logits: float32[B, R, V], the target's.
    """
    penalties = view.penalties

    def accept(
        acceptor: Acceptor, distribution: Distribution, keys: jax.Array, proposal: Proposal, logits: jax.Array
    ) -> Acceptance:
        if branches is None:
            return acceptor.accept(keys, proposal, logits, distribution)
        # Recursive rejection needs the draft's distribution; without it, only the target's own draws are accepted.
        accept_tree = getattr(acceptor, "accept_tree", walk if proposal.log_probs is None else reject)
        accepted: Acceptance = accept_tree(keys, proposal, branches, logits, distribution)
        return accepted

    def sampled() -> tuple[Acceptance, jax.Array]:
        judged = logits
        if penalties is not None:
            judged = penalties.apply(logits, view.tokens, view.length, proposal.tokens, branches)
        finite = is_finite(judged)
        # NaN would spread to earlier tokens, because an acceptor may weigh a token by those after it.
        judged = jnp.where(finite[..., None], judged, 0.0)
        return accept(acceptor, distribution, keys(), proposal, judged), finite

    def greedy() -> tuple[Acceptance, jax.Array]:
        # Greedy acceptance draws nothing: any keys do, one for each position.
        of_positions = jnp.broadcast_to(seed_key(0), (len(logits), depth + 1))
        plain = dataclasses.replace(proposal, log_probs=None)
        return accept(GreedyAcceptor(), Greedy(), of_positions, plain, logits), is_finite(logits)

    drawing = distribution.drawing
    if isinstance(drawing, bool):
        return sampled()
    # A batch of greedy rows without penalties neither filters nor draws: at temperature 0 all acceptors are equal.
    if penalties is not None:
        drawing |= penalties.active(view.length)
    return either(drawing, sampled, greedy)


def trimmed(proposal: Proposal, budget: jax.Array, depth: int) -> Proposal:
    """Removes the draft tokens beyond the budget `budget`, int32[B].

    In a tree of at most `depth` levels, every node that is not proposed becomes −1.
    """
    if proposal.parents is None:
        return dataclasses.replace(proposal, count=jnp.minimum(proposal.count, budget))
    node = jnp.arange(proposal.tokens.shape[1])[None]
    useful = Tree.of(proposal.parents, depth).depth[:, 1:] <= budget[:, None]
    there = useful & (node < proposal.count[:, None]) & (proposal.tokens >= 0)
    count = jnp.max(jnp.where(there, node + 1, 0), axis=1, initial=0)
    return dataclasses.replace(proposal, tokens=jnp.where(there, proposal.tokens, -1), count=count)


def num_verified(proposal: Proposal, depth: int, count: jax.Array, acceptance: Acceptance) -> jax.Array:
    """Returns the number of draft tokens that a round verified, int32[B]; `count` is the number it committed.

    If an accepted draft ends the text, the drafts after it are not counted.
    """
    cut = count <= acceptance.count
    if proposal.parents is None:
        return jnp.where(cut, count, proposal.count)
    there = proposal.tokens >= 0
    before_end = Tree.of(proposal.parents, depth).depth[:, 1:] <= count[:, None]
    return jnp.sum(there & (before_end | ~cut[:, None]), axis=1)


def fed(pending: jax.Array, proposal: Proposal) -> jax.Array:
    """Returns the tokens of the verified rows, in the form of `Outcome.fed`."""
    drafts = proposal.tokens
    if proposal.parents is None:
        drafts = jnp.where(jnp.arange(drafts.shape[1])[None] < proposal.count[:, None], drafts, -1)
    return rows_of(pending, drafts)


def rows_of(pending: jax.Array, drafts: jax.Array) -> jax.Array:
    """The tokens that are verified, int32[B, R]: the pending one, int32[B], and the drafts, [B, R − 1]."""
    return jnp.concatenate([pending[:, None], drafts], axis=1)


def accepted_tokens(view: View, drafts: jax.Array, acceptance: Acceptance) -> jax.Array:
    """Returns the drafts in text order, int32[B, K]: the chain, or the accepted path of a tree."""
    if acceptance.path is None:
        return drafts
    return tree.along(rows_of(view.pending, drafts), acceptance.path[:, 1:])


def with_next(drafts: jax.Array, acceptance: Acceptance) -> jax.Array:
    """Accepted drafts and the token after them, int32[B, K + 1] for drafts [B, K]."""
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    here = jnp.arange(padded.shape[1])[None] == acceptance.count[:, None]
    return jnp.where(here, acceptance.token[:, None], padded)


def log_probs_of(logits: jax.Array, tokens: jax.Array, exact: bool = False) -> jax.Array:
    """Raw log-probabilities float32[B, T] of tokens [B, T] under logits [B, T, V]; `exact`: see `numerics.linear`."""
    if exact:
        # The barriers keep XLA from fusing the sum: the kernel of a fused one depends on the number of rows.
        top = jax.lax.optimization_barrier(jnp.max(logits, axis=-1, keepdims=True))
        total = sums(jax.lax.optimization_barrier(jnp.exp(logits - top)))
        normed = logits - top - jnp.log(total)
    else:
        normed = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(normed, tokens[..., None], axis=-1)[..., 0]


def _leading(good: jax.Array) -> jax.Array:
    """How many entries of bool[B, T] are True before the first False, int32[B]."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)
