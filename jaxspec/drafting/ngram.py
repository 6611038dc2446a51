"""Drafts copied from text that is already there: prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.lookup import BREAK, LookupDrafter, committed_text, match_lengths
from jaxspec.protocol import Proposal, View

Match = Literal["latest", "earliest", "longest", "random"]


@struct.dataclass
class NGram(LookupDrafter):
    """Finds an earlier place that ends in the same tokens, and proposes what followed there.

    The last n committed tokens are looked for, n from `ngram_max` down to `ngram_min`; the first n with a
    match decides. No match is a plain step; so is a match with nothing after it.

    Attributes:
      reference: None for prompt lookup: prompt and output are searched. Else int32[R], texts in which alone
        to search (LLMA), separated by `lookup.BREAK`.
      match: among several places, the `latest`, the `earliest` (as in transformers), the latest of those
        with the `longest` continuation (up to K), or a `random` one of those.
      ngram_max, ngram_min: n.
      num_draft_tokens: K.
    """

    reference: jax.Array | None = None
    match: Match = struct.field(pytree_node=False, default="latest")
    ngram_max: int = struct.field(pytree_node=False, default=3)
    ngram_min: int = struct.field(pytree_node=False, default=1)
    num_draft_tokens: int = struct.field(pytree_node=False, default=10)

    def look_up(self, keys: jax.Array, view: View) -> tuple[Proposal, jax.Array]:
        """What follows at the place that was chosen; all of it should be accepted."""
        batch = view.length.shape[0]
        if self.reference is None:
            text = committed_text(view)
        else:
            text = jnp.broadcast_to(self.reference, (batch, self.reference.shape[0]))
        matched = match_lengths(text, view, self.ngram_max)
        follows = self._follow_lengths(text)
        best = jnp.max(jnp.where(follows > 0, matched, 0), axis=1)
        good = (matched >= best[:, None]) & (follows > 0)
        end = self._choose(keys, good, follows)
        count = jnp.where(best >= self.ngram_min, jnp.take_along_axis(follows, end[:, None], axis=1)[:, 0], 0)
        columns = jnp.minimum(end[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None], text.shape[1] - 1)
        tokens = jnp.maximum(jnp.take_along_axis(text, columns, axis=1), 0)
        return Proposal(tokens, count), count.astype(jnp.float32)

    def _follow_lengths(self, text: jax.Array) -> jax.Array:
        """int32[B, N]: how many tokens follow each place before a break, at most K."""
        batch, size = text.shape
        running = jnp.ones((batch, size), bool)
        total = jnp.zeros((batch, size), jnp.int32)
        for n in range(1, self.num_draft_tokens + 1):
            shifted = jnp.pad(text, ((0, 0), (0, n)), constant_values=BREAK)[:, n:]
            running &= shifted != BREAK
            total += running
        return total

    def _choose(self, keys: jax.Array, good: jax.Array, follows: jax.Array) -> jax.Array:
        """One of the places where `good` bool[B, N], int32[B]."""
        size = good.shape[1]
        if self.match == "earliest":
            return jnp.argmax(good, axis=1).astype(jnp.int32)
        if self.match in ("longest", "random"):
            longest = jnp.max(jnp.where(good, follows, 0), axis=1, keepdims=True)
            good &= follows == longest
        if self.match == "random":
            # One number per row, whatever N is: N follows the longest text of the batch.
            among = jnp.cumsum(good, axis=1)
            which = jax.vmap(lambda key, many: jax.random.randint(key, (), 0, many))(keys, among[:, -1])
            return jnp.argmax(among > which[:, None], axis=1).astype(jnp.int32)
        return (size - 1 - jnp.argmax(good[:, ::-1], axis=1)).astype(jnp.int32)
