"""Penalties, biases, bans and grammars: changes of the logits that depend on the tokens of the text before a position.

They belong to the target's sampling distribution. A draft token is part of the text before the positions after it, so
verification applies them to the tokens on each row's path, and the text keeps the distribution of plain decoding.
The definitions are those of transformers' logits processors, and for presence and frequency those of the OpenAI API.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.allowed_tokens import Grammars
from jaxspec.model.control import run_if
from jaxspec.model.tree import Tree
from jaxspec.sampling import is_finite


@struct.dataclass
class Penalties:
    """Penalties and bans for B rows. 1, 0 or −1 disable a setting in single rows.

    A setting that no row uses takes no time; one that is None is not compiled.

    Attributes:
      begin: int32[B], the length of each prompt.
      repetition: float32[B]; the logit of each token of the prompt and text is divided by it if the logit is positive,
        else multiplied by it. 1 for none.
      presence: float32[B], subtracted from the logit of each token of the text. 0 for none.
      frequency: float32[B], subtracted once for each time that the token occurs in the text. 0 for none.
      biased: int32[B, M], tokens whose logits have a bias; −1 for none.
      bias: float32[B, M], added to the logit of each of them; −inf for a token that is impossible.
      until: int32[B, M], the position, counted from the start of the prompt, from which on it is not added.
      words: int32[B, P, L], sequences whose last token is impossible after the others; −1 before the first token of
        shorter sequences.
      ngram: int32[B], n: no n tokens in a row occur twice in prompt and text. 0 for no ban.
      grammar: the grammars of the rows; None for none. Where a penalty or ban leaves no token of the grammar, it has no
        effect.
      longest_ngram: the largest n, static.
    """

    begin: jax.Array
    repetition: jax.Array | None = None
    presence: jax.Array | None = None
    frequency: jax.Array | None = None
    biased: jax.Array | None = None
    bias: jax.Array | None = None
    until: jax.Array | None = None
    words: jax.Array | None = None
    ngram: jax.Array | None = None
    grammar: Grammars | None = None
    longest_ngram: int = struct.field(pytree_node=False, default=0)

    def for_live(self, live: jax.Array, state: jax.Array) -> Penalties:
        """Returns the penalties with the grammars in these states, int32[B].

        Rows that are not live, bool[B], have none, so that they take no time.
        """

        def kept(setting: jax.Array | None, neutral: float) -> jax.Array | None:
            return None if setting is None else jnp.where(live, setting, neutral)

        return dataclasses.replace(
            self,
            repetition=kept(self.repetition, 1.0),
            presence=kept(self.presence, 0.0),
            frequency=kept(self.frequency, 0.0),
            until=None if self.until is None else jnp.where(live[:, None], self.until, 0),
            grammar=None if self.grammar is None else self.grammar.for_live(live, state),
        )

    def active(self, length: jax.Array) -> jax.Array:
        """Returns whether penalties or bans change the logits of some row, bool[]; grammars do not count.

        A bias whose end is at or before `length`, int32[B], the committed tokens, changes nothing.
        """
        changed = jnp.full(length.shape, self.words is not None or self.ngram is not None)
        for setting, neutral in ((self.repetition, 1.0), (self.presence, 0.0), (self.frequency, 0.0)):
            if setting is not None:
                changed |= setting != neutral
        if self.biased is not None and self.until is not None:
            changed |= jnp.any((self.biased >= 0) & (length[:, None] < self.until), axis=1)
        return jnp.any(changed)

    def apply(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        length: jax.Array,
        drafts: jax.Array | None = None,
        branches: Tree | None = None,
    ) -> jax.Array:
        """Returns the logits float32[B, R, V] with all penalties, biases and bans applied; −inf for a banned token.

        Args:
          logits: float32[B, R, V], after the pending token and after each draft token, masked by the grammar.
          tokens: int32[B, N], prompt and text, valid up to length[b].
          length: int32[B].
          drafts: int32[B, R − 1], the draft tokens, −1 for none; None if R is 1.
          branches: the first R rows of the tree whose nodes are the drafts; None for a chain.
        """
        batch, rows, _ = logits.shape
        drafts = jnp.zeros((batch, 0), jnp.int32) if drafts is None else drafts
        place, given = jnp.arange(rows), logits
        depth, before = place[None], (place[:, None] >= place)[None]
        if branches is not None:
            depth, before = branches.depth, branches.behind
        # The drafts between the committed tokens and each row's next token, bool[B, R, R − 1].
        on_path = before[:, :, 1:] & (drafts >= 0)[:, None]
        logits = self._penalised(logits, tokens, length, drafts, on_path)
        # The position of each row's next token.
        at = length[:, None] + depth
        if self.biased is not None and self.bias is not None and self.until is not None:
            biased, bias, early = (
                self.biased[:, None],
                self.bias[:, None],
                at[..., None] < self.until[:, None],
            )
            logits = run_if(
                jnp.any(early & (biased >= 0)), lambda logits: _biased(logits, biased, early, bias), logits
            )
        # Sequences are compared with the text before each row's next token, including the drafts on its path.
        if self.words is not None or self.ngram is not None:
            text = _texts(tokens, length, drafts, on_path, depth)
        if self.words is not None:
            words = self.words[:, None]
            match = jnp.ones(words.shape[:3], bool)
            for back in range(words.shape[-1] - 1):
                wanted = words[..., -2 - back]
                match &= (wanted < 0) | (wanted == _back(text, at, back)[..., None])
            logits = _biased(logits, words[..., -1], match, -jnp.inf)
        if self.ngram is not None:
            size = self.ngram[:, None, None]
            # For each position of the text, whether the n − 1 tokens before it equal those before the next token. The
            # token at a matching position is then banned.
            where = jnp.arange(text.shape[-1])
            match = (size > 0) & (where >= size - 1) & (where < at[..., None])
            for back in range(self.longest_ngram - 1):
                shifted = jnp.pad(text, ((0, 0), (0, 0), (back + 1, 0)), constant_values=-1)[
                    ..., : len(where)
                ]
                match &= (back >= size - 1) | (shifted == _back(text, at, back)[..., None])
            logits = _biased(logits, text, match, -jnp.inf)
        if self.grammar is None:
            return logits
        kept = is_finite(logits) | (self.grammar.which == 0)[:, None]
        return jnp.where(kept[..., None], logits, given)

    def _penalised(
        self, logits: jax.Array, tokens: jax.Array, length: jax.Array, drafts: jax.Array, on_path: jax.Array
    ) -> jax.Array:
        """Returns the logits after the repetition, presence and frequency penalties."""

        def counts(begin: jax.Array | int) -> jax.Array:
            """Returns the number of occurrences of each token from position `begin` on, float32[B, R, V]."""
            batch, rows, size = logits.shape
            row, place = jnp.arange(batch)[:, None], jnp.arange(tokens.shape[1])[None]
            counted = ((place >= begin) & (place < length[:, None])).astype(jnp.float32)
            committed = jnp.zeros((batch, size)).at[row, tokens].add(counted, mode="drop")
            every = jnp.broadcast_to(committed[:, None], (batch, rows, size))
            # Each row counts the committed tokens and the drafts on its own path.
            drafted = jnp.maximum(drafts, 0)[:, None]
            return every.at[row[..., None], jnp.arange(rows)[None, :, None], drafted].add(
                on_path.astype(jnp.float32), mode="drop"
            )

        def of_row(number: jax.Array) -> jax.Array:
            return number[:, None, None]

        repetition, presence, frequency = self.repetition, self.presence, self.frequency

        def less_repetition(logits: jax.Array) -> jax.Array:
            assert repetition is not None
            penalised = jnp.where(logits < 0, logits * of_row(repetition), logits / of_row(repetition))
            return jnp.where(counts(0) > 0, penalised, logits)

        def less_frequent(logits: jax.Array) -> jax.Array:
            # Unlike repetition, presence and frequency do not count the prompt.
            occurrences = counts(self.begin[:, None])
            if frequency is not None:
                logits = logits - of_row(frequency) * occurrences
            if presence is not None:
                logits = logits - of_row(presence) * (occurrences > 0)
            return logits

        # Occurrences are counted only for a penalty that some row has.
        if repetition is not None:
            logits = run_if(jnp.any(repetition != 1), less_repetition, logits)
        some = [jnp.any(setting != 0) for setting in (presence, frequency) if setting is not None]
        return run_if(jnp.any(jnp.stack(some)), less_frequent, logits) if some else logits


def _biased(logits: jax.Array, tokens: jax.Array, which: jax.Array, bias: jax.Array | float) -> jax.Array:
    """Returns logits [B, R, V] plus a bias at those of tokens [B, R or 1, M] where `which`, bool[B, R, M], is True."""
    batch, rows, size = logits.shape
    # An index past the end is dropped; a negative one would count from the end.
    index = jnp.where(which & (tokens >= 0), tokens, size)
    row = jnp.arange(batch)[:, None, None], jnp.arange(rows)[None, :, None]
    return logits.at[(*row, index)].add(bias, mode="drop")


def _texts(
    tokens: jax.Array, length: jax.Array, drafts: jax.Array, on_path: jax.Array, depth: jax.Array
) -> jax.Array:
    """Returns the text before the next token of each row, int32[B, R, N + R]; −1 past its end."""
    batch, rows, _ = on_path.shape
    committed = jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], tokens, -1)
    committed = jnp.pad(committed, ((0, 0), (0, rows)), constant_values=-1)
    text = jnp.broadcast_to(committed[:, None], (batch, rows, committed.shape[1]))
    # Node i, in row i + 1, is draft number depth[i + 1] on its path; drafts off the path are dropped.
    place = (length[:, None] + depth[:, 1:rows] - 1)[:, None]
    place = jnp.where(on_path, place, text.shape[-1])
    row = jnp.arange(batch)[:, None, None], jnp.arange(rows)[None, :, None]
    return text.at[(*row, place)].set(drafts[:, None], mode="drop")


def _back(text: jax.Array, at: jax.Array, back: int) -> jax.Array:
    """Returns the token `back` tokens before the last of each text, int32[B, R]; −2 if there is none."""
    place = jnp.broadcast_to(at - 1 - back, text.shape[:2])
    found = jnp.take_along_axis(text, jnp.maximum(place, 0)[..., None], axis=2)[..., 0]
    return jnp.where(place >= 0, found, -2)
