"""The compiled decoding loop without the engine: prompts in, tokens out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decoding
from jaxspec.decoding import DecodeState, Emitted, Parts, Request
from jaxspec.model import cache as kv
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.programs.compiler_options import tracing
from jaxspec.protocol import View, Weights
from jaxspec.sampling import seed_key
from jaxspec.testing import reference
from jaxspec.testing.models import CAPACITY, TARGET, params

prefill = jax.jit(decoding.prefill, static_argnames=("config", "chunk_size", "merged"))
# Without donation, because tests compare a state before and after.
run_rounds = jax.jit(decoding.run_rounds, static_argnames=("config", "window"))


def num_compiled() -> tuple[int, int]:
    """Returns the numbers of compiled programs of `prefill` and of `run_rounds`."""
    sizes = (cast(Any, function)._cache_size() for function in (prefill, run_rounds))
    return next(sizes), next(sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A method on a model, with one row per prompt.

    Examples:
      >>> from jaxspec.drafting.ngram_drafter import NGramDrafter
      >>> from jaxspec.testing.contracts import drafter_loop
      >>> loop = drafter_loop(NGramDrafter(num_draft_tokens=3), "greedy")
      >>> texts = loop.texts([[1, 2, 3], [5], [7]], budgets=4)
      >>> texts[0] == greedy([1, 2, 3], budget=4)
      True
    """

    parts: Parts
    weights: Weights
    config: LlamaConfig = TARGET

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        budgets: int | Sequence[int] = 12,
        *,
        eos: Collection[int] = (),
        seeds: Sequence[int] | None = None,
        capacity: int = CAPACITY,
        log_probs: bool = False,
    ) -> tuple[DecodeState, Emitted]:
        """Runs the prefill of the prompts, and returns the loop's state and the first tokens."""
        batch = len(prompts)
        tokens, eos_ids = np.zeros((batch, capacity), np.int32), np.full((batch, 2), -1, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            eos_ids[row, : len(eos)] = list(eos)
        length = np.array([len(prompt) for prompt in prompts], np.int32)
        keys = jax.vmap(seed_key)(jnp.arange(batch) if seeds is None else jnp.asarray(seeds))
        limit = np.asarray(length + np.asarray(budgets), np.int32)
        request = Request(
            jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(limit), jnp.asarray(eos_ids), keys
        )
        with tracing(self.weights):
            begun: tuple[DecodeState, Emitted] = prefill(
                self.config, self.weights, self._parts(batch, log_probs), request, chunk_size=8
            )
        return begun

    def go_on(
        self,
        state: DecodeState,
        rounds: int = 99,
        halt: Sequence[bool] | None = None,
        log_probs: bool = False,
    ) -> tuple[DecodeState, Emitted]:
        """Runs at most `rounds` rounds, and returns the state and the tokens that they added."""
        stop = jnp.zeros(len(state.length), bool) if halt is None else jnp.asarray(halt)
        with tracing(self.weights):
            ended: tuple[DecodeState, Emitted] = run_rounds(
                self.config, self.weights, self._parts(len(stop), log_probs), state, jnp.int32(rounds), stop,
                window=CAPACITY,
            )  # fmt: skip
        return ended

    def _parts(self, batch: int, log_probs: bool) -> Parts:
        return dataclasses.replace(self.parts, log_probs=jnp.full(batch, 2) if log_probs else None)

    def texts(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[list[int]]:
        """Returns the tokens that each row generates."""
        state, _ = self.begin(prompts, *args, **options)
        state, _ = self.go_on(state)
        assert state.done.all(), "the rows did not fit the capacity"
        return generated(state, prompts)


def view(state: DecodeState) -> View:
    """Returns the drafter's view of a state, as a round computes it."""
    budget = jnp.where(state.done, 0, state.limit - state.length - 1)
    return View(state.tokens, state.length, state.cache, budget)


def generated(state: DecodeState, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens after each prompt in a state."""
    rows = zip(np.asarray(state.tokens), np.asarray(state.length), prompts, strict=True)
    return [row[len(prompt) : length].tolist() for row, length, prompt in rows]


def greedy(
    prompt: Sequence[int], budget: int, eos: Collection[int] = (), config: LlamaConfig = TARGET
) -> list[int]:
    """Returns the expected tokens of plain greedy decoding, from the slow decoder."""
    return list(_greedy(config, tuple(prompt), budget, tuple(eos)))


@functools.cache
def _greedy(config: LlamaConfig, prompt: tuple[int, ...], budget: int, eos: tuple[int, ...]) -> list[int]:
    return reference.greedy(config, params(config), prompt, budget, eos)


def log_probs(prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """Returns the raw log-probability of each token of a text after a prompt, from the slow decoder."""
    logits = reference.forward(TARGET, params(), [*prompt, *text])[len(prompt) - 1 : -1]
    every = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found: np.ndarray = every[range(len(text)), text]
    return found


def committed(cache: KVCache, row: int, length: int) -> list[np.ndarray]:
    """Returns a copy of a row's keys and values at its first `length` positions, in either layout of the cache.

    From a layer with a window, they are those that the next token sees.
    """
    found = []
    for layer, most in zip(cache.layers, cache.most, strict=True):
        seen = range(0 if most is None else max(0, length - most + kv.SPARE), length)
        # Copies, because a later program may write into the same buffer.
        for array in map(np.array, layer):
            split = array.reshape(len(cache.rope_length), -1, *array.shape[-2:])
            found.append(split[row, :, np.array(seen, int) % split.shape[2]])
    return found
