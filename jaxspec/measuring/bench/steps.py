"""Compiled loops of a few steps for timing: decoding rounds, drafts under a mask, parts of a model.

Every call starts at the same live length, so that calls differ only by noise.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec import decoding
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.decoding import DecodeState, Parts
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import put_on_mesh, state_shardings
from jaxspec.programs import compiled
from jaxspec.protocol import Drafter, View, Weights
from jaxspec.sampling import Greedy, seed_key

# Tokens in the cache during a timing, steps per timing, and cache slots.
LIVE, ROUNDS, CAPACITY = 32, 8, 128
# Prompt length of the timed prefill.
PREFILL = 256


class Loop:
    """A program that is called repeatedly on its own result, such as a donated cache; compiled as those that decode.

    Args:
      lm: the model, which keeps the executable.
      function: a jitted function (*given, state, *arguments) → (result to wait for, next state).
      given: its first arguments.
      state: state of the first call.
      static: its static arguments.

    Attributes:
      rounds: steps per call.
    """

    rounds = ROUNDS

    def __init__(self, lm: LanguageModel, function: Any, given: tuple[Any, ...], state: Any, **static: Any):
        # On a mesh with several processes, collectives of two concurrent programs could be mixed up.
        self._given, self._state = given, jax.block_until_ready(state)
        self._compile = functools.partial(lm.executables.compiled, function, **static)
        self._run: Any = None

    def program(self, *arguments: Any) -> Any:
        """Returns the executable of a call, compiled at the first one."""
        self._run = self._run or self._compile(*self._given, self._state, *arguments)
        return self._run

    def __call__(self, *arguments: Any) -> None:
        """Runs once; returns when the device is done."""
        done, self._state = self.program(*arguments)(*self._given, self._state, *arguments)
        jax.block_until_ready(done)


class Steps(Loop):
    """A few rounds of the decoding loop.

    Args:
      lm: the model.
      params: its parameters.
      drafter: the drafter; it determines the rows of a round.
      capacity: slots of the cache.

    Attributes:
      prefill: runs the prefill of `PREFILL` tokens; returns before the device is done.
    """

    def __init__(
        self, lm: LanguageModel, params: Weights, drafter: Drafter, capacity: int = CAPACITY
    ) -> None:
        given = params, Parts(drafter, GreedyAcceptor(), Greedy())
        static = compiled.prefill_static(lm.config, PREFILL, lm.device.platform, lm.mesh)
        start = functools.partial(lm.executables.call, compiled.prefill, *given)
        self.prefill = functools.partial(start, _request(lm, PREFILL, PREFILL), None, **static)
        state, _ = start(_request(lm, LIVE, capacity), None, **(static | {"chunk_size": LIVE}))
        super().__init__(lm, _rounds, given, state, config=lm.config, window=capacity, mesh=lm.mesh)


@functools.partial(jax.jit, static_argnames=("config", "window", "mesh"), donate_argnums=2)
def _rounds(
    params: Weights, parts: Parts, state: DecodeState, *, config: LlamaConfig, window: int, mesh: Mesh | None
) -> tuple[Any, DecodeState]:
    halt = jnp.zeros(1, bool)
    state = dataclasses.replace(state, length=jnp.full(1, LIVE + 1, jnp.int32), done=halt)
    state, emitted = decoding.run_rounds(config, params, parts, state, jnp.int32(ROUNDS), halt, window=window)
    return emitted, compiled.constrained(mesh, state)


class SubmodelSteps(Loop):
    """A few steps of a part of a model, each on the tokens of the step before, without a decoding method.

    A call takes the number of steps, by default `rounds`; all numbers share one executable.

    Args:
      lm: the model.
      plan: the sublayers that run.
      num_rows: tokens per step and text.
      head: whether the final norm and the head run.
      live: tokens in the cache, including those of the step.
      capacity: slots of the cache.
      batch_size: number of texts.
    """

    def __init__(
        self,
        lm: LanguageModel,
        plan: LayerPlan,
        num_rows: int = 1,
        head: bool = True,
        live: int = LIVE + 1,
        capacity: int = 256,
        batch_size: int = 1,
    ) -> None:
        cache = kv.create(lm.config, batch_size, capacity, lm.params["embed"].dtype, merged=lm.mesh is None)
        fed = jnp.arange(3, 3 + batch_size * num_rows, dtype=jnp.int32) % lm.config.vocab_size
        fed = fed.reshape(batch_size, num_rows)
        start = jnp.full(batch_size, live - num_rows, jnp.int32)
        given, static = (
            (lm.params, fed, start),
            {"config": lm.config, "plan": plan, "head": head, "mesh": lm.mesh},
        )
        # The first state needs the placement of a returned state, otherwise the second call would compile again.
        place = lm.device if lm.mesh is None else state_shardings(lm.mesh, cache)
        super().__init__(lm, _submodel_steps, given, put_on_mesh(cache, place), **static)

    def __call__(self, count: int = ROUNDS) -> None:
        """Runs `count` steps; returns when the device is done."""
        super().__call__(jnp.int32(count))


@functools.partial(jax.jit, static_argnames=("config", "plan", "head", "mesh"), donate_argnums=3)
def _submodel_steps(
    params: llama.Params,
    fed: jax.Array,
    start: jax.Array,
    cache: KVCache,
    count: jax.Array,
    *,
    config: LlamaConfig,
    plan: LayerPlan,
    head: bool,
    mesh: Mesh | None,
) -> tuple[jax.Array, KVCache]:
    def step(_: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        token, cache = carry
        hidden, cache = llama.run_layers(
            config, params, llama.embed(config, params, token), start, cache, plan=plan
        )
        # Without the head, the argmax of the state is a cheap token substitute that depends on the step.
        read = llama.logits(config, params, hidden) if head else hidden
        return jnp.argmax(read, axis=-1).astype(jnp.int32) % config.vocab_size, cache

    fed, cache = jax.lax.fori_loop(0, count, step, (fed, cache))
    return fed, compiled.constrained(mesh, cache)


class LookupSteps(Loop):
    """A few draft lookups of `ngram` in a text of `capacity` slots.

    Args:
      lm: the model, on whose device the lookups run.
      live: tokens of the text.
      capacity: slots of the text buffer.
    """

    def __init__(self, lm: LanguageModel, live: int, capacity: int) -> None:
        given = NGramDrafter(), jax.random.split(seed_key(0), 1)
        super().__init__(lm, _lookups, given, jnp.arange(capacity, dtype=jnp.int32)[None] % live, live=live)


@functools.partial(jax.jit, static_argnames="live")
def _lookups(
    drafter: NGramDrafter, keys: jax.Array, tokens: jax.Array, *, live: int
) -> tuple[jax.Array, jax.Array]:
    capacity = tokens.shape[1]

    def one(at: jax.Array, tokens: jax.Array) -> jax.Array:
        length = jnp.full(1, live - ROUNDS, jnp.int32) + at
        view = View(tokens, length, KVCache([], length, True, capacity, ()), jnp.full(1, capacity, jnp.int32))
        proposal, _ = drafter.look_up(keys, view)
        # Writing the result into the text prevents the compiler from removing a lookup.
        return tokens.at[:, 0].set(proposal.tokens[:, 0] + proposal.count)

    tokens = jax.lax.fori_loop(0, ROUNDS, one, tokens)
    return tokens, tokens


def _request(lm: LanguageModel, live: int, capacity: int) -> decoding.Request:
    """A request of one row with `live` arbitrary prompt tokens and without an end of text."""
    prompt = 3 + jnp.arange(capacity, dtype=jnp.int32)[None] % (lm.config.vocab_size - 3)
    one = jnp.ones(1, jnp.int32)
    nothing = -jnp.ones((1, 1), jnp.int32)
    keys = jax.random.split(seed_key(0), 1)
    return decoding.Request(prompt, live * one, 10**6 * one, nothing, keys)
