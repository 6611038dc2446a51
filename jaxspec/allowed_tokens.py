"""Grammars: finite automata over tokens that restrict each row's text. They are data of the compiled loop.

A grammar changes the target's distribution: the logits of tokens that it forbids are −inf. Verification masks its rows
by the states along the draft, so every acceptor, penalty and filter works on the masked distribution.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.tree import Parents, Tree, along

# The columns of `Grammars.states`.
MASK, FORCED, LAST = range(3)
# The columns of `Grammars.tables`.
START, WIDTH, FIRST = range(3)


@struct.dataclass
class Grammars:
    """The grammars of B rows, of which rows may share some.

    The G tables have one array each for all their states, transitions and masks. Table 0 allows every token. State 0 of
    a table is its start; −1 stands for the state after a forbidden token.

    Attributes:
      next: int16[T], the state after a token of each class, for each state of each table; −1 for a forbidden token.
      states: int32[N, 3], for each state of each table: its mask, the token that is certain after it (−1 for none), and
        whether no token can follow except an end token.
      class_of: int32[G, V], the class of each token.
      masks: uint32[M, W], the allowed tokens: token t is bit t ÷ W of word t mod W, so that a mask unfolds in order.
      tables: int32[G, 3], the position of each table in `next`, its number of classes, and its position in `states`.
      which: int32[B], the table of each row; 0 for no grammar.
      state: int32[B], the state after each row's text.
    """

    next: jax.Array
    states: jax.Array
    class_of: jax.Array
    masks: jax.Array
    tables: jax.Array
    which: jax.Array
    state: jax.Array

    def for_live(self, live: jax.Array, state: jax.Array) -> Grammars:
        """Returns the grammars in these states, int32[B]; rows that are not live, bool[B], have none."""
        return dataclasses.replace(
            self, which=jnp.where(live, self.which, 0), state=jnp.where(live, state, 0)
        )

    def step(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the states after tokens, int32[B] or [B, R]; −1 if a token is forbidden or −1, or a state is."""
        which = self._of_rows(self.which, state)
        start, width = self.tables[which, START], self.tables[which, WIDTH]
        place = start + jnp.maximum(state, 0) * width + self.class_of[which, jnp.maximum(tokens, 0)]
        after = self.next[place].astype(jnp.int32)
        return jnp.where((state < 0) | (tokens < 0), -1, after)

    def walk(self, tokens: jax.Array, parents: Parents | None = None, depth: int = 0) -> jax.Array:
        """Returns the states at the pending token and after each draft token, int32[B, R].

        Args:
          tokens: int32[B, R − 1], a chain, or the nodes of a tree.
          parents: of the nodes; None for a chain.
          depth: the depth of the tree, static.
        """
        if parents is None:
            after = [self.state]
            for place in range(tokens.shape[1]):
                after.append(self.step(after[-1], tokens[:, place]))
            return jnp.stack(after, axis=1)
        states = jnp.pad(self.state[:, None], ((0, 0), (0, tokens.shape[1])), constant_values=-1)
        parent = jnp.broadcast_to(Tree.from_parents(parents, depth).parent, states.shape)[:, 1:]
        for _ in range(depth):  # each iteration reaches one more level
            states = states.at[:, 1:].set(self.step(along(states, parent), tokens))
        return states

    def mask(self, logits: jax.Array, state: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """Returns the logits with −inf for each token that the grammar forbids.

        Args:
          logits: float32[B, R, V], or [B, R, N] for a reduced vocabulary.
          state: int32[B, R], the state before the token.
          ids: int32[N], the tokens of the logits; None for all.
        """
        masks = self.masks[self._read(state, MASK)]
        words = masks.shape[-1]
        if ids is None:
            bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[:, None]
            bits = bits.reshape(*masks.shape[:2], -1)[..., : logits.shape[-1]]
        else:
            bits = masks[..., ids % words] >> (ids // words).astype(jnp.uint32)
        return jnp.where(bits & 1, logits, -jnp.inf)

    def ends(self, state: jax.Array) -> jax.Array:
        """Returns whether no token except an end token can follow states, bool."""
        return (state >= 0) & (self._read(state, LAST) > 0)

    def completed(self, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Continues drafts by the tokens that are certain after them.

        Args:
          tokens: int32[B, K], chains.
          count: int32[B], the draft tokens of each.

        Returns:
          The tokens, int32[B, K], the number of draft tokens before the first forbidden one, and of all, int32[B].
        """
        state, copying = self.state, jnp.ones_like(self.state, bool)
        columns, kept, whole = [], jnp.zeros_like(count), jnp.zeros_like(count)
        for place in range(tokens.shape[1]):
            after = self.step(state, tokens[:, place])
            copying &= (after >= 0) & (place < count)
            certain = jnp.where(state < 0, -1, self._read(state, FORCED))
            state = jnp.where(copying, after, self.step(state, certain))
            columns.append(jnp.where(copying, tokens[:, place], jnp.maximum(certain, 0)))
            kept, whole = kept + copying, whole + (state >= 0)
        return jnp.stack(columns, axis=1), kept, whole

    def _read(self, state: jax.Array, column: int) -> jax.Array:
        first = self.tables[self._of_rows(self.which, state), FIRST]
        return self.states[first + jnp.maximum(state, 0), column]

    @staticmethod
    def _of_rows(numbers: jax.Array, like: jax.Array) -> jax.Array:
        return numbers.reshape(-1, *(1,) * (like.ndim - 1))
