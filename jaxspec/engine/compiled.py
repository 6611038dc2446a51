"""The compiled functions of the loop: positional arguments are traced, keywords static."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import jax
from jax.sharding import Mesh

from jaxspec import decoding
from jaxspec.decoding import DecodeState
from jaxspec.model.llama import Prefilling
from jaxspec.model.sharding import state_shardings

State = TypeVar("State", DecodeState, Prefilling)


def _constrained(mesh: Mesh | None, state: State) -> State:
    """Fixes where a state lives, so that what one call returns the next one takes."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))


@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "merged", "log_probs", "mesh"))
def prefill(params, parts, request, *, config, chunk_size, merged, log_probs, mesh):
    """See `decoding.prefill`."""
    state, emitted = decoding.prefill(
        config, params, parts, request, chunk_size=chunk_size, merged=merged, log_probs=log_probs
    )
    return _constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("config", "merged", "mesh"))
def start_prefill(params, request, *, config, merged, mesh):
    """See `decoding.start_prefill`."""
    return _constrained(mesh, decoding.start_prefill(config, params, request, merged=merged))


@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "mesh"), donate_argnames="fed")
def feed(params, request, fed, first, stop, *, config, chunk_size, mesh):
    """See `decoding.feed`; what was fed before is donated."""
    return _constrained(mesh, decoding.feed(config, params, request, fed, first, stop, chunk_size=chunk_size))


@functools.partial(
    jax.jit, static_argnames=("config", "chunk_size", "log_probs", "mesh"), donate_argnames="cache"
)
def end_prefill(params, parts, request, fed, cache, *, config, chunk_size, log_probs, mesh):
    """See `decoding.end_prefill`; the cache of what was fed comes apart from the rest, and is donated."""
    fed = dataclasses.replace(fed, cache=cache)
    state, emitted = decoding.end_prefill(
        config, params, parts, request, fed, chunk_size=chunk_size, log_probs=log_probs
    )
    return _constrained(mesh, state), emitted


@functools.partial(
    jax.jit, static_argnames=("config", "window", "log_probs", "mesh"), donate_argnames="state"
)
def run_rounds(params, parts, state, max_rounds, halt, *, config, window, log_probs, mesh):
    """See `decoding.run_rounds`; the state is donated."""
    state, emitted = decoding.run_rounds(
        config, params, parts, state, max_rounds, halt, window=window, log_probs=log_probs
    )
    return _constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames="state")
def insert(state, row, others, which, *, mesh):
    """See `decoding.insert`; the state is donated."""
    return _constrained(mesh, decoding.insert(state, row, others, which))


@functools.partial(jax.jit, static_argnames=("capacity", "mesh"))
def grow(state, *, capacity, mesh):
    """See `decoding.grow`."""
    return _constrained(mesh, decoding.grow(state, capacity))
