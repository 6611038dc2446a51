"""The jitted functions of the decode loop. Positional arguments are traced; keyword arguments are static."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import decoding
from jaxspec.decoding import Caches, DecodeState, Emitted, Parts, Request
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.prefill import Prefilling
from jaxspec.model.sharding import put_on_mesh, state_shardings
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


def _program(function: Callable[..., Any], *donated: int) -> Any:
    """Returns a function of `decoding` as a program whose positional arguments are traced, and the others static.

    The configuration, the function's first argument, is one of the static ones, where it has it. So is `mesh`, over
    which the sharding of the first result is fixed.

    Args:
      function: the function.
      donated: the positional arguments whose buffers the program takes over.
    """

    @functools.wraps(function)
    def program(*traced: Any, mesh: Mesh | None = None, **static: Any) -> Any:
        config = [static.pop("config")] if "config" in static else []
        made = function(*config, *traced, **static)
        return (constrained(mesh, made[0]), *made[1:]) if type(made) is tuple else constrained(mesh, made)

    del program.__wrapped__  # JAX would read its signature
    return jax.jit(program, static_argnames=_STATIC, donate_argnums=donated)


def _end_prefill(
    config: LlamaConfig,
    params: Weights,
    parts: Parts,
    request: Request,
    fed: Prefilling,
    cache: KVCache,
    absorbed: Any,
    **static: Any,
) -> tuple[DecodeState, Emitted]:
    """See `decoding.end_prefill`; the caches of `fed` are separate arguments, so that only they are donated."""
    fed = dataclasses.replace(fed, cache=cache, absorbed=absorbed)
    return decoding.end_prefill(config, params, parts, request, fed, **static)


_STATIC = ("config", "chunk_size", "merged", "mesh", "window", "capacity", "slots", "batch")
# params, parts, request, caches; config, chunk_size, merged, mesh
prefill = _program(decoding.prefill, 3)
# params, request, aux_drafter, caches; config, merged, mesh
start_prefill = _program(decoding.start_prefill, 3)
# params, request, fed, first, stop, aux_drafter; config, chunk_size, mesh
feed = _program(decoding.feed, 2)
# params, parts, request, fed, cache, absorbed; config, chunk_size, mesh
end_prefill = _program(_end_prefill, 4, 5)
# params, parts, state, max_rounds, halt; config, window, mesh
run_rounds = _program(decoding.run_rounds, 2)
# params, tokens, length, first; config, chunk_size, merged
score = _program(decoding.score)
# state, row, others, which; mesh
insert = _program(decoding.insert, 0)
# params, drafter, length; config, capacity, merged, mesh
empty_caches = _program(decoding.empty_caches)
# caches, row; slots, mesh
take = _program(decoding.take_row)
# state; capacity, mesh
grow = _program(decoding.grow)
# state; batch, mesh
resize = _program(decoding.resize)


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
        return put_on_mesh(tree, self.place)

    def prefill_static(self, capacity: int) -> dict[str, Any]:
        """Returns the static arguments of `prefill` for rows of `capacity` slots."""
        return prefill_static(self.config, capacity, self.platform, self.mesh)

    def rounds_static(self, drafter: Drafter) -> dict[str, Any]:
        """Returns the static arguments of `run_rounds`."""
        return rounds_static(self.config, drafter, self.mesh)

    def rounds_of(self, params: Weights, parts: Parts, state: Any) -> Call:
        """Returns the call of `run_rounds` for a state of these shapes."""
        # With numbers as in a call: on a mesh, a program depends on the placement of all of its arguments.
        arguments, static = self.rounds(params, parts, state, 0, np.zeros(state.done.shape, bool))
        return run_rounds, arguments, static

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
        self, params: Weights, parts: Parts, state: Any, max_rounds: int, halt: np.ndarray
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of `run_rounds`, traced and static; `halt`: bool[B]."""
        numbers = self.put((np.int32(max_rounds), halt))
        return (params, parts, state, *numbers), self.rounds_static(parts.drafter)
