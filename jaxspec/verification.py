"""One pass of the target over what was drafted, and what it accepts: of a chain by an acceptor, of a tree along a path.

Every function takes and returns arrays of B rows; K = `num_draft_tokens` of the drafter, the most tokens accepted.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.model import cache as kv
from jaxspec.model import llama, tree
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import narrowest
from jaxspec.model.numerics import widened
from jaxspec.model.tree import Tree
from jaxspec.protocol import (
    Acceptance,
    Acceptor,
    Drafter,
    Proposal,
    View,
    Weights,
)
from jaxspec.sampling import Law, is_finite
from jaxspec.tree_acceptance import reject, walk


class Verified(NamedTuple):
    """What verification finds.

    Attributes:
      cache: the target's, with the accepted tokens in the slots of their positions.
      acceptance: which tokens stand.
      sound: int32[B], at how many places from the first on the logits are finite: no token after them counts.
      log_probs: float32[B, K + 1] of the accepted tokens and the one after them under the raw law, or None.
      features: as `Outcome.features`.
      likely: as `Outcome.likely`.
    """

    cache: KVCache
    acceptance: Acceptance
    sound: jax.Array
    log_probs: jax.Array | None
    features: jax.Array | None
    likely: jax.Array | None


def verify(
    config: LlamaConfig,
    params: Weights,
    drafter: Drafter,
    acceptor: Acceptor,
    law: Law,
    keys: jax.Array,
    view: View,
    proposal: Proposal,
    widths: tuple[int, ...],
    log_probs: bool,
) -> Verified:
    """Runs the target over pending and drafts, in the narrowest of `widths` that holds the longest live draft.

    Args:
      config, params, drafter, acceptor, law: the method, on the target.
      keys: [B] for a chain; [B, K + 1], a key for each position of the text, for a tree or a coupled acceptor.
      view: the rows.
      proposal: what was drafted, as far as it can be of use, see `trimmed`.
      widths: those of the drafter, or the last of them alone.
      log_probs: whether to report them, static.
    """
    pending, start, depth = view.pending, view.start, drafter.num_draft_tokens
    batch, full = pending.shape[0], drafter.num_nodes + 1
    taps, num_likely = drafter.taps, drafter.num_likely
    whole = None if proposal.parents is None else Tree.of(proposal.parents, depth)

    def run(width: int, cache: KVCache) -> Verified:
        drawn_from = None if proposal.log_probs is None else proposal.log_probs[:, : width - 1]
        kept = Proposal(proposal.tokens[:, : width - 1], proposal.count, drawn_from, parents=proposal.parents)
        branches = None if whole is None else whole.rows(0, width)
        if proposal.exit_hidden is None:
            fed = rows_of(pending, kept.tokens)
            hidden = llama.embed(params.target, fed if branches is None else jnp.maximum(fed, 0))
        else:
            hidden = proposal.exit_hidden[:, :width]
        rest = range(proposal.exit_layer, config.num_layers)
        hidden, features, cache = llama.run_tapped(
            config, params.target, hidden, start, cache, taps, layers=rest, tree=branches
        )
        if features is not None and branches is None:
            features = widened(features, full)
        raw = judged = llama.logits(config, params.target, hidden)
        if view.penalties is not None:
            judged = view.penalties.apply(raw, view.tokens, view.length, kept.tokens, branches)
        finite = is_finite(judged)
        if branches is None:
            sound = _leading(finite)
        # Some law in place of none: an acceptor may weigh a token by those after it.
        with jax.named_scope("sampling"):
            raw, judged = (jnp.where(finite[..., None], logits, 0.0) for logits in (raw, judged))
        likely = widened(jax.lax.top_k(raw, num_likely)[1], full) if num_likely else None
        if branches is None:
            with jax.named_scope("sampling"):
                acceptance = acceptor.accept(keys, kept, judged, law)
            tokens, of_path = kept.tokens, raw
        else:
            accept = getattr(acceptor, "accept_tree", walk if drawn_from is None else reject)
            with jax.named_scope("sampling"):
                acceptance = accept(keys, kept, branches, judged, law)
            assert acceptance.path is not None
            sound = _leading(tree.along(finite, acceptance.path))
            features = None if features is None else tree.along(features, acceptance.path)
            tokens = accepted_tokens(view, kept.tokens, acceptance)
            of_path = tree.along(raw, acceptance.path) if log_probs else raw
        if not log_probs:
            return Verified(cache, acceptance, sound, None, features, likely)
        reported = widened(log_probs_of(of_path, with_next(tokens, acceptance)), depth + 1)
        return Verified(cache, acceptance, sound, reported, features, likely)

    def compacted(verified: Verified) -> Verified:
        if (path := verified.acceptance.path) is None:
            return verified
        place = jnp.arange(depth + 1)
        # What was rejected stays where it is.
        path = jnp.where(place <= verified.acceptance.count[:, None], path, place)
        return verified._replace(cache=kv.move(verified.cache, start, path, full))

    if widths == (full,):
        return compacted(run(full, view.cache))
    needed = jnp.max(proposal.count) + 1
    nothing = jnp.zeros(batch, jnp.int32)
    no_path = None if whole is None else jnp.zeros((batch, depth + 1), jnp.int32)
    no_log_probs = jnp.zeros((batch, depth + 1), jnp.float32) if log_probs else None
    no_features = None
    if taps:
        width_of_taps = len(taps) * config.hidden_size
        no_features = jnp.zeros((batch, depth + 1, width_of_taps), params.target["embed"].dtype)
    no_likely = jnp.zeros((batch, full, num_likely), jnp.int32) if num_likely else None
    nowhere = Acceptance(nothing, nothing, no_path)
    carry = Verified(view.cache, nowhere, nothing, no_log_probs, no_features, no_likely)
    verified = narrowest(widths, needed, lambda width, carry: run(width, carry.cache), carry, "verify")
    return compacted(verified)


def trimmed(proposal: Proposal, room: jax.Array, depth: int) -> Proposal:
    """Returns a proposal without the tokens for which a row has no room, int32[B].

    Of a tree of at most `depth` tokens one after the other, all tokens that are not proposed become −1.
    """
    if proposal.parents is None:
        return dataclasses.replace(proposal, count=jnp.minimum(proposal.count, room))
    node = jnp.arange(proposal.tokens.shape[1])[None]
    useful = Tree.of(proposal.parents, depth).depth[:, 1:] <= room[:, None]
    there = useful & (node < proposal.count[:, None]) & (proposal.tokens >= 0)
    count = jnp.max(jnp.where(there, node + 1, 0), axis=1, initial=0)
    return dataclasses.replace(proposal, tokens=jnp.where(there, proposal.tokens, -1), count=count)


def num_verified(proposal: Proposal, depth: int, count: jax.Array, acceptance: Acceptance) -> jax.Array:
    """How many draft tokens a round verified, int32[B], of which it committed `count` tokens.

    Where the end of the text is an accepted draft, what was drafted after it does not count.
    """
    cut = count <= acceptance.count
    if proposal.parents is None:
        return jnp.where(cut, count, proposal.count)
    there = proposal.tokens >= 0
    before_end = Tree.of(proposal.parents, depth).depth[:, 1:] <= count[:, None]
    return jnp.sum(there & (before_end | ~cut[:, None]), axis=1)


def fed(pending: jax.Array, proposal: Proposal) -> jax.Array:
    """What was verified, as `Outcome.fed`."""
    drafts = proposal.tokens
    if proposal.parents is None:
        drafts = jnp.where(jnp.arange(drafts.shape[1])[None] < proposal.count[:, None], drafts, -1)
    return rows_of(pending, drafts)


def rows_of(pending: jax.Array, drafts: jax.Array) -> jax.Array:
    """The tokens that are verified, int32[B, R]: the pending one, int32[B], and the drafts, [B, R − 1]."""
    return jnp.concatenate([pending[:, None], drafts], axis=1)


def accepted_tokens(view: View, drafts: jax.Array, acceptance: Acceptance) -> jax.Array:
    """The drafts one after the other, int32[B, K]: those of a chain, or those on the accepted path of a tree."""
    if acceptance.path is None:
        return drafts
    return tree.along(rows_of(view.pending, drafts), acceptance.path[:, 1:])


def with_next(drafts: jax.Array, acceptance: Acceptance) -> jax.Array:
    """Accepted drafts and the token after them, int32[B, K + 1] for drafts [B, K]."""
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    here = jnp.arange(padded.shape[1])[None] == acceptance.count[:, None]
    return jnp.where(here, acceptance.token[:, None], padded)


def log_probs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Raw log-probabilities float32[B, T] of tokens [B, T] under logits [B, T, V]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]


def _leading(good: jax.Array) -> jax.Array:
    """How many entries of bool[B, T] are True before the first False, int32[B]."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)
