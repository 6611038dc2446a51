"""Drafts the most frequent continuation of the text's last tokens: SuffixDecoding (Oliaro et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafting.lookup import BREAK, LookupDrafter, committed_text, joined, match_lengths
from jaxspec.protocol import Proposal, View

# For each row and suffix: the counted places, the draft's probability, its score and its number of tokens so far.
Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@struct.dataclass
class SuffixDrafter(LookupDrafter):
    """Drafts, token by token, the most frequent continuation of the text's last tokens.

    For each m up to `suffix_max`, the places that end in the text's last m tokens are counted. The most frequent next
    token is drafted (among ties the one at the longest match, then at the latest place), and places with another next
    token are dropped; then the same for the next token. The probability of a draft token is the product of these shares
    up to it. A draft ends before a token below `min_prob`, and has at most `factor` · m tokens. The draft with the
    largest sum of probabilities, the expected number of accepted tokens, is proposed; among ties that of the largest m.

    The paper keeps a tree of all suffixes on the host. Here each round compares the text again, without a state. This
    is cheap compared with a step of the target, but only `num_places` places are counted.

    Attributes:
      reference: None, or int32[R], texts that are searched besides prompt and output, see `lookup.joined`.
      min_prob: the minimum probability of a token, 0 to 1.
      factor: the maximum number of draft tokens per token of the match.
      suffix_max: the largest m.
      num_draft_tokens: K.
      num_places: the number of counted places: those with the longest matches, among ties the latest.
    """

    reference: jax.Array | None = None
    min_prob: jax.Array | float = 0.1
    factor: jax.Array | float = 1.0
    suffix_max: int = struct.field(pytree_node=False, default=16)
    num_draft_tokens: int = struct.field(pytree_node=False, default=15)
    num_places: int = struct.field(pytree_node=False, default=64)

    def remembering(self, texts: Iterable[Sequence[int]], size: int) -> SuffixDrafter:
        """Returns the same drafter with these texts, for example past outputs, as its reference.

        Args:
          texts: token ids, the latest last.
          size: the number of tokens kept, from the latest texts; drafters with equal sizes share compiled programs.
        """
        return dataclasses.replace(self, reference=joined(texts, size))

    def look_up(self, keys: jax.Array, view: View) -> tuple[Proposal, jax.Array]:
        """Returns the best draft, and the sum of its tokens' probabilities."""
        text = committed_text(view)
        batch = len(text)
        if self.reference is not None:
            # The reference comes first, so that the text itself has the latest places.
            before = jnp.append(self.reference, BREAK)
            text = jnp.concatenate([jnp.broadcast_to(before, (batch, len(before))), text], axis=1)
        matched, following = self._places(text, view)
        suffixes = jnp.arange(1, self.suffix_max + 1)
        counted = matched[:, None, :] >= suffixes[:, None]
        most = jnp.floor(self.factor * suffixes)

        def step(carry: Carry, column: tuple[jax.Array, jax.Array]) -> tuple[Carry, jax.Array]:
            counted, prob, score, count = carry
            tokens, number = column
            # A place whose text has ended has no next token.
            counted &= (tokens != BREAK)[:, None, :]
            # The number of counted places with the same token as each place, [B, suffixes, places].
            same = (tokens[:, :, None] == tokens[:, None, :]).astype(jnp.float32)
            votes = jnp.where(counted, counted.astype(jnp.float32) @ same, 0)
            chosen = jnp.take_along_axis(tokens, jnp.argmax(votes, axis=2), axis=1)
            share = jnp.max(votes, axis=2) / jnp.maximum(jnp.sum(counted, axis=2), 1)
            # Once the product is below the minimum it stays below, so a draft never resumes.
            prob = prob * share
            goes_on = (prob >= self.min_prob) & (prob > 0) & (number < most)
            counted &= tokens[:, None, :] == chosen[:, :, None]
            return (counted, prob, score + jnp.where(goes_on, prob, 0), count + goes_on), chosen

        shape = (batch, self.suffix_max)
        first = (counted, jnp.ones(shape), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))
        columns = (jnp.moveaxis(following, 2, 0), jnp.arange(self.num_draft_tokens))
        (_, _, score, count), drafts = jax.lax.scan(step, first, columns)
        # Reversed, because argmax takes the first of equal scores and the largest m is preferred.
        best = self.suffix_max - 1 - jnp.argmax(score[:, ::-1], axis=1, keepdims=True)
        tokens = jnp.take_along_axis(drafts, best[None], axis=2)[:, :, 0].T
        count = jnp.take_along_axis(count, best, axis=1)[:, 0]
        return Proposal(jnp.maximum(tokens, 0), count), jnp.take_along_axis(score, best, axis=1)[:, 0]

    def _places(self, text: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
        """Returns the match lengths of the counted places, int32[B, P], and their next tokens, int32[B, P, K]."""
        batch, size = text.shape
        padded = jnp.pad(text, ((0, 0), (0, self.num_draft_tokens)), constant_values=BREAK)
        followed = padded[:, 1 : size + 1] != BREAK
        matched = jnp.where(followed, match_lengths(text, view, self.suffix_max), 0)
        # Reversed, because `top_k` takes the first of equal lengths and the latest place is preferred. In float32,
        # because for integers XLA sorts the whole array, which takes a CPU 5 to 20 times as long.
        longest, places = jax.lax.top_k(matched[:, ::-1].astype(jnp.float32), min(self.num_places, size))
        columns = (size - 1 - places)[:, :, None] + jnp.arange(1, self.num_draft_tokens + 1)
        following = jnp.take_along_axis(padded, columns.reshape(batch, -1), axis=1)
        return longest.astype(jnp.int32), following.reshape(columns.shape)
