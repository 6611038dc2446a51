"""A batch of requests in the compiled loop: prefill, rounds, and refills of finished rows. Tokens only, no text."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.decoding import Caches, DecodeState, Emitted, Parts
from jaxspec.engine import buckets, compiled, memory
from jaxspec.engine.compiled import Loop
from jaxspec.engine.executables import Call
from jaxspec.engine.jax_settings import needed
from jaxspec.engine.prefix import Prefix, PrefixStore
from jaxspec.engine.requests import RowRequest, drawn_apart, needs_sampling
from jaxspec.engine.results import Token
from jaxspec.engine.reuse import Reuse
from jaxspec.engine.row_settings import Shapes, distribution_of
from jaxspec.engine.strategies import Strategy, Turn
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import fetched
from jaxspec.protocol import Acceptor, Weights
from jaxspec.sampling import seed_key
from jaxspec.stopping import GammaState

# On an accelerator, free rows wait until one row in `REFILL_FRACTION` is free, for less than `REFILL_ROUNDS` rounds.
REFILL_FRACTION, REFILL_ROUNDS = 16, 64


@dataclasses.dataclass(frozen=True)
class _Held:
    """A request, its index, and the time at which it got a row."""

    index: int
    request: RowRequest
    began: float = 0.0


@dataclasses.dataclass
class _Refill:
    """Requests whose long prompts are fed in chunks, between the rounds of the other rows.

    Attributes:
      rows: the requests, by the number of their row; None for one that has been halted.
      arguments, static: the arguments of `compiled.prefill`.
      fed: the state after the first `next_chunk` of `num_chunks` chunks.
    """

    rows: dict[int, _Held | None]
    arguments: tuple[Weights, Parts, decoding.Request]
    static: dict[str, Any]
    fed: Prefilling
    num_chunks: int
    next_chunk: int = 0


@dataclasses.dataclass(frozen=True)
class Update:
    """The progress of one row in one host poll.

    Attributes:
      index: the index of the request.
      row: the row of the batch that holds the request until the next step.
      tokens: the new tokens.
      done: whether the row has ended.
      broken: whether it has ended because its next logits are not finite.
      stats: counts since its prefill, NumPy scalars and a histogram int[K + 1].
      began: the time at which it got its row, by `time.perf_counter`.
      num_reused_tokens: prompt tokens that were not fed.
    """

    index: int
    row: int
    tokens: list[Token]
    done: bool
    broken: bool
    stats: decoding.Stats
    began: float
    num_reused_tokens: int = 0


class Session:
    """Runs requests through the loop, at most `max_batch` rows at a time; the next request takes a finished row.

    Args:
      loop: the compiled loop of the target.
      params: the parameters of the target and of the drafter.
      strategy: decides which drafter drafts; made for the same loop.
      acceptor: accepts drafts.
      requests: one for each text.
      max_batch: the most rows at a time.
      prefix: a text whose caches hold the tokens before `start` of the only request; they are used up.
      prefixes: keeps caches of texts, from which requests that begin with the same tokens continue. None for none.
      elastic: whether requests arrive with `add`, while others run. `requests` are then only examples of them, of the
        same `Shapes`. The batch begins with the power of two of rows that the present requests need, gets more rows
        when requests wait, as far as memory allows, and fewer when most are free. Sampled texts that the other rows of
        a batch would influence have a batch of one row each, so that they do not depend on the requests beside them.

    Attributes:
      strategy, requests, loop: as given.
    """

    def __init__(
        self,
        loop: Loop,
        params: Weights,
        strategy: Strategy,
        acceptor: Acceptor,
        requests: Sequence[RowRequest],
        *,
        max_batch: int = 8,
        prefix: Prefix | None = None,
        prefixes: PrefixStore | None = None,
        elastic: bool = False,
    ) -> None:
        self.loop, self._executables, self._params = loop, loop.executables, params
        self.strategy, self._drafter, self._acceptor = strategy, strategy.drafter, loop.put(acceptor)
        # Whether the other rows influence a text: through the drafts that the acceptor takes in one row.
        mixes = strategy.mixes_rows and not acceptor.coupled and needs_sampling(requests)
        self.requests = drawn_apart(requests) if mixes and not elastic else requests
        self._shapes = Shapes.of(requests)
        self._elastic = elastic
        self._waiting: deque[_Held] = deque()
        if not elastic:
            for index, request in enumerate(self.requests):
                self.add(index, request)
        # The request of each row; None once it has ended.
        self._rows: list[_Held | None] = []
        # Rows whose long prompts are being fed, in order of arrival. They count as ended until then.
        self._refills: deque[_Refill] = deque()
        self._max_batch = 1 if mixes and elastic else max_batch
        self._reuse = None if prefixes is None else Reuse(prefixes, loop, params, strategy.drafter)
        # The texts from which requests continue, by index, until their prefill begins.
        self._found: dict[int, Prefix] = {} if prefix is None else {0: prefix}
        self._state: DecodeState | None = None
        self._lengths = np.zeros(0, np.int64)
        self._halt = np.zeros(0, bool)
        # The last check of `_narrow`: the wanted and present numbers of rows, the number of compilations, and whether
        # the program that drops rows was ready.
        self._tried = (0, 0, 0, False)
        # Rounds for which free rows have waited, see `_waits`.
        self._waited = 0

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return not (self._waiting or self._refills) and all(row is None for row in self._rows)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a row."""
        return len(self._waiting)

    def add(self, index: int, request: RowRequest) -> None:
        """Adds a request, which gets a row when one is free; its `Update`s have this index."""
        self._waiting.append(_Held(index, request))

    def check_memory(self, requests: Sequence[RowRequest], max_batch: int) -> None:
        """Raises ValueError if the caches of a batch do not fit into memory: the target's and the drafter's."""
        if self.loop.mesh is None:
            longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
            rows = self._width(min(max_batch, len(requests)))
            # Refilled rows have a cache of their own until their prompts have been processed.
            rows += min(rows, len(requests) - rows)
            capacity = buckets.capacity_for(longest + self._drafter.reach, self._most)
            memory.check_cache_fits(self._row_bytes(capacity), rows, capacity, self._device)

    @property
    def capacity(self) -> int:
        """The number of token slots per row; 0 before the first step."""
        return self._state.capacity if self._state is not None else 0

    def warm_up(self, longest: int, continued: bool = False) -> None:
        """Compiles all that rows of up to `longest` tokens need; nothing runs.

        `continued`: also what a text needs that continues the only row, see `prefix`. On a mesh the programs depend on
        how their arguments are placed. There the first requests run, and only what they need is compiled.
        """
        if self.loop.mesh is not None:
            self.step(1)
            return
        for function, args, static in self._calls(longest, continued):
            self._executables.compiled(function, *args, **static)

    def _calls(self, longest: int, continued: bool) -> Iterator[Call]:
        """Yields the calls for rows of up to `longest` tokens with shapes in place of states, the smallest first."""
        shapes, mesh = self._executables.shapes, self.loop.mesh
        example = dataclasses.replace(self.requests[0], prompt=self.requests[0].prompt[:1], start=0)
        batches = [self._width(len(self.requests))]
        if self._elastic:
            batches = sorted({self._width(count) for count in range(1, self._max_batch + 1)})
        capacity = self._start_capacity([example])
        while True:
            states: dict[Any, Any] = {}
            for batch in batches:
                parts = self._parts_of([example] * batch)
                first, static = self._prefill_arguments([example] * batch, capacity, parts)
                arguments: tuple[Any, ...] = first
                if self._reuse is not None:
                    function, its, fixed = self._reuse.empty(first[2])
                    yield function, its, fixed
                    arguments = (*first, shapes(function, *its, **fixed))
                if batch == batches[0] or not self._alone:
                    states[batch], _ = shapes(compiled.prefill, *arguments, **static)
                    yield compiled.prefill, arguments, static
                    if self._elastic and capacity > buckets.POLL_CHUNKS * static["chunk_size"]:
                        number = jax.ShapeDtypeStruct((), jnp.int32)
                        yield (start := _starts(arguments, static))
                        fed = shapes(start[0], *start[1], **start[2])
                        yield from (
                            _feeds(arguments, static, fed, number, number),
                            _ends(arguments, static, fed),
                        )
                else:
                    states[batch] = shapes(compiled.resize, states[1], batch=batch, mesh=mesh)
                yield compiled.run_rounds, *self._rounds_of(states[batch], parts)
            for batch, state in states.items() if self._elastic else ():
                for other in batches:
                    if other != batch:
                        yield compiled.resize, (state,), {"batch": other, "mesh": mesh}
                    if other == 1 or (other <= batch and not self._alone):
                        number = jax.ShapeDtypeStruct((), jnp.int32)
                        yield compiled.insert, (state, number, states[other], number), {"mesh": mesh}
            if continued:
                state = states[batches[0]]
                states["caches"] = jax.eval_shape(self.strategy.caches, state)
                later, _ = self._prefill_arguments([dataclasses.replace(example, start=1)], capacity, parts)
                yield compiled.prefill, (*later, states["caches"]), static
            if not buckets.must_grow(longest, self._drafter.reach, capacity):
                return
            capacity = self._larger(capacity)
            for state in states.values():
                yield compiled.grow, (state,), {"capacity": capacity, "mesh": mesh}

    def halt(self, index: int) -> None:
        """Ends a request before the next step, such as after a stop string; its row is free then."""
        for row, held in enumerate(self._rows):
            if held is not None and held.index == index:
                self._keep(row)
                self._halt[row] = True
                self._rows[row] = None
        for refill in self._refills:
            for row, held in refill.rows.items():
                if held is not None and held.index == index:
                    refill.rows[row] = None
        self._refills = deque(refill for refill in self._refills if any(refill.rows.values()))
        self._waiting = deque(held for held in self._waiting if held.index != index)
        self._found.pop(index, None)

    def end(self) -> None:
        """Takes note that all requests have ended. If more may come, the caches are freed."""
        if self._state is None:
            return
        self.strategy.end()
        if self._elastic:
            self._state, self._rows = None, []

    def prefix(self) -> Prefix | None:
        """Returns the text of the only row as it is now, for a later text; the session can no longer run then.

        Before the first step it is the prefix given. None if a call was interrupted, or the text ended in an error.
        """
        state = self._state
        if state is None:
            return self._found.get(0)
        if state.tokens.is_deleted() or bool(fetched(state.broken)[0]):
            return None
        tokens = fetched(state.tokens)[0, : int(fetched(state.length)[0])]
        return Prefix(tokens, self.strategy.caches(state))

    def gamma(self, row: int) -> float | None:
        """Returns the adaptive γ of a row (`Update.row`) after the last step, clipped to [0, 1].

        With several adaptive stop rules it is the γ of the first; without one it is None.
        """
        assert self._state is not None
        nodes = jax.tree.leaves(self._state.drafter_state, is_leaf=lambda node: isinstance(node, GammaState))
        state = next((node for node in nodes if isinstance(node, GammaState)), None)
        return None if state is None else float(np.clip(fetched(state.gamma)[row], 0, 1))

    @needed()
    def step(self, max_rounds: int) -> list[Update]:
        """Runs one host poll: prefills waiting requests if rows are free, else runs up to `max_rounds` rounds.

        The long prompt of a request that refills a row is fed in chunks, between the rounds of the other rows. A
        drafter with its own cache fills that cache in one call after the last chunk.
        """
        if self._state is None:
            begun = self._begin(self._first())
            return begun + (self._refill(max_rounds) if self._joins else [])
        self._narrow()
        updates = self._refill(max_rounds) or self._feed()
        if updates or all(held is None for held in self._rows):
            return updates
        return self._decode(max_rounds)

    def _next(self, fed: list[RowRequest]) -> _Held | None:
        """Takes the next waiting request, with the text that it continues; None if there is none.

        A request waits if its beginning is being fed for one of `fed`: it will continue from the caches of that one.
        """
        held = next((held for held in self._waiting if not self._awaits(held, fed)), None)
        if held is None:
            return None
        self._waiting.remove(held)
        fed.append(held.request)
        return self._continued(dataclasses.replace(held, began=time.perf_counter()))

    def _first(self) -> list[_Held | None]:
        """Returns the requests with which the batch begins; None for an empty row."""
        count = min(self._max_batch, len(self._waiting))
        if not self._elastic:
            self._feed_shared([held.request for held in list(self._waiting)[:count]])
            rows = [self._next([]) for _ in range(count)]
            return rows + [None] * (self._width(count) - count)
        asked = [held.request for held in list(self._waiting)[:count]]
        capacity = self._start_capacity(asked)
        count = 1 if self._alone else min(count, self._affordable(self._width(count), 1, capacity))
        # Long prompts wait for the next step, which feeds them in chunks.
        first: list[_Held | None] = []
        long: list[_Held] = []
        fed: list[RowRequest] = []
        while len(fed) < count and (held := self._next(fed)) is not None:
            (long if self._is_long(held) else first).append(held)
        self._waiting.extendleft(reversed(long))
        return first + [None] * (self._width(count) - len(first))

    def _is_long(self, held: _Held) -> bool:
        return buckets.is_long(held.request, self.loop.platform)

    def _width(self, count: int) -> int:
        """Returns the number of rows for `count` requests that run together."""
        smallest = 1 if self.loop.mesh is None else self.loop.mesh.shape.get("data", 1)
        return buckets.rows_for(count, self._max_batch, smallest)

    def _begin(self, first: list[_Held | None]) -> list[Update]:
        self._rows = list(first)
        self._lengths = np.zeros(len(first), np.int64)
        self._halt = np.zeros(len(first), bool)
        # An empty row ends with its first token.
        example = self.requests[0]
        empty = dataclasses.replace(example, prompt=example.prompt[:1], max_new_tokens=1)
        requests = [empty if held is None else held.request for held in first]
        self._parts = self._parts_of(requests)
        arguments, static = self._first_arguments(requests)
        arguments += self._caches([None if held is None else held.index for held in first], arguments[2])
        self.strategy.begin(*arguments, **static)
        arguments = (*self.strategy.running(*arguments[:2]), *arguments[2:])
        if (
            self.loop.mesh is None
            and not self._joins
            and any(request.max_new_tokens > 1 for request in requests)
            and not self._executables.ready(self._executables.key(compiled.prefill, *arguments, **static))
        ):
            # The loop is made ready in the background during the prefill.
            state, _ = self._executables.shapes(compiled.prefill, *arguments, **static)
            self._prepare_rounds(state)
        self._state, emitted = self._executables.call(compiled.prefill, *arguments, **static)
        updates = self._updates(emitted, list(enumerate(range(len(first)))), begins=True)
        if any(row is not None for row in self._rows) and not self._joins:
            # The loop is compiled before the first token is returned, so that the text continues without a pause.
            running = self.strategy.running(self._params, self._parts)
            rounds, static = self.loop.rounds(*running, self._state, 0, self._halt)
            self._executables.compiled(compiled.run_rounds, *rounds, **static)
        return updates

    def _first_arguments(self, requests: list[RowRequest]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the first prefill, traced and static."""
        needed = self._start_capacity(requests)
        used_up = [prefix.caches.cache.capacity for prefix in self._found.values() if not prefix.kept]
        return self._prefill_arguments(requests, max([needed, *used_up]), self._parts)

    def _waits(self, free: int, max_rounds: int) -> bool:
        """Whether free rows wait for others, so that one prefill serves several.

        Fewer numbers of rows occur then, and fewer programs are compiled. Only on an accelerator, where a prefill of
        one row takes nearly as long as one of several. An elastic session does not wait: that would delay first tokens.
        """
        enough = min(len(self._rows) // REFILL_FRACTION, len(self._waiting))
        self._waited = self._waited + max_rounds if 0 < free < enough else 0
        return not self._elastic and self.loop.platform != "cpu" and 0 < self._waited < REFILL_ROUNDS

    def _refill(self, max_rounds: int) -> list[Update]:
        """Assigns waiting requests to free rows, and feeds the short prompts."""
        taken = {row for refill in self._refills for row, held in refill.rows.items() if held is not None}
        free = [row for row, held in enumerate(self._rows) if held is None and row not in taken]
        if self._waits(len(free), max_rounds):
            return []
        if self._elastic and len(self._waiting) > len(free):
            before = len(self._rows)
            wanted = min(before - len(free) + len(self._waiting), self._max_batch)
            if (width := self._affordable(self._width(wanted), before, self.capacity)) > before:
                self._resize(width)
                free += range(before, width)
        requests = [
            held.request for refill in self._refills for held in refill.rows.values() if held is not None
        ]
        given: dict[int, _Held] = {}
        for row in free:
            if (one := self._next(requests)) is None:
                break
            given[row] = one
        short: dict[int, _Held | None] = {}
        long: dict[int, _Held | None] = {}
        for row, held in given.items():
            (long if self._is_long(held) else short)[row] = held
        for rows in self._together(long):
            arguments, static = self._refill_arguments(rows)
            fed = self._call(_starts(arguments, static))
            longest = max(held.request.num_fed for held in rows.values() if held is not None)
            refill = _Refill(rows, arguments[:3], static, fed, -(-longest // static["chunk_size"]))
            self._refills.append(refill)
        updates: list[Update] = []
        for rows in self._together(short):
            arguments, static = self._refill_arguments(rows)
            updates += self._insert(rows, *self._executables.call(compiled.prefill, *arguments, **static))
        return updates

    def _together(self, rows: dict[int, _Held | None]) -> list[dict[int, _Held | None]]:
        """Returns the requests by the call that feeds their prompts.

        On a CPU, where every position costs time, each has its own call, so that no prompt is padded to another.
        """
        if self._alone:
            return [{row: held} for row, held in rows.items()]
        return [rows] if rows else []

    def _awaits(self, held: _Held, fed: Sequence[RowRequest]) -> bool:
        if self._reuse is None or not fed:
            return False
        return self._reuse.is_being_fed(held.request.prompt, [request.prompt for request in fed])

    def _continued(self, held: _Held) -> _Held:
        """Returns a request with the position from which it has to be fed, and notes the text that it continues."""
        if self._reuse is None or held.index in self._found:
            return held
        prefix, start = self._reuse.find(held.request.prompt)
        if prefix is not None:
            self._found[held.index] = prefix
        return dataclasses.replace(held, request=dataclasses.replace(held.request, start=start))

    def _feed_shared(self, requests: Sequence[RowRequest]) -> None:
        """Feeds tokens with which several prompts begin once, in a row of their own, and keeps the caches."""
        while self._reuse is not None:
            tokens = self._reuse.shared([request.prompt for request in requests])
            if tokens is None:
                return
            alone = dataclasses.replace(requests[0], prompt=tuple(tokens), max_new_tokens=1)
            alone = self._continued(_Held(-1, alone)).request
            capacity = self._start_capacity([alone])
            arguments, static = self._prefill_arguments([alone], capacity, self._parts_of([alone]))
            kept = self._caches([-1], arguments[2])
            state, _ = self._executables.call(compiled.prefill, *arguments, *kept, **static)
            caches = Caches(state.cache, self._drafter.absorbed(state.drafter_state))
            self._reuse.keep(0, np.array([*tokens, -1]), caches)

    def _caches(self, indices: Sequence[int | None], request: decoding.Request) -> tuple[Caches, ...]:
        """Returns the caches from which the rows of a prefill continue, as its last argument; () if they are empty.

        With a store, empty ones are returned too, so that there is only one program.
        """
        found = [None if index is None else self._found.pop(index, None) for index in indices]
        used_up = next((prefix.caches for prefix in found if prefix is not None and not prefix.kept), None)
        if used_up is not None:
            capacity = request.tokens.shape[1]
            if capacity > used_up.cache.capacity:
                used_up = self._executables.call(
                    compiled.grow, used_up, capacity=capacity, mesh=self.loop.mesh
                )
            return (used_up,)
        return () if self._reuse is None else (self._reuse.caches(found, request),)

    def _keep(self, row: int) -> None:
        """Keeps the caches of a row for later texts."""
        if self._reuse is not None and self._state is not None:
            tokens = fetched(self._state.tokens)[row, : self._lengths[row]]
            self._reuse.keep(row, tokens, self.strategy.caches(self._state))

    def _feed(self) -> list[Update]:
        """Feeds some chunks of the first refill; after the last chunk its rows begin."""
        if not self._refills:
            return []
        refill = self._refills[0]
        first = refill.next_chunk
        refill.next_chunk = min(first + buckets.POLL_CHUNKS, refill.num_chunks)
        numbers = self.loop.put((np.int32(first), np.int32(refill.next_chunk)))
        refill.fed = self._call(_feeds(refill.arguments, refill.static, refill.fed, *numbers))
        if refill.next_chunk < refill.num_chunks:
            return []
        self._refills.popleft()
        return self._insert(refill.rows, *self._call(_ends(refill.arguments, refill.static, refill.fed)))

    def _call(self, call: Call) -> Any:
        function, arguments, static = call
        return self._executables.call(function, *arguments, **static)

    def _refill_arguments(self, rows: dict[int, _Held | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `compiled.prefill` for requests that refill rows; the batch grows if necessary.

        The number of requests is padded with prompts of one token, to limit the number of programs.
        """
        requests = [held.request for held in rows.values() if held is not None]
        needed = self._start_capacity(requests)
        if needed > self.capacity:
            self._grow(needed)
        count = buckets.rows_for(len(requests), len(self._rows))
        some = dataclasses.replace(requests[0], prompt=requests[0].prompt[:1], start=0)
        requests += [some] * (count - len(requests))
        arguments, static = self._prefill_arguments(requests, self.capacity, self._parts_of(requests))
        caches = self._caches([None if held is None else held.index for held in rows.values()], arguments[2])
        return (*arguments, *caches), static

    def _insert(self, rows: dict[int, _Held | None], others: DecodeState, emitted: Emitted) -> list[Update]:
        """Inserts the first rows of the prefilled state `others` into the batch, at the rows given."""
        others = self._grown(others, self.capacity)  # if the batch has grown since the prefill began
        for which, (row, held) in enumerate(rows.items()):
            if held is None:
                continue
            numbers = self.loop.put((np.int32(row), np.int32(which)))
            self._state = self._executables.call(
                compiled.insert, self._state, numbers[0], others, numbers[1], mesh=self.loop.mesh
            )
            self._rows[row] = held
            self._halt[row] = False
        self._use_parts()
        self.strategy.changed()
        # A row that was halted may have another request by now.
        kept = [(which, row) for which, (row, held) in enumerate(rows.items()) if held is not None]
        return self._updates(emitted, kept, begins=True)

    def _examples(self) -> list[RowRequest]:
        """Returns the request of each row; ended rows need some numbers too, and their tokens are discarded."""
        return [self.requests[0] if held is None else held.request for held in self._rows]

    def _use_parts(self) -> None:
        self._parts = self._parts_of(self._examples())

    def _affordable(self, width: int, least: int, capacity: int) -> int:
        """Returns the number of rows up to `width` whose caches fit into memory now, at least `least`.

        The caches are those of the target and of the drafter.
        """
        if self.loop.mesh is None and width > least:
            row_bytes = self._row_bytes(capacity)
            while width > least and not memory.is_free(width * row_bytes, self._device):
                width = max(buckets.rows_below(width), least)
        return width

    def _row_bytes(self, capacity: int) -> int:
        return self.loop.row_bytes(self._params, self._drafter, capacity)

    @property
    def _alone(self) -> bool:
        """Whether each prompt that joins a batch has its own prefill call, see `_together`."""
        return self.loop.platform == "cpu" and self.loop.mesh is None

    @property
    def _joins(self) -> bool:
        """Whether waiting requests join a batch that begins with one of them, each with its own prefill call."""
        return self._elastic and self._alone and len(self._waiting) > 0

    @property
    def _most(self) -> int:
        """The slots that the longest text needs."""
        most: int = self.loop.config.context_length + self._drafter.reach
        return most

    def _start_capacity(self, requests: Sequence[RowRequest]) -> int:
        """Returns the initial capacity of a batch, for its prompts and a round."""
        longest = max(len(request.prompt) for request in requests)
        return buckets.capacity_for(longest + 1 + self._drafter.reach, self._most)

    def _larger(self, capacity: int) -> int:
        """Returns the next capacity."""
        return buckets.capacity_for(capacity + 1, max(self._most, capacity + 1))

    @property
    def _device(self) -> jax.Device:
        return self.loop.device or jax.local_devices()[0]

    def _resize(self, batch: int) -> None:
        """Keeps the first `batch` rows, or adds free ones."""
        self._state = self._executables.call(compiled.resize, self._state, batch=batch, mesh=self.loop.mesh)
        new = max(batch - len(self._rows), 0)
        self._rows = [*self._rows[:batch], *[None] * new]
        self._lengths = np.pad(self._lengths[:batch], (0, new), constant_values=1)
        self._halt = np.pad(self._halt[:batch], (0, new), constant_values=True)
        self._use_parts()
        self.strategy.resized(batch)

    def _narrow(self) -> None:
        """Drops the free rows after the last text if they are half of the batch and no request waits.

        Only to a number of rows for which the loop is compiled already; the program that drops the rows is compiled in
        the background first, except on a mesh, whose processes must all run it in the same step.
        """
        assert self._state is not None
        used = [row + 1 for row, held in enumerate(self._rows) if held is not None]
        width = self._width(max(used, default=1))
        if not self._elastic or self._waiting or self._refills or 2 * width > len(self._rows):
            return
        resize: tuple[Any, ...] = compiled.resize, self._state
        static: dict[str, Any] = {"batch": width, "mesh": self.loop.mesh}
        resizes = self._executables.ready(self._executables.key(*resize, **static))
        tried = width, len(self._rows), self._executables.num_compilations, resizes
        if tried == self._tried:
            return
        self._tried = tried
        state = self._executables.shapes(*resize, **static)
        rounds, its = self._rounds_of(state, self._parts_of(self._examples()[:width]))
        if not self._executables.ready(self._executables.key(compiled.run_rounds, *rounds, **its)):
            return
        if resizes or self.loop.mesh is not None:
            self._resize(width)
        else:
            self._executables.prepare(*resize, **static)

    def _decode(self, max_rounds: int) -> list[Update]:
        assert self._state is not None
        longest, reach = int(self._lengths.max()), self._drafter.reach
        if buckets.must_grow(longest, reach, self.capacity):
            self._grow(self.capacity + 1)
        elif self.loop.mesh is None and buckets.may_grow(longest, self._unfinished(), reach, self.capacity):
            self._prepare_next(self._state)
        limits = [
            len(held.request.prompt) + held.request.max_new_tokens if held else 0 for held in self._rows
        ]
        remaining = np.maximum(np.array(limits) - self._lengths, 0)
        turn = Turn(max_rounds, self._halt, remaining)
        self._state, emitted = self.strategy.rounds(self._params, self._parts, self._state, turn)
        updates = self._updates(emitted, list(enumerate(range(len(self._rows)))))
        self.strategy.learn()
        return updates

    def _prefill_arguments(
        self, requests: list[RowRequest], capacity: int, parts: Parts
    ) -> tuple[tuple[Weights, Parts, decoding.Request], dict[str, Any]]:
        """Returns the arguments of `compiled.prefill`, traced and static."""
        batch = len(requests)
        tokens = np.zeros((batch, capacity), np.int32)
        for row, request in enumerate(requests):
            tokens[row, : len(request.prompt)] = request.prompt
        length = np.array([len(request.prompt) for request in requests], np.int32)
        budget = np.array([request.max_new_tokens for request in requests], np.int32)
        keys = [jax.random.fold_in(seed_key(request.seed), request.stream) for request in requests]
        arrays = {
            "tokens": tokens,
            "length": length,
            "limit": length + budget,
            "eos_ids": self._shapes.eos_ids(requests),
            "keys": jnp.stack(keys),
        }
        if self._reuse is not None or any(request.start for request in requests):
            arrays["start"] = np.array([request.start for request in requests], np.int32)
        static = self.loop.prefill_static(capacity)
        return (self._params, parts, decoding.Request(**self.loop.put(arrays))), static

    def _grow(self, needed: int) -> None:
        """Grows the batch by whole steps, for which there are programs, until it has the capacity that is needed."""
        self._state = self._grown(self._state, needed)
        self.strategy.changed()

    def _grown(self, state: Any, needed: int) -> Any:
        while (capacity := state.capacity) < needed:
            larger = self._larger(capacity)
            state = self._executables.call(compiled.grow, state, capacity=larger, mesh=self.loop.mesh)
        return state

    def _unfinished(self) -> list[RowRequest]:
        return [
            held.request
            for held in (*self._rows, *self._waiting, *(h for r in self._refills for h in r.rows.values()))
            if held is not None
        ]

    def _prepare_next(self, state: DecodeState) -> DecodeState:
        """Compiles the programs for the next capacity in the background; returns the shapes of that state."""
        capacity = self._larger(state.capacity)
        larger: DecodeState = jax.eval_shape(functools.partial(decoding.grow, capacity=capacity), state)
        self._executables.prepare(compiled.grow, state, capacity=capacity, mesh=None)
        self._prepare_rounds(larger)
        return larger

    def _prepare_rounds(self, state: Any) -> None:
        """Compiles the loop in the background for a state of these shapes."""
        arguments, static = self._rounds_of(state, self._parts)
        self._executables.prepare(compiled.run_rounds, *arguments, **static)

    def _rounds_of(self, state: Any, parts: Parts) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the loop for a state of these shapes, traced and static."""
        numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(state.done.shape, bool)
        running = self.strategy.running(self._params, parts)
        return (*running, state, *numbers), self.loop.rounds_static(self._drafter)

    def _parts_of(self, requests: Sequence[RowRequest]) -> Parts:
        reported = np.array([request.log_probs for request in requests])
        distribution, penalties, log_probs = self.loop.put(
            (distribution_of(requests), self._shapes.penalties(requests), reported)
        )
        return Parts(
            self._drafter,
            self._acceptor,
            distribution,
            one_width=self.loop.platform != "cpu",
            penalties=penalties,
            log_probs=log_probs,
        )

    def _updates(
        self, emitted: Emitted, rows: Sequence[tuple[int, int]], begins: bool = False
    ) -> list[Update]:
        """Reads the emitted tokens of some rows.

        `rows`: their numbers in `emitted` and in the batch; `begins`: whether the tokens come from a prefill.
        """
        host = fetched(emitted)
        updates = []
        for at, row in rows:
            self._lengths[row] = host.length[at]
            held = self._rows[row]
            if held is None:
                continue
            stats = jax.tree.map(lambda leaf, at=at: leaf[at], host.stats)
            tokens = _tokens_of(host, at, held.request.log_probs)
            if begins:
                self.strategy.begin_row(row)
            done, broken = bool(host.done[at]), bool(host.broken[at])
            reused = held.request.start
            updates.append(Update(held.index, row, tokens, done, broken, stats, held.began, reused))
            if (begins or done) and not broken:
                self._keep(row)
            if done:
                self._rows[row] = None
        return updates


def _starts(arguments: tuple[Any, ...], static: dict[str, Any]) -> Call:
    """Returns the call that begins to feed prompts in chunks; the arguments are those of `compiled.prefill`."""
    params, parts, request, *caches = arguments
    its = {name: static[name] for name in ("config", "merged", "mesh")}
    return compiled.start_prefill, (params, request, decoding.aux_drafter_of(parts), *caches), its


def _feeds(
    arguments: tuple[Any, ...], static: dict[str, Any], fed: Prefilling, first: Any, stop: Any
) -> Call:
    """Returns the call that feeds the chunks from `first` to before `stop`."""
    params, parts, request = arguments[:3]
    its = {name: static[name] for name in ("config", "chunk_size", "mesh")}
    return compiled.feed, (params, request, fed, first, stop, decoding.aux_drafter_of(parts)), its


def _ends(arguments: tuple[Any, ...], static: dict[str, Any], fed: Prefilling) -> Call:
    """Returns the call after the last chunk."""
    its = {name: static[name] for name in ("config", "chunk_size", "mesh")}
    rest = dataclasses.replace(fed, cache=None, absorbed=None)
    return compiled.end_prefill, (*arguments[:3], rest, fed.cache, fed.absorbed), its


def _tokens_of(host: Emitted, row: int, reported: bool) -> list[Token]:
    """Returns the new tokens of a row; `host`: on the host; `reported`: with their log-probabilities."""
    count = int(host.count[row])
    drafted = host.drafted[row, :count]
    # Each round ends with a token that was not drafted, except perhaps the last round of a text. Therefore rounds are
    # numbered backwards from the last token.
    ends = np.cumsum(~drafted[::-1])[::-1]
    rounds = host.stats.num_rounds[row] - (ends - ends[-1:])
    log_probs = host.log_probs[row, :count].tolist() if reported else [None] * count  # type: ignore[index]
    columns = host.tokens[row, :count], drafted, host.proposed[row, :count], rounds
    return [Token(*one) for one in zip(*(column.tolist() for column in columns), log_probs, strict=True)]
