"""The compiled functions of the loop: positional arguments are traced, keywords static."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from jaxspec import decoding
from jaxspec.decoding import DecodeState
from jaxspec.model.sharding import state_shardings


def _constrained(mesh: Mesh | None, state: DecodeState) -> DecodeState:
    """Fixes where a state lives, so that what one call returns the next one takes."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))


@functools.partial(jax.jit, static_argnames=("config", "piece", "merged", "log_probs", "mesh"))
def prefill(params, parts, request, *, config, piece, merged, log_probs, mesh):
    """See `decoding.prefill`."""
    state, emitted = decoding.prefill(
        config, params, parts, request, piece=piece, merged=merged, log_probs=log_probs
    )
    return _constrained(mesh, state), emitted


@functools.partial(
    jax.jit, static_argnames=("config", "window", "log_probs", "mesh"), donate_argnames="state"
)
def chunk(params, parts, state, max_rounds, halt, *, config, window, log_probs, mesh):
    """See `decoding.chunk`; the state is donated."""
    state, emitted = decoding.chunk(
        config, params, parts, state, max_rounds, halt, window=window, log_probs=log_probs
    )
    return _constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames="state")
def insert(state, row, single, *, mesh):
    """See `decoding.insert`; the state is donated."""
    return _constrained(mesh, decoding.insert(state, row, single))


@functools.partial(jax.jit, static_argnames=("capacity", "mesh"))
def grow(state, *, capacity, mesh):
    """See `decoding.grow`."""
    return _constrained(mesh, decoding.grow(state, capacity))
