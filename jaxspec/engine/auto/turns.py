"""The strategy of method `auto`: the drafter may change between two calls of the loop.

It holds the states and programs of the candidates; `choosing.policy` decides.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.choosing import beliefs
from jaxspec.choosing.beliefs import Counts, Expectation
from jaxspec.choosing.costs import StepCosts, guessed, guessed_row
from jaxspec.choosing.policy import Policy, Times
from jaxspec.decoding import Caches, DecodeState, Emitted, Parts, Request
from jaxspec.engine import buckets, compiled, memory, stored_programs
from jaxspec.engine.auto.record import Record
from jaxspec.engine.compiled import Loop
from jaxspec.engine.executables import LOADING, Call, Executables
from jaxspec.engine.results import Chosen, Expected, Token, played_rounds
from jaxspec.engine.strategies import Strategy, Turn
from jaxspec.io.methods.choice_file import ChoiceFile
from jaxspec.methods.base import Candidate
from jaxspec.model.prefill import num_fed
from jaxspec.model.sharding import fetched
from jaxspec.protocol import Drafter, Weights

Traced = TypeVar("Traced")
# The maximum number of candidates whose programs are loaded at the start of a text.
AT_ONCE = 2


@dataclasses.dataclass
class Programs:
    """The programs of a candidate in a batch of certain shapes.

    Attributes:
      shape: the shape of its drafter's state.
      keys: the keys of the programs, see `Executables.ready`.
      fits: whether the state fits into memory.
      there: whether all programs are compiled.
    """

    shape: Any
    keys: Sequence[Any]
    fits: bool = True
    there: bool = False


@dataclasses.dataclass
class Known:
    """Facts about this machine that all texts of a model share: programs and times.

    Attributes:
      times: see `choosing.policy.Times`.
      counts: of the drafts of earlier texts, by candidate, see `beliefs.remembered`.
      programs: by candidate and shapes of the batch. The value is None while a background thread still determines the
        programs.
      begins: the key of the program that runs the prefill and creates the candidate's state, by candidate, shapes of
        the batch and chunk size.
      lengths: a cache of draft lengths as device arrays. It avoids a transfer per call, which takes as long as several
        rounds of a small model.
      ran: names of candidates, with shapes of the batch, whose rounds have run in this process.
      num_dropped: `Executables.num_dropped` at the time when `programs` and `begins` were valid.
      eager: whether all programs are compiled at once, without a check that they save time. Measurements set this.
    """

    times: Times = dataclasses.field(default_factory=Times)
    counts: dict[str, Counts] = dataclasses.field(default_factory=dict)
    programs: weakref.WeakKeyDictionary[Candidate, dict[Any, Programs | None]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    begins: weakref.WeakKeyDictionary[Candidate, dict[Any, Any]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    lengths: dict[int, Any] = dataclasses.field(default_factory=dict)
    ran: set[tuple[str, Any]] = dataclasses.field(default_factory=set)
    num_dropped: int = 0
    eager: bool = False

    def forget_dropped(self, executables: Executables) -> None:
        """Forgets the programs that were dropped since the last time; they are found again, or compiled."""
        if executables.num_dropped == self.num_dropped:
            return
        self.num_dropped = executables.num_dropped
        for candidate, by_shapes in self.programs.items():
            for shapes, programs in list(by_shapes.items()):
                if programs is not None and programs.fits and not all(map(executables.holds, programs.keys)):
                    del by_shapes[shapes]
                    self.ran.discard((candidate.name, shapes))
        for by_place in self.begins.values():
            for place, key in list(by_place.items()):
                if not executables.holds(key):
                    del by_place[place]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The candidates of a batch, and the data for the choice between them.

    Attributes:
      candidates: the methods that may draft; plain decoding is always possible and not among them.
      expected: expectations of offered candidates, by name; they replace the candidates' own.
      costs: the costs of steps; None if they were not measured.
      known: the facts that all texts of the model share, such as compiled programs.
      file: the file from which choices are repeated, or to which they are written; None for no file.
      explain: whether results report the choices.
      sampled: whether texts are drawn at random. The draft counts of sampled texts are stored separately from those of
        greedy texts.
      keep: saves the facts for the next process; with `now=True` immediately. None saves nothing.
    """

    candidates: tuple[Candidate, ...]
    expected: Mapping[str, Expectation] = dataclasses.field(default_factory=dict)
    costs: StepCosts | None = None
    known: Known = dataclasses.field(default_factory=Known)
    file: ChoiceFile | None = None
    explain: bool = False
    sampled: bool = False
    keep: Callable[..., None] | None = None

    def remembered_as(self, candidate: Candidate) -> str:
        """Returns the name of a candidate's counts in `Known.counts`."""
        return f"{candidate.name}, sampled" if self.sampled else candidate.name

    def expectation(self, candidate: Candidate) -> Expectation | None:
        """Returns what is expected of a candidate's drafts before a text begins; None if nothing is known."""
        known = candidate.expected
        if candidate.offered:
            known = self.expected.get(candidate.name, known)
            return beliefs.informed(known, self.known.counts.get(self.remembered_as(candidate)))
        return known

    @property
    def replayed(self) -> bool:
        """Whether choices are repeated from a file."""
        return self.file is not None and self.file.entries is not None


