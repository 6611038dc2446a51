"""A batch whose drafter changes between two calls of the loop: parts, states and programs of the candidates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.choosing.acceptance import Expectation
from jaxspec.choosing.costs import StepCosts, guessed, guessed_row
from jaxspec.decoding import DecodeState, Emitted, Parts, Request
from jaxspec.engine import buckets, compiled
from jaxspec.engine.choices import Choices
from jaxspec.engine.executables import Call, Executables
from jaxspec.engine.known import Known, Programs
from jaxspec.engine.results import Chosen, Expected, Token, played_rounds
from jaxspec.io import memory
from jaxspec.io.choice_file import ChoiceFile
from jaxspec.methods.base import Candidate
from jaxspec.model.config import LlamaConfig
from jaxspec.protocol import Weights

Traced = TypeVar("Traced", DecodeState, Request)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a batch may change between, and by what.

    Attributes:
      candidates: plain decoding is not among them.
      expected: what is known of those that the model offers, by name, beside what they say themselves.
      costs: of steps; None where they were not measured.
      seed: of what is drawn to choose.
      known: of the model, so that several texts pay for a program together.
      file: where choices are read from, or written to; None for neither.
      explain: whether results report the choices.
    """

    candidates: tuple[Candidate, ...]
    expected: Mapping[str, Expectation] = dataclasses.field(default_factory=dict)
    costs: StepCosts | None = None
    seed: int = 0
    known: Known = dataclasses.field(default_factory=Known)
    file: ChoiceFile | None = None
    explain: bool = False

    @property
    def replayed(self) -> bool:
        """Whether the choices are made again from a file."""
        return self.file is not None and self.file.entries is not None


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
        drafters = [candidate.drafter for candidate in plan.candidates]
        widths = [
            Parts(drafter, None, None, one_width, longest=0).verify_widths  # type: ignore[arg-type]
            for drafter in drafters
        ]
        self._choices = Choices(
            [candidate.name for candidate in plan.candidates],
            [
                dataclasses.replace(one.cost, widths=of)
                for one, of in zip(plan.candidates, widths, strict=True)
            ],
            [drafter.num_draft_tokens for drafter in drafters],
            guessed(config.num_layers, guessed_row(platform)) if plan.costs is None else plan.costs,
            batch,
            seed=plan.seed,
            known=plan.known,
            file=plan.file,
            measured=plan.costs is not None,
            explains=plan.explain,
            expectations=[
                plan.expected.get(one.name, one.expected) if one.offered else one.expected
                for one in plan.candidates
            ],
        )
        # The candidate whose state is there (0: plain decoding), and that state.
        self._at, self._held = 0, None
        self._fair, self._took_up = True, False

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

    def prefilled(self, num_tokens: int, took_ms: float) -> None:
        """Takes in how long it took to feed prompts, of so many tokens in all."""
        self._choices.prefilled(num_tokens, took_ms)

    def begin_row(self, row: int, tokens: Sequence[int]) -> None:
        """A text has taken a row: its prompt and its first token."""
        self._choices.begin_row(row, tokens)

    def begin(
        self, params: Weights, parts: Parts, request: Request, static: dict[str, Any]
    ) -> tuple[DecodeState, Emitted] | None:
        """What a prefill gives, with the state of what is expected to draft best made on the way: to make it later
        takes another pass over the prompts. None where plain decoding begins.

        Args:
          params, parts, request, static: as of `compiled.prefill`, of plain decoding.
        """
        shapes = self._shapes(parts, request)
        place = shapes, static["chunk_size"]
        static = static | {"longest": parts.drafter.num_draft_tokens}
        lengths = np.asarray(request.length)
        remaining = np.asarray(request.limit) - lengths
        ready = functools.partial(self._ready, shapes=shapes)
        at, length = self._choices.begin(lengths, remaining, ready)
        there = at != 0 and self._executables.ready(self._begins(at).get(place))
        if not self._plan.replayed and not there:
            wanted = self._choices.informed if self._plan.known.eager else [at] if at else []
            for one in wanted:
                if place not in self._begins(one):
                    call = compiled.begin, (*self._of(one, params, parts, 0), _by_shape(request)), static
                    self._begins(one)[place] = self._executables.key(call[0], *call[1], **static)
                    self._executables.later(functools.partial(list, [call]))
        if not there and not (self._plan.replayed and at):
            return None
        own = self._of(at, params, parts, length)
        state, self._held, emitted = self._executables.call(compiled.begin, *own, request, **static)
        self._at = at
        return state, emitted

    def _begins(self, at: int) -> dict[Any, Any]:
        """By shapes of a batch and piece of a prompt, the program with which a candidate begins."""
        return self._plan.known.begins.setdefault(self._plan.candidates[at - 1], {})

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
        shapes = self._shapes(parts, state)
        ready = functools.partial(self._ready, shapes=shapes)
        self._compile(params, parts, state, lengths, remaining, shapes)
        held = self._at if self._held is not None else None
        at, length, rounds = self._choices.next(lengths, remaining, most, held, ready)
        # What is compiled meanwhile takes time from the rounds.
        self._fair, self._took_up = not self._executables.busy, False
        if at == 0:
            self.forget()
            return params, parts, state, rounds
        own_params, own_parts = self._of(at, params, parts, length)
        if held != at:
            self._held = self._taken_up(at, own_params, own_parts, state)
            self._took_up = bool(jax.tree.leaves(self._held))
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
            self._fair and not blocked and not self._took_up,
            self._took_up,
        )
        if self._at:
            self._held = state.drafter_state
        return dataclasses.replace(state, drafter_state=())

    def _of(self, at: int, params: Weights, parts: Parts, length: int) -> tuple[Weights, Parts]:
        candidate, lengths = self._plan.candidates[at - 1], self._plan.known.lengths
        if length not in lengths:
            lengths[length] = jax.device_put(np.int32(length), self._device)
        parts = dataclasses.replace(parts, drafter=candidate.drafter, longest=lengths[length])
        return Weights(params.target, candidate.params), parts

    def _taken_up(self, at: int, params: Weights, parts: Parts, state: DecodeState) -> Any:
        shapes = self._shapes(parts, state)
        if self._programs(at).get(shapes) is None:  # of choices that a file says
            self._describe(at, params, parts, _by_shape(state))
        programs = self._programs(at)[shapes]
        assert programs is not None
        if not jax.tree.leaves(programs.shape):
            return programs.shape
        return self._executables.call(compiled.take_up, params, parts, state, **self._take_up_static(state))

    def _take_up_static(self, state: DecodeState) -> dict[str, Any]:
        size = buckets.prefill_chunk_size(state.capacity, self._platform)
        return {"config": self._config, "chunk_size": min(size, state.capacity)}

    def _shapes(self, parts: Parts, state: DecodeState | Request) -> Any:
        """What of a batch tells programs of a candidate apart."""
        kinds = jax.tree.structure((parts.acceptor, parts.law, parts.penalties))
        penalties = tuple(leaf.shape for leaf in jax.tree.leaves(parts.penalties))
        return state.tokens.shape, state.eos_ids.shape, self._log_probs, kinds, penalties

    def _programs(self, at: int) -> dict[Any, Programs | None]:
        """Those of a candidate, of all texts: they are many shapes, which are looked at once."""
        return self._plan.known.programs.setdefault(self._plan.candidates[at - 1], {})

    def _describe(self, at: int, params: Weights, parts: Parts, state: DecodeState) -> list[Call]:
        """Finds out what a candidate runs in a batch of such shapes, and returns it with arguments by shape."""
        params, own_parts = self._of(at, params, parts, 0)
        up = self._take_up_static(state)
        make = functools.partial(decoding.take_up, up["config"], chunk_size=up["chunk_size"])
        shape = jax.eval_shape(make, params, own_parts, state)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        halt = jax.ShapeDtypeStruct(state.done.shape, bool)
        static = compiled.rounds_static(self._config, own_parts.drafter, self._log_probs, None)
        own = dataclasses.replace(state, drafter_state=shape)
        calls: list[Call] = [(compiled.run_rounds, (params, own_parts, own, scalar, halt), static)]
        if jax.tree.leaves(shape):
            calls.append((compiled.take_up, (params, own_parts, state), up))
        keys = [self._executables.key(function, *given, **static) for function, given, static in calls]
        # It is brought up beside the batch; one with taps reads the target, which has another cache for that.
        needed = shape if decoding.tapped_drafter(own_parts) is None else (shape, state.cache)
        programs = Programs(shape, keys, memory.fits(needed, self._device))
        self._programs(at)[self._shapes(parts, state)] = programs
        return calls if programs.fits else []

    def _ready(self, at: int, shapes: Any) -> bool:
        """Whether a candidate's programs are there; once they are, they stay."""
        programs = self._programs(at).get(shapes)
        if programs is None or not programs.fits:
            return False
        programs.there = programs.there or all(map(self._executables.ready, programs.keys))
        return programs.there

    def _compile(
        self,
        params: Weights,
        parts: Parts,
        state: DecodeState,
        lengths: np.ndarray,
        remaining: np.ndarray,
        shapes: Any,
    ) -> None:
        """Begins to compile the most promising candidate in the background, if it pays and nothing else is compiled."""
        if self._plan.replayed:
            return
        eager = self._plan.known.eager
        if eager:
            worth = list(range(1, 1 + len(self._plan.candidates)))
        elif self._executables.busy:
            return
        else:
            ready = functools.partial(self._ready, shapes=shapes)
            worth = self._choices.wanted(lengths, remaining, self._executables.longest_ms, ready)
        # What was asked for, and is not there, cannot be compiled or has no room.
        new = [at for at in worth if shapes not in self._programs(at)]
        for at in new if eager else new[:1]:
            self._programs(at)[shapes] = None
            self._executables.later(functools.partial(self._describe, at, params, parts, _by_shape(state)))


def _by_shape(state: Traced) -> Traced:
    by_shape: Traced = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return by_shape
