"""Plain decoding: a drafter without draft tokens, so that the baseline runs in the same loop as every method."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.cache import KVCache
from jaxspec.protocol import Drafter, Proposal, State, View, Weights
from jaxspec.sampling import Distribution


@struct.dataclass
class AutoregressiveDrafter(Drafter):
    """Plain decoding: each round feeds the pending token and commits one token.

    Attributes:
      num_draft_tokens: 0, or the largest K of the drafters that take turns with it, which sizes counts.
      reach: 1, or the largest reach of the drafters that take turns with it, which sizes caches.
    """

    num_draft_tokens: int = struct.field(pytree_node=False, default=0)
    reach: int = struct.field(pytree_node=False, default=1)

    @property
    def num_nodes(self) -> int:
        """0."""
        return 0

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, distribution: Distribution
    ) -> tuple[Proposal, State, KVCache]:
        """Returns a proposal without tokens."""
        batch = view.length.shape[0]
        return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)), state, view.cache
