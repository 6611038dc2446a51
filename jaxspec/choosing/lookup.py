"""Replays prompt lookup on a text that other drafters wrote: both are known, so this costs no run of the model."""

from __future__ import annotations

from collections.abc import Sequence

# As `methods.NGram` where no option is given.
_LONGEST_RUN = 3


class ReplayedLookup:
    """Plays the rounds that `drafting.ngram.NGram` would have had on one text.

    Whichever method drafts, the text follows the same distribution. The share of its tokens that lookup would have
    drafted is therefore an unbiased estimate of lookup's acceptance.

    Args:
      num_draft_tokens: K.
      prompt: the tokens before the text.

    Examples:
      >>> lookup = ReplayedLookup(3, prompt=[1, 2, 3, 4, 1, 2])
      >>> lookup.played([3, 4, 9, 5])  # after (1, 2) it drafts (3, 4, 1); after (9) and (5) nothing
      [(3, 2), (0, 0)]
      >>> lookup.played([1, 2, 3])  # after (5) nothing; after (1) it drafts (2, 3, 4), still undecided
      [(0, 0)]
    """

    def __init__(self, num_draft_tokens: int, prompt: Sequence[int]) -> None:
        self._longest, self._tokens = num_draft_tokens, list(prompt)
        # The position where each run of tokens ended last; runs that end before `_indexed` are in it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        # The last token before the next round.
        self._at = len(self._tokens) - 1

    def played(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (drafted, accepted) of the rounds that more tokens of the text decide."""
        self._tokens += tokens
        rounds: list[tuple[int, int]] = []
        while self._at + 1 < len(self._tokens):
            place = self._place()
            drafted = 0 if place is None else min(self._longest, self._at - place)
            draft = [] if place is None else self._tokens[place + 1 : place + 1 + drafted]
            text = self._tokens[self._at + 1 : self._at + 2 + drafted]
            wrong = (at for at, (one, other) in enumerate(zip(draft, text, strict=False)) if one != other)
            accepted = next(wrong, min(drafted, len(text)))
            if accepted == len(text):  # the next token decides
                break
            rounds.append((drafted, accepted))
            self._at += accepted + 1
        return rounds

    def _place(self) -> int | None:
        """Returns the position where the longest run of the last tokens ended last before; None if nowhere."""
        for end in range(self._indexed, self._at):
            for size in range(1, min(_LONGEST_RUN, end + 1) + 1):
                self._ends[tuple(self._tokens[end + 1 - size : end + 1])] = end
        self._indexed = max(self._indexed, self._at)
        for size in range(min(_LONGEST_RUN, self._at + 1), 0, -1):
            found = self._ends.get(tuple(self._tokens[self._at + 1 - size : self._at + 1]))
            if found is not None:
                return found
        return None
