"""The record of a batch's choices and expectations, and the file with which choices are repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.choosing.policy import MOST_ROUNDS, ROUNDS, Choice, Policy
from jaxspec.choosing.prices import OFF
from jaxspec.engine.results import Chosen, Expected
from jaxspec.io.methods.choice_file import ChoiceFile, Entry

# The most choices that are kept, which bounds the memory of a batch that requests keep joining.
MOST_CHOICES = 4096


class Record:
    """Makes the choices of a policy, or repeats those of a file, and records them.

    Args:
      policy: the policy of the batch.
      file: choices are repeated from it if it has any, else written to it; None for no file.

    Attributes:
      policy: as given.
      choice: the last choice.
      chosen: the last choices, at most `MOST_CHOICES`, one for each decision of the policy.
      expected: the expectations before the first choice, the best first; () unless `explain` was called.
    """

    def __init__(self, policy: Policy, file: ChoiceFile | None = None) -> None:
        self.policy, self._file = policy, file
        self._entries = None if file is None else file.entries
        self.choice = Choice(OFF, 0, 0)
        # The number of rounds so far, and the round of the last choice.
        self._round, self._chosen_at = 0, 0
        self.chosen: deque[Chosen] = deque(maxlen=MOST_CHOICES)
        self.expected: tuple[Expected, ...] = ()

    def begin(
        self, lengths: np.ndarray, remaining: np.ndarray, ready: Callable[[int], bool]
    ) -> tuple[int, int]:
        """Returns the candidate that drafts first and its draft length, see `Policy.begin`."""
        if self._entries is not None:
            return self._again(MOST_ROUNDS)[:2]
        return self.policy.begin(lengths, remaining, ready)

    def next(
        self,
        lengths: np.ndarray,
        remaining: np.ndarray,
        most_rounds: int,
        held: int | None,
        ready: Callable[[int], bool],
    ) -> Choice:
        """Returns the next choice, see `Policy.next`."""
        if self._entries is not None:
            self.choice = self._again(most_rounds)
            return self.choice
        self.choice, new = self.policy.next(lengths, remaining, most_rounds, held, ready)
        if new:
            self._chosen_at = self._round
            if self._file is not None:
                name = self.policy.names[self.choice.candidate]
                self._file.add(Entry(self._round, name, self.choice.length))
        return self.choice

    def learn(
        self,
        rounds: Sequence[Sequence[tuple[int, int]]],
        tokens: Sequence[Sequence[int]],
        lengths: np.ndarray,
        took_ms: float,
        fair: bool,
        taken_up: bool = False,
        disturbed: bool = False,
    ) -> None:
        """Takes the result of a call of the loop by the last choice, see `Policy.learn`."""
        (candidate, length, _), count = self.choice, max(map(len, rounds), default=0)
        expected_ms = self.policy.learn(
            (candidate, length), rounds, tokens, lengths, took_ms, fair, taken_up, disturbed
        )
        played = count, sum(map(len, tokens))
        turn = Chosen(self._round, self.policy.names[candidate], length, *played, expected_ms, took_ms)
        if self.chosen and self.chosen[-1].round >= self._chosen_at:
            # Several calls by one choice are recorded as one.
            before = self.chosen.pop()
            sums = [None if None in pair else sum(pair) for pair in zip(before[3:], turn[3:], strict=True)]  # type: ignore[arg-type]
            turn = Chosen(*before[:3], *sums)  # type: ignore[arg-type]
        self.chosen.append(turn)
        self._round += count

    def explain(self, lengths: np.ndarray, remaining: np.ndarray, ready: Callable[[int], bool]) -> None:
        """Records the expectations of the candidates."""
        seen, timed = self.policy.outlook(lengths, remaining), self.policy.timed
        columns = (seen.speedup, seen.length, seen.accept, seen.round_ms)
        rows = zip(self.policy.names, *(column.tolist() for column in columns), strict=True)
        expected = [
            Expected(
                *(name, length, first if at else None, took if timed else None, speed),
                ready=at == OFF or ready(at),
                assumed=at != OFF and at not in self.policy.informed,
            )
            for at, (name, speed, length, first, took) in enumerate(rows)
        ]
        self.expected = tuple(sorted(expected, key=lambda one: -one.speedup))

    def _again(self, most_rounds: int) -> Choice:
        """Returns the choice of the file for the present round; it lasts until the round of the next entry."""
        entries, names = self._entries or [], self.policy.names
        over = [entry for entry in entries if entry.round <= self._round]
        later = [entry.round for entry in entries if entry.round > self._round]
        candidate, length = (names.index(over[-1].candidate), over[-1].length) if over else (OFF, 0)
        self._chosen_at = over[-1].round if over else 0
        rounds = min(later[0] - self._round, MOST_ROUNDS) if later else ROUNDS
        return Choice(candidate, length, min(rounds, most_rounds))
