"""The jitted functions of the decode loop. Positional arguments are traced; keyword arguments are static."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import decoding, protocol
from jaxspec.decoding import Caches, DecodeState, Emitted, Parts, Request
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import put, state_shardings
from jaxspec.programs import buckets, memory
from jaxspec.programs.executables import Call, Executables
from jaxspec.protocol import Drafter, Weights

# Tokens that a row can emit between two host polls, in addition to the K + 1 of the last round.
WINDOW = 64
State = TypeVar("State", DecodeState, Caches, Prefilling, KVCache)
Rows = TypeVar("Rows", DecodeState, Caches)


def constrained(mesh: Mesh | None, state: State) -> State:
    """Fixes a state's sharding, so that the output of one call fits the input of the next."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))


def prefill_static(config: LlamaConfig, capacity: int, platform: str, mesh: Mesh | None) -> dict[str, Any]:
    """Returns the static arguments of `prefill` for rows of `capacity` slots."""
    return {
        "config": config,
        "chunk_size": min(buckets.prefill_chunk_size(capacity, platform), capacity),
        "merged": mesh is None,
        "mesh": mesh,
    }


def rounds_static(config: LlamaConfig, drafter: Drafter, mesh: Mesh | None) -> dict[str, Any]:
    """Returns the static arguments of `run_rounds`."""
    return {"config": config, "window": WINDOW + drafter.num_draft_tokens + 1, "mesh": mesh}


@functools.partial(
    jax.jit,
    static_argnames=("config", "chunk_size", "merged", "mesh"),
    donate_argnames="caches",
)
def prefill(
    params: Weights,
    parts: Parts,
    request: Request,
    caches: Caches | None = None,
    *,
    config: LlamaConfig,
    chunk_size: int,
    merged: bool,
    mesh: Mesh | None,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.prefill`; `caches` is donated."""
    state, emitted = decoding.prefill(
        config, params, parts, request, caches, chunk_size=chunk_size, merged=merged
    )
    return constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("config", "merged", "mesh"), donate_argnames="caches")
def start_prefill(
    params: Weights,
    request: Request,
    aux_drafter: Drafter | None,
    caches: Caches | None = None,
    *,
    config: LlamaConfig,
    merged: bool,
    mesh: Mesh | None,
) -> Prefilling:
    """See `decoding.start_prefill`; `caches` is donated."""
    fed = decoding.start_prefill(config, params, request, aux_drafter, caches, merged=merged)
    return constrained(mesh, fed)


@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "mesh"), donate_argnames="fed")
def feed(
    params: Weights,
    request: Request,
    fed: Prefilling,
    first: jax.Array,
    stop: jax.Array,
    aux_drafter: Drafter | None,
    *,
    config: LlamaConfig,
    chunk_size: int,
    mesh: Mesh | None,
) -> Prefilling:
    """See `decoding.feed`; `fed` is donated."""
    fed = decoding.feed(config, params, request, fed, first, stop, aux_drafter, chunk_size=chunk_size)
    return constrained(mesh, fed)


@functools.partial(
    jax.jit,
    static_argnames=("config", "chunk_size", "mesh"),
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
    mesh: Mesh | None,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.end_prefill`; the caches of `fed` are separate arguments, so that only they are donated."""
    fed = dataclasses.replace(fed, cache=cache, absorbed=absorbed)
    state, emitted = decoding.end_prefill(config, params, parts, request, fed, chunk_size=chunk_size)
    return constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("config", "window", "mesh"), donate_argnames="state")
def run_rounds(
    params: Weights,
    parts: Parts,
    state: DecodeState,
    max_rounds: jax.Array,
    halt: jax.Array,
    *,
    config: LlamaConfig,
    window: int,
    mesh: Mesh | None,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.run_rounds`; the state is donated."""
    state, emitted = decoding.run_rounds(config, params, parts, state, max_rounds, halt, window=window)
    return constrained(mesh, state), emitted


@functools.partial(jax.jit, static_argnames=("config", "chunk_size", "merged"))
def score(
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    first: jax.Array,
    *,
    config: LlamaConfig,
    chunk_size: int,
    merged: bool,
) -> decoding.Scores:
    """See `decoding.score`."""
    return decoding.score(config, params, tokens, length, first, chunk_size=chunk_size, merged=merged)


@functools.partial(jax.jit, static_argnames=("config", "chunk_size"))
def catch_up(
    params: Weights, parts: Parts, state: DecodeState, *, config: LlamaConfig, chunk_size: int
) -> protocol.State:
    """See `decoding.catch_up`."""
    return decoding.catch_up(config, params, parts, state, chunk_size=chunk_size)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames="state")
