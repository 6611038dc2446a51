"""Method `auto` in the engine: its candidates, what earlier texts have shown, and the first text of a process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.costs.expectations import remembered
from jaxspec.costs.prices import expected_speedups
from jaxspec.decoding import DecodeState, Emitted, Parts
from jaxspec.drafting.choosing_drafter import Choosing
from jaxspec.io.methods import auto_file
from jaxspec.model.sharding import fetched
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Drafter, Weights
from jaxspec.session.strategies import Always, Turn
from jaxspec.texts.results import Expected


class Learnt:
    """What texts of one model show of the candidates' drafts: the part that this process uses, and what it adds.

    Args:
      key: what the counts belong to.
      keeps: whether they are kept for the next process.

    Attributes:
      before: the counts of earlier processes, float[K, 2] by candidate, see `io.methods.auto_file`; they never change.
    """

    def __init__(self, key: dict[str, Any], keeps: bool) -> None:
        self._key, self._keeps = key, keeps
        self.before = auto_file.read(key) if keeps else {}
        self._seen, self._changed = dict(self.before), False

    def add(self, names: Sequence[str | None], seen: np.ndarray) -> None:
        """Adds the counts of a text, int[C, K, 2]; those of a candidate with the name None are left out."""
        for name, counts in zip(names, seen, strict=True):
            if name is not None and counts.any():
                self._seen[name], self._changed = remembered(self._seen.get(name), counts), True

    def keep(self) -> None:
        """Keeps the counts for the next process, if there are new ones."""
        if self._keeps and self._changed:
            auto_file.write(self._key, self._seen)
            self._changed = False


@dataclasses.dataclass(frozen=True)
class Auto:
    """The drafter of `auto` for texts of one kind.

    Attributes:
      drafter, params: the result of the method's `build`.
      names: the names of its candidates.
      learns: the names by which their counts are kept; None for a candidate that the model does not offer by itself,
        because another head, draft or option can have the same name.
      learnt: receives the counts of texts.
    """

    drafter: Drafter
    params: Any
    names: tuple[str, ...]
    learns: tuple[str | None, ...]
    learnt: Learnt


class Chosen(Always):
    """The strategy of `auto`: one drafter, which chooses among its candidates in each round.

    A text need not wait for the compiler: until the program is compiled, in the background, the text is decoded by a
    smaller one, in which the drafter counts right copies and chooses plain decoding. Both have the same state.

    Args:
      loop: the compiled loop.
      auto: the drafter, with candidates.
      explain: whether `expected` and `prices` are reported.
      waits: whether every round needs the whole program.
    """

    name = "auto"

    def __init__(self, loop: Loop, auto: Auto, explain: bool, waits: bool) -> None:
        super().__init__(loop, auto.drafter)
        self._auto, self._explain = auto, explain
        # The drafter of the smaller program; None once the whole one is used.
        self._plain = None if waits else dataclasses.replace(self.drafter, plain=True)
        # Each row has the counts `seen` and `used` of a `ChoiceState`.
        self._seen: np.ndarray | None = None
        self._used: np.ndarray | None = None
        self._after: Any = None

    @functools.cached_property
    def expected(self) -> tuple[Expected, ...]:
        """The expectations of the candidates, the fastest first."""
        drafter = self._auto.drafter
        if not self._explain or not isinstance(drafter, Choosing):
            return ()
        return expectations(drafter, self._auto.names)

    @functools.cached_property
    def prices(self) -> dict[str, Any] | None:
        """The candidates, the widths of verification, and the prices, as JSON values."""
        drafter = self._auto.drafter
        if not self._explain or not isinstance(drafter, Choosing):
            return None
        arrays = {name: np.asarray(value).tolist() for name, value in vars(drafter.prices).items()}
        return {"candidates": list(self._auto.names), "widths": list(drafter.verify_widths), **arrays}

    def drafted_by(self, row: int) -> str:
        used = [] if self._used is None or row >= len(self._used) else self._used[row].tolist()
        parts = [
            f"{name} in {count} round{'s' * (count > 1)}"
            for name, count in zip(self._auto.names, used, strict=False)
            if count
        ]
        late = ", its program was not compiled in time" if self._plain and self._used is not None else ""
        return f"auto: {', '.join(parts) if parts else 'plain decoding' + late}"

    def begin_row(self, row: int) -> None:
        self._take(row)

    def resized(self, batch: int) -> None:
        for row in range(batch, 0 if self._seen is None else len(self._seen)):
            self._take(row)

    def next_call(self, params: Weights, parts: Parts, state: Any) -> Call:
        return super().next_call(params, self._current(params, parts, state), state)

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        current = self._current(params, parts, state)
        if self._plain is not None:
            # Not before the first round: until then, the compiler works for the smaller program.
            function, arguments, static = super().next_call(params, parts, state)
            self._loop.executables.prepare(function, *arguments, **static)
        state, emitted = super().rounds(params, current, state, turn)
        self._after = state.drafter_state
        return state, emitted

    def _current(self, params: Weights, parts: Parts, state: Any) -> Parts:
        """Returns the settings of the next call: those of the whole program unless it has to be compiled."""
        if self._plain is not None:
            function, arguments, static = super().next_call(params, parts, state)
            executables = self._loop.executables
            if executables.failed or executables.at_hand(function, *arguments, **static):
                self._plain = None
        return parts if self._plain is None else dataclasses.replace(parts, drafter=self._plain)

    def learn(self) -> None:
        # The state is donated to the next call.
        seen, used = fetched((self._after.rule.seen, self._after.rule.used))
        self._seen, self._used, self._after = np.array(seen), np.array(used), None

    def end(self) -> None:
        for row in range(0 if self._seen is None else len(self._seen)):
            self._take(row)
        self._auto.learnt.keep()

    def _take(self, row: int) -> None:
        """Adds the counts of the text that a row had."""
        if self._seen is not None and self._used is not None and row < len(self._seen):
            self._auto.learnt.add(self._auto.learns, self._seen[row])
            self._seen[row] = self._used[row] = 0


def expectations(drafter: Choosing, names: Sequence[str]) -> tuple[Expected, ...]:
    """Returns what is expected of each candidate before the first round of a text, alone in a batch."""
    found, rule = [], drafter.rule
    for at, (name, one) in enumerate(zip(names, drafter.candidates, strict=True)):
        most = one.num_draft_tokens
        nodes = [one.num_nodes] * most if one.drafts_trees else range(1, most + 1)
        rates = expected_speedups(rule.prices, at, at in rule.lookups, rule.widths, nodes)
        best = most - 1 if one.drafts_trees else int(rates.argmax())
        found.append(Expected(name, best + 1, float(rule.prices.accept[at, 0]), float(rates[best])))
    return tuple(sorted(found, key=lambda one: -one.speedup))
