"""A batch of rows on their way through the compiled loop: begun, refilled, ended. Tokens only, no text."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import decoding
from jaxspec.decoding import DecodeState, Emitted, Parts
from jaxspec.engine import buckets, compiled
from jaxspec.engine.executables import Executables
from jaxspec.engine.jax_settings import needed
from jaxspec.engine.penalties import Settings
from jaxspec.engine.requests import RowRequest, filters_used, needs_sampling
from jaxspec.engine.results import Token
from jaxspec.engine.switching import Plan, Switching
from jaxspec.io import processes
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import fetched, put
from jaxspec.protocol import Acceptor, Drafter, Weights
from jaxspec.sampling import Greedy, Law, Sampling, seed_key
from jaxspec.stopping import GammaState


@dataclasses.dataclass
class _Refill:
    """Rows to be replaced by requests whose prompts are being fed.

    `arguments` and `static` are what `compiled.prefill` takes; `fed` is what of the prompts has been fed, up to
    chunk number `next_chunk` of `num_chunks`.
    """

    rows: dict[int, tuple[int, RowRequest]]
    arguments: tuple[Weights, Parts, decoding.Request]
    static: dict[str, Any]
    fed: Prefilling
    num_chunks: int
    next_chunk: int = 0


@dataclasses.dataclass(frozen=True)
class Update:
    """What one row gained between two host polls.

    Attributes:
      index: which request.
      row: which row of the batch holds it until the next step.
      tokens: the new tokens.
      done: whether the row has ended.
      broken: whether it did because its next logits are not finite.
      stats: counts since its prefill, NumPy scalars and a histogram int[K + 1].
    """

    index: int
    row: int
    tokens: list[Token]
    done: bool
    broken: bool
    stats: decoding.Stats


class Session:
    """Runs requests through the loop, `max_batch` rows at a time; a finished row makes room for the next.

    Args:
      executables: where compiled functions are kept.
      config: the target.
      params: all parameters.
      drafter, acceptor: the method.
      requests: the texts.
      max_batch: most rows at once.
      log_probs: whether to report them.
      mesh: where params live; None for one device.
      device: that one device.
      plan: what may draft in place of `drafter`, which then is plain decoding; None for nothing. On one device alone.
    """

    def __init__(
        self,
        executables: Executables,
        config: LlamaConfig,
        params: Weights,
        drafter: Drafter,
        acceptor: Acceptor,
        requests: Sequence[RowRequest],
        *,
        max_batch: int = 8,
        log_probs: bool = False,
        mesh: Mesh | None = None,
        device: jax.Device | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._executables = executables
        self._config, self._params, self._log_probs, self._mesh = config, params, log_probs, mesh
        self._device: Any = device if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._platform = (device or jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]).platform
        self._filters = filters_used(requests) if needs_sampling(requests) else None
        self._settings = Settings(requests)
        self._drafter, self._acceptor = self._put((drafter, acceptor))
        # The drafter for the one mask that all rows have, where there is one; whether the rows are others since.
        self._specialised: Drafter | None = None
        self._rows_changed = True
        self._num_eos = max(1, *(len(request.eos_ids) for request in requests))
        self._waiting = deque(enumerate(requests))
        # Which request each row holds; None once it has ended.
        self._rows: list[tuple[int, RowRequest] | None] = []
        # Rows whose long prompts are being fed, the first first; they count as ended until then.
        self._refills: deque[_Refill] = deque()
        self._max_batch = max_batch
        self._state: DecodeState | None = None
        self._lengths = np.zeros(0, np.int64)
        self._halt = np.zeros(0, bool)
        self._plan = plan
        self.switching: Switching | None = None

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return not (self._waiting or self._refills) and all(row is None for row in self._rows)

    @property
    def capacity(self) -> int:
        """Tokens a row has room for at present; 0 before the first step."""
        return self._state.capacity if self._state is not None else 0

    def halt(self, index: int) -> None:
        """Ends a request before the next step (a stop string was seen)."""
        for row, held in enumerate(self._rows):
            if held is not None and held[0] == index:
                self._halt[row] = True
                self._end(row)

    def gamma(self, row: int) -> float | None:
        """The adaptive γ of a row as the last step left it, cut to [0, 1]; None where the stop rule has none.

        Of several stop rules with one, the first counts. Row: `Update.row`.
        """
        assert self._state is not None
        nodes = jax.tree.leaves(self._state.drafter_state, is_leaf=lambda node: isinstance(node, GammaState))
        state = next((node for node in nodes if isinstance(node, GammaState)), None)
        return None if state is None else float(np.clip(fetched(state.gamma)[row], 0, 1))

    @needed()
    def step(self, max_rounds: int) -> list[Update]:
        """One host poll: prefills what waits and fits, else runs up to `max_rounds` rounds.

        A long prompt that comes after another text is fed in bounded chunks, between the rounds of its neighbours.
        (A drafter with a cache of its own fills that in one go, once the whole prompt is through.)
        """
        if self._state is None:
            first = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
            return self._begin(first)
        updates = self._refill() or self._feed()
        if updates or all(held is None for held in self._rows):
            return updates
        return self._decode(max_rounds)

    def _begin(self, first: list[tuple[int, RowRequest]]) -> list[Update]:
        self._rows = list(first)
        self._lengths = np.zeros(len(first), np.int64)
        self._halt = np.zeros(len(first), bool)
        requests = [request for _, request in first]
        self._parts = self._parts_of(requests)
        if self._plan is not None:
            self.switching = Switching(
                self._plan,
                *(self._executables, self._config, self._log_probs, self._device, self._platform),
                batch=len(first),
            )
        capacity = buckets.start_capacity(requests, self._drafter.reach)
        arguments, static = self._prefill_arguments(requests, capacity, self._parts)
        if (
            self._mesh is None
            and any(request.max_new_tokens > 1 for request in requests)
            and not self._executables.ready(self._executables.key(compiled.prefill, *arguments, **static))
        ):
            # It traces the prefill, which takes some milliseconds of each first token.
            state, _ = compiled.prefill.eval_shape(*arguments, **static)
            self._prepare_rounds(state)  # beside the prefill
        began, blocked_ms = time.perf_counter(), self._executables.blocked_ms
        begun = None if self.switching is None else self.switching.begin(*arguments, static)
        if begun is None:
            begun = self._executables.call(compiled.prefill, *arguments, **static)
        self._state, emitted = begun
        updates = self._updates(emitted, range(len(first)), begins=True)
        if self.switching is not None and self._executables.blocked_ms == blocked_ms:
            took_ms = 1e3 * (time.perf_counter() - began)
            self.switching.prefilled(sum(len(request.prompt) for request in requests), took_ms)
        if any(row is not None for row in self._rows):
            # The loop is there before anybody sees a first token: a text that has begun goes on.
            self._executables.compiled(
                compiled.run_rounds, *self._rounds_arguments(0), **self._rounds_static()
            )
        return updates

    def _refill(self) -> list[Update]:
        """Gives the free rows to requests that wait: short prompts are prefilled at once, all in one call."""
        taken = {row for refill in self._refills for row in refill.rows}
        free = [row for row, held in enumerate(self._rows) if held is None and row not in taken]
        given = {row: self._waiting.popleft() for row in free[: len(self._waiting)]}
        short: dict[int, tuple[int, RowRequest]] = {}
        long: dict[int, tuple[int, RowRequest]] = {}
        for row, held in given.items():
            (long if buckets.is_long(held[1], self._platform) else short)[row] = held
        if long:
            arguments, static = self._refill_arguments(long)
            names = ("config", "merged", "mesh")
            fed = self._executables.call(
                compiled.start_prefill,
                arguments[0],
                arguments[2],
                decoding.tapped_drafter(arguments[1]),
                **{name: static[name] for name in names},
            )
            longest = max(len(request.prompt) for _, request in long.values())
            self._refills.append(_Refill(long, arguments, static, fed, -(-longest // static["chunk_size"])))
        if not short:
            return []
        arguments, static = self._refill_arguments(short)
        return self._insert(short, *self._executables.call(compiled.prefill, *arguments, **static))

    def _feed(self) -> list[Update]:
        """Feeds some chunks of the long prompts that came first; with the last of them their rows begin."""
        if not self._refills:
            return []
        refill = self._refills[0]
        params, parts, request = refill.arguments
        shared = {name: refill.static[name] for name in ("config", "chunk_size", "mesh")}
        first = refill.next_chunk
        refill.next_chunk = min(first + buckets.POLL_CHUNKS, refill.num_chunks)
        numbers = self._put((np.int32(first), np.int32(refill.next_chunk)))
        tapped = decoding.tapped_drafter(parts)
        refill.fed = self._executables.call(
            compiled.feed, params, request, refill.fed, *numbers, tapped, **shared
        )
        if refill.next_chunk < refill.num_chunks:
            return []
        self._refills.popleft()
        fed = dataclasses.replace(refill.fed, cache=None, absorbed=None)
        arguments = (params, parts, request, fed, refill.fed.cache, refill.fed.absorbed)
        return self._insert(
            refill.rows,
            *self._executables.call(compiled.end_prefill, *arguments, **shared, log_probs=self._log_probs),
        )

    def _refill_arguments(
        self, rows: dict[int, tuple[int, RowRequest]]
    ) -> tuple[tuple[Weights, Parts, decoding.Request], dict[str, Any]]:
        """What `compiled.prefill` takes for requests that take rows over, in a capacity in which they fit.

        Their number is rounded up to a power of two, so that few programs serve all: the first one stands in.
        """
        requests = [request for _, request in rows.values()]
        needed = buckets.start_capacity(requests, self._drafter.reach)
        if needed > self.capacity:
            self._grow(needed)
        count = min(buckets.bucket(len(requests), 1), len(self._rows))
        requests += requests[:1] * (count - len(requests))
        return self._prefill_arguments(requests, self.capacity, self._parts_of(requests))

    def _insert(
        self, rows: dict[int, tuple[int, RowRequest]], others: DecodeState, emitted: Emitted
    ) -> list[Update]:
        """Puts the first rows of `others`, which have been prefilled, into these rows."""
        if others.capacity < self.capacity:  # the batch has grown since
            others = self._executables.call(compiled.grow, others, capacity=self.capacity, mesh=self._mesh)
        for which, (row, held) in enumerate(rows.items()):
            numbers = self._put((np.int32(row), np.int32(which)))
            self._state = self._executables.call(
                compiled.insert, self._state, numbers[0], others, numbers[1], mesh=self._mesh
            )
            self._rows[row] = held
            self._halt[row] = False
        # A row that has ended keeps some law: whatever it draws is thrown away.
        some = next(iter(rows.values()))
        self._parts = self._parts_of([(held or some)[1] for held in self._rows])
        self._rows_changed = True
        if self.switching is not None:
            self.switching.forget()
        return self._updates(emitted, list(rows), begins=True)

    def _decode(self, max_rounds: int) -> list[Update]:
        assert self._state is not None
        longest, reach = int(self._lengths.max()), self._drafter.reach
        if buckets.must_grow(longest, reach, self.capacity):
            self._grow(2 * self.capacity)
        elif self._mesh is None and buckets.may_grow(longest, self._unfinished(), reach, self.capacity):
            self._prepare_next()
        if self.switching is not None:
            return self._take_turn(self.switching, max_rounds)
        arguments, static, variant = self._rounds_arguments(max_rounds), self._rounds_static(), None
        # When a program is compiled in the background is another matter in each of several processes.
        if self._rows_changed and self._drafter.static and not processes.spans_processes(self._mesh):
            self._specialise()
        if self._specialised is not None:
            params, parts, *rest = arguments
            special = (params, dataclasses.replace(parts, drafter=self._specialised), *rest)
            variant = self._executables.variant(compiled.run_rounds, *special, **static)
        if variant is not None:
            self._state, emitted = variant(*special)
        else:
            self._state, emitted = self._executables.call(compiled.run_rounds, *arguments, **static)
        return self._updates(emitted, range(len(self._rows)))

    def _take_turn(self, switching: Switching, max_rounds: int) -> list[Update]:
        """Runs rounds of what drafts next."""
        assert self._state is not None
        lengths, rows = self._lengths.copy(), list(self._rows)
        limits = [len(held[1].prompt) + held[1].max_new_tokens if held else 0 for held in rows]
        remaining = np.maximum(np.array(limits) - lengths, 0)
        blocked_ms = self._executables.blocked_ms
        params, parts, state, most = switching.next(
            self._params, self._parts, self._state, lengths, remaining, max_rounds
        )
        began = time.perf_counter()
        static = compiled.rounds_static(self._config, parts.drafter, self._log_probs, None)
        numbers = self._put((np.int32(most), self._halt))
        state, emitted = self._executables.call(compiled.run_rounds, params, parts, state, *numbers, **static)
        updates = self._updates(emitted, range(len(rows)))
        took_ms = 1e3 * (time.perf_counter() - began)
        gained: list[list[Token]] = [[] for _ in rows]
        for update in updates:
            gained[update.row] = update.tokens
        blocked = self._executables.blocked_ms > blocked_ms
        self._state = switching.learn(state, gained, lengths, took_ms, blocked)
        return updates

    def _specialise(self) -> None:
        """Finds out whether all rows have one mask."""
        assert self._state is not None
        self._rows_changed = False
        live = jnp.array([held is not None for held in self._rows])
        plans = np.asarray(self._drafter.plans(self._state.drafter_state, live))[np.asarray(live)]
        alike = len(plans) > 0 and bool((plans == plans[0]).all())
        self._specialised = self._drafter.specialised(LayerPlan.of(plans[0])) if alike else None

    def _end(self, row: int) -> None:
        """Frees a row."""
        self._rows[row] = None
        self._rows_changed = True

    def _prefill_arguments(
        self, requests: list[RowRequest], capacity: int, parts: Parts
    ) -> tuple[tuple[Weights, Parts, decoding.Request], dict[str, Any]]:
        """What `compiled.prefill` takes, traced and static."""
        batch = len(requests)
        longest = max(len(request.prompt) for request in requests)
        tokens = np.zeros((batch, capacity), np.int32)
        eos_ids = np.full((batch, self._num_eos), -1, np.int32)
        for row, request in enumerate(requests):
            tokens[row, : len(request.prompt)] = request.prompt
            eos_ids[row, : len(request.eos_ids)] = request.eos_ids
        length = np.array([len(request.prompt) for request in requests], np.int32)
        budget = np.array([request.max_new_tokens for request in requests], np.int32)
        keys = [jax.random.fold_in(seed_key(request.seed), request.stream) for request in requests]
        arrays = {
            "tokens": tokens,
            "length": length,
            "limit": length + budget,
            "eos_ids": eos_ids,
            "keys": jnp.stack(keys),
        }
        static = compiled.prefill_static(
            self._config, longest, capacity, self._platform, self._log_probs, self._mesh
        )
        return (self._params, parts, decoding.Request(**self._put(arrays))), static

    def _grow(self, capacity: int) -> None:
        self._state = self._executables.call(compiled.grow, self._state, capacity=capacity, mesh=self._mesh)
        if self.switching is not None:
            self.switching.forget()

    def _unfinished(self) -> list[RowRequest]:
        return [
            held[1]
            for held in (*self._rows, *self._waiting, *(h for r in self._refills for h in r.rows.values()))
            if held is not None
        ]

    def _prepare_next(self) -> None:
        """Compiles the next bucket's executables in the background."""
        state = self._state
        assert state is not None
        capacity = 2 * state.capacity
        larger = jax.eval_shape(functools.partial(decoding.grow, capacity=capacity), state)
        self._executables.prepare(compiled.grow, state, capacity=capacity, mesh=None)
        self._prepare_rounds(larger)

    def _prepare_rounds(self, state: Any) -> None:
        """Compiles the loop in the background for a state of such shapes."""
        scalar, halt = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(self._halt.shape, bool)
        self._executables.prepare(
            compiled.run_rounds, self._params, self._parts, state, scalar, halt, **self._rounds_static()
        )

    def _rounds_arguments(self, max_rounds: int) -> tuple[Any, ...]:
        """What `compiled.run_rounds` takes, traced."""
        limits = self._put((np.int32(max_rounds), self._halt))
        return (self._params, self._parts, self._state, *limits)

    def _rounds_static(self) -> dict[str, Any]:
        return compiled.rounds_static(self._config, self._drafter, self._log_probs, self._mesh)

    def _parts_of(self, requests: Sequence[RowRequest]) -> Parts:
        law, penalties = self._put((law_of(requests, self._filters), self._settings.of(requests)))
        return Parts(
            self._drafter, self._acceptor, law, one_width=self._platform != "cpu", penalties=penalties
        )

    def _put(self, tree: Any) -> Any:
        return put(tree, self._device)

    def _updates(self, emitted: Emitted, rows: Sequence[int], begins: bool = False) -> list[Update]:
        """What rows gained; `begins`: by their prefills."""
        host = fetched(emitted)
        self._lengths[list(rows)] = host.length[: len(rows)]
        updates = []
        for at, row in enumerate(rows):
            held = self._rows[row]
            if held is None:
                continue
            stats = jax.tree.map(lambda leaf, at=at: leaf[at], host.stats)
            tokens = _tokens_of(host, at)
            if self.switching is not None and begins:
                self.switching.begin_row(row, [*held[1].prompt, *(token.id for token in tokens)])
            done, broken = bool(host.done[at]), bool(host.broken[at])
            updates.append(Update(held[0], row, tokens, done, broken, stats))
            if done:
                self._end(row)
        return updates


def law_of(requests: Sequence[RowRequest], filters: Sequence[str] | None) -> Law:
    """The law of a batch, from the numbers named in `filters` (see `filters_used`); None for greedy texts alone."""
    if filters is None:
        return Greedy()
    numbers: dict[str, Any] = {
        name: np.array([getattr(r, name) for r in requests], np.int32 if name == "top_k" else np.float32)
        for name in filters
    }
    return Sampling(**numbers)


def _tokens_of(host: Emitted, row: int) -> list[Token]:
    """What a row gained, from what a call emitted, on the host."""
    count = int(host.count[row])
    drafted = host.drafted[row, :count]
    # Every round but perhaps a text's last ends with a token that is no draft: the rounds are counted from the last.
    ends = np.cumsum(~drafted[::-1])[::-1]
    rounds = host.stats.num_rounds[row] - (ends - ends[-1:])
    log_probs = [None] * count if host.log_probs is None else host.log_probs[row, :count].tolist()
    columns = host.tokens[row, :count], drafted, host.proposed[row, :count], rounds
    return [Token(*one) for one in zip(*(column.tolist() for column in columns), log_probs, strict=True)]
