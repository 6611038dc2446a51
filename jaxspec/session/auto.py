"""Method `auto` in the engine: its candidates, and the first text of a process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxspec.decoding import DecodeState, Emitted, Parts
from jaxspec.drafting.choosing_drafter import ChoosingDrafter
from jaxspec.model.sharding import fetched
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Drafter, Weights
from jaxspec.requests.results import Expected
from jaxspec.session.strategies import Always, Turn


@dataclasses.dataclass(frozen=True)
class BuiltAuto:
    """The drafter of `auto` for texts of one kind.

    Attributes:
      drafter, params: the result of the method's `build`.
      names: the names of its candidates.
    """

    drafter: Drafter
    params: Any
    names: tuple[str, ...]


# The tokens that a text must still gain for its program to be compiled beside it.
_LONG = 256
# Why a text for which a draft would pay was decoded plainly.
_ASKED = "the program of drafts was not ready in time"
_NOT_ASKED = "the program of drafts is not compiled yet, LanguageModel.warm_up compiles it"


class Chosen(Always):
    """The strategy of `auto`: one drafter, which chooses among its candidates in each round.

    A text begins with a smaller program, in which the drafter counts right copies and chooses plain decoding. As soon
    as a draft is expected to pay, the whole program is loaded in the background, and takes over. Both have the same
    state. A program that no process has stored is compiled only for a long text, or after the first text of a process:
    a compilation takes as long as hundreds of tokens, on the same cores.

    Args:
      loop: the compiled loop.
      auto: the drafter, with candidates.
      explain: whether `expected` and `prices` are reported.
      waits: whether every round needs the whole program.
    """

    name = "auto"

    def __init__(self, loop: Loop, auto: BuiltAuto, explain: bool, waits: bool) -> None:
        super().__init__(loop, auto.drafter)
        self._auto, self._explain = auto, explain
        # The drafter of the smaller program; None if there is none.
        self._plain = None if waits else dataclasses.replace(self.drafter, plain=True)
        # The capacities for which the whole program is ready.
        self._whole: set[int] = set()
        # Whether a draft has been expected to pay.
        none = np.zeros((1, len(auto.names), 2))
        self._pays = self._is_expected_to_pay(none, none)
        # `ChoiceState.used` of each row, after the last call.
        self._used: np.ndarray | None = None
        # The arguments of the next call, until `learn`.
        self._last: Any = None
        # Whether the whole program has been asked for.
        self._asked = False
        # Whether the smaller program was not ready before the first call: no text of this process has used it.
        self._first: bool | None = None

    @functools.cached_property
    def expected(self) -> tuple[Expected, ...]:
        """The expectations of the candidates, the fastest first."""
        drafter = self._auto.drafter
        if not self._explain or not isinstance(drafter, ChoosingDrafter):
            return ()
        return expectations(drafter, self._auto.names)

    @functools.cached_property
    def prices(self) -> dict[str, Any] | None:
        """The candidates, the widths of verification, and the prices, as JSON values."""
        drafter = self._auto.drafter
        if not self._explain or not isinstance(drafter, ChoosingDrafter):
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
        waited = self._plain is not None and self._pays and not self._whole and self._used is not None
        late = f"; {_ASKED if self._asked else _NOT_ASKED}" if waited else ""
        return f"auto: {', '.join(parts) if parts else 'plain decoding' + late}"

    def begin_row(self, row: int) -> None:
        if self._used is not None and row < len(self._used):
            self._used[row] = 0

    def next_call(self, params: Weights, parts: Parts, state: Any) -> Call:
        return super().next_call(params, self._current(params, parts, state), state)

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        state, emitted = super().rounds(params, self._current(params, parts, state), state, turn)
        self._last = params, parts, state
        return state, emitted

    def _current(self, params: Weights, parts: Parts, state: Any) -> Parts:
        """Returns the settings of a call: those of the whole program once it is ready for such a state."""
        if self._plain is None or state.capacity in self._whole:
            return parts
        small = dataclasses.replace(parts, drafter=self._plain)
        if self._first is None:
            self._first = not self._is_ready(params, small, state)
        elif not self._pays:
            return small
        if self._loop.executables.failed or self._is_ready(params, parts, state):
            self._whole.add(state.capacity)
            self._pays = True
            return parts
        return small

    def _is_ready(self, params: Weights, parts: Parts, state: Any) -> bool:
        function, arguments, static = super().next_call(params, parts, state)
        executables = self._loop.executables
        return executables.ready(executables.key(function, *arguments, **static))

    def learn(self, remaining: np.ndarray) -> None:
        # The state is donated to the next call.
        (params, parts, state), self._last = self._last, None
        rule = state.drafter_state.rule
        self._used = np.array(fetched(rule.used))
        if self._plain is None or state.capacity in self._whole:
            return
        self._pays = self._pays or self._is_expected_to_pay(*fetched((rule.right, rule.wrong)))
        if self._pays:
            function, arguments, static = super().next_call(params, parts, state)
            executables = self._loop.executables
            # Not for a capacity that the text leaves: the programs of the next one are needed first.
            stays = (fetched(state.length) + remaining).max() <= state.capacity
            goes_on = stays and remaining.max() >= _LONG
            if not self._first or goes_on or executables.at_hand(function, *arguments, **static):
                self._asked = True
                executables.prepare(function, *arguments, **static)

    def _is_expected_to_pay(self, right: np.ndarray, wrong: np.ndarray) -> bool:
        """Whether a lookup is expected to be faster than plain decoding; counts of B rows, float[B, C, 2].

        The smaller program does not count drafts of models, which therefore always have a chance.
        """
        rule = cast("ChoosingDrafter", self._auto.drafter).rule
        return bool(rule.models) or any(
            rule.speedups(at, *counts).max() > 1
            for row in zip(right, wrong, strict=True)
            for at, counts in enumerate(zip(*row, strict=True))
        )


def expectations(drafter: ChoosingDrafter, names: Sequence[str]) -> tuple[Expected, ...]:
    """Returns what is expected of each candidate before the first round of a text, alone in a batch."""
    found, rule = [], drafter.rule
    for at, (name, one) in enumerate(zip(names, drafter.candidates, strict=True)):
        rates = rule.speedups(at)
        best = len(rates) - 1 if one.drafts_trees else int(rates.argmax())
        found.append(Expected(name, best + 1, float(rule.prices.accept[at, 0]), float(rates[best])))
    return tuple(sorted(found, key=lambda one: -one.speedup))
