"""Drafts copied from existing text: prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.lookup import BREAK, LookupDrafter, committed_text, match_lengths
from jaxspec.protocol import Proposal, View


@struct.dataclass
class NGramDrafter(LookupDrafter):
    """Finds earlier occurrences of the last n tokens, and proposes the tokens that follow the latest of them.

    The largest n from `ngram_max` down to `ngram_min` with an occurrence decides. Without an occurrence that
    other tokens follow, the round is a plain step.

    Attributes:
      reference: None for prompt lookup, which searches prompt and output. For LLMA int32[R], the only texts that are
        searched, separated by `lookup.BREAK`.
      ngram_max, ngram_min: the bounds of n.
      num_draft_tokens: K.
    """

    reference: jax.Array | None = None
    ngram_max: int = struct.field(pytree_node=False, default=3)
    ngram_min: int = struct.field(pytree_node=False, default=1)
    num_draft_tokens: int = struct.field(pytree_node=False, default=10)

    def look_up(self, keys: jax.Array, view: View) -> tuple[Proposal, jax.Array]:
        """Returns the continuation of the latest occurrence, and its length as the expected acceptance."""
        batch = view.length.shape[0]
        if self.reference is None:
            text = committed_text(view)
        else:
            text = jnp.broadcast_to(self.reference, (batch, self.reference.shape[0]))
        matched = match_lengths(text, view, self.ngram_max)
        follows = self._follow_lengths(text)
        # The longest match with a continuation decides. The end of the text, which matches itself, has none.
        best = jnp.max(jnp.where(follows > 0, matched, 0), axis=1)
        good = (matched >= best[:, None]) & (follows > 0)
        end = (text.shape[1] - 1 - jnp.argmax(good[:, ::-1], axis=1)).astype(jnp.int32)
        count = jnp.where(best >= self.ngram_min, jnp.take_along_axis(follows, end[:, None], axis=1)[:, 0], 0)
        columns = jnp.minimum(end[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None], text.shape[1] - 1)
        # Columns past `count` may contain breaks; a proposal's padding must be valid token ids.
        tokens = jnp.maximum(jnp.take_along_axis(text, columns, axis=1), 0)
        return Proposal(tokens, count), count.astype(jnp.float32)

    def _follow_lengths(self, text: jax.Array) -> jax.Array:
        """Returns the number of tokens between each place and the next break, at most K, int32[B, N]."""
        batch, size = text.shape
        running = jnp.ones((batch, size), bool)
        total = jnp.zeros((batch, size), jnp.int32)
        for n in range(1, self.num_draft_tokens + 1):
            shifted = jnp.pad(text, ((0, 0), (0, n)), constant_values=BREAK)[:, n:]
            running &= shifted != BREAK
            total += running
        return total
