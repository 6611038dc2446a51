"""How prompts come into the caches of rows: the calls of the compiled loop, and copies of kept prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.decoding import Caches, DecodeState, Parts, Request
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import fetched
from jaxspec.programs import buckets, compiled
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Acceptor, Drafter, Weights
from jaxspec.requests.grammar_tables import tables_on
from jaxspec.requests.reading import RowRequest
from jaxspec.requests.row_settings import Shapes, distribution_of
from jaxspec.sampling import seed_key
from jaxspec.session.batch_rows import Held
from jaxspec.session.prefix import Owner, Prefix, PrefixStore, num_common, shared_beginning
from jaxspec.session.strategies import Strategy


class Prompts:
    """The prompts of some requests in one call of `compiled.prefill`, whole or in chunks.

    Args:
      loop: the compiled loop.
      arguments, static: the arguments of `compiled.prefill`.
    """

    def __init__(self, loop: Loop, arguments: tuple[Any, ...], static: dict[str, Any]) -> None:
        self.loop, self.arguments, self.static = loop, arguments, static

    @property
    def call(self) -> Call:
        """The call that feeds the prompts whole."""
        return compiled.prefill, self.arguments, self.static

    def start(self) -> Call:
        """Returns the call that begins to feed them in chunks."""
        params, parts, request, *caches = self.arguments
        arguments = params, request, decoding.aux_drafter_of(parts), *caches
        return compiled.start_prefill, arguments, self._static("config", "merged", "mesh")

    def feed(self, fed: Prefilling, first: Any, stop: Any) -> Call:
        """Returns the call that feeds the chunks from `first` to before `stop`."""
        params, parts, request = self.arguments[:3]
        arguments = params, request, fed, first, stop, decoding.aux_drafter_of(parts)
        return compiled.feed, arguments, self._static("config", "chunk_size", "mesh")

    def end(self, fed: Prefilling) -> Call:
        """Returns the call after the last chunk."""
        rest = dataclasses.replace(fed, cache=None, absorbed=None)
        arguments = *self.arguments[:3], rest, fed.cache, fed.absorbed
        return compiled.end_prefill, arguments, self._static("config", "chunk_size", "mesh")

    def _static(self, *names: str) -> dict[str, Any]:
        return {name: self.static[name] for name in names}


class Feeding:
    """Makes the calls of the loop for the requests of one session.

    Args:
      loop: the compiled loop.
      params: the parameters of the target and of the drafter.
      strategy: decides which drafter drafts.
      acceptor: accepts drafts.
      shapes: of the requests.
      prefix: a text from which request 0 continues, whose caches are used up; None for none.
      prefixes: keeps caches of texts, from which requests continue; None for none.
    """

    def __init__(
        self,
        loop: Loop,
        params: Weights,
        strategy: Strategy,
        acceptor: Acceptor,
        shapes: Shapes,
        prefix: Prefix | None,
        prefixes: PrefixStore | None,
    ) -> None:
        self._loop, self._params, self._strategy, self._shapes = loop, params, strategy, shapes
        self._drafter, self._acceptor = strategy.drafter, loop.put(acceptor)
        self._reuse = None if prefixes is None else _Reuse(prefixes, loop, params, strategy.drafter)
        # The texts from which requests continue, by index, until their prefill begins.
        self._found: dict[int, Prefix] = {} if prefix is None else {0: prefix}

    @property
    def most_slots(self) -> int:
        """The slots that the longest text needs."""
        most: int = self._loop.config.context_length + self._drafter.reach
        return most

    @property
    def alone(self) -> bool:
        """Whether each prompt that joins a batch has its own prefill call.

        On a CPU, where every position costs time, so that no prompt is padded to another.
        """
        return self._loop.platform == "cpu" and self._loop.mesh is None

    def together(self, rows: dict[int, Held | None]) -> list[dict[int, Held | None]]:
        """Returns requests, by their row, in groups of which each has one prefill call."""
        if self.alone:
            return [{row: held} for row, held in rows.items()]
        return [rows] if rows else []

    def call(self, call: Call) -> Any:
        """Runs a call."""
        function, arguments, static = call
        return self._loop.executables.call(function, *arguments, **static)

    def prepare(self, call: Call) -> None:
        """Compiles a call in the background."""
        function, arguments, static = call
        self._loop.executables.prepare(function, *arguments, **static)

    def capacity(self, requests: Sequence[RowRequest]) -> int:
        """Returns the initial capacity of a batch, for its prompts and a round."""
        return self.capacity_for(max(len(one.prompt) for one in requests) + 1 + self._drafter.reach)

    def first_capacity(self, requests: Sequence[RowRequest]) -> int:
        """Returns the capacity with which a batch begins, at least that of the caches that it uses up."""
        used_up = [prefix.caches.cache.capacity for prefix in self._found.values() if not prefix.kept]
        return max([self.capacity(requests), *used_up])

    def capacity_for(self, size: int) -> int:
        """Returns the capacity for rows of `size` tokens."""
        return buckets.capacity_for(size, self.most_slots, self._loop.platform)

    def grown(self, state: Any, needed: int) -> Any:
        """Returns a state that has grown by whole steps, for which there are programs, to the capacity needed."""
        while (capacity := state.capacity) < needed:
            state = self.call((compiled.grow, (state,), self._grow_static(self.capacity_for(capacity + 1))))
        return state

    def parts(self, requests: Sequence[RowRequest]) -> Parts:
        """Returns the settings of the loop for these requests, a row each."""
        reported = np.array([min(one.log_probs + 1, 2) for one in requests], np.int32)
        distribution, penalties, log_probs = self._loop.put(
            (distribution_of(requests), self._shapes.penalties(requests), reported)
        )
        grammar = tables_on(self._loop.place, self._loop.config.vocab_size).pack(requests)
        penalties = dataclasses.replace(penalties, grammar=grammar)
        return Parts(
            self._drafter,
            self._acceptor,
            distribution,
            one_width=self._loop.platform != "cpu",
            penalties=penalties,
            log_probs=log_probs,
        )

    def prompts(self, requests: Sequence[RowRequest], capacity: int, parts: Parts) -> Prompts:
        """Returns the prompts of requests, a row each, without the caches from which they continue."""
        tokens = np.zeros((len(requests), capacity), np.int32)
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
        arguments = self._params, parts, Request(**self._loop.put(arrays))
        return Prompts(self._loop, arguments, self._loop.prefill_static(capacity))

    def continuing(self, prompts: Prompts, indices: Sequence[int | None]) -> Prompts:
        """Returns prompts with the caches from which their rows continue; `indices`: of the requests.

        With a store, empty ones are included too, so that there is only one program.
        """
        request = prompts.arguments[2]
        found = [None if index is None else self._found.pop(index, None) for index in indices]
        used_up = next((prefix.caches for prefix in found if prefix is not None and not prefix.kept), None)
        if used_up is not None:
            capacity = request.tokens.shape[1]
            if capacity > used_up.cache.capacity:
                used_up = self.call((compiled.grow, (used_up,), self._grow_static(capacity)))
            caches: tuple[Caches, ...] = (used_up,)
        else:
            caches = () if self._reuse is None else (self._reuse.caches(found, request),)
        return Prompts(self._loop, (*prompts.arguments, *caches), prompts.static)

    def continued(self, held: Held) -> Held:
        """Returns a request with the position from which it has to be fed, and notes the text that it continues."""
        if self._reuse is None or held.index in self._found:
            return held
        prefix, start = self._reuse.find(held.request.prompt)
        if prefix is not None:
            self._found[held.index] = prefix
        return dataclasses.replace(held, request=dataclasses.replace(held.request, start=start))

    def forget(self, index: int) -> None:
        """Takes note that a request has ended before it got a row."""
        self._found.pop(index, None)

    def found(self, index: int) -> Prefix | None:
        """Returns the text from which a request will continue; None once its prefill has begun."""
        return self._found.get(index)

    def waits_for(self, request: RowRequest, fed: Sequence[RowRequest]) -> bool:
        """Whether the beginning of a request is being fed for one of `fed`, from whose caches it will continue."""
        if self._reuse is None or not fed:
            return False
        return self._reuse.is_being_fed(request.prompt, [other.prompt for other in fed])

    def feed_shared(self, requests: Sequence[RowRequest]) -> None:
        """Feeds tokens with which several prompts begin once, in a row of their own, and keeps the caches."""
        while self._reuse is not None:
            tokens = self._reuse.shared([request.prompt for request in requests])
            if tokens is None:
                return
            alone = dataclasses.replace(requests[0], prompt=tuple(tokens), max_new_tokens=1)
            alone = self.continued(Held(-1, alone)).request
            prompts = self.prompts([alone], self.capacity([alone]), self.parts([alone]))
            state, _ = self.call(self.continuing(prompts, [-1]).call)
            caches = Caches(state.cache, self._drafter.absorbed(state.drafter_state))
            self._reuse.keep(0, np.array([*tokens, -1]), caches)

    def keep(self, state: DecodeState | None, row: int, length: int) -> None:
        """Keeps the caches of a row with `length` tokens for later texts; `state`: None before the first prefill."""
        if self._reuse is not None and state is not None:
            self._reuse.keep(row, fetched(state.tokens)[row, :length], self._strategy.caches(state))

    def calls(
        self,
        example: RowRequest,
        batches: Sequence[int],
        longest: int,
        elastic: bool,
        in_chunks: bool,
        continued: bool,
    ) -> Iterator[Call]:
        """Yields the calls for rows of up to `longest` tokens with shapes in place of states, the smallest first.

        Args:
          example: a request with a prompt of one token.
          batches: the numbers of rows, rising.
          longest: the most tokens of a row.
          elastic: whether the number of rows changes.
          in_chunks: whether long prompts are fed in chunks.
          continued: also what a text needs that continues the only row.
        """
        shapes, static = self._loop.executables.shapes, {"mesh": self._loop.mesh}
        number = jax.ShapeDtypeStruct((), jnp.int32)
        capacity = self.capacity([example])
        while True:
            states: dict[int, Any] = {}
            for batch in batches:
                parts = self.parts([example] * batch)
                prompts = self.prompts([example] * batch, capacity, parts)
                if self._reuse is not None:
                    function, its, fixed = empty = self._reuse.empty(prompts.arguments[2])
                    yield empty
                    caches = shapes(function, *its, **fixed)
                    prompts = Prompts(self._loop, (*prompts.arguments, caches), prompts.static)
                if batch == batches[0] or not self.alone:
                    yield from self._prefills(prompts, chunks=elastic and in_chunks)
                    states[batch], _ = shapes(compiled.prefill, *prompts.arguments, **prompts.static)
                else:
                    states[batch] = shapes(compiled.resize, states[1], batch=batch, **static)
                yield self._loop.rounds_of(self._params, parts, states[batch])
            for batch, state in states.items() if elastic else ():
                for other in batches:
                    if other != batch:
                        yield compiled.resize, (state,), {"batch": other, **static}
                    if other == 1 or (other <= batch and not self.alone):
                        yield compiled.insert, (state, number, states[other], number), static
            if continued:
                later = self.prompts([dataclasses.replace(example, start=1)], capacity, parts)
                caches = jax.eval_shape(self._strategy.caches, states[batches[0]])
                yield compiled.prefill, (*later.arguments, caches), later.static
            if not buckets.must_grow(longest, self._drafter.reach, capacity):
                return
            capacity = self.capacity_for(capacity + 1)
            for state in states.values():
                yield compiled.grow, (state,), self._grow_static(capacity)

    def _prefills(self, prompts: Prompts, chunks: bool) -> Iterator[Call]:
        """Yields the calls that feed prompts whole and, where a prompt may be long, in chunks."""
        yield prompts.call
        chunk_size, capacity = prompts.static["chunk_size"], prompts.arguments[2].tokens.shape[1]
        if chunks and capacity > buckets.POLL_CHUNKS * chunk_size:
            number = jax.ShapeDtypeStruct((), jnp.int32)
            function, arguments, static = start = prompts.start()
            yield start
            fed = self._loop.executables.shapes(function, *arguments, **static)
            yield from (prompts.feed(fed, number, number), prompts.end(fed))

    def _grow_static(self, capacity: int) -> dict[str, Any]:
        return {"capacity": capacity, "mesh": self._loop.mesh}


class _Reuse:
    """The use that the batch of one session makes of a store.

    Args:
      store: the kept texts.
      loop: the compiled loop of the target.
      params: the parameters of the target and of the drafter.
      drafter: the drafter with which prompts are prefilled.
    """

    def __init__(self, store: PrefixStore, loop: Loop, params: Weights, drafter: Drafter) -> None:
        self._store, self._loop, self._executables = store, loop, loop.executables
        self._params, self._drafter = params, drafter
        self._owner = Owner.of_drafter(drafter, params.drafter)
        # The bytes of the caches of a row, by capacity.
        self._sizes: dict[int, int] = {}

    def find(self, prompt: Sequence[int]) -> tuple[Prefix | None, int]:
        """Returns the text that a prompt continues, and the position from which it has to be fed."""
        return self._store.find(prompt, self._drafter, self._owner, self._loop.config)

    def is_being_fed(self, prompt: Sequence[int], fed: Sequence[Sequence[int]]) -> bool:
        """Whether a prompt shares enough tokens, which no kept text has, with prompts whose caches will be kept."""
        common = max((num_common(prompt, other) for other in fed), default=0)
        return self._wants(prompt[:common])

    def shared(self, prompts: Sequence[Sequence[int]]) -> Sequence[int] | None:
        """Returns tokens with which several prompts begin and that are worth to be fed once; None without such."""
        held = [self.find(prompt)[1] for prompt in prompts]
        found = shared_beginning(prompts, held, self._store.min_tokens)
        tokens = None if found is None else prompts[found[0]][: found[1]]
        return tokens if tokens is not None and self._wants(tokens) else None

    def caches(self, found: Sequence[Prefix | None], request: Request) -> Caches:
        """Returns the caches from which a prefill continues, with a copy of the text found for each of its rows."""
        function, (params, drafter, _), static = self.empty(request)
        caches: Caches = self._executables.call(function, params, drafter, request.length, **static)
        for row, prefix in enumerate(found):
            if prefix is not None:
                # Without the drafter's caches, only those of the target are copied.
                whole = prefix.caches.absorbed is not None
                rows = caches if whole else Caches(caches.cache)
                numbers = self._loop.put((np.int32(row), np.int32(0)))
                arguments = rows, numbers[0], prefix.caches, numbers[1]
                rows = self._executables.call(compiled.insert, *arguments, mesh=self._loop.mesh)
                caches = rows if whole else dataclasses.replace(caches, cache=rows.cache)
        return caches

    def empty(self, request: Request) -> Call:
        """Returns the call that makes empty caches for the rows of a prefill."""
        return compiled.empty_caches, *self._loop.empty_caches(
            self._params, self._drafter, *request.tokens.shape
        )

    def keep(self, row: int, tokens: np.ndarray, caches: Caches) -> None:
        """Keeps the caches of a row, which hold all `tokens` but the last, unless a kept text has nearly as many."""
        if not self._wants(tokens):
            return
        if self._owner is None:  # method auto has caches of several drafters
            caches = Caches(caches.cache)
        slots = min(buckets.bucket(len(tokens) - 1), caches.cache.capacity)
        number = self._loop.put(np.int32(row))
        kept = self._executables.call(compiled.take, caches, number, slots=slots, mesh=self._loop.mesh)
        self._store.add(Prefix(tokens, kept, owner=self._owner))

    def _wants(self, tokens: Sequence[int] | np.ndarray) -> bool:
        capacity = buckets.bucket(len(tokens))
        if capacity not in self._sizes:
            self._sizes[capacity] = self._loop.row_bytes(self._params, self._drafter, capacity)
        return self._store.wants(tokens, self._owner, self._sizes[capacity])