def insert(state: Rows, row: jax.Array, others: Rows, which: jax.Array, *, mesh: Mesh | None) -> Rows:
    """See `decoding.insert`; the state is donated."""
    return constrained(mesh, decoding.insert(state, row, others, which))


@functools.partial(jax.jit, static_argnames=("config", "capacity", "merged", "mesh"))
def empty_caches(
    params: Weights,
    drafter: Drafter,
    length: jax.Array,
    *,
    config: LlamaConfig,
    capacity: int,
    merged: bool,
    mesh: Mesh | None,
) -> Caches:
    """See `decoding.empty_caches`."""
    return constrained(mesh, decoding.empty_caches(config, params, drafter, length, capacity, merged))


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def take(caches: Caches, row: jax.Array, *, slots: int, mesh: Mesh | None) -> Caches:
    """See `decoding.take`."""
    return constrained(mesh, decoding.take(caches, row, slots))


@functools.partial(jax.jit, static_argnames=("capacity", "mesh"))
def grow(state: State, *, capacity: int, mesh: Mesh | None) -> State:
    """See `decoding.grow`."""
    grown: State = decoding.grow(state, capacity)
    return constrained(mesh, grown)


@functools.partial(jax.jit, static_argnames=("batch", "mesh"))
def resize(state: DecodeState, *, batch: int, mesh: Mesh | None) -> DecodeState:
    """See `decoding.resize`."""
    return constrained(mesh, decoding.resize(state, batch))


@dataclasses.dataclass(frozen=True)
class Loop:
    """The compiled loop of one model, with the arguments that all calls for a batch share.

    Args:
      executables: holds the programs that have been compiled.
      config: the configuration of the target.
      mesh: the devices over which the parameters are spread; None for one device.
      device: the device if there is no mesh; None for JAX's default device.
    """

    executables: Executables
    config: LlamaConfig
    mesh: Mesh | None = None
    device: jax.Device | None = None

    @functools.cached_property
    def place(self) -> Any:
        """The device or sharding of the arrays that the host makes."""
        return self.device if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def platform(self) -> str:
        """The platform of the parameters: cpu, gpu or tpu."""
        device = self.device or jax.local_devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        platform: str = device.platform
        return platform

    def put(self, tree: Any) -> Any:
        """Returns arrays on the devices of the loop."""
        return put(tree, self.place)

    def prefill_static(self, capacity: int) -> dict[str, Any]:
        """Returns the static arguments of `prefill` for rows of `capacity` slots."""
        return prefill_static(self.config, capacity, self.platform, self.mesh)

    def rounds_static(self, drafter: Drafter) -> dict[str, Any]:
        """Returns the static arguments of `run_rounds`."""
        return rounds_static(self.config, drafter, self.mesh)

    def rounds_of(self, params: Weights, parts: Parts, state: Any) -> Call:
        """Returns the call of `run_rounds` for a state of these shapes."""
        numbers = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct(state.done.shape, bool)
        return run_rounds, (params, parts, state, *numbers), self.rounds_static(parts.drafter)

    def empty_caches(
        self, params: Weights, drafter: Drafter, batch: int, capacity: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `empty_caches` for `batch` rows of `capacity` slots, traced and static."""
        static = {"config": self.config, "capacity": capacity, "merged": self.mesh is None, "mesh": self.mesh}
        return (params, drafter, self.put(np.ones(batch, np.int32))), static

    def row_bytes(self, params: Weights, drafter: Drafter, capacity: int) -> int:
        """Returns the bytes of the caches of one row of `capacity` slots: the target's and the drafter's."""
        arguments, static = self.empty_caches(params, drafter, 1, capacity)
        return memory.size_bytes(self.executables.shapes(empty_caches, *arguments, **static))

    def rounds(
        self, params: Weights, parts: Parts, state: DecodeState, max_rounds: int, halt: np.ndarray
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `run_rounds`, traced and static; `halt`: bool[B]."""
        numbers = self.put((np.int32(max_rounds), halt))
        return (params, parts, state, *numbers), self.rounds_static(parts.drafter)
