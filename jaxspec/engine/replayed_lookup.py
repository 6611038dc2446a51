"""What prompt lookup would have drafted for a text that others drafted: known for nothing, as both are there."""

from __future__ import annotations

from collections.abc import Sequence

# As `methods.NGram` where no option is given.
_LONGEST_RUN = 3


class ReplayedLookup:
    """Plays the rounds that `drafting.ngram.NGram` would have had on one text.

    Whatever drafted, the text is the one that lookup would have led to, or follows the same law: so the share of its
    drafts that agree with the text is the share that would have been accepted.

    Args:
      num_draft_tokens: K.
      prompt: the tokens before the text.

    Attributes:
      open: how many tokens of the draft that is not decided yet are right so far.

    Examples:
      >>> lookup = ReplayedLookup(3, prompt=[1, 2, 3, 4, 1, 2])
      >>> lookup.played([3, 4, 9, 5])  # after (1, 2) it drafts (3, 4, 1); after (9) and (5) nothing
      [(3, 2), (0, 0)]
      >>> lookup.played([1, 2, 3]), lookup.open  # after (5) nothing, after (1) it drafts (2, 3, 4)
      ([(0, 0)], 2)
    """

    def __init__(self, num_draft_tokens: int, prompt: Sequence[int]) -> None:
        self._longest, self._tokens = num_draft_tokens, list(prompt)
        # By run of last tokens, where it ended last; the first so many places are in it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        # The last token of the text before the next round.
        self._at = len(self._tokens) - 1
        # Of the next round's draft, how many tokens are right so far; what would follow is yet to come.
        self.open = 0

    def played(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(drafted, accepted) of the rounds that more tokens of the text decide."""
        self._tokens += tokens
        known = self._tokens
        rounds: list[tuple[int, int]] = []
        self.open = 0
        while self._at + 1 < len(known):
            place = self._place()
            drafted = 0 if place is None else min(self._longest, self._at - place)
            accepted = 0
            while accepted < drafted and place is not None:
                following = self._at + 1 + accepted
                if following == len(known):
                    self.open = accepted
                    return rounds
                if known[place + 1 + accepted] != known[following]:
                    break
                accepted += 1
            if self._at + 1 + accepted == len(known):
                self.open = accepted
                return rounds
            rounds.append((drafted, accepted))
            self._at += accepted + 1
        return rounds

    def _place(self) -> int | None:
        """Where the last tokens stand earlier, as many of them as there are; of several places the last."""
        for end in range(self._indexed, self._at):
            for size in range(1, min(_LONGEST_RUN, end + 1) + 1):
                self._ends[tuple(self._tokens[end + 1 - size : end + 1])] = end
        self._indexed = max(self._indexed, self._at)
        for size in range(min(_LONGEST_RUN, self._at + 1), 0, -1):
            found = self._ends.get(tuple(self._tokens[self._at + 1 - size : self._at + 1]))
            if found is not None:
                return found
        return None
