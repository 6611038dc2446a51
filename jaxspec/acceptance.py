"""Acceptors decide which draft tokens are accepted, and draw the token after them. All four are lossless.

Draft tokens and logits from index `proposal.count` on are padding, which no acceptor reads.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.protocol import Acceptance, Acceptor, Proposal
from jaxspec.sampling import Distribution, categorical, drawn_by
from jaxspec.tree_acceptance import walk


@struct.dataclass
class GreedyAcceptor(Acceptor):
    """Accepts drafts while they equal the target's most likely token: the text of greedy decoding.

    The text is exact for the given logits. Plain decoding computes its logits with a kernel for one row, and they may
    differ in the last bits.

    Examples:
      >>> from jaxspec.sampling import Greedy
      >>> proposal = Proposal(jnp.array([[1, 2]]), jnp.array([2]))
      >>> logits = jax.nn.one_hot(jnp.array([[1, 3, 0]]), 4)
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> acceptance = GreedyAcceptor().accept(keys, proposal, logits, Greedy())
      >>> int(acceptance.count[0]), int(acceptance.token[0])
      (1, 3)
    """

    def accept(
        self, keys: jax.Array, proposal: Proposal, logits: jax.Array, distribution: Distribution
    ) -> Acceptance:
        """Accepts the longest run of most likely tokens, see `protocol.Acceptor`. Uses no keys."""
        # Row i of the logits follows draft token i − 1, so it decides draft token i.
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        count = _leading(proposal.tokens == best[:, :-1], proposal.count)
        # The target's token at the first mismatch is the correction; after full acceptance it is the bonus token.
        return Acceptance(count, jnp.squeeze(jnp.take_along_axis(best, count[:, None], axis=1), 1))


@struct.dataclass
class RejectionAcceptor(Acceptor):
    """Accepts x with probability min(1, p(x) ÷ q(x)), else redraws from norm(max(p − q, 0)).

    Speculative sampling (Chen et al. 2023, Algorithm 2; Leviathan et al. 2023, Algorithm 1): the text
    follows the target's distribution p for any draft distribution q.

    Examples:
      >>> from jaxspec.sampling import Sampling
      >>> proposal = Proposal(jnp.array([[1]]), jnp.array([1]), jnp.log(jnp.full((1, 1, 4), 0.25)))
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> same_distribution = jnp.zeros((1, 2, 4))
      >>> RejectionAcceptor().accept(keys, proposal, same_distribution, Sampling(jnp.ones(1))).count.tolist()
      [1]
    """

    def accept(
        self, keys: jax.Array, proposal: Proposal, logits: jax.Array, distribution: Distribution
    ) -> Acceptance:
        """Draws which draft tokens stand and the token after them, see `protocol.Acceptor`."""
        target = jnp.exp(distribution.log_probs(logits))
        draft = _draft_probs(proposal, target.shape[-1])
        p, q = _of_drafted(target[:, :-1], proposal), _of_drafted(draft, proposal)
        # u·q < p is the test u < p ÷ q without a division by zero; the first failure ends the draft.
        count = _leading(_uniforms(keys, p.shape[1]) * q < p, proposal.count)
        return _redraw(keys, target, draft, count, count < proposal.count)


@struct.dataclass
class BlockAcceptor(Acceptor):
    """Verifies the draft as a block; accepts at least as many tokens as `RejectionAcceptor` on average.

    Block verification (Sun et al. 2024, Algorithm 2). A prefix of i tokens has the weight
    w_i = min(1, w_{i−1} p_i ÷ q_i). Prefixes are tried from the longest to the shortest; prefix i is accepted with
    probability h_i = (w_i − s_i) ÷ (1 − s_i), where s_i = Σ_x min(w_i p(x), q(x)) is the probability that a longer one
    is accepted (0 at the end of the draft). The proof is an induction over prefixes, so the length of a draft may
    depend on its tokens.

    Examples:
      >>> from jaxspec.sampling import Sampling
      >>> proposal = Proposal(jnp.array([[1]]), jnp.array([1]), jnp.log(jnp.full((1, 1, 4), 0.25)))
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> same_distribution = jnp.zeros((1, 2, 4))
      >>> BlockAcceptor().accept(keys, proposal, same_distribution, Sampling(jnp.ones(1))).count.tolist()
      [1]
    """

    def accept(
        self, keys: jax.Array, proposal: Proposal, logits: jax.Array, distribution: Distribution
    ) -> Acceptance:
        """Draws which draft tokens stand and the token after them, see `protocol.Acceptor`."""
        target = jnp.exp(distribution.log_probs(logits))
        draft = _draft_probs(proposal, target.shape[-1])
        p, q = _of_drafted(target[:, :-1], proposal), _of_drafted(draft, proposal)
        width = p.shape[1]
        # w_i, capped at every step, so a loop over K and not a cumulative product.
        weights = [jnp.ones(p.shape[0])]
        for i in range(width):
            weights.append(jnp.minimum(weights[-1] * p[:, i] / jnp.maximum(q[:, i], 1e-38), 1.0))
        weight = jnp.stack(weights, axis=1)  # [B, T], of the prefix of i tokens
        weighted = weight[..., None] * target
        # Σ max(w p − q, 0) = w − s, because min(a, b) = a − max(a − b, 0); hence h = excess ÷ (excess + 1 − w).
        excess = jnp.sum(jnp.maximum(weighted[:, :-1] - draft, 0.0), axis=-1)
        inner = excess / jnp.maximum(excess + 1.0 - weight[:, :-1], 1e-38)
        inner = jnp.concatenate([inner, weight[:, -1:]], axis=1)
        # At the end of the draft there is no longer prefix: h = w.
        prefix = jnp.arange(width + 1)[None]
        stands = jnp.where(prefix == proposal.count[:, None], weight, inner)[:, 1:]
        # The longest accepted prefix counts, whatever happened to the shorter ones.
        tried = (_uniforms(keys, width) < stands) & (prefix[:, 1:] <= proposal.count[:, None])
        count = jnp.max(jnp.where(tried, prefix[:, 1:], 0), axis=1, initial=0)
        return _redraw(keys, weighted, draft, count, count < proposal.count)


@struct.dataclass
class CoupledAcceptor(Acceptor):
    """Accepts drafts that equal the target's own draws at their positions: a seed gives the text of plain decoding.

    The key of the target's token depends only on the position, so the draft does not influence the text: it equals the
    text of plain decoding token for token, if the logits are equal. A draft that is drawn with the same keys, that is,
    with the same Gumbel noise, is accepted with a probability of at least (1 − d) ÷ (1 + d), where
    d = Σ|p − q| ÷ 2; `RejectionAcceptor` accepts it with 1 − d. See
    drafter-invariant speculative decoding (Daliri, Musco and Suresh 2024, "Coupling without Communication and
    Drafter-Invariant Speculative Decoding", arXiv:2408.07978).

    Examples:
      >>> from jaxspec.sampling import Sampling
      >>> keys = jax.random.split(jax.random.key(0), (1, 2))
      >>> logits = jnp.array([[[0.0, 1.0, 0.5], [0.3, 0.2, 0.1]]])
      >>> distribution, every = Sampling(jnp.ones(1)), [Proposal(jnp.array([[x]]), jnp.array([1])) for x in range(3)]
      >>> accepted = [CoupledAcceptor().accept(keys, draft, logits, distribution).count for draft in every]
      >>> sorted(int(count[0]) for count in accepted)  # one of the three is what the target draws
      [0, 0, 1]
    """

    coupled: ClassVar[bool] = True

    def accept(
        self, keys: jax.Array, proposal: Proposal, logits: jax.Array, distribution: Distribution
    ) -> Acceptance:
        """Draws the target's token at each position from keys [B, T] or more, see `protocol.Acceptor`."""
        # The keys of plain decoding: each draw is the token of its text, provided that the drafts before it are.
        places = drawn_by(keys[:, : logits.shape[1]])
        drawn = jax.vmap(categorical, 1, 1)(places, distribution.log_probs(logits))
        # A draft token is accepted only if it is the draw itself, so no residual is needed after a mismatch.
        count = _leading(proposal.tokens == drawn[:, :-1], proposal.count)
        return Acceptance(count, jnp.take_along_axis(drawn, count[:, None], axis=1)[:, 0])

    # The walk also serves trees whose nodes were drawn, because acceptance never uses the draft's probabilities.
    accept_tree = staticmethod(walk)


def _leading(good: jax.Array, count: jax.Array) -> jax.Array:
    """Returns how many of the first `count` entries of bool[B, K] are True before the first False, int32[B]."""
    valid = jnp.arange(good.shape[1])[None] < count[:, None]
    return jnp.sum(jnp.cumprod((good & valid).astype(jnp.int32), axis=1), axis=1)


def _draft_probs(proposal: Proposal, vocab_size: int) -> jax.Array:
    """Returns the draft's distribution q, float32[B, K, V]; a point mass where the proposal has none."""
    if proposal.log_probs is not None:
        return jnp.exp(proposal.log_probs)
    return jax.nn.one_hot(proposal.tokens, vocab_size, dtype=jnp.float32)


def _of_drafted(probs: jax.Array, proposal: Proposal) -> jax.Array:
    """Returns the probability that `probs` [B, K, V] give to each draft token, [B, K]."""
    return jnp.squeeze(jnp.take_along_axis(probs, proposal.tokens[..., None], axis=-1), -1)


def _uniforms(keys: jax.Array, count: int) -> jax.Array:
    """Draws `count` numbers in [0, 1) per row, from a stream apart from the redraw's, float32[B, count].

    Each number has its own key. It does not depend on `count`, which follows the longest draft in the batch, so a row
    does not depend on the other rows.
    """

    def of_row(key: jax.Array) -> jax.Array:
        streams = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, 0), jnp.arange(count))
        return jax.vmap(jax.random.uniform)(streams)

    return jax.vmap(of_row)(keys)


def _redraw(
    keys: jax.Array, target: jax.Array, draft: jax.Array, count: jax.Array, cut: jax.Array
) -> Acceptance:
    """Draws the token after `count` drafts, int32[B]: from max(p − q, 0) after a rejection, else from p.

    p: the target's distribution [B, T, V], scaled by any factor per position; q: the draft's [B, K, V]; `cut`: bool[B],
    whether draft `count` was rejected. If max(p − q, 0) is all zero, which only rounding can cause, p is used.
    """
    here = count[:, None, None]
    p = jnp.squeeze(jnp.take_along_axis(target, here, axis=1), 1)
    # After the last draft there is no q, and `cut` is False.
    q = jnp.squeeze(jnp.take_along_axis(draft, here, axis=1), 1)
    residual = jnp.where(cut[:, None], jnp.maximum(p - q, 0.0), p)
    p = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p)
    streams = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
    return Acceptance(count, categorical(streams, jnp.log(p)))
