"""Acceptors that are NOT lossless: the text follows another law than the target's. None is ever a default."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.protocol import Acceptance, Proposal
from jaxspec.sampling import Law, categorical


@struct.dataclass
class TypicalAcceptor:
    """Keeps drafts that are typical of the target's law. LOSSY: the text follows another law, whatever the draft.

    Typical acceptance (Cai et al. 2024, §3.3.1): draft token x stands if p(x) > min(ε, δ·exp(−H(p))) and all before it
    stand, where p is the target's law, temperature and filters included, and H its entropy in nats. The token after
    them is drawn from p (the authors take the most likely one). Likely tokens come more often than p says, the more so
    the better the draft. In a row of temperature 0, p is a point mass, and the text is the greedy one.

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
        probs = jnp.exp(log_probs)
        entropy = -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0.0), axis=-1)
        least = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        drafted = jnp.take_along_axis(probs[:, :-1], proposal.tokens[..., None], axis=-1)[..., 0]
        valid = jnp.arange(drafted.shape[1])[None] < proposal.count[:, None]
        stands = (drafted > least[:, :-1]) & valid
        count = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
        here = jnp.take_along_axis(log_probs, count[:, None, None], axis=1)[:, 0]
        return Acceptance(count, categorical(keys, here))
