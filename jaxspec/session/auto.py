"""Method `auto` in the engine: its candidates, and the first text of a process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decoding import DecodeState, Emitted, Parts
from jaxspec.drafting.choosing_drafter import Choosing
from jaxspec.model.sharding import fetched
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Drafter, Weights
from jaxspec.session.strategies import Always, Turn
from jaxspec.texts.results import Expected


@dataclasses.dataclass(frozen=True)
class Auto:
    """The drafter of `auto` for texts of one kind.

    Attributes:
      drafter, params: the result of the method's `build`.
      names: the names of its candidates.
    """

    drafter: Drafter
    params: Any
    names: tuple[str, ...]


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
        # `ChoiceState.used` of each row, after the last call.
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
        if self._used is not None and row < len(self._used):
            self._used[row] = 0

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
        self._used, self._after = np.array(fetched(self._after.rule.used)), None


def expectations(drafter: Choosing, names: Sequence[str]) -> tuple[Expected, ...]:
    """Returns what is expected of each candidate before the first round of a text, alone in a batch."""
    found, rule = [], drafter.rule
    for at, (name, one) in enumerate(zip(names, drafter.candidates, strict=True)):
        rates = rule.speedups(at)
        best = len(rates) - 1 if one.drafts_trees else int(rates.argmax())
        found.append(Expected(name, best + 1, float(rule.prices.accept[at, 0]), float(rates[best])))
    return tuple(sorted(found, key=lambda one: -one.speedup))
