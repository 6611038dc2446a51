"""The compiled functions of the loop: positional arguments are traced, keywords static."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec import decoding, protocol
from jaxspec.decoding import DecodeState, Emitted, Parts, Request
from jaxspec.engine import buckets
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import state_shardings
from jaxspec.protocol import Drafter, Weights

# Tokens a row can emit between two host polls, beyond the K + 1 of the last round.
WINDOW = 64
State = TypeVar("State", DecodeState, Prefilling, KVCache)


def constrained(mesh: Mesh | None, state: State) -> State:
    """Fixes where a state lives, so that what one call returns the next one takes."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))


def prefill_static(
    config: LlamaConfig, longest: int, capacity: int, platform: str, log_probs: bool, mesh: Mesh | None
) -> dict[str, Any]:
    """The static arguments of `prefill` where the longest prompt has `longest` tokens."""
    return {
        "config": config,
        "chunk_size": min(buckets.prefill_chunk_size(longest, platform), capacity),
        "merged": mesh is None,
        "log_probs": log_probs,
        "mesh": mesh,
    }


def rounds_static(
    config: LlamaConfig, drafter: Drafter, log_probs: bool, mesh: Mesh | None
) -> dict[str, Any]:
    """The static arguments of `run_rounds`."""
    window = WINDOW + drafter.num_draft_tokens + 1
    return {"config": config, "window": window, "log_probs": log_probs, "mesh": mesh}


@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "merged", "log_probs", "mesh"))
def prefill(
    params: Weights,
    parts: Parts,
    request: Request,
    *,
    config: LlamaConfig,
    chunk_size: int,
    merged: bool,
    log_probs: bool,
    mesh: Mesh | None,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.prefill`."""
    state, emitted = decoding.prefill(
        config, params, parts, request, chunk_size=chunk_size, merged=merged, log_probs=log_probs
    )
    return constrained(mesh, state), emitted


@functools.partial(
    jax.jit, static_argnames=("config", "chunk_size", "merged", "log_probs", "mesh", "longest")
)
def begin(
    params: Weights,
    parts: Parts,
    request: Request,
    *,
    config: LlamaConfig,
    chunk_size: int,
    merged: bool,
    log_probs: bool,
    mesh: Mesh | None,
    longest: int,
) -> tuple[DecodeState, protocol.State, Emitted]:
    """As `prefill`, for a text whose drafter may change: plain decoding's state, with statistics of drafts of up to
    `longest` tokens, and the drafter's apart."""
    state, emitted = decoding.prefill(
        config, params, parts, request, chunk_size=chunk_size, merged=merged, log_probs=log_probs
    )
    histogram = jnp.zeros((state.length.shape[0], longest + 1), jnp.int32)
    stats = dataclasses.replace(state.stats, acceptance_histogram=histogram)
    plain = dataclasses.replace(state, drafter_state=(), stats=stats)
    return constrained(mesh, plain), state.drafter_state, dataclasses.replace(emitted, stats=stats)


@functools.partial(jax.jit, static_argnames=("config", "merged", "mesh"))
def start_prefill(
    params: Weights,
    request: Request,
    tapped: Drafter | None,
    *,
    config: LlamaConfig,
    merged: bool,
    mesh: Mesh | None,
) -> Prefilling:
    """See `decoding.start_prefill`."""
    return constrained(mesh, decoding.start_prefill(config, params, request, tapped, merged=merged))


@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "mesh"), donate_argnames="fed")
def feed(
    params: Weights,
    request: Request,
    fed: Prefilling,
    first: jax.Array,
    stop: jax.Array,
    tapped: Drafter | None,
    *,
    config: LlamaConfig,
    chunk_size: int,
    mesh: Mesh | None,
) -> Prefilling:
    """See `decoding.feed`; what was fed before is donated."""
    fed = decoding.feed(config, params, request, fed, first, stop, tapped, chunk_size=chunk_size)
    return constrained(mesh, fed)


@functools.partial(
    jax.jit,
    static_argnames=("config", "chunk_size", "log_probs", "mesh"),
    donate_argnames=("cache", "absorbed"),
)
def end_prefill(
    params: Weights,
    parts: Parts,
    request: Request,
    fed: Prefilling,
    cache: KVCache,
    absorbed: Any,
    *,
    config: LlamaConfig,
    chunk_size: int,
    log_probs: bool,
    mesh: Mesh | None,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.end_prefill`; what goes on into the state, caches, comes apart from the rest, and is donated."""
    fed = dataclasses.replace(fed, cache=cache, absorbed=absorbed)
    state, emitted = decoding.end_prefill(
        config, params, parts, request, fed, chunk_size=chunk_size, log_probs=log_probs
    )
    return constrained(mesh, state), emitted


@functools.partial(
    jax.jit, static_argnames=("config", "window", "log_probs", "mesh"), donate_argnames="state"
)
def run_rounds(
    params: Weights,
    parts: Parts,
    state: DecodeState,
    max_rounds: jax.Array,
    halt: jax.Array,
    *,
    config: LlamaConfig,
    window: int,
    log_probs: bool,
    mesh: Mesh | None,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.run_rounds`; the state is donated."""
    state, emitted = decoding.run_rounds(
        config, params, parts, state, max_rounds, halt, window=window, log_probs=log_probs
    )
    return constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("config", "chunk_size"))
def take_up(
    params: Weights, parts: Parts, state: DecodeState, *, config: LlamaConfig, chunk_size: int
) -> protocol.State:
    """See `decoding.take_up`."""
    return decoding.take_up(config, params, parts, state, chunk_size=chunk_size)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames="state")
def insert(
    state: DecodeState, row: jax.Array, others: DecodeState, which: jax.Array, *, mesh: Mesh | None
) -> DecodeState:
    """See `decoding.insert`; the state is donated."""
    return constrained(mesh, decoding.insert(state, row, others, which))


@functools.partial(jax.jit, static_argnames=("capacity", "mesh"))
def grow(state: DecodeState, *, capacity: int, mesh: Mesh | None) -> DecodeState:
    """See `decoding.grow`."""
    return constrained(mesh, decoding.grow(state, capacity))
