"""Drafts copied from text that is already there: prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.cache import KVCache
from jaxspec.protocol import Proposal, State, StatelessDrafter, View, Weights, rising_widths
from jaxspec.sampling import Law

Match = Literal["latest", "earliest", "longest", "random"]
# No token: what separates reference texts and ends their padding. It matches nothing and is never proposed.
BREAK = -1


@struct.dataclass
class NGram(StatelessDrafter):
    """Finds an earlier place that ends in the same tokens, and proposes what followed there.

    The last n committed tokens are looked for, n from `ngram_max` down to `ngram_min`; the first n with a
    match decides. No match is a plain step; so is a match with nothing after it.

    Attributes:
      reference: None for prompt lookup: prompt and output are searched. Else int32[R], texts in which alone
        to search (LLMA), separated by `BREAK`.
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

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """One row where nothing was found."""
        return rising_widths(self.num_draft_tokens)

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, law: Law
    ) -> tuple[Proposal, State, KVCache]:
        """Point masses: where a copied token comes from has nothing to do with the target's law."""
        batch = view.length.shape[0]
        if self.reference is None:
            text = jnp.where(
                jnp.arange(view.tokens.shape[1])[None] < view.length[:, None], view.tokens, BREAK
            )
        else:
            text = jnp.broadcast_to(self.reference, (batch, self.reference.shape[0]))
        matched = self._match_lengths(text, view)
        follows = self._follow_lengths(text)
        best = jnp.max(jnp.where(follows > 0, matched, 0), axis=1)
        good = (matched >= best[:, None]) & (follows > 0)
        end = self._choose(keys, good, follows)
        count = jnp.where(best >= self.ngram_min, jnp.take_along_axis(follows, end[:, None], axis=1)[:, 0], 0)
        columns = jnp.minimum(end[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None], text.shape[1] - 1)
        tokens = jnp.maximum(jnp.take_along_axis(text, columns, axis=1), 0)
        return Proposal(tokens, count), state, view.cache

    def _match_lengths(self, text: jax.Array, view: View) -> jax.Array:
        """int32[B, N]: how many tokens up to and including each place equal the text's last ones."""
        batch, size = text.shape
        running = jnp.ones((batch, size), bool)
        total = jnp.zeros((batch, size), jnp.int32)
        for n in range(self.ngram_max):
            last = jnp.take_along_axis(view.tokens, jnp.maximum(view.length - 1 - n, 0)[:, None], axis=1)
            shifted = jnp.pad(text, ((0, 0), (n, 0)), constant_values=BREAK)[:, :size]
            running &= (shifted == last) & (view.length > n)[:, None]
            total += running
        return total

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
