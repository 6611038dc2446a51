"""The base of drafters that copy from existing text: reference texts, the search, and the proposal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model.cache import KVCache
from jaxspec.protocol import Drafter, Proposal, State, View, Weights, rising_widths
from jaxspec.sampling import Distribution

# Separates and pads reference texts. It is not a token: it matches none and is never proposed.
BREAK = -1


def joined(texts: Iterable[Sequence[int]], size: int | None = None) -> jax.Array:
    """Returns the texts as one reference, int32[R], with a `BREAK` after each.

    Args:
      texts: token ids.
      size: R. A shorter reference is padded with `BREAK`; a longer one loses its beginning. None for the length of the
        texts.

    Raises:
      ValueError: a text is not a sequence of token ids, or `size` is below 1.
    """
    rows = [text.tolist() if isinstance(text, (np.ndarray, jax.Array)) else list(text) for text in texts]
    if wrong := next(
        (token for row in rows for token in row if not isinstance(token, int | np.integer)), None
    ):
        raise ValueError(f"a text has the token {wrong!r}; give token ids, such as a result's `tokens`")
    if size is not None and size < 1:
        raise ValueError(f"size is {size}; give a whole number of at least 1")
    tokens = [token for row in rows for token in (*row, BREAK)]
    if size is not None:
        tokens = tokens[max(0, len(tokens) - size) :]
        tokens += [BREAK] * (size - len(tokens))
    return jnp.asarray(np.array(tokens, np.int32))


def committed_text(view: View) -> jax.Array:
    """Returns prompt and output of each row, int32[B, N], padded with `BREAK`."""
    return jnp.where(jnp.arange(view.tokens.shape[1])[None] < view.length[:, None], view.tokens, BREAK)


def match_lengths(text: jax.Array, view: View, longest: int) -> jax.Array:
    """Returns the length of the match between the tokens that end at each place of a text and the row's last tokens.

    Args:
      text: int32[B, N].
      view: the rows.
      longest: the longest match that is counted.

    Returns:
      int32[B, N], 0 to `longest`.
    """
    batch, size = text.shape
    running = jnp.ones((batch, size), bool)
    total = jnp.zeros((batch, size), jnp.int32)
    # Iteration n compares the token n places before each place with the row's n-th last token.
    for n in range(longest):
        last = jnp.take_along_axis(view.tokens, jnp.maximum(view.length - 1 - n, 0)[:, None], axis=1)
        shifted = jnp.pad(text, ((0, 0), (n, 0)), constant_values=BREAK)[:, :size]
        running &= (shifted == last) & (view.length > n)[:, None]
        total += running
    return total


class LookupDrafter(Drafter):
    """A base for drafters that copy from text: a subclass adds `num_draft_tokens` and `look_up`."""

    @property
    def verify_widths(self) -> tuple[int, ...]:
        """The widths of verification: a row for rounds without a match, two for doubtful copies, and wider ones.

        A copy is mostly right for one token or for many, and on a CPU two rows cost little more than one in int8.
        """
        return tuple(sorted({2, *rising_widths(self.num_draft_tokens)}))

    def look_up(self, keys: jax.Array, view: View) -> tuple[Proposal, jax.Array]:
        """Returns the draft of each row, without `log_probs`, and the expected number of accepted tokens, float32[B].

        Copied tokens are deterministic given the text and the keys, so their distributions are point masses.
        """
        raise NotImplementedError

    def drafts(self, keys: jax.Array, view: View) -> tuple[Proposal, jax.Array]:
        """Returns the drafts of `look_up` under the grammars of the rows, and the expected acceptance.

        A draft ends before the first forbidden token. While a grammar allows a single token after it, the draft goes on
        with that token.
        """
        copied, promised = self.look_up(keys, view)
        if view.grammar is None:
            return copied, promised
        tokens, kept, count = view.grammar.completed(copied.tokens, copied.count)
        return Proposal(tokens, count), jnp.minimum(promised, kept) + (count - kept)

    def propose(
        self, keys: jax.Array, params: Weights, state: State, view: View, distribution: Distribution
    ) -> tuple[Proposal, State, KVCache]:
        """Proposes `drafts`; the target's cache is returned unchanged."""
        return self.drafts(keys, view)[0], state, view.cache
