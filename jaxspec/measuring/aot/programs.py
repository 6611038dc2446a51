"""Lowers the programs of generation for devices that are not attached, from shapes and shardings alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxspec.acceptance import BlockAcceptor, GreedyAcceptor
from jaxspec.decoding import DecodeState, Parts, Request
from jaxspec.host.extras import require
from jaxspec.io.methods.method_files import PLAN_NAME, distribution_name, read_plan
from jaxspec.measuring.aot.accelerators import Topology
from jaxspec.measuring.aot.stand_ins import UNREAD, ModelShape, draft_shape, loaded_head, write_files
from jaxspec.measuring.bench.suite_options import check_count
from jaxspec.methods import Method, Resources
from jaxspec.methods.resources import LoadedModel, ModelLike
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantisation import is_quantised, shardings_for
from jaxspec.model.sharding import param_shardings, state_shardings
from jaxspec.programs import compiled
from jaxspec.programs.buckets import bucket
from jaxspec.programs.compiler_options import compiler_options, tracing
from jaxspec.protocol import Drafter, Weights
from jaxspec.sampling import Distribution, Greedy, Sampling, seed_key
from jaxspec.texts.requests import RowRequest
from jaxspec.texts.row_settings import Shapes, distribution_of


def devices(topology: Topology) -> Sequence[jax.Device]:
    """Returns the devices of a topology as compilation targets; they need not be attached.

    Raises:
      MissingExtra: the compiler (libtpu, or JAX's for CUDA) is not installed.
      ValueError: the compiler does not support the topology; one line.
    """
    request = topology.request
    if topology.accelerator.is_gpu:
        require("aot-cuda", "jax_cuda13_plugin", "nvidia.cu13")
        compiler, asked = "XLA for CUDA", f"{topology.num_devices} × {topology.accelerator.name}"
    else:
        require("aot", "libtpu")
        compiler, asked = "libtpu", request["topology_name"]
    try:
        return list(topologies.get_topology_desc(**request).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{compiler} cannot compile for {asked}: {reason}") from None


# Positions are int32; the bound leaves space for the slots of one more round.
LARGEST_CAPACITY = 2**30


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices and the mesh for which a program is compiled.

    Attributes:
      devices: all devices.
      mesh: the mesh over which arrays are sharded; None for one device.
    """

    devices: Sequence[jax.Device]
    mesh: Mesh | None

    @classmethod
    def of(cls, devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Place:
        """Returns a mesh of these axes over the devices, or a place without a mesh for one device."""
        if len(devices) == 1:
            return cls(devices, None)
        places = np.array(devices).reshape(tuple(axes.values()))
        return cls(devices, Mesh(places, tuple(axes)))

    @property
    def whole(self) -> Any:
        """The sharding of a replicated array."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, tree: Any, shardings: Any = None) -> Any:
        """Returns the shapes of a tree of arrays with these shardings; without them, arrays are replicated."""

        def shape(leaf: Any, sharding: Any = self.whole) -> jax.ShapeDtypeStruct:
            leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(shape, tree) if shardings is None else jax.tree.map(shape, tree, shardings)

    def put_params(self, params: Params, config: LlamaConfig) -> Params:
        """Returns the shapes of a model's parameters, sharded as in generation; other entries are replicated."""
        if self.mesh is None or "embed" not in params:
            placed: Params = self.put(params)
            return placed
        known = param_shardings(self.mesh, config)
        shardings = {name: shardings_for(known[name], part) for name, part in params.items() if name in known}
        return {name: self.put(part, shardings.get(name)) for name, part in params.items()}

    def put_state(self, state: Any) -> Any:
        """Returns the shapes of a loop's state, sharded as `programs.compiled` returns it."""
        return self.put(state, None if self.mesh is None else state_shardings(self.mesh, state))


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs that generation runs for a method: the prefill and the rounds.

    `weights`, `parts` and `request` are trees of sharded shapes (`jax.ShapeDtypeStruct`).

    Attributes:
      config: the target's shape.
      weights: parameters of the target and of the drafter.
      parts: the method's parts.
      request: the rows.
      place: devices and mesh.
      static: static arguments of the prefill.
      shared_bytes: bytes per device of the parameters that the drafter shares with the target. The programs take them
        twice, but they are in memory once.
    """

    config: LlamaConfig
    weights: Weights
    parts: Parts
    request: Request
    place: Place
    static: Mapping[str, Any]
    shared_bytes: int

    @functools.cached_property
    def state(self) -> DecodeState:
        """The state that the prefill returns and the rounds take, as sharded shapes."""
        state, _ = compiled.prefill.eval_shape(self.weights, self.parts, self.request, **self.static)
        placed: DecodeState = self.place.put_state(state)
        return placed

    @property
    def options(self) -> dict[str, str] | None:
        """The compiler options that generation uses for these programs."""
        return compiler_options(self.weights)

    def prefill(self) -> Any:
        """Returns the lowered prefill (`jax.stages.Lowered`)."""
        with tracing(self.weights):
            return compiled.prefill.lower(self.weights, self.parts, self.request, **self.static)

    def rounds(self) -> Any:
        """Returns the lowered loop of rounds (`jax.stages.Lowered`)."""
        batch = self.request.length.shape[0]
        limits = self.place.put((jnp.int32(0), jnp.zeros(batch, bool)))
        static = compiled.rounds_static(self.config, self.parts.drafter, self.static["mesh"])
        with tracing(self.weights):
            return compiled.run_rounds.lower(self.weights, self.parts, self.state, *limits, **static)

    def cache_shapes(self) -> set[tuple[int, ...]]:
        """Returns the shapes of one device's part of the keys and values of every cache."""
        nodes = jax.tree.leaves(self.state, is_leaf=_is_cache)
        layers = [leaf for node in nodes if _is_cache(node) for leaf in jax.tree.leaves(node.layers)]
        # Without the scales of an int8 cache, whose last axis is 1.
        return {part(leaf) for leaf in layers if leaf.shape[-1] > 1}

    def weight_shapes(self) -> set[tuple[int, ...]]:
        """Returns the shapes of one device's part of the matrices among the parameters, also reshaped to two axes."""
        leaves = jax.tree.leaves(self.weights, is_leaf=is_quantised)
        plain = {part(leaf) for leaf in leaves if not is_quantised(leaf) and leaf.ndim > 1}
        return with_two_axes(plain) | self.quantised_shapes()

    def quantised_shapes(self) -> set[tuple[int, ...]]:
        """Returns the shapes of one device's part of the quantised weights after dequantisation."""
        leaves = filter(is_quantised, jax.tree.leaves(self.weights, is_leaf=is_quantised))
        packed = [(part(leaf.packed), 8 // leaf.bits) for leaf in leaves]
        return with_two_axes((*shape[:-1], shape[-1] * numbers) for shape, numbers in packed)


def with_two_axes(shapes: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Returns the shapes, and the shapes of the same arrays reshaped to two axes."""
    given = set(shapes)
    return given | {(math.prod(shape[:-1]), shape[-1]) for shape in given}


def part(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of one device's part of a sharded array."""
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return shape


def part_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of sharded arrays, without PRNG keys."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(part(leaf)) * leaf.dtype.itemsize for leaf in leaves)


def make(
    target: ModelShape,
    method: Method,
    place: Place,
    *,
    batch: int = 1,
    capacity: int = 1024,
    dtype: DTypeLike = jnp.bfloat16,
    distribution: Mapping[str, Any] | None = None,
    every_option: bool = False,
) -> Programs:
    """Returns the programs of a method at these sizes, without the branches that no row enters.

    Generation compiles one program for all options; a batch enters only the branches that its rows need. An estimate
    counts a condition as its most expensive branch, so the branches of other options are left out here.

    Files of the method (a plan, a probe, a ranking) are replaced by stand-ins, since their numbers are data of the
    program. A static mask is that of the stand-in plan, which skips every other sublayer of the later layers.

    Args:
      target: the model.
      method: the method, as `methods.registry.make` returns it.
      place: the devices.
      batch: number of rows.
      capacity: tokens per row; rounded up to a power of two, as in generation.
      dtype: type of weights, and of the cache if the target's `kv_cache_dtype` is auto.
      distribution: parameters of the sampling distribution, see `sampling.Sampling`; greedy by default.
      every_option: whether the programs are those of generation, with the branches of all options.

    Raises:
      ValueError, FileNotFoundError: an option does not fit the model or the sizes; one line.
    """
    for name, number in {"batch": batch, "capacity": capacity}.items():
        check_count(name, number)
    if capacity > LARGEST_CAPACITY:
        raise ValueError(f"capacity is {capacity}; give at most {LARGEST_CAPACITY}")
    capacity, target = bucket(capacity), target.over(place.mesh)
    row = RowRequest(prompt=(0,), max_new_tokens=1, **(distribution or {}))
    sampling = row.temperature > 0
    name = distribution_name(row.temperature, row.top_k, row.top_p, row.min_p)
    with _files(target.config, name, getattr(method, "draft_vocab", None) is not None) as directory:
        drafter, own, shared = _build(target, method, directory, name, place, dtype)
        if drafter.static:
            plan = read_plan(directory / PLAN_NAME, UNREAD, target.config.num_layers)
            drafter = drafter.specialised(plan)
    if drafter.reach >= capacity:
        raise ValueError(
            f"capacity is {capacity}, and a round of {method.name} writes {drafter.reach} slots; give more than "
            f"{drafter.reach}"
        )
    platform = place.devices[0].platform
    rows, shapes = [row] * batch, Shapes.of([row])
    parts = Parts(
        drafter,
        BlockAcceptor() if sampling or every_option else GreedyAcceptor(),
        distribution_of(rows) if every_option else _only(distribution_of(rows), row),
        one_width=platform != "cpu",
    )
    if every_option:
        parts = dataclasses.replace(
            parts, penalties=shapes.penalties(rows), log_probs=jnp.zeros(batch, jnp.int32)
        )

    def asked() -> Request:
        zeros, ends = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, shapes.num_eos), jnp.int32)
        keys = jax.random.split(seed_key(0), batch)
        return Request(jnp.zeros((batch, capacity), jnp.int32), zeros, zeros, ends, keys)

    request = jax.eval_shape(asked)
    weights = Weights(place.put_params(target.params(dtype), target.config), own)
    static = compiled.prefill_static(target.config, capacity, platform, place.mesh)
    return Programs(
        target.config, weights, place.put(parts), place.put(request), place, static, part_bytes(shared)
    )


def _only(distribution: Sampling, row: RowRequest) -> Distribution:
    """Returns the distribution without the filters that a request does not use."""
    if row.temperature == 0:
        return Greedy()
    return dataclasses.replace(
        distribution,
        top_k=distribution.top_k if row.top_k > 0 else None,
        top_p=distribution.top_p if row.top_p < 1 else None,
        min_p=distribution.min_p if row.min_p > 0 else None,
    )


def _build(
    target: ModelShape, method: Method, directory: Path, distribution: str, place: Place, dtype: DTypeLike
) -> tuple[Drafter, Any, Any]:
    """Returns the drafter, its parameters, and those that it shares with the target, all as sharded shapes."""
    shared: list[bool] = []
    drafts: list[LlamaConfig] = []

    def load_draft(draft: ModelLike) -> LoadedModel:
        found = draft_shape(draft).over(place.mesh)
        if found.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"draft {found.name} has a vocabulary of {found.config.vocab_size} tokens, the target of "
                f"{target.config.vocab_size}; a draft must have the target's"
            )
        drafts.append(found.config)
        config = dataclasses.replace(found.config, kv_cache_dtype=target.config.kv_cache_dtype)
        return dataclasses.replace(found, config=config, bits=target.bits).loaded(dtype)

    def build() -> tuple[Drafter, Any]:
        loaded = target.loaded(dtype)
        resources = Resources(
            load_draft,
            lambda text: [0] * len(text),
            directory,
            (distribution,),
            place.devices[0].platform,
            load_head=lambda path, _: loaded_head(Path(path), directory, target.config, dtype),
        )
        drafter, own = method.build(loaded, resources)
        of_target = {id(leaf) for leaf in jax.tree.leaves(loaded.params)}
        shared.extend(id(leaf) in of_target for leaf in jax.tree.leaves(own))
        return drafter, own

    drafter, own = jax.eval_shape(build)

    def put(own: Any) -> Any:
        if isinstance(own, tuple):  # of the candidates of a choice
            return tuple(map(put, own))
        if isinstance(own, dict) and "layers" in own and not drafter.aux_layers:
            model = drafts[-1] if drafts else target.config
            return place.put_params(own, model.truncated(len(own["layers"])))
        return None if own is None else place.put(own)

    own = put(own)
    leaves = jax.tree.leaves(own)
    return drafter, own, [leaf for leaf, same in zip(leaves, shared, strict=True) if same]


@contextlib.contextmanager
def _files(config: LlamaConfig, distribution: str, vocabulary: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jaxspec-") as name:
        write_files(Path(name), config, distribution, vocabulary)
        yield Path(name)


def _is_cache(node: object) -> bool:
    return isinstance(node, KVCache)
