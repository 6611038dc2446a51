"""Copies kept prefixes into the rows of a batch, and keeps the caches of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.decoding import Caches, Request
from jaxspec.programs import buckets, compiled
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Drafter, Weights
from jaxspec.session.prefix import Owner, Prefix, PrefixStore, num_common, shared_beginning


class Reuse:
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
        self._owner = Owner.of(drafter, params.drafter)
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
