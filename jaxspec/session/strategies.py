"""Strategies: which drafter drafts in the next call of the compiled loop."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import Caches, DecodeState, Emitted, Parts
from jaxspec.host import processes
from jaxspec.model.plan import LayerPlan
from jaxspec.programs import compiled
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Drafter, Weights
from jaxspec.requests.results import Expected


class Turn(NamedTuple):
    """The numbers of one call of the loop, for a batch of B rows.

    Attributes:
      max_rounds: the most rounds to run.
      halt: bool[B], the rows to end before the first round.
      remaining: int[B], the tokens that each row may still gain; 0 for a row without an unfinished text.
    """

    max_rounds: int
    halt: np.ndarray
    remaining: np.ndarray


class Strategy(abc.ABC):
    """Decides which drafter drafts in each call of the loop for one batch.

    A subclass defines `rounds`. The other methods tell it about the batch, and do nothing by default.

    Args:
      loop: the compiled loop.
      drafter: the drafter with which prompts are prefilled, rows inserted and caches grown.

    Attributes:
      name: the name of the method, for reports.
      drafter: the drafter, on the devices of the loop.
      mixes_rows: whether drafts of a row depend on the other rows, which must then have different randomness.
    """

    name: str = ""
    mixes_rows: bool = False

    def __init__(self, loop: Loop, drafter: Drafter) -> None:
        self._loop, self.drafter = loop, loop.put(drafter)

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The expectations before the first round, see `Result.expected`."""
        return ()

    @property
    def prices(self) -> dict[str, Any] | None:
        """The prices of the choice, see `Result.prices`."""
        return None

    def drafted_by(self, row: int) -> str:
        """Returns `Result.drafted_by` of the text in a row."""
        return self.name

    def next_call(self, params: Weights, parts: Parts, state: Any) -> Call:
        """Returns the next call of the loop for a state, or for one of these shapes."""
        return self._loop.rounds_of(params, parts, state)

    def caches(self, state: DecodeState) -> Caches:
        """Returns the caches of the batch, from which later texts can continue by the same method."""
        return Caches(state.cache, self.drafter.absorbed(state.drafter_state))

    def begin_row(self, row: int) -> None:
        """Takes note of a text that begins in a row."""
        return

    @abc.abstractmethod
    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        """Runs rounds, and returns the state of `drafter` after them and the emitted tokens.

        Args:
          params, parts, state: those of `drafter`; the state is donated.
          turn: the numbers of this call.
        """

    def learn(self, remaining: np.ndarray) -> None:
        """Takes note of the last call of `rounds`, once the host has read its tokens; `remaining`: as in `Turn`."""
        return


class Always(Strategy):
    """One drafter drafts in all rounds."""

    def __init__(self, loop: Loop, drafter: Drafter) -> None:
        super().__init__(loop, drafter)
        self.mixes_rows = drafter.mixes_rows

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        arguments, static = self._loop.rounds(params, parts, state, turn.max_rounds, turn.halt)
        result: tuple[DecodeState, Emitted] = self._loop.executables.call(
            compiled.run_rounds, *arguments, **static
        )
        return result


class Specialised(Always):
    """A drafter whose mask is data, replaced by its program for the mask that all rows share.

    The program is compiled in the background, and takes over at the next call of the loop. Until then, and while rows
    have different masks, the general program runs.
    """

    def __init__(self, loop: Loop, drafter: Drafter) -> None:
        super().__init__(loop, drafter)
        # The drafter for the shared mask, and the rows that share it: bool[B], None where a row has a new text.
        self._special: Drafter | None = None
        self._live: np.ndarray | None = None

    def begin_row(self, row: int) -> None:
        self._live = None

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        live = turn.remaining > 0
        if self._live is None or not np.array_equal(live, self._live):
            self._live, self._special = live, self._shared(state, live)
        if self._special is not None:
            special = dataclasses.replace(parts, drafter=self._special)
            arguments, static = self._loop.rounds(params, special, state, turn.max_rounds, turn.halt)
            program = self._loop.executables.variant(compiled.run_rounds, *arguments, **static)
            if program is not None:
                result: tuple[DecodeState, Emitted] = program(*arguments)
                return result
        return super().rounds(params, parts, state, turn)

    def _shared(self, state: DecodeState, live: np.ndarray) -> Drafter | None:
        """Returns the drafter for the mask of the live rows; None where they have different masks."""
        plans = np.asarray(self.drafter.plans(state.drafter_state, jnp.asarray(live)))[live]
        alike = len(plans) > 0 and bool((plans == plans[0]).all())
        return self.drafter.specialised(LayerPlan.from_array(plans[0])) if alike else None


def for_drafter(loop: Loop, drafter: Drafter) -> Strategy:
    """Returns the strategy for texts of one drafter."""
    # A background compilation ends at different times in several processes, which must all run the same program.
    special = drafter.static and not processes.spans_processes(loop.mesh)
    return (Specialised if special else Always)(loop, drafter)