class Switching(Strategy):
    """Method `auto`: before each call of the loop a policy chooses which candidate drafts, or none.

    The batch uses the parts and state of plain decoding. In addition, it holds the drafter state of the candidate that
    drafted last. If another candidate drafted last, or rows or capacity have changed, `decoding.catch_up` recomputes
    this state from the text.

    Args:
      loop: the compiled loop, on one device.
      drafter: plain decoding.
      plan: the candidates.
    """

    mixes_rows = True

    def __init__(self, loop: Loop, drafter: Drafter, plan: Plan) -> None:
        super().__init__(loop, drafter)
        self._plan, self._executables = plan, loop.executables
        self.recorded = plan.file is not None
        # The candidate whose state is held (0: plain decoding), and that state.
        self._at, self._held = 0, None
        self._disturbed = self._took_up = False

    def _policy(self, batch: int) -> Policy:
        """Returns the policy for a batch of `batch` rows."""
        plan, config, platform = self._plan, self._loop.config, self._loop.platform
        one_width = platform != "cpu"
        drafters = [candidate.drafter for candidate in plan.candidates]
        widths = [
            Parts(drafter, None, None, one_width, longest=0).verify_widths  # type: ignore[arg-type]
            for drafter in drafters
        ]
        return Policy(
            [candidate.name for candidate in plan.candidates],
            [
                dataclasses.replace(one.cost, widths=of)
                for one, of in zip(plan.candidates, widths, strict=True)
            ],
            [drafter.num_draft_tokens for drafter in drafters],
            guessed(config.num_layers, guessed_row(platform)) if plan.costs is None else plan.costs,
            batch,
            times=plan.known.times,
            measured=plan.costs is not None,
            expectations=[plan.expectation(one) for one in plan.candidates],
        )

    @property
    def drafting(self) -> str | None:
        at = self._record.choice.candidate
        return self._record.policy.names[at] if at else None

    def drafted_by(self, tokens: Mapping[str, int]) -> str:
        if tokens:
            return f"auto: {', '.join(name for name, _ in Counter(tokens).most_common())}"
        unready = self._record.policy.unready
        why = f"the programs of {unready[0]} were not ready" if unready else "no draft is expected to pay"
        return f"auto: plain decoding, {why}"

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The expectations before the first round; () unless the plan has `explain`."""
        return self._record.expected if self._plan.explain else ()

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The choices so far; () unless the plan has `explain`."""
        return tuple(self._record.chosen) if self._plan.explain else ()

    def changed(self) -> None:
        self._at, self._held = 0, None

    def resized(self, batch: int) -> None:
        self.changed()
        self._remember(range(batch, len(self._record.policy.counts.accept)))
        self._record.policy.resize(batch)

    def begin_row(self, row: int, tokens: Sequence[int]) -> None:
        self._remember([row])
        self._record.policy.begin_row(row, tokens)

    def end(self) -> None:
        self._remember(range(len(self._record.policy.counts.accept)))
        times = self._plan.known.times
        times.compile_ms = max(times.compile_ms or 0.0, self._executables.longest_ms) or None
        if self._plan.keep is not None and not self._plan.replayed:
            self._plan.keep()

    def _remember(self, rows: Sequence[int]) -> None:
        """Adds the counts of texts that have ended to those of earlier texts."""
        counts, known = self._record.policy.counts, self._plan.known.counts
        for at, one in enumerate(self._plan.candidates, 1):
            of = Counts(counts.accept[list(rows), at], counts.draft[list(rows), at])
            if one.offered and (of.accept.any() or of.draft.any()):
                name = self._plan.remembered_as(one)
                known[name] = beliefs.remembered(known.get(name), of)

    def begin(
        self, params: Weights, parts: Parts, request: Request, *caches: Caches, **static: Any
    ) -> tuple[DecodeState, Emitted]:
        self._plan.known.forget_dropped(self._executables)
        self._record = Record(self._policy(request.length.shape[0]), self._plan.file)
        self._prepare(params, parts, request, static)
        began, blocked_ms = time.perf_counter(), self._executables.blocked_ms
        begun = self._prefill_with(params, parts, request, caches, static)
        if begun is None:
            plain = [Caches(one.cache) for one in caches]
            begun = super().begin(params, parts, request, *plain, **static)
        state, emitted = begun
        emitted = fetched(emitted)
        if self._executables.blocked_ms == blocked_ms:
            took_ms = 1e3 * (time.perf_counter() - began)
            fed = num_fed(request.length, request.start)
            self._record.policy.prefilled(int(np.asarray(fed).sum()), took_ms)
        return state, emitted

    def _prepare(self, params: Weights, parts: Parts, request: Request, static: dict[str, Any]) -> None:
        """Makes programs in the background that the text will probably need, while the prompts are fed.

        Stored programs are loaded if they save more time in this text than loading takes. The best candidate's programs
        are compiled if, after they are stored, loading them would save time in a text of this length.
        """
        plan, shapes = self._plan, self._shapes(parts, request)
        if plan.replayed or plan.keep is None or plan.known.eager:
            return
        lengths = np.asarray(request.length)
        remaining = np.asarray(request.limit) - lengths
        times = plan.known.times
        loading_ms = functools.partial(self._loading_ms, shapes=shapes)
        promising = self._record.policy.promising(lengths, remaining, loading_ms)[:AT_ONCE]
        for at in promising:
            stored = self._name(at, shapes) in times.programs
            if (stored or at == promising[0]) and shapes not in self._programs(at):
                self._programs(at)[shapes] = None
                arguments = params, parts, _by_shape(request), static
                describe = functools.partial(self._describe_first, at, *arguments)
                self._executables.later(
                    describe, functools.partial(self._made, at, shapes), stored, self._what(at)
                )

    def _describe_first(
        self, at: int, params: Weights, parts: Parts, request: Request, static: dict[str, Any]
    ) -> list[Call]:
        state, _ = self._executables.shapes(compiled.prefill, params, parts, request, **static)
        return self._describe(at, params, parts, state)

    def caches(self, state: DecodeState) -> Caches:
        """Returns the caches of the batch, with those of the candidate that drafted last by its number."""
        if self._at == 0 or self._held is None:
            return Caches(state.cache)
        absorbed = self._plan.candidates[self._at - 1].drafter.absorbed(self._held)
        return Caches(state.cache, {self._at: absorbed})

    def _continued(self, at: int, caches: Sequence[Caches], continues: bool) -> tuple[Caches, ...] | None:
        """Returns the caches from which a candidate continues; None for a head that has to read the whole texts."""
        continued = tuple(Caches(one.cache, (one.absorbed or {}).get(at)) for one in caches)
        reads = continues and bool(self._plan.candidates[at - 1].drafter.aux_layers)
        return None if reads and any(one.absorbed is None for one in continued) else continued

    def _prefill_with(
        self,
        params: Weights,
        parts: Parts,
        request: Request,
        caches: Sequence[Caches],
        static: dict[str, Any],
    ) -> tuple[DecodeState, Emitted] | None:
        """Prefills for the candidate that the policy expects to draft best; None where plain decoding begins.

        The candidate's state is made during the prefill: to make it later takes another pass over the prompts.
        """
        shapes = self._shapes(parts, request)
        static = static | {"longest": parts.drafter.num_draft_tokens}
        lengths = np.asarray(request.length)
        remaining = np.asarray(request.limit) - lengths
        ready = functools.partial(self._ready, shapes=shapes)
        at, length = self._record.begin(lengths, remaining, ready)
        continues = request.start is not None and bool(np.asarray(fetched(request.start)).any())
        continued = self._continued(at, caches, continues) if at else None
        place = shapes, static["chunk_size"], jax.tree.structure(continued)
        there = continued is not None and self._executables.ready(self._begins(at).get(place))
        if not self._plan.replayed and not there:
            wanted = self._record.policy.informed if self._plan.known.eager else [at] if at else []
            for one in wanted:
                its_caches = self._continued(one, caches, continues)
                place = shapes, static["chunk_size"], jax.tree.structure(its_caches)
                if its_caches is not None and place not in self._begins(one):
                    arguments = *self._of(one, params, parts, 0), *_by_shape((request, *its_caches))
                    call = compiled.begin, arguments, static
                    self._begins(one)[place] = self._executables.key(call[0], *call[1], **static)
                    self._executables.later(functools.partial(list, [call]), what=self._what(one))
        if continued is None or not (there or self._plan.replayed):
            return None
        own = self._of(at, params, parts, length)
        state, self._held, emitted = self._executables.call(
            compiled.begin, *own, request, *continued, **static
        )
        self._at = at
        return state, emitted

    def _begins(self, at: int) -> dict[Any, Any]:
        """Returns the keys of the programs that prefill for a candidate, by shapes of the batch and chunk size."""
        return self._plan.known.begins.setdefault(self._plan.candidates[at - 1], {})

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        self._turn, self._blocked_ms = turn, self._executables.blocked_ms
        params, parts, state, most = self._next(params, parts, state, turn)
        self._began = time.perf_counter()
        arguments, static = self._loop.rounds(params, parts, state, most, turn.halt)
        state, emitted = self._executables.call(compiled.run_rounds, *arguments, **static)
        if self._at:
            self._held = state.drafter_state
        return dataclasses.replace(state, drafter_state=()), emitted

    def _next(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[Weights, Parts, DecodeState, int]:
        """Returns the parameters, the parts, the state and the maximum number of rounds of the next call.

        The arguments are the parameters, parts and state of plain decoding.
        """
        _, _, lengths, remaining = turn
        self._plan.known.forget_dropped(self._executables)
        shapes = self._shapes(parts, state)
        ready = functools.partial(self._ready, shapes=shapes)
        self._compile(params, parts, state, lengths, remaining, shapes)
        held = self._at if self._held is not None else None
        self._record.policy.awaits = self._executables.busy
        if self._plan.explain and not self._plan.replayed and not self._record.expected:
            self._record.explain(lengths, remaining, ready)
        at, length, rounds = self._record.next(lengths, remaining, turn.max_rounds, held, ready)
        # A compilation in the background slows the rounds down. So do XLA's preparations in the first run of a program.
        ran, program = self._plan.known.ran, (self._record.policy.names[at], shapes)
        self._disturbed, self._took_up = self._executables.busy or program not in ran, False
        ran.add(program)
        if at == 0:
            self.changed()
            return params, parts, state, rounds
        own_params, own_parts = self._of(at, params, parts, length)
        if held != at:
            self._held = self._taken_up(at, own_params, own_parts, state)
            self._took_up = bool(jax.tree.leaves(self._held))
        self._at = at
        return own_params, own_parts, dataclasses.replace(state, drafter_state=self._held), rounds

    def learn(self, gained: Sequence[Sequence[Token]]) -> None:
        took_ms = 1e3 * (time.perf_counter() - self._began)
        rounds = [played_rounds(row) for row in gained]
        tokens = [[token.id for token in row] for row in gained]
        fair = self._executables.blocked_ms == self._blocked_ms and not self._took_up
        self._record.learn(rounds, tokens, self._turn.lengths, took_ms, fair, self._took_up, self._disturbed)

    def _of(self, at: int, params: Weights, parts: Parts, length: int) -> tuple[Weights, Parts]:
        candidate, lengths = self._plan.candidates[at - 1], self._plan.known.lengths
        if length not in lengths:
            lengths[length] = jax.device_put(np.int32(length), self._loop.place)
        parts = dataclasses.replace(parts, drafter=candidate.drafter, longest=lengths[length])
        return Weights(params.target, candidate.params), parts

    def _taken_up(self, at: int, params: Weights, parts: Parts, state: DecodeState) -> Any:
        shapes = self._shapes(parts, state)
        if self._programs(at).get(shapes) is None:  # only where choices are repeated from a file
            self._describe(at, params, parts, _by_shape(state))
        programs = self._programs(at)[shapes]
        assert programs is not None
        if not jax.tree.leaves(programs.shape):
            return programs.shape
        return self._executables.call(compiled.catch_up, params, parts, state, **self._take_up_static(state))

    def _take_up_static(self, state: DecodeState) -> dict[str, Any]:
        size = buckets.prefill_chunk_size(state.capacity, self._loop.platform)
        return {"config": self._loop.config, "chunk_size": min(size, state.capacity)}

    def _shapes(self, parts: Parts, state: DecodeState | Request) -> Any:
        """Returns the properties of a batch on which a candidate's programs depend."""
        kinds = jax.tree.structure((parts.acceptor, parts.distribution, parts.penalties))
        penalties = tuple(leaf.shape for leaf in jax.tree.leaves(parts.penalties))
        return state.tokens.shape, state.eos_ids.shape, kinds, penalties

    def _programs(self, at: int) -> dict[Any, Programs | None]:
        """Returns the programs of a candidate by shapes of the batch, shared by all texts."""
        return self._plan.known.programs.setdefault(self._plan.candidates[at - 1], {})

    def _describe(self, at: int, params: Weights, parts: Parts, state: DecodeState) -> list[Call]:
        """Records the programs of a candidate for a batch of these shapes, and returns the calls to compile."""
        params, own_parts = self._of(at, params, parts, 0)
        up = self._take_up_static(state)
        shape = self._executables.shapes(compiled.catch_up, params, own_parts, state, **up)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        halt = jax.ShapeDtypeStruct(state.done.shape, bool)
        static = self._loop.rounds_static(own_parts.drafter)
        own = dataclasses.replace(state, drafter_state=shape)
        calls: list[Call] = [(compiled.run_rounds, (params, own_parts, own, scalar, halt), static)]
        if jax.tree.leaves(shape):
            calls.append((compiled.catch_up, (params, own_parts, state), up))
        keys = [self._executables.key(function, *given, **static) for function, given, static in calls]
        # The candidate's state is allocated while the batch's state is in memory. Both must therefore fit. A drafter
        # with auxiliary layers also needs a second target cache.
        needed = shape if decoding.aux_drafter_of(own_parts) is None else (shape, state.cache)
        programs = Programs(shape, keys, memory.fits(needed, self._loop.place))
        self._programs(at)[self._shapes(parts, state)] = programs
        return calls if programs.fits else []

    def _ready(self, at: int, shapes: Any) -> bool:
        """Returns whether a candidate's programs are compiled.

        A positive result is remembered until programs are dropped.
        """
        programs = self._programs(at).get(shapes)
        if programs is None or not programs.fits:
            return False
        programs.there = programs.there or all(map(self._executables.ready, programs.keys))
        return programs.there

    def _made(self, at: int, shapes: Any) -> None:
        """Records the load time of a candidate's new programs, if they are stored for the next process."""
        programs, keep = self._programs(at).get(shapes), self._plan.keep
        if programs is None or not programs.fits or keep is None:
            return
        if (kept_ms := self._executables.kept_ms(programs.keys)) is not None:
            self._plan.known.times.programs[self._name(at, shapes)] = kept_ms
            keep(now=True)

    def _name(self, at: int, shapes: Any) -> str:
        """Returns the name of a candidate's programs in `Times.programs`."""
        digest = hashlib.sha256(str(shapes).encode()).hexdigest()[:16]
        return f"{self._plan.candidates[at - 1].name} {digest} {stored_programs.version()}"

    def _what(self, at: int) -> str:
        """Returns the description of a candidate's programs, for progress."""
        return f"the programs of {self._plan.candidates[at - 1].name}, a candidate of auto"

    def _loading_ms(self, at: int, shapes: Any) -> float:
        """Returns the time to load a candidate's programs.

        If it is unknown, it is estimated from the compile time.
        """
        known = self._plan.known.times.programs.get(self._name(at, shapes))
        return LOADING * self._making_ms(at, shapes) if known is None else known

    def _making_ms(self, at: int, shapes: Any) -> float:
        """Returns the time to load or compile a candidate's programs."""
        times = self._plan.known.times
        compile_ms = max(times.compile_ms or 0.0, self._executables.longest_ms)
        return times.programs.get(self._name(at, shapes), compile_ms)

    def _compile(
        self,
        params: Weights,
        parts: Parts,
        state: DecodeState,
        lengths: np.ndarray,
        remaining: np.ndarray,
        shapes: Any,
    ) -> None:
        """Starts to compile the best candidate's programs in the background.

        They must be expected to save time, and no other compilation may be running. With `eager` all candidates are
        compiled.
        """
        if self._plan.replayed:
            return
        eager = self._plan.known.eager
        if eager:
            worth = list(range(1, 1 + len(self._plan.candidates)))
        elif self._executables.busy:
            return
        else:
            ready = functools.partial(self._ready, shapes=shapes)
            making_ms = functools.partial(self._making_ms, shapes=shapes)
            worth = self._record.policy.wanted(lengths, remaining, making_ms, ready)
        # Candidates that were requested before are skipped. Their programs are being compiled, failed to compile, or do
        # not fit into memory.
        new = [at for at in worth if shapes not in self._programs(at)]
        for at in new if eager else new[:1]:
            self._programs(at)[shapes] = None
            loads = self._name(at, shapes) in self._plan.known.times.programs
            describe = functools.partial(self._describe, at, params, parts, _by_shape(state))
            self._executables.later(
                describe, functools.partial(self._made, at, shapes), loads, self._what(at)
            )


def _by_shape(state: Traced) -> Traced:
    by_shape: Traced = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return by_shape
