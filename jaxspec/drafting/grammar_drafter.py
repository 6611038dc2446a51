"""Drafts the tokens that a row's grammar makes certain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.lookup import LookupDrafter
from jaxspec.protocol import Proposal, View


@struct.dataclass
class GrammarDrafter(LookupDrafter):
    """Copies nothing, so that each draft is the certain continuation of `LookupDrafter.drafts`.

    Attributes:
      num_draft_tokens: K.
    """

    num_draft_tokens: int = struct.field(pytree_node=False, default=10)

    def look_up(self, keys: jax.Array, view: View) -> tuple[Proposal, jax.Array]:
        """Returns no draft tokens."""
        nothing = jnp.zeros_like(view.length)
        tokens = jnp.zeros((len(nothing), self.num_draft_tokens), jnp.int32)
        return Proposal(tokens, nothing), nothing.astype(jnp.float32)
