"""A batch whose drafter changes between two calls of the loop: parts, states and programs of the candidates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.choosing.costs import StepCosts, guessed
from jaxspec.decoding import DecodeState, Parts
from jaxspec.engine import buckets, compiled
from jaxspec.engine.choices import Choices, Known
from jaxspec.engine.executables import Executables
from jaxspec.engine.results import Chosen, Expected, Token, played_rounds
from jaxspec.io.choice_file import ChoiceFile
from jaxspec.methods.base import Candidate
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights, kinds_of

# What a further row of a step costs where nothing is measured, as a share of a step of one.
_ROW_CPU, _ROW = 0.15, 0.01


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a batch may change between, and by what.

    Attributes:
      candidates: plain decoding is not among them.
      costs: of steps; None where they were not measured.
      seed: of what is drawn to choose.
      known: of the model, so that several texts pay for a program together.
      file: where choices are read from, or written to; None for neither.
      explain: whether results report the choices.
    """

    candidates: tuple[Candidate, ...]
    costs: StepCosts | None = None
    seed: int = 0
    known: Known = dataclasses.field(default_factory=Known)
    file: ChoiceFile | None = None
    explain: bool = False


class Switching:
    """Hands a `Session`, before each call of the loop, the candidate that drafts in it.

    The session's own parts and state are plain decoding's: prompts are prefilled, rows inserted and caches grown by
    them, and a candidate has a state of its own beside. One is made by feeding the text again (`decoding.take_up`)
    where the candidate was not the last to draft, or rows or capacity have changed since.

    Args:
      plan: the candidates.
      executables, config, log_probs: as of the session.
      device: to which numbers are put.
      platform: cpu, gpu or tpu.
      batch: rows.
    """

    def __init__(
        self,
        plan: Plan,
        executables: Executables,
        config: LlamaConfig,
        log_probs: bool,
        device: Any,
        platform: str,
        batch: int,
    ) -> None:
        self._plan, self._executables, self._config, self._log_probs = plan, executables, config, log_probs
        self._device, self._platform = device, platform
        one_width = platform != "cpu"
        row = _ROW if one_width else _ROW_CPU
        drafters = [candidate.drafter for candidate in plan.candidates]
        widths = [
            Parts(drafter, None, None, one_width, longest=0).verify_widths  # type: ignore[arg-type]
            for drafter in drafters
        ]
        self._choices = Choices(
            [candidate.name for candidate in plan.candidates],
            [
                dataclasses.replace(one.kind, widths=of)
                for one, of in zip(plan.candidates, widths, strict=True)
            ],
            [drafter.num_draft_tokens for drafter in drafters],
            guessed(config.num_layers, row) if plan.costs is None else plan.costs,
            batch,
            seed=plan.seed,
            known=plan.known,
            file=plan.file,
            measured=plan.costs is not None,
        )
        # The candidate whose state is there (0: plain decoding), and that state.
        self._at, self._held = 0, None
        self._there: set[tuple[int, int]] = set()
        # Of the programs of those that are not there: they are many shapes, which are looked at once.
        self._keys: dict[tuple[int, int], list[Any]] = {}
        self._asked: set[tuple[int, int]] = set()
        self._lengths: dict[int, jax.Array] = {}
        self._fair = True

    @property
    def expected(self) -> tuple[Expected, ...]:
        """What was expected before the first round; () if nobody asked."""
        return self._choices.expected if self._plan.explain else ()

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """What was chosen so far; () if nobody asked."""
        return tuple(self._choices.chosen) if self._plan.explain else ()

    def forget(self) -> None:
        """The state that a candidate keeps is of no use any more."""
        self._at, self._held = 0, None

    def begin_row(self, row: int, tokens: Sequence[int]) -> None:
        """A text has taken a row: its prompt and its first token."""
        self.forget()
        self._choices.begin_row(row, tokens)

    def next(
        self,
        params: Weights,
        parts: Parts,
        state: DecodeState,
        lengths: np.ndarray,
        remaining: np.ndarray,
        most: int,
    ) -> tuple[Weights, Parts, DecodeState, int]:
        """The parameters, parts and state with which the loop runs now, and for how many rounds at most.

        Args:
          params, parts, state: of plain decoding.
          lengths, remaining, most: see `Choices.next`.
        """
        ready = functools.partial(self._ready, params, parts, state)
        self._compile(params, parts, state, lengths, remaining)
        held = self._at if self._held is not None else None
        at, length, rounds = self._choices.next(lengths, remaining, most, held, ready)
        # What is compiled meanwhile takes time from the rounds.
        self._fair = not self._executables.busy
        if at == 0:
            self.forget()
            return params, parts, state, rounds
        own_params, own_parts = self._of(at, params, parts, length)
        if held != at:
            self._held = self._taken_up(at, own_params, own_parts, state)
            self._fair &= not jax.tree.leaves(self._held)
        self._at = at
        return own_params, own_parts, dataclasses.replace(state, drafter_state=self._held), rounds

    def learn(
        self,
        state: DecodeState,
        rows: Sequence[Sequence[Token]],
        lengths: np.ndarray,
        took_ms: float,
        blocked: bool,
    ) -> DecodeState:
        """Takes in what a call of the loop gave, and returns plain decoding's state after it.

        Args:
          state: after the call.
          rows: the tokens that each row gained.
          lengths: of the rows before.
          took_ms: the time of the call, until its result was read.
          blocked: whether it had to wait for a program.
        """
        self._choices.learn(
            [played_rounds(row) for row in rows],
            [[token.id for token in row] for row in rows],
            lengths,
            took_ms,
            self._fair and not blocked,
        )
        if self._at:
            self._held = state.drafter_state
        return dataclasses.replace(state, drafter_state=())

    def _of(self, at: int, params: Weights, parts: Parts, length: int) -> tuple[Weights, Parts]:
        candidate = self._plan.candidates[at - 1]
        if length not in self._lengths:
            self._lengths[length] = jax.device_put(np.int32(length), self._device)
        parts = dataclasses.replace(parts, drafter=candidate.drafter, longest=self._lengths[length])
        return Weights(params.target, candidate.params), parts

    def _taken_up(self, at: int, params: Weights, parts: Parts, state: DecodeState) -> Any:
        shape = self._state_shape(at, params, parts, state)
        if not jax.tree.leaves(shape):
            return shape
        return self._executables.call(compiled.take_up, params, parts, state, **self._take_up_static(state))

    def _take_up_static(self, state: DecodeState) -> dict[str, Any]:
        size = buckets.prefill_chunk_size(state.capacity, self._platform)
        return {"config": self._config, "chunk_size": min(size, state.capacity)}

    def _state_shape(self, at: int, params: Weights, parts: Parts, state: DecodeState) -> Any:
        drafter, known = self._plan.candidates[at - 1].drafter, self._plan.known.shapes
        key = jax.tree.structure(drafter), kinds_of(drafter), state.tokens.shape, self._platform
        if key not in known:
            static = self._take_up_static(state)
            make = functools.partial(decoding.take_up, static["config"], chunk_size=static["chunk_size"])
            known[key] = jax.eval_shape(make, params, parts, state)
        return known[key]

    def _programs(
        self, at: int, params: Weights, parts: Parts, state: DecodeState
    ) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        """The functions that a candidate runs, with arguments by shape."""
        params, parts = self._of(at, params, parts, 0)
        plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        shape = self._state_shape(at, params, parts, plain)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        halt = jax.ShapeDtypeStruct(plain.done.shape, bool)
        static = compiled.rounds_static(self._config, parts.drafter, self._log_probs, None)
        own = dataclasses.replace(plain, drafter_state=shape)
        programs: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (compiled.run_rounds, (params, parts, own, scalar, halt), static)
        ]
        if jax.tree.leaves(shape):
            programs.append((compiled.take_up, (params, parts, plain), self._take_up_static(plain)))
        return programs

    def _ready(self, params: Weights, parts: Parts, state: DecodeState, at: int) -> bool:
        """Whether a candidate's programs are there; once they are, they stay."""
        key = at, state.capacity
        if key not in self._there:
            if key not in self._keys:
                self._keys[key] = [
                    self._executables.key(function, *given, **static)
                    for function, given, static in self._programs(at, params, parts, state)
                ]
            if all(map(self._executables.ready, self._keys[key])):
                self._there.add(key)
        return key in self._there

    def _compile(
        self, params: Weights, parts: Parts, state: DecodeState, lengths: np.ndarray, remaining: np.ndarray
    ) -> None:
        """Begins to compile the most promising candidate in the background, if it pays and nothing else is compiled."""
        if self._executables.busy or (self._plan.file is not None and self._plan.file.entries is not None):
            return
        ready = functools.partial(self._ready, params, parts, state)
        for at in self._choices.wanted(lengths, remaining, self._executables.longest_ms, ready):
            key = at, state.capacity
            if key in self._asked:  # and it is not there: it cannot be compiled
                continue
            self._asked.add(key)
            for function, given, static in self._programs(at, params, parts, state):
                self._executables.prepare(function, *given, **static)
            return
