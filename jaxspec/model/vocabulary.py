"""A reduced vocabulary for drafts: FR-Spec (Zhao et al. 2025) and VocabTrim (Goel et al. 2025).

A head over N tokens costs N ÷ V of the whole one. The draft's distribution q is 0 outside these tokens. Every acceptor
allows that, and the text follows the target's distribution, because the target's head is whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.quantisation import Quantised


@struct.dataclass
class Vocabulary:
    """N of a model's tokens, and their rows of its head.

    Attributes:
      head: [N, D], the rows; None if a draft has several heads of its own.
      ids: int32[N], the tokens, rising, so that ties are broken as in the whole vocabulary.
      size: V, the size of the whole vocabulary, static.
    """

    head: jax.Array | Quantised | None
    ids: jax.Array
    size: int = struct.field(pytree_node=False)

    def spread(self, log_probs: jax.Array) -> jax.Array:
        """Returns log-probabilities [..., V] from those of the reduced vocabulary [..., N]; −inf for other tokens."""
        nothing = jnp.full((*log_probs.shape[:-1], self.size), -jnp.inf, log_probs.dtype)
        return nothing.at[..., self.ids].set(log_probs, indices_are_sorted=True, unique_indices=True)
