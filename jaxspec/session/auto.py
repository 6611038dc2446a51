"""Method `auto` in the engine: its candidates, what earlier texts have shown, and the first text of a process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.costs.expectations import remembered
from jaxspec.costs.prices import expected_speedups
from jaxspec.decoding import Caches, DecodeState, Emitted, Parts, Request
from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.drafting.choosing_drafter import Choosing
from jaxspec.io.methods import auto_file
from jaxspec.model.sharding import fetched
from jaxspec.programs import compiled
from jaxspec.programs.compiled import Loop
from jaxspec.programs.executables import Call
from jaxspec.protocol import Drafter, Weights
from jaxspec.session.strategies import Always, Turn
from jaxspec.texts.results import Expected


class Learnt:
    """What texts of one model show of the candidates' drafts: the part that this process uses, and what it adds.

    Args:
      key: what the counts belong to.
      keeps: whether they are kept for the next process.

    Attributes:
      before: the counts of earlier processes, float[K, 2] by candidate, see `io.methods.auto_file`; they never change.
    """

    def __init__(self, key: dict[str, Any], keeps: bool) -> None:
        self._key, self._keeps = key, keeps
        self.before = auto_file.read(key) if keeps else {}
        self._seen, self._changed = dict(self.before), False

    def add(self, names: Sequence[str | None], seen: np.ndarray) -> None:
        """Adds the counts of a text, int[C, K, 2]; those of a candidate with the name None are left out."""
        for name, counts in zip(names, seen, strict=True):
            if name is not None and counts.any():
                self._seen[name], self._changed = remembered(self._seen.get(name), counts), True

    def keep(self) -> None:
        """Keeps the counts for the next process, if there are new ones."""
        if self._keeps and self._changed:
            auto_file.write(self._key, self._seen)
            self._changed = False


@dataclasses.dataclass(frozen=True)
class Auto:
    """The drafter of `auto` for texts of one kind.

    Attributes:
      drafter, params: the result of the method's `build`.
      names: the names of its candidates.
      learns: the names by which their counts are kept; None for a candidate that the model does not offer by itself,
        because another head, draft or option can have the same name.
      learnt: receives the counts of texts.
    """

    drafter: Drafter
    params: Any
    names: tuple[str, ...]
    learns: tuple[str | None, ...]
    learnt: Learnt


class Chosen(Always):
    """The strategy of `auto`: one drafter, which chooses among its candidates in each round.

    Args:
      loop: the compiled loop.
      auto: the drafter, with candidates.
      explain: whether `expected` and `prices` are reported.
    """

    name = "auto"

    def __init__(self, loop: Loop, auto: Auto, explain: bool) -> None:
        super().__init__(loop, auto.drafter)
        self._auto, self._explain = auto, explain
        # Each row has the counts `seen` and `used` of a `ChoiceState`.
        self._seen: np.ndarray | None = None
        self._used: np.ndarray | None = None
        self._after: Any = None

    @functools.cached_property
    def expected(self) -> tuple[Expected, ...]:
        """The expectations of the candidates, the fastest first."""
        drafter = self._auto.drafter
        if not self._explain or not isinstance(drafter, Choosing):
            return ()
        return expectations(drafter, self._auto.names)

    @functools.cached_property
    def prices(self) -> dict[str, Any] | None:
        """The candidates, the widths of verification, and the prices, as JSON values."""
        drafter = self._auto.drafter
        if not self._explain or not isinstance(drafter, Choosing):
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
        return f"auto: {', '.join(parts) if parts else 'plain decoding'}"

    def begin_row(self, row: int) -> None:
        self._take(row)

    def resized(self, batch: int) -> None:
        for row in range(batch, 0 if self._seen is None else len(self._seen)):
            self._take(row)

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        state, emitted = super().rounds(params, parts, state, turn)
        self._after = state.drafter_state
        return state, emitted

    def learn(self) -> None:
        # The state is donated to the next call.
        seen, used = fetched((self._after.rule.seen, self._after.rule.used))
        self._seen, self._used, self._after = np.array(seen), np.array(used), None

    def end(self) -> None:
        for row in range(0 if self._seen is None else len(self._seen)):
            self._take(row)
        self._auto.learnt.keep()

    def _take(self, row: int) -> None:
        """Adds the counts of the text that a row had."""
        if self._seen is not None and self._used is not None and row < len(self._seen):
            self._auto.learnt.add(self._auto.learns, self._seen[row])
            self._seen[row] = self._used[row] = 0


class Awaited(Chosen):
    """The strategy of a text that begins before the programs of `auto` are compiled.

    Plain decoding runs while they are compiled in the background, from the first token on: before it, the compiler
    works for plain decoding alone. The drafter takes over once, if the text has not needed more capacity by then. The
    text is the same, because drafts do not change it with the acceptors for which this strategy is used.
    """

    def __init__(self, loop: Loop, auto: Auto, explain: bool) -> None:
        super().__init__(loop, auto, explain)
        self._plain = loop.put(Autoregressive(auto.drafter.num_draft_tokens, auto.drafter.reach))
        self._waits, self._grown = False, False
        self._keys: list[Any] = []
        self._wanted: Callable[[], list[Call]] | None = None

    def drafted_by(self, row: int) -> str:
        if self._waits and self._wanted is None:
            return "auto: plain decoding, its program is being compiled once for this model"
        return super().drafted_by(row)

    def begin(self, params: Weights, parts: Parts, request: Request, *caches: Caches, **static: Any) -> None:
        executables = self._loop.executables
        key = executables.key(compiled.prefill, params, parts, request, *caches, **static)
        if (
            caches
            or executables.ready(key)
            or executables.failed  # the error is then the caller's
            or executables.is_stored(compiled.prefill, params, parts, request, **static)
        ):
            return
        self._waits = True
        described: tuple[Weights, Parts, Request] = _shapes((params, parts, request))
        self._wanted = functools.partial(self._describe, *described, static)

    def running(self, params: Weights, parts: Parts) -> tuple[Weights, Parts]:
        if not self._waits:
            return params, parts
        return Weights(params.target), dataclasses.replace(parts, drafter=self._plain)

    def _describe(
        self, params: Weights, parts: Parts, request: Request, static: dict[str, Any]
    ) -> list[Call]:
        """Returns the calls to compile: rounds, the take-over, and the prefill of the next process."""
        state, _ = self._loop.executables.shapes(compiled.prefill, params, parts, request, **static)
        plain = dataclasses.replace(state, drafter_state=())
        calls: list[Call] = [
            self._loop.rounds_of(params, parts, state),
            (compiled.catch_up, (params, parts, plain), self._catch_up_static(state.capacity)),
        ]
        self._keys = [self._loop.executables.key(function, *args, **its) for function, args, its in calls]
        return [*calls, (compiled.prefill, (params, parts, request), static)]

    def _catch_up_static(self, capacity: int) -> dict[str, Any]:
        static = self._loop.prefill_static(capacity)
        return {name: static[name] for name in ("config", "chunk_size")}

    def caches(self, state: DecodeState) -> Caches:
        return Caches(state.cache) if self._waits else super().caches(state)

    def changed(self) -> None:
        self._grown = True

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, turn: Turn
    ) -> tuple[DecodeState, Emitted]:
        executables = self._loop.executables
        if self._wanted is not None:
            executables.later(self._wanted, what="the program of auto, once for this model")
            self._wanted = None
        if self._waits and not self._grown and self._keys and all(map(executables.ready, self._keys)):
            own = executables.call(
                compiled.catch_up, params, parts, state, **self._catch_up_static(state.capacity)
            )
            state, self._waits = dataclasses.replace(state, drafter_state=own), False
        return super().rounds(params, parts, state, turn)

    def learn(self) -> None:
        if not self._waits:
            super().learn()


def expectations(drafter: Choosing, names: Sequence[str]) -> tuple[Expected, ...]:
    """Returns what is expected of each candidate before the first round of a text, alone in a batch."""
    found, rule = [], drafter.rule
    for at, (name, one) in enumerate(zip(names, drafter.candidates, strict=True)):
        most = one.num_draft_tokens
        nodes = [one.num_nodes] * most if one.drafts_trees else range(1, most + 1)
        rates = expected_speedups(rule.prices, at, at in rule.lookups, rule.widths, nodes)
        best = most - 1 if one.drafts_trees else int(rates.argmax())
        found.append(Expected(name, best + 1, float(rule.prices.accept[at, 0]), float(rates[best])))
    return tuple(sorted(found, key=lambda one: -one.speedup))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
