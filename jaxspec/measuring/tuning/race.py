"""Finds the fastest of many candidates: measures each once, then the best of them again, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

Candidate = TypeVar("Candidate", bound=Hashable)
# The figures of one turn of a candidate, by name; candidates are ranked by `score`.
Turn = dict[str, Any]
# Called with the number of finished turns, their total, and the best row so far.
OnMeasured = Callable[[int, int, dict[str, Any]], None]
# Number of candidates in the second heat.
FINALISTS = 6


class Race(Generic[Candidate]):
    """A sweep in two heats; an interrupt (Ctrl-C) ends it and keeps the finished measurements.

    Args:
      measure: measures one turn of a candidate.
      repeats: turns of the second heat.
      row: maps a candidate and its turns to a row of the report.
      on_measured: called after each turn, see `OnMeasured`.

    Attributes:
      interrupted: whether the sweep was interrupted.
    """

    def __init__(
        self,
        measure: Callable[[Candidate], Turn],
        repeats: int,
        row: Callable[[Candidate, Sequence[Turn]], dict[str, Any]],
        on_measured: OnMeasured,
    ) -> None:
        self._measure, self._repeats, self._row, self._on_measured = measure, repeats, row, on_measured
        self._once: dict[Candidate, list[Turn]] = {}
        self._again: dict[Candidate, list[Turn]] = {}
        self._total = 0
        self.interrupted = False

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Runs both heats.

        Raises:
          KeyboardInterrupt: interrupted before the first turn was done.
        """
        self._total = len(candidates) + self._repeats * min(FINALISTS, len(candidates))
        try:
            for candidate in candidates:
                self._turn(candidate, self._once)
            fastest = sorted(candidates, key=lambda one: -self._once[one][0]["score"])
            finalists = fastest[:FINALISTS]
            for turn in range(self._repeats):
                for candidate in finalists if turn % 2 == 0 else reversed(finalists):
                    self._turn(candidate, self._again)
        except KeyboardInterrupt:
            self.interrupted = True
            if not self._once:
                raise

    def results(self) -> list[dict[str, Any]]:
        """Rows of the report: those of the second heat, then the others, each the best first."""
        single = {one: turns for one, turns in self._once.items() if one not in self._again}
        return self._ranked(self._again) + self._ranked(single)

    def _turn(self, candidate: Candidate, heat: dict[Candidate, list[Turn]]) -> None:
        taken = self._measure(candidate)
        heat.setdefault(candidate, []).append(taken)
        done = sum(map(len, (*self._once.values(), *self._again.values())))
        # Single turns are not comparable with medians, so the second heat is ranked by itself.
        self._on_measured(done, self._total, self._ranked(self._again or self._once)[0])

    def _ranked(self, heat: dict[Candidate, list[Turn]]) -> list[dict[str, Any]]:
        return sorted((self._row(*entry) for entry in heat.items()), key=lambda row: -row["score"])


def medians(turns: Sequence[Turn]) -> dict[str, Any]:
    """The number of turns, and the median of each figure over the turns in which it is not None."""

    def median(name: str) -> float | None:
        known = [turn[name] for turn in turns if turn[name] is not None]
        return statistics.median(known) if known else None

    return {"turns": len(turns), **{name: median(name) for name in turns[0]}}
