"""Verifies a proposal with one pass of the target: it accepts a prefix of a chain or a path of a tree.

`verify_chain` and `verify_tree` both run the target by `run_target` and accept by `_judged`. Every function takes and
returns arrays of B rows; K = `drafter.num_draft_tokens`, the most tokens accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.acceptance import GreedyAcceptor
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.control import either, narrowest
from jaxspec.model.numerics import sums, widened
from jaxspec.model.tree import Tree, along
from jaxspec.protocol import Acceptance, Acceptor, Beside, Drafter, Proposal, View, Weights
from jaxspec.sampling import Distribution, Greedy, is_finite, seed_key
from jaxspec.tree_acceptance import reject, walk

# The most of the likeliest tokens that are reported beside a token, as in OpenAI's API.
MOST_TOP = 20
# Takes an acceptor and the arguments of `Acceptor.accept`.
Accept = Callable[..., Acceptance]


class Inputs(NamedTuple):
    """The inputs of a verification.

    Attributes:
      config, params, drafter, acceptor, distribution: the method, on the target.
      keys: returns [B] for a chain; [B, K + 1], a key for each position of the text, for a tree or a coupled acceptor.
      view: the rows.
      proposal: the draft tokens within the budget, see `trimmed`.
      states: int32[B, R], the states of the grammars before and after each draft token; None without grammars.
      widths: compiled numbers of rows, rising, static; the last one is the number of nodes + 1.
      log_probs: the largest `Parts.log_probs`, int32[]; None for never.
    """

    config: LlamaConfig
    params: Weights
    drafter: Drafter
    acceptor: Acceptor
    distribution: Distribution
    keys: Callable[[], jax.Array]
    view: View
    proposal: Proposal
    states: jax.Array | None
    widths: tuple[int, ...]
    log_probs: jax.Array | None

    def masked(self, logits: jax.Array) -> jax.Array:
        """Returns the logits [B, R, V] of the first R rows, −inf where a grammar forbids a token."""
        grammar = self.view.grammar
        if grammar is None or self.states is None:
            return logits
        return grammar.mask(logits, self.states[:, : logits.shape[1]])


class Pass(NamedTuple):
    """The results of a pass of the target, except its logits.

    Attributes:
      cache: the target's.
      aux_hidden_states: [B, R, F] of the R rows, as the drafter's `aux_layers`; None without them.
      top_tokens, beside: as in `Outcome`.
    """

    cache: KVCache
    aux_hidden_states: jax.Array | None = None
    top_tokens: jax.Array | None = None
    beside: jax.Array | None = None


class Verified(NamedTuple):
    """The result of a verification.

    Attributes:
      ran: the pass of the target. The accepted tokens are in the cache's slots of their positions, and
        `aux_hidden_states` are those of `Outcome`.
      acceptance: the accepted tokens.
      sound: int32[B], number of leading positions with finite logits; later tokens are invalid.
      log_probs: float32[B, K + 1, 1 + 2N] of the accepted tokens and the next one under the unmodified logits, see
        `report_of`; or None.
    """

    ran: Pass
    acceptance: Acceptance
    sound: jax.Array
    log_probs: jax.Array | None


def verify(inputs: Inputs) -> Verified:
    """Verifies a chain or a tree, in the smallest of `widths` that holds the longest draft."""
    return verify_chain(inputs) if inputs.proposal.parents is None else verify_tree(inputs)


def verify_chain(inputs: Inputs) -> Verified:
    """Runs the target over the pending token (row 0) and the chain, and accepts a prefix of the chain."""
    proposal, pending = inputs.proposal, inputs.view.pending
    beside = inputs.drafter.beside(inputs.params, inputs.view, proposal)
    whole = len(inputs.widths) == 1 and proposal.exit_hidden is None
    assert beside is None or whole, "the rows beside follow a whole chain, through all layers"

    def run(width: int, cache: KVCache) -> Verified:
        drafts = _first(proposal, width - 1)
        logits, ran = run_target(inputs, rows_of(pending, drafts.tokens), cache, beside=beside)
        acceptance, finite = _judged(inputs, drafts, logits, lambda acceptor, *given: acceptor.accept(*given))
        return _verified(inputs, logits, ran, drafts, acceptance, finite, lambda rows: rows)

    return _run_narrowest(inputs, run)


def verify_tree(inputs: Inputs) -> Verified:
    """Runs the target over the pending token (row 0, the root) and the nodes, and accepts a path from the root."""
    proposal, pending, depth = inputs.proposal, inputs.view.pending, inputs.drafter.num_draft_tokens
    assert proposal.parents is not None
    tree = Tree.from_parents(proposal.parents, depth)

    def run(width: int, cache: KVCache) -> Verified:
        drafts, branches = _first(proposal, width - 1), tree.first(width)

        def accept(acceptor: Acceptor, keys: jax.Array, drafts: Proposal, *given: Any) -> Acceptance:
            # Recursive rejection needs the draft's distribution; without it, only the target's own draws are accepted.
            accept_tree = acceptor.accept_tree or (walk if drafts.log_probs is None else reject)
            return accept_tree(keys, drafts, branches, *given)

        # The −1 of an empty node is not a token of the vocabulary.
        tokens = jnp.maximum(rows_of(pending, drafts.tokens), 0)
        logits, ran = run_target(inputs, tokens, cache, tree)
        acceptance, finite = _judged(inputs, drafts, logits, accept, branches)
        # From here on, arrays follow the accepted path instead of the nodes.
        path = acceptance.path
        assert path is not None
        return _verified(inputs, logits, ran, drafts, acceptance, finite, lambda rows: along(rows, path))

    verified = _run_narrowest(inputs, run)
    ran, path, place = verified.ran, verified.acceptance.path, jnp.arange(depth + 1)
    assert path is not None
    # The path's keys and values move to the slots of their positions; rejected slots are overwritten later.
    path = jnp.where(place <= verified.acceptance.count[:, None], path, place)
    cache = kv.move(ran.cache, inputs.view.start, path, inputs.drafter.num_nodes + 1)
    return verified._replace(ran=ran._replace(cache=cache))


def run_target(
    inputs: Inputs, tokens: jax.Array, cache: KVCache, tree: Tree | None = None, beside: Beside | None = None
) -> tuple[jax.Array, Pass]:
    """Runs the target over the first R rows of a verification, except for the layers that the draft has run.

    Args:
      inputs: of the verification.
      tokens: int32[B, R], the pending token and R − 1 draft tokens.
      cache: the target's.
      tree: the whole tree of which these are the first rows; None for a chain.
      beside: the rows that run beside a whole chain; None for none.

    Returns:
      The logits of the rows, float32[B, R, V], and the other results.
    """
    config, target, drafter = inputs.config, inputs.params.target, inputs.drafter
    exits, rest = inputs.proposal.exit_hidden, range(inputs.proposal.exit_layer, config.num_layers)
    # The number of rows that the draft has run through all layers: that of the pending token, or none.
    done = 0 if exits is None or rest else 1
    assert not (done and drafter.aux_layers), "auxiliary hidden states of the pending token need its row"
    if exits is None or done:
        hidden, rest = llama.embed(config, target, tokens[:, done:]), range(config.num_layers)
    else:
        # An early-exit draft has run the first layers on these tokens: continue from its hidden states.
        hidden = exits[:, : tokens.shape[1]]
    weights, start, count = target, inputs.view.start + done, hidden.shape[1]
    rows = None if tree is None else tree.rows(done, count)
    if beside is not None:
        hidden = jnp.concatenate([hidden, llama.embed(config, target, beside.tokens)], axis=1)
        weights, rows = beside.params, Tree.from_parents(beside.shape, beside.shape.depth)
    aux_hidden_states = None
    if count:
        hidden, aux_hidden_states, cache, _ = llama.run_with_aux(
            config, weights, hidden, start, cache, drafter.aux_layers, layers=rest, tree=rows
        )
    hidden, further = hidden[:, :count], None if beside is None else hidden[:, count:]
    if exits is not None and done:
        hidden = jnp.concatenate([exits, hidden], axis=1)
    logits, top_tokens = llama.logits(config, target, hidden), None
    if drafter.num_top_tokens:
        top, top_tokens = jax.lax.top_k(inputs.masked(logits), drafter.num_top_tokens)
        top_tokens = widened(jnp.where(top > -jnp.inf, top_tokens, -1), drafter.num_nodes + 1)
    return logits, Pass(cache, aux_hidden_states, top_tokens, further)


@jax.named_scope("sampling")
def _judged(
    inputs: Inputs, drafts: Proposal, logits: jax.Array, accept: Accept, branches: Tree | None = None
) -> tuple[Acceptance, jax.Array]:
    """Returns the accepted tokens, and where the logits are finite, bool[B, R].

    Args:
      inputs: of the verification.
      drafts: the R − 1 draft tokens.
      logits: float32[B, R, V], the target's.
      accept: how the tokens are accepted.
      branches: the R rows of a tree; None for a chain.
    """
    view, penalties, drawing = inputs.view, inputs.view.penalties, inputs.distribution.drawing
    logits = inputs.masked(logits)

    def sampled() -> tuple[Acceptance, jax.Array]:
        judged = logits
        if penalties is not None:
            judged = penalties.apply(logits, view.tokens, view.length, drafts.tokens, branches)
        finite = is_finite(judged)
        if branches is None:
            # NaN would spread to earlier tokens, because an acceptor may weigh a token by those after it.
            judged = jnp.where(finite[..., None], judged, 0.0)
        return accept(inputs.acceptor, inputs.keys(), drafts, judged, inputs.distribution), finite

    def greedy() -> tuple[Acceptance, jax.Array]:
        # Greedy acceptance draws nothing: any keys do, one for each position.
        of_positions = jnp.broadcast_to(seed_key(0), (len(logits), inputs.drafter.num_draft_tokens + 1))
        plain = dataclasses.replace(drafts, log_probs=None)
        return accept(GreedyAcceptor(), of_positions, plain, logits, Greedy()), is_finite(logits)

    if isinstance(drawing, bool):
        return sampled()
    # A batch of greedy rows without penalties neither filters nor draws: at temperature 0 all acceptors are equal.
    if penalties is not None:
        drawing |= penalties.active(view.length)
    return either(drawing, sampled, greedy)


def _verified(
    inputs: Inputs,
    logits: jax.Array,
    ran: Pass,
    drafts: Proposal,
    acceptance: Acceptance,
    finite: jax.Array,
    in_text_order: Callable[[jax.Array], jax.Array],
) -> Verified:
    """Returns the result of a verification; `in_text_order` maps rows [B, R, ...] to positions [B, T, ...]."""
    length, log_probs = inputs.drafter.num_draft_tokens + 1, inputs.log_probs
    finite = in_text_order(finite)

    def reported() -> tuple[jax.Array, jax.Array]:
        return in_text_order(logits), text_of(inputs.view, drafts.tokens, acceptance)

    if log_probs is not None:
        like = *finite.shape, logits.shape[-1]
        log_probs = widened(report_of(log_probs, inputs.config.exact, like, reported), length)
    if (aux := ran.aux_hidden_states) is not None:
        ran = ran._replace(aux_hidden_states=widened(in_text_order(aux), length))
    return Verified(ran, acceptance, _leading(finite), log_probs)


def _run_narrowest(inputs: Inputs, run: Callable[[int, KVCache], Verified]) -> Verified:
    """Returns `run(width, cache)` for the smallest of `widths` that holds the longest draft."""
    drafter, proposal, aux_layers = inputs.drafter, inputs.proposal, inputs.drafter.aux_layers
    length, dtype = drafter.num_draft_tokens + 1, llama.stream_of(inputs.params.target)

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((len(proposal.count), *shape), dtype)

    # The carry has the shapes of a result; every width replaces all of it except the cache.
    ran = Pass(
        inputs.view.cache,
        zeros(length, len(aux_layers) * inputs.config.hidden_size, dtype=dtype) if aux_layers else None,
        zeros(drafter.num_nodes + 1, drafter.num_top_tokens) if drafter.num_top_tokens else None,
    )
    nowhere = Acceptance(zeros(), zeros(), None if proposal.parents is None else zeros(length))
    columns = report_size(inputs.config.vocab_size)
    log_probs = None if inputs.log_probs is None else zeros(length, columns, dtype=jnp.float32)
    carry, needed = Verified(ran, nowhere, zeros(), log_probs), jnp.max(proposal.count) + 1
    return narrowest(inputs.widths, needed, lambda width, carry: run(width, carry.ran.cache), carry, "verify")


def _first(proposal: Proposal, count: int) -> Proposal:
    """Returns the first `count` draft tokens."""
    log_probs = None if proposal.log_probs is None else proposal.log_probs[:, :count]
    return dataclasses.replace(proposal, tokens=proposal.tokens[:, :count], log_probs=log_probs)


def trimmed(proposal: Proposal, budget: jax.Array, depth: int, states: jax.Array | None = None) -> Proposal:
    """Removes the draft tokens beyond `budget`, int32[B], and those that a grammar forbids.

    In a tree of at most `depth` levels, every node that is not proposed becomes −1. `states`: as in `Inputs`. A
    forbidden token that was drawn stays, without those after it: the target rejects it, and then draws from what is
    left of its distribution.
    """
    drawn = proposal.log_probs is not None
    if proposal.parents is None:
        count = jnp.minimum(proposal.count, budget)
        if states is not None:
            possible = states[:, :-1] if drawn else states[:, 1:]
            count = jnp.minimum(count, jnp.sum(jnp.cumprod(possible >= 0, axis=1), axis=1))
        return dataclasses.replace(proposal, count=count)
    node = jnp.arange(proposal.tokens.shape[1])[None]
    tree = Tree.from_parents(proposal.parents, depth)
    useful = tree.depth[:, 1:] <= budget[:, None]
    if states is not None:
        parent = jnp.broadcast_to(tree.parent, states.shape)[:, 1:]
        useful &= (along(states, parent) if drawn else states[:, 1:]) >= 0
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
    before_end = Tree.from_parents(proposal.parents, depth).depth[:, 1:] <= count[:, None]
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


def text_of(view: View, drafts: jax.Array, acceptance: Acceptance) -> jax.Array:
    """Returns the accepted drafts, in text order, and the token after them, int32[B, T], for drafts int32[B, R − 1].

    T is R for a chain and K + 1 for a tree. Entries after acceptance.count[b] are padding.
    """
    if acceptance.path is not None:
        drafts = along(rows_of(view.pending, drafts), acceptance.path[:, 1:])
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    here = jnp.arange(padded.shape[1])[None] == acceptance.count[:, None]
    return jnp.where(here, acceptance.token[:, None], padded)


def log_probs_of(logits: jax.Array, tokens: jax.Array, exact: bool = False) -> jax.Array:
    """Raw log-probabilities float32[B, T, C] of tokens [B, T, C] under logits [B, T, V]; `exact`: `numerics.linear`."""
    if exact:
        # The barriers keep XLA from fusing the sum: the kernel of a fused one depends on the number of rows.
        top = jax.lax.optimization_barrier(jnp.max(logits, axis=-1, keepdims=True))
        total = sums(jax.lax.optimization_barrier(jnp.exp(logits - top)))
        normed = logits - top - jnp.log(total)
    else:
        normed = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(normed, tokens, axis=-1)


def report_size(vocab_size: int) -> int:
    """Returns 1 + 2N, the columns of `report_of`."""
    return 1 + 2 * min(MOST_TOP, vocab_size)


def report_of(
    level: jax.Array,
    exact: bool,
    like: tuple[int, ...],
    given: Callable[[], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """Returns the log-probabilities to report about tokens, float32[B, T, 1 + 2N].

    The columns are the log-probability of the token, those of the N = min(20, V) likeliest tokens, falling, and the ids
    of these, which float32 holds exactly.

    Args:
      level: int32[]; 0 leaves all columns 0, and 1 those of the likeliest tokens meaningless.
      exact: see `numerics.linear`.
      like: B, T and V.
      given: returns logits [B, T, V] and tokens [B, T]; it runs only where they are reported.
    """
    *rows, vocab_size = like
    shape = *rows, report_size(vocab_size)

    def reported() -> jax.Array:
        logits, tokens = given()
        # Rows without a request for the likeliest tokens do not pay for them: a GPU sorts the vocabulary.
        likeliest = either(
            level > 1,
            lambda: jax.lax.top_k(logits, shape[-1] // 2)[1],
            lambda: jnp.zeros((*rows, shape[-1] // 2), jnp.int32),
        )
        log_probs = log_probs_of(logits, jnp.concatenate([tokens[..., None], likeliest], axis=-1), exact)
        return jnp.concatenate([log_probs, likeliest.astype(jnp.float32)], axis=-1)

    return either(level > 0, reported, lambda: jnp.zeros(shape, jnp.float32))


def _leading(good: jax.Array) -> jax.Array:
    """How many entries of bool[B, T] are True before the first False, int32[B]."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)
