"""A batch of requests in the compiled loop: prefill, rounds, and refills of finished rows. Tokens only, no text."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.decoding import DecodeState, Emitted
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import fetched
from jaxspec.programs import buckets, compiled
from jaxspec.programs.compiled import Loop
from jaxspec.programs.jax_settings import needed
from jaxspec.protocol import Acceptor, Weights
from jaxspec.requests.pieces import Update
from jaxspec.requests.reading import RowRequest, drawn_apart, needs_sampling
from jaxspec.requests.row_settings import Shapes
from jaxspec.requests.text import Token
from jaxspec.session.batch_rows import Held, Rows, Widths
from jaxspec.session.feeding import Feeding, Prompts
from jaxspec.session.prefix import Prefix, PrefixStore
from jaxspec.session.strategies import Strategy, Turn
from jaxspec.stopping import GammaState

# On an accelerator, free rows wait until one row in `REFILL_FRACTION` is free, for less than `REFILL_ROUNDS` rounds.
REFILL_FRACTION, REFILL_ROUNDS = 16, 64


@dataclasses.dataclass
class _Refill:
    """Requests whose long prompts are fed in chunks, between the rounds of the other rows.

    Attributes:
      rows: the requests, by the number of their row; None for one that has been halted.
      prompts: their prompts.
      fed: the state after the first `next_chunk` of `num_chunks` chunks.
    """

    rows: dict[int, Held | None]
    prompts: Prompts
    fed: Prefilling
    num_chunks: int
    next_chunk: int = 0

    @property
    def held(self) -> list[Held]:
        """The requests that have not been halted."""
        return [held for held in self.rows.values() if held is not None]


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
        same `Shapes`. The batch begins with the rows that the present requests need, gets more rows when requests wait,
        as far as memory allows, and fewer when most are free. Sampled texts that the other rows of a batch would
        influence have a batch of one row each, so that they do not depend on the requests beside them.
      in_chunks: whether a long prompt that joins a batch is fed in chunks, between rounds of the other rows. Their
        texts then go on meanwhile, and its own row is idle for longer.

    Attributes:
      strategy, requests, loop: as given.
      rows: the rows of the batch.
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
        in_chunks: bool = True,
    ) -> None:
        self.loop, self._executables, self._params = loop, loop.executables, params
        self.strategy, self._drafter = strategy, strategy.drafter
        # Whether the other rows influence a text: through the drafts that the acceptor takes in one row.
        mixes = strategy.mixes_rows and not acceptor.coupled and needs_sampling(requests)
        self.requests = drawn_apart(requests) if mixes and not elastic else requests
        self._feeding = Feeding(
            loop, params, strategy, acceptor, Shapes.from_requests(requests), prefix, prefixes
        )
        self._elastic, self._in_chunks = elastic, in_chunks
        self._waiting: deque[Held] = deque()
        if not elastic:
            for index, request in enumerate(self.requests):
                self.add(index, request)
        self.rows = Rows()
        # Rows whose long prompts are being fed, in order of arrival. They count as free until then.
        self._refills: deque[_Refill] = deque()
        self._widths = Widths(loop, params, strategy.drafter, 1 if mixes and elastic else max_batch)
        self._state: DecodeState | None = None
        # The last check of `_narrow`: the wanted and present numbers of rows, the number of compilations, and whether
        # the program that drops rows was ready.
        self._tried = (0, 0, 0, False)
        # Rounds for which free rows have waited, see `_free`.
        self._waited = 0

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return not (self._waiting or self._refills or self.rows.busy)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a row."""
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """The number of token slots per row; 0 before the first step."""
        return self._state.capacity if self._state is not None else 0

    def add(self, index: int, request: RowRequest) -> None:
        """Adds a request, which gets a row when one is free; its `Update`s have this index."""
        self._waiting.append(Held(index, request))

    def check_memory(self, requests: Sequence[RowRequest], max_batch: int) -> None:
        """Raises ValueError if the caches of a batch do not fit into memory: the target's and the drafter's."""
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        capacity = self._feeding.capacity_for(longest + self._drafter.reach)
        dataclasses.replace(self._widths, most=min(self._widths.most, max_batch)).check(
            len(requests), self._feeding.capacity(requests), capacity
        )

    def warm_up(self, longest: int, continued: bool = False) -> None:
        """Compiles all that rows of up to `longest` tokens need; nothing runs.

        `continued`: also what a text needs that continues the only row, see `prefix`. On a mesh the programs depend on
        how their arguments are placed. There the first requests run, and only what they need is compiled.
        """
        if self.loop.mesh is not None:
            self.step(1)
            return
        example = dataclasses.replace(self.requests[0], prompt=self.requests[0].prompt[:1], start=0)
        counts = range(1, self._widths.most + 1) if self._elastic else [len(self.requests)]
        batches = sorted({self._widths.width_for(count) for count in counts})
        calls = [*self._feeding.calls(example, batches, longest, self._elastic, self._in_chunks, continued)]
        # A second thread compiles half of the long ones, and then half of the short ones, at the same time.
        calls.sort(key=lambda call: call[0] is not compiled.run_rounds)
        for (function, args, static), other in itertools.zip_longest(calls[::2], calls[1::2]):
            if other is not None:
                self._feeding.prepare(other)
            self._executables.compiled(function, *args, **static)
        for function, args, static in calls[1::2]:
            self._executables.compiled(function, *args, **static)

    def halt(self, index: int) -> None:
        """Ends a request before the next step, such as after a stop string; its row is free then."""
        for row, held in enumerate(self.rows.held):
            if held is not None and held.index == index:
                self._feeding.keep(self._state, row, int(self.rows.lengths[row]))
                self.rows.stop(row)
        for refill in self._refills:
            for row, held in refill.rows.items():
                if held is not None and held.index == index:
                    refill.rows[row] = None
        self._refills = deque(refill for refill in self._refills if refill.held)
        self._waiting = deque(held for held in self._waiting if held.index != index)
        self._feeding.forget(index)

    def end(self) -> None:
        """Takes note that all requests have ended. If more may come, the caches are freed."""
        if self._elastic:
            self._state, self.rows = None, Rows()

    def prefix(self) -> Prefix | None:
        """Returns the text of the only row as it is now, for a later text; the session can no longer run then.

        Before the first step it is the prefix given. None if a call was interrupted, or the text ended in an error.
        """
        state = self._state
        if state is None:
            return self._feeding.found(0)
        if state.tokens.is_deleted() or bool(fetched(state.broken)[0]):
            return None
        tokens = fetched(state.tokens)[0, : int(fetched(state.length)[0])]
        return Prefix(tokens, self.strategy.caches(state))

    def drafting(self, row: int) -> dict[str, Any]:
        """Returns the fields of a `Result` about the drafts of a row (`Update.row`), after the last step.

        γ is clipped to [0, 1]. With several adaptive stop rules it is the γ of the first; without one it is None.
        """
        assert self._state is not None
        nodes = jax.tree.leaves(self._state.drafter_state, is_leaf=lambda node: isinstance(node, GammaState))
        state = next((node for node in nodes if isinstance(node, GammaState)), None)
        return {
            "gamma": None if state is None else float(np.clip(fetched(state.gamma)[row], 0, 1)),
            "expected": self.strategy.expected,
            "prices": self.strategy.prices,
            "drafted_by": self.strategy.drafted_by(row),
        }

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
        return updates if updates or not self.rows.busy else self._decode(max_rounds)

    def _next(self, fed: list[RowRequest]) -> Held | None:
        """Takes the next waiting request, with the text that it continues; None if there is none.

        A request waits if its beginning is being fed for one of `fed`: it will continue from the caches of that one.
        """
        for held in self._waiting:
            if not self._feeding.waits_for(held.request, fed):
                self._waiting.remove(held)
                fed.append(held.request)
                return self._feeding.continued(dataclasses.replace(held, began=time.perf_counter()))
        return None

    def _is_long(self, held: Held) -> bool:
        """Whether a prompt is fed in chunks, between the rounds of other rows."""
        return self._in_chunks and buckets.is_long(held.request.num_fed, self.loop.platform)

    def _first(self) -> list[Held | None]:
        """Returns the requests with which the batch begins; None for a free row."""
        count = min(self._widths.most, len(self._waiting))
        asked = [held.request for held in list(self._waiting)[:count]]
        if not self._elastic:
            self._feeding.feed_shared(asked)
            rows = [self._next([]) for _ in range(count)]
            return rows + [None] * (self._widths.width_for(count) - count)
        if self._feeding.alone:
            count = 1
        else:
            count = min(
                count,
                self._widths.affordable(self._widths.width_for(count), 1, self._feeding.capacity(asked)),
            )
        # Long prompts wait for the next step, which feeds them in chunks.
        first: list[Held | None] = []
        long: list[Held] = []
        fed: list[RowRequest] = []
        while len(fed) < count and (held := self._next(fed)) is not None:
            (long if self._is_long(held) else first).append(held)
        self._waiting.extendleft(reversed(long))
        return first + [None] * (self._widths.width_for(count) - len(first))

    def _begin(self, first: list[Held | None]) -> list[Update]:
        """Feeds the prompts of the first requests, which make the batch."""
        self.rows = Rows(first)
        # A free row ends with its first token.
        example = self.requests[0]
        empty = dataclasses.replace(example, prompt=example.prompt[:1], max_new_tokens=1)
        requests = [empty if held is None else held.request for held in first]
        self._parts = self._feeding.parts(requests)
        prompts = self._feeding.prompts(requests, self._feeding.first_capacity(requests), self._parts)
        prompts = self._feeding.continuing(prompts, [None if held is None else held.index for held in first])
        function, arguments, static = prompts.call
        if (
            self.loop.mesh is None
            and not self._joins
            and any(request.max_new_tokens > 1 for request in requests)
            and not self._executables.ready(self._executables.key(function, *arguments, **static))
        ):
            # The loop is made ready in the background during the prefill.
            state, _ = self._executables.shapes(function, *arguments, **static)
            self._feeding.prepare(self.strategy.next_call(self._params, self._parts, state))
        self._state, emitted = self._executables.call(function, *arguments, **static)
        updates = self._updates(emitted, list(enumerate(range(len(first)))), begins=True)
        if self.rows.busy and not self._joins:
            # The loop is compiled before the first token is returned, so that the text continues without a pause.
            function, arguments, static = self.strategy.next_call(self._params, self._parts, self._state)
            self._executables.compiled(function, *arguments, **static)
        return updates

    def _refill(self, max_rounds: int) -> list[Update]:
        """Assigns waiting requests to free rows, and feeds the short prompts."""
        fed = [held.request for refill in self._refills for held in refill.held]
        short: dict[int, Held | None] = {}
        long: dict[int, Held | None] = {}
        for row in self._free(max_rounds):
            if (held := self._next(fed)) is None:
                break
            (long if self._is_long(held) else short)[row] = held
        for rows in self._feeding.together(long):
            prompts = self._prompts(rows)
            longest = max(held.request.num_fed for held in rows.values() if held is not None)
            num_chunks = -(-longest // prompts.static["chunk_size"])
            self._refills.append(_Refill(rows, prompts, self._feeding.call(prompts.start()), num_chunks))
        updates: list[Update] = []
        for rows in self._feeding.together(short):
            updates += self._insert(rows, *self._feeding.call(self._prompts(rows).call))
        return updates

    def _free(self, max_rounds: int) -> list[int]:
        """Returns the rows that waiting requests may take now; an elastic batch gets more if necessary."""
        taken = {row for refill in self._refills for row, held in refill.rows.items() if held is not None}
        free = [row for row, held in enumerate(self.rows.held) if held is None and row not in taken]
        # Free rows wait for others, so that one prefill serves several: fewer numbers of rows occur, and fewer programs
        # are compiled. Only on an accelerator, where a prefill of one row takes nearly as long as one of several. An
        # elastic session does not wait: that would delay first tokens.
        enough = min(len(self.rows) // REFILL_FRACTION, len(self._waiting))
        self._waited = self._waited + max_rounds if 0 < len(free) < enough else 0
        if not self._elastic and self.loop.platform != "cpu" and 0 < self._waited < REFILL_ROUNDS:
            return []
        if self._elastic and len(self._waiting) > len(free):
            before = len(self.rows)
            wanted = min(before - len(free) + len(self._waiting), self._widths.most)
            if (
                width := self._widths.affordable(self._widths.width_for(wanted), before, self.capacity)
            ) > before:
                self._resize(width)
                free += range(before, width)
        return free

    def _prompts(self, rows: dict[int, Held | None]) -> Prompts:
        """Returns the prompts of requests that refill rows; the batch grows if necessary.

        The number of requests is padded with prompts of one token, to limit the number of programs.
        """
        requests = [held.request for held in rows.values() if held is not None]
        if (needed := self._feeding.capacity(requests)) > self.capacity:
            self._state = self._feeding.grown(self._state, needed)
        count = buckets.rows_for(len(requests), len(self.rows))
        some = dataclasses.replace(requests[0], prompt=requests[0].prompt[:1], start=0)
        requests += [some] * (count - len(requests))
        prompts = self._feeding.prompts(requests, self.capacity, self._feeding.parts(requests))
        return self._feeding.continuing(
            prompts, [None if held is None else held.index for held in rows.values()]
        )

    def _feed(self) -> list[Update]:
        """Feeds some chunks of the first refill; after the last chunk its rows begin."""
        if not self._refills:
            return []
        refill = self._refills[0]
        first = refill.next_chunk
        refill.next_chunk = min(first + buckets.POLL_CHUNKS, refill.num_chunks)
        numbers = self.loop.put((np.int32(first), np.int32(refill.next_chunk)))
        refill.fed = self._feeding.call(refill.prompts.feed(refill.fed, *numbers))
        if refill.next_chunk < refill.num_chunks:
            return []
        self._refills.popleft()
        return self._insert(refill.rows, *self._feeding.call(refill.prompts.end(refill.fed)))

    def _insert(self, rows: dict[int, Held | None], others: DecodeState, emitted: Emitted) -> list[Update]:
        """Inserts the first rows of the prefilled state `others` into the batch, at the rows given."""
        others = self._feeding.grown(others, self.capacity)  # if the batch has grown since the prefill began
        for which, (row, held) in enumerate(rows.items()):
            if held is None:
                continue
            numbers = self.loop.put((np.int32(row), np.int32(which)))
            self._state = self._executables.call(
                compiled.insert, self._state, numbers[0], others, numbers[1], mesh=self.loop.mesh
            )
            self.rows.put(row, held)
        self._parts = self._feeding.parts(self.rows.requests(self.requests[0]))
        # A row that was halted may have another request by now.
        kept = [(which, row) for which, (row, held) in enumerate(rows.items()) if held is not None]
        return self._updates(emitted, kept, begins=True)

    def _decode(self, max_rounds: int) -> list[Update]:
        """Runs rounds of the rows."""
        assert self._state is not None
        longest, reach = int(self.rows.lengths.max()), self._drafter.reach
        every = *self.rows.held, *self._waiting, *(held for refill in self._refills for held in refill.held)
        unfinished = (held.request for held in every if held is not None)
        most = max(len(request.prompt) + request.max_new_tokens for request in unfinished)
        if buckets.must_grow(longest, reach, self.capacity):
            self._state = self._feeding.grown(self._state, self.capacity + 1)
        elif self.loop.mesh is None and buckets.may_grow(longest, most, reach, self.capacity):
            # The programs for the next capacity are compiled in the background.
            static = {"capacity": self._feeding.capacity_for(self.capacity + 1), "mesh": None}
            self._feeding.prepare((compiled.grow, (self._state,), static))
            larger = self._executables.shapes(compiled.grow, self._state, **static)
            self._feeding.prepare(self.strategy.next_call(self._params, self._parts, larger))
        turn = Turn(max_rounds, self.rows.halt, self.rows.remaining)
        self._state, emitted = self.strategy.rounds(self._params, self._parts, self._state, turn)
        updates = self._updates(emitted, list(enumerate(range(len(self.rows)))))
        self.strategy.learn(self.rows.remaining)
        return updates

    def _resize(self, batch: int) -> None:
        """Keeps the first `batch` rows, or adds free ones."""
        self._state = self._executables.call(compiled.resize, self._state, batch=batch, mesh=self.loop.mesh)
        self.rows.resize(batch)
        self._parts = self._feeding.parts(self.rows.requests(self.requests[0]))

    def _narrow(self) -> None:
        """Drops the free rows after the last text if they are half of the batch and no request waits.

        Only to a number of rows for which the loop is compiled already; the program that drops the rows is compiled in
        the background first, except on a mesh, whose processes must all run it in the same step.
        """
        width = self._widths.width_for(max(self.rows.num_used, 1))
        if not self._elastic or self._waiting or self._refills or 2 * width > len(self.rows):
            return
        resize: tuple[Any, ...] = compiled.resize, self._state
        static: dict[str, Any] = {"batch": width, "mesh": self.loop.mesh}
        resizes = self._executables.ready(self._executables.key(*resize, **static))
        tried = width, len(self.rows), self._executables.num_compilations, resizes
        if tried == self._tried:
            return
        self._tried = tried
        state = self._executables.shapes(*resize, **static)
        parts = self._feeding.parts(self.rows.requests(self.requests[0])[:width])
        function, rounds, its = self.strategy.next_call(self._params, parts, state)
        if not self._executables.ready(self._executables.key(function, *rounds, **its)):
            return
        if resizes or self.loop.mesh is not None:
            self._resize(width)
        else:
            self._executables.prepare(*resize, **static)

    @property
    def _joins(self) -> bool:
        """Whether waiting requests join a batch that begins with one of them, each with its own prefill call."""
        return self._elastic and self._feeding.alone and len(self._waiting) > 0

    def _updates(
        self, emitted: Emitted, rows: Sequence[tuple[int, int]], begins: bool = False
    ) -> list[Update]:
        """Reads the emitted tokens of some rows.

        `rows`: their numbers in `emitted` and in the batch; `begins`: whether the tokens come from a prefill.
        """
        host = fetched(emitted)
        updates = []
        for at, row in rows:
            self.rows.lengths[row] = host.length[at]
            held = self.rows.held[row]
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
                self._feeding.keep(self._state, row, int(self.rows.lengths[row]))
            if done:
                self.rows.held[row] = None
        return updates


def _tokens_of(host: Emitted, row: int, num_top: int) -> list[Token]:
    """Returns the new tokens of a row.

    Args:
      host: on the host.
      row: the row.
      num_top: see `RowRequest.log_probs`.
    """
    count = int(host.count[row])
    drafted = host.drafted[row, :count]
    # Each round ends with a token that was not drafted, except perhaps the last round of a text. Therefore rounds are
    # numbered backwards from the last token.
    ends = np.cumsum(~drafted[::-1])[::-1]
    rounds = host.stats.num_rounds[row] - (ends - ends[-1:])
    columns = [
        one.tolist() for one in (host.tokens[row, :count], drafted, host.proposed[row, :count], rounds)
    ]
    if num_top >= 0 and host.log_probs is not None:
        report = host.log_probs[row, :count]
        own, top, ids = np.split(report, [1, 1 + report.shape[1] // 2], axis=1)
        likeliest = zip(ids.astype(int).tolist(), top.tolist(), strict=True)
        columns += [own[:, 0].tolist(), [tuple(zip(*one, strict=True))[:num_top] for one in likeliest]]
    return [Token(*one) for one in zip(*columns, strict=True)]
