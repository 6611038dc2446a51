"""Plain decoding: the drafter that drafts nothing. The baseline shares the loop with everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.cache import KVCache
from jaxspec.protocol import Drafter, Proposal, State, View, Weights
from jaxspec.sampling import Law


@struct.dataclass
class Autoregressive(Drafter):
    """Each round feeds the pending token and yields one.

    Attributes:
      num_draft_tokens: 0; or the K of those with which it takes turns, so that counts and caches have room for theirs.
    """

    num_draft_tokens: int = struct.field(pytree_node=False, default=0)

    @property
    def num_nodes(self) -> int:
        """Nothing is drafted."""
        return 0

    @property
    def reach(self) -> int:
        """K + 1: the caches have room for the rounds of drafters that take turns with this one."""
        return self.num_draft_tokens + 1

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, law: Law
    ) -> tuple[Proposal, State, KVCache]:
        """An empty proposal."""
        batch = view.length.shape[0]
        return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)), state, view.cache
