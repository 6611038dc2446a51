"""The part of a vocabulary among which a draft chooses: FR-Spec (Zhao et al. 2025) and VocabTrim (Goel et al. 2025).

A head over N tokens costs N ÷ V of the whole one. A draft's law q is then 0 outside these tokens, which no acceptor
minds: the text keeps the target's law, whose head is whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.quantised import Quantised


@struct.dataclass
class Vocabulary:
    """N of a model's tokens, and their rows of its head.

    Attributes:
      head: [N, D], the rows; None where they lie in the several heads of a draft.
      ids: int32[N], the tokens: rising, so that among equals the same is first as in the whole vocabulary.
      size: V, tokens of the whole vocabulary, static.

    Examples:
      >>> few = Vocabulary(jnp.ones((2, 4)), jnp.array([3, 5]), size=7)
      >>> few.spread(jnp.array([[-0.5, -1.0]])).tolist()
      [[-inf, -inf, -inf, -0.5, -inf, -1.0, -inf]]
    """

    head: jax.Array | Quantised | None
    ids: jax.Array
    size: int = struct.field(pytree_node=False)

    def spread(self, log_probs: jax.Array) -> jax.Array:
        """Returns the log-probabilities of all tokens [..., V] from those of these [..., N]: −inf for the others."""
        nothing = jnp.full((*log_probs.shape[:-1], self.size), -jnp.inf, log_probs.dtype)
        return nothing.at[..., self.ids].set(log_probs, indices_are_sorted=True, unique_indices=True)
