"""Acceptors that are NOT lossless: the text does not follow the target's distribution. None is a default."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.tree import Tree
from jaxspec.protocol import Acceptance, Acceptor, Proposal
from jaxspec.sampling import Distribution, categorical
from jaxspec.tree_acceptance import lengths, path_to


@struct.dataclass
class TypicalAcceptor(Acceptor):
    """Accepts drafts that are typical of the target. LOSSY: the text follows another distribution.

    Typical acceptance (Cai et al. 2024, §3.3.1): draft token x is kept if p(x) > min(ε, δ·exp(−H(p))) and all before
    it are, where p is the target's distribution after temperature and filters, H its entropy in nats. The next
    token is drawn from p (the authors take the most likely one). Likely tokens are more frequent than under p, more so
    with a better draft. At temperature 0, p is a point mass and the text is greedy. In a tree, the longest path of
    typical tokens is accepted, and among equally long paths the most probable one under p, as in the authors' code.

    Attributes:
      epsilon: ε, the upper bound of the threshold.
      delta: δ, the factor of exp(−H) for flat distributions; the authors take √ε.

    Examples:
      >>> from jaxspec.sampling import Sampling
      >>> proposal = Proposal(jnp.array([[1, 0]]), jnp.array([2]))
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> logits = jnp.log(jnp.array([[[0.85, 0.1, 0.05], [0.04, 0.95, 0.01], [0.3, 0.3, 0.4]]]))
      >>> TypicalAcceptor().accept(keys, proposal, logits, Sampling(jnp.ones(1))).count.tolist()
      [1]
    """

    epsilon: jax.Array | float = 0.09
    delta: jax.Array | float = 0.3

    def accept(
        self, keys: jax.Array, proposal: Proposal, logits: jax.Array, distribution: Distribution
    ) -> Acceptance:
        """Accepts the longest run of typical tokens, see `protocol.Acceptor`, and draws the token after it."""
        # Row i of the logits is the target's distribution for draft token i.
        log_probs = distribution.log_probs(logits)
        drafted = jnp.take_along_axis(log_probs[:, :-1], proposal.tokens[..., None], axis=-1)[..., 0]
        valid = jnp.arange(drafted.shape[1])[None] < proposal.count[:, None]
        stands = (jnp.exp(drafted) > self._least(log_probs[:, :-1])) & valid
        # The cumulative product ends the draft at its first untypical token.
        count = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
        # The next token is drawn from p itself; a lossless acceptor would draw from a residual after a rejection.
        here = jnp.take_along_axis(log_probs, count[:, None, None], axis=1)[:, 0]
        return Acceptance(count, categorical(keys, here))

    def accept_tree(
        self,
        keys: jax.Array,
        proposal: Proposal,
        branches: Tree,
        logits: jax.Array,
        distribution: Distribution,
    ) -> Acceptance:
        """Accepts the longest path of typical tokens, and draws the token after it, see `protocol.Acceptor`."""
        tokens, log_probs = proposal.tokens, distribution.log_probs(logits)
        # A node is judged by the distribution after its parent.
        parent = jnp.broadcast_to(branches.parent, logits.shape[:2])[:, 1:]
        before = jnp.take_along_axis(log_probs, jnp.maximum(tokens, 0)[:, None], axis=2)
        drafted = jnp.take_along_axis(before, parent[:, None], axis=1)[:, 0]
        least = jnp.take_along_axis(self._least(log_probs), parent, axis=1)
        stands = (jnp.exp(drafted) > least) & (tokens >= 0)
        # Row 0, the pending token, is always accepted.
        stands = jnp.pad(stands, ((0, 0), (1, 0)), constant_values=True)
        # A path is accepted if every row on it is typical.
        length = lengths(branches, stands)
        count = jnp.max(length, axis=1)
        likelihood = jnp.where(branches.behind, jnp.pad(drafted, ((0, 0), (1, 0)))[:, None], 0.0).sum(axis=2)
        # Among the longest paths, the most probable one under p.
        longest = length == count[:, None]
        last = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1)
        here = jnp.take_along_axis(log_probs, last[:, None, None], axis=1)[:, 0]
        # Keys belong to positions; the next token's position follows the accepted ones.
        own = jax.vmap(lambda of_row, number: of_row[number])(keys, count)
        return Acceptance(count, categorical(own, here), path_to(branches, last, keys.shape[1]))

    def _least(self, log_probs: jax.Array) -> jax.Array:
        """Returns the threshold on the probability of a typical token, [...], from log-probabilities [..., V]."""
        probs = jnp.exp(log_probs)
        entropy = -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0.0), axis=-1)
        return jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
