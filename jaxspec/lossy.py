"""Acceptors that are NOT lossless: the text follows another law than the target's. None is ever a default."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.tree import Tree
from jaxspec.protocol import Acceptance, Acceptor, Proposal
from jaxspec.sampling import Law, categorical


@struct.dataclass
class TypicalAcceptor(Acceptor):
    """Keeps drafts that are typical of the target's law. LOSSY: the text follows another law, whatever the draft.

    Typical acceptance (Cai et al. 2024, §3.3.1): draft token x stands if p(x) > min(ε, δ·exp(−H(p))) and all before it
    stand, where p is the target's law, temperature and filters included, and H its entropy in nats. The token after
    them is drawn from p (the authors take the most likely one). Likely tokens come more often than p says, the more so
    the better the draft. In a row of temperature 0, p is a point mass, and the text is the greedy one. Of a tree the
    longest path stands whose tokens all do; of equally long ones the one that p holds more probable, as in the authors'
    code.

    Attributes:
      epsilon: ε, the threshold where the law is sure.
      delta: δ, of the threshold where it is not; the authors take √ε.

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

    def accept(self, keys: jax.Array, proposal: Proposal, logits: jax.Array, law: Law) -> Acceptance:
        """Accepts the longest run of typical tokens, see `protocol.Acceptor`, and draws the token after it."""
        log_probs = law.log_probs(logits)
        drafted = jnp.take_along_axis(log_probs[:, :-1], proposal.tokens[..., None], axis=-1)[..., 0]
        valid = jnp.arange(drafted.shape[1])[None] < proposal.count[:, None]
        stands = (jnp.exp(drafted) > self._least(log_probs[:, :-1])) & valid
        count = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
        here = jnp.take_along_axis(log_probs, count[:, None, None], axis=1)[:, 0]
        return Acceptance(count, categorical(keys, here))

    def accept_tree(
        self, keys: jax.Array, proposal: Proposal, branches: Tree, logits: jax.Array, law: Law
    ) -> Acceptance:
        """Accepts the longest path of typical tokens, and draws the token after it, see `protocol.Acceptor`."""
        tokens, log_probs, depth = proposal.tokens, law.log_probs(logits), keys.shape[1] - 1
        parent = jnp.broadcast_to(branches.parent, logits.shape[:2])[:, 1:]
        before = jnp.take_along_axis(log_probs, jnp.maximum(tokens, 0)[:, None], axis=2)
        drafted = jnp.take_along_axis(before, parent[:, None], axis=1)[:, 0]
        least = jnp.take_along_axis(self._least(log_probs), parent, axis=1)
        stands = (jnp.exp(drafted) > least) & (tokens >= 0)
        # Row 0, the pending token, stands.
        stands = jnp.pad(stands, ((0, 0), (1, 0)), constant_values=True)
        whole = ~jnp.any(branches.behind & ~stands[:, None], axis=2)
        length = jnp.where(whole, branches.depth, 0)
        count = jnp.max(length, axis=1)
        likelihood = jnp.where(branches.behind, jnp.pad(drafted, ((0, 0), (1, 0)))[:, None], 0.0).sum(axis=2)
        longest = whole & (length == count[:, None])
        last = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1)
        places = jnp.arange(depth + 1)
        behind, depths = (
            jnp.broadcast_to(of, (len(last), *of.shape[1:])) for of in (branches.behind, branches.depth)
        )
        on_path = jnp.take_along_axis(behind, last[:, None, None], axis=1) & (
            depths[:, None] == places[:, None]
        )
        here = jnp.take_along_axis(log_probs, last[:, None, None], axis=1)[:, 0]
        own = jax.vmap(lambda of_row, number: of_row[number])(keys, count)
        return Acceptance(count, categorical(own, here), jnp.argmax(on_path, axis=2).astype(jnp.int32))

    def _least(self, log_probs: jax.Array) -> jax.Array:
        """What a typical token's probability is above under laws [..., V], [...]."""
        probs = jnp.exp(log_probs)
        entropy = -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0.0), axis=-1)
        return jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
