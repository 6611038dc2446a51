"""Compiles the programs of generation for devices that are not attached, from shapes and shardings alone.

It answers two questions about a model, a method and a device: whether the programs compile, and whether they fit. The
compilers are libtpu for TPUs and XLA for CUDA for NVIDIA GPUs, from a description of the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxspec.acceptance import BlockAcceptor
from jaxspec.decoding import DecodeState, Parts, Request
from jaxspec.heads import files as heads
from jaxspec.heads.kinds import known
from jaxspec.host.extras import require
from jaxspec.io import checkpoint
from jaxspec.io.methods import method_files, vocabulary_file
from jaxspec.io.trained_for import TrainedFor
from jaxspec.loading.loading import find_model
from jaxspec.measuring.accelerators import Accelerator, Topology
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.bench.suite_options import check_count
from jaxspec.methods import Method, Resources
from jaxspec.methods.resources import LoadedHead, LoadedModel, ModelLike
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import quantise, shardings_for
from jaxspec.model.sharding import param_shardings, spread_config, state_shardings
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.programs import compiled
from jaxspec.programs.buckets import bucket
from jaxspec.programs.compiler_options import compiler_options, tracing
from jaxspec.protocol import Drafter, Weights
from jaxspec.requests.reading import RowRequest
from jaxspec.requests.row_settings import Shapes, distribution_of
from jaxspec.sampling import seed_key

# Positions are int32; the bound leaves space for the slots of one more round.
LARGEST_CAPACITY = 2**30
# Replaces the fingerprint of weights that are not read, and the distribution of their probes.
UNREAD, _GREEDY = "weights-not-read", method_files.distribution_name(0.0)

# Devices

# The compiler's name of a TPU where it differs, and further arguments; the two cores of a v5p share its memory and are
# one device. Chips of a TPU host along each axis, at most.
_NAMES, _OPTIONS, _HOST = {"v5p": "v5"}, {"v5p": {"chip_config_name": "megacore"}}, (2, 2, 1)
# A driver gives the compiler the versions of CUDA and cuDNN, and limits. Capabilities 7.0 to 9.0 share these limits.
_TOOLKIT, _DNN = (13, 0, 0), (9, 12, 0)
_EVERY_GPU = {
    "shared_memory_per_block": 48 * 2**10,
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}
# Columns: the multiprocessors of a GPU; the float32 cores, the resident threads and the KiB of shared memory of each
# multiprocessor; the MiB of the level-2 cache; the maximum clock in GHz. Sources: CUDA's programming guide (compute
# capabilities) and NVIDIA's papers on the architectures Hopper, Ampere, Ada, Volta and Turing. An H200 has the chip of
# an H100.
_PROCESSORS = {
    "h100": (132, 128, 2048, 228, 50, 1.98),
    "h200": (132, 128, 2048, 228, 50, 1.98),
    "a100": (108, 64, 2048, 164, 40, 1.41),
    "l4": (58, 128, 1536, 100, 48, 2.04),
    "v100": (80, 64, 2048, 96, 6, 1.53),
    "t4": (40, 64, 1024, 64, 4, 1.59),
}


def target_config(gpu: Accelerator) -> str:
    """Returns a GPU's description for XLA's compiler, a `GpuTargetConfigProto` in text form.

    With a GPU, the compiler queries the device and times several kernels for each product. Without one, it uses this
    description and selects kernels by rules, so the kernels can differ. Copies, fusions and memory do not differ.
    """
    assert gpu.capability is not None
    cores, units, threads, shared, cache, clock = _PROCESSORS[gpu.name]
    # From capability 8.0 on, a block can use 1 KiB less than the multiprocessor has.
    block = shared * 2**10 - (2**10 if gpu.capability >= (8, 0) else 0)
    numbers = _EVERY_GPU | {
        "core_count": cores,
        "fpus_per_core": units,
        "threads_per_core_limit": threads,
        "shared_memory_per_core": shared * 2**10,
        "shared_memory_per_block_optin": block,
        "l2_cache_size": cache * 2**20,
        "clock_rate_ghz": clock,
        "device_memory_size": gpu.memory_bytes,
        "memory_bandwidth": round(gpu.bandwidth),
    }
    lines = [f"{key}: {number}" for key, number in numbers.items()]
    versions = ("driver_version", "runtime_version", "compile_time_toolkit_version")
    lines += [f'{key}: "{".".join(map(str, _TOOLKIT))}"' for key in versions]

    def version(name: str, parts: Sequence[int], *fields: str) -> str:
        fields = fields or ("major", "minor", "patch")
        return (
            f"{name} {{ {' '.join(f'{field}: {part}' for field, part in zip(fields, parts, strict=True))} }}"
        )

    lines.append(version("cuda_compute_capability", gpu.capability, "major", "minor"))
    return "\n".join(
        [
            *("gpu_device_info {", *lines, "}", 'platform_name: "CUDA"'),
            *(version("dnn_version_info", _DNN), version("runtime_version", _TOOLKIT)),
            f'device_description_str: "{gpu.kind}"\n',
        ]
    )


def devices(topology: Topology) -> Sequence[jax.Device]:
    """Returns the devices of a topology as compilation targets; they need not be attached.

    Raises:
      MissingExtra: the compiler (libtpu, or JAX's for CUDA) is not installed.
      ValueError: the compiler does not support the topology; one line.
    """
    kind = topology.accelerator
    request: dict[str, Any]
    if kind.is_gpu:
        require("aot-cuda", "jax_cuda13_plugin", "nvidia.cu13")
        compiler, asked = "XLA for CUDA", f"{topology.num_devices} × {kind.name}"
        # Numbers of slices, of hosts per slice, and of GPUs per host.
        request = {"platform": "cuda", "topology": f"1x1x{topology.num_devices}"}
        request["target_config"] = target_config(kind)
    else:
        require("aot", "libtpu")
        compiler, bounds = "libtpu", (*topology.bounds, 1)[:3]
        asked = f"{_NAMES.get(kind.name, kind.name)}:{'x'.join(map(str, topology.bounds))}"
        request = {"platform": "tpu", "topology_name": asked, **_OPTIONS.get(kind.name, {})}
        request["chips_per_host_bounds"] = tuple(map(min, bounds, _HOST))
    try:
        return list(topologies.get_topology_desc(**request).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{compiler} cannot compile for {asked}: {reason}") from None


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices and the mesh for which a program is compiled; the mesh is None for one device."""

    devices: Sequence[jax.Device]
    mesh: Mesh | None

    @classmethod
    def from_devices(cls, devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Place:
        """Returns a mesh of these axes over the devices, or a place without a mesh for one device."""
        if len(devices) == 1:
            return cls(devices, None)
        return cls(devices, Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes)))

    def put(self, tree: Any, shardings: Any = None) -> Any:
        """Returns the shapes of a tree of arrays with these shardings; without them, arrays are replicated."""
        whole: Any = SingleDeviceSharding(self.devices[0])
        if self.mesh is not None:
            whole = NamedSharding(self.mesh, PartitionSpec())

        def shape(leaf: Any, sharding: Any = whole) -> jax.ShapeDtypeStruct:
            leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(shape, tree) if shardings is None else jax.tree.map(shape, tree, shardings)

    def put_params(self, params: llama.Params, config: LlamaConfig) -> llama.Params:
        """Returns the shapes of a model's parameters, sharded as in generation; other entries are replicated."""
        if self.mesh is None or "embed" not in params:
            placed: llama.Params = self.put(params)
            return placed
        known = param_shardings(self.mesh, config)
        shardings = {name: shardings_for(known[name], part) for name, part in params.items() if name in known}
        return {name: self.put(part, shardings.get(name)) for name, part in params.items()}


# Models and the files of methods: they determine a program's shapes, and their numbers are arbitrary.


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The shape of a model without its weights.

    Attributes:
      name: the model's name in messages.
      config: the architecture.
      trained_for: what it was trained for, such as the exits of a sorted draft.
      bits: bits of quantised weights; None if the weights are not quantised.
    """

    name: str
    config: LlamaConfig
    trained_for: TrainedFor = TrainedFor()
    bits: int | None = None

    def over(self, mesh: Mesh | None) -> ModelShape:
        """Returns the shape sharded over a mesh (None: one device), see `model.sharding.spread_config`."""
        return self if mesh is None else dataclasses.replace(self, config=spread_config(mesh, self.config))

    def params(self, dtype: DTypeLike) -> llama.Params:
        """Returns the parameters as `jax.ShapeDtypeStruct`s."""

        def make() -> llama.Params:
            params = llama.init_params(self.config, seed_key(0), dtype)
            return params if self.bits is None else quantise(self.config, params, self.bits)

        made: llama.Params = jax.eval_shape(make)
        return made

    def loaded(self, dtype: DTypeLike) -> LoadedModel:
        """Returns the model for a method's `build`; call it only under tracing, where nothing is allocated."""
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.params(dtype))
        return _Unread(self.config, params, self.name, dataclasses.replace(self.trained_for, target=None))


@dataclasses.dataclass(frozen=True)
class _Unread(LoadedModel):
    @functools.cached_property
    def fingerprint(self) -> str:
        return UNREAD


def model_shape(model: str | os.PathLike[str] | None, shape: str | None = None) -> ModelShape:
    """Returns the shape of a model from its config file, or a named shape.

    A named shape also serves as a sorted draft, with exits after a quarter, half and all of its layers.

    Raises:
      ValueError, FileNotFoundError: the model or shape does not exist, or both are given; one line.

    Examples:
      >>> model_shape(None, "8b").trained_for.exits
      (8, 16, 32)
    """
    if shape is not None and model is not None:
        raise ValueError(f"got both model={model!r} and shape={shape!r}; give one of them")
    if shape is not None:
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; give one of {', '.join(SHAPES)}")
        config = SHAPES[shape]
        depth = config.num_layers
        exits = TrainedFor(tuple(sorted({max(1, depth // 4), max(1, depth // 2), depth})))
        return ModelShape(shape, config, exits)
    path = find_model(model)
    config = checkpoint.read_config(path)
    name = os.fspath(model) if model is not None else path.name
    return ModelShape(name, config, checkpoint.read_trained_for(path, config))


def _draft_shape(draft: object) -> ModelShape:
    if isinstance(draft, str) and draft in SHAPES:
        return model_shape(None, draft)
    if not isinstance(draft, (str, os.PathLike)):
        raise ValueError("draft is a loaded model; give a directory or the name of a shape")
    return model_shape(draft)


def _loaded_head(path: Path, directory: Path, target: LlamaConfig, dtype: DTypeLike) -> LoadedHead:
    """Returns a head for a method's `build`; one in `directory`, see `_files`, is the usual head of its name's type."""
    if path.is_relative_to(directory):
        config = known()[path.name].usual(target.plain)
    else:
        config = heads.read_head(heads.resolve(path), target.plain).config
    params = jax.tree.map(lambda shape: jnp.zeros(shape, dtype), config.shapes, is_leaf=llama.is_shape)
    rows = getattr(config, "head_size", None)
    if rows is not None and rows < target.vocab_size:
        ids = jnp.zeros(rows, jnp.int32)
        params["vocabulary"] = Vocabulary(params.pop("head", None), ids, target.vocab_size)
    return LoadedHead(config, params, UNREAD)


@contextlib.contextmanager
def _files(config: LlamaConfig, vocabulary: bool) -> Iterator[Path]:
    """Yields a directory with stand-ins of the files that methods read beside a model, if asked with a vocabulary."""
    with tempfile.TemporaryDirectory(prefix="jaxspec-") as name:
        directory = Path(name)
        for kind in known():
            path = directory / heads.head_name(kind)
            path.parent.mkdir(parents=True)
            path.touch()
        depth = config.num_layers
        every_other = range(depth // 4, depth - 1, 2)
        plan = LayerPlan.skipping(depth, every_other, every_other)
        method_files.write_plan(directory / method_files.PLAN_NAME, UNREAD, plan, {})
        for exit_layer in range(1, depth):
            path = method_files.probe_path(directory, exit_layer, _GREEDY)
            path.parent.mkdir(exist_ok=True)
            direction = np.zeros(config.hidden_size, np.float32)
            probe = method_files.ProbeFile(direction, 0.0, exit_layer, _GREEDY)
            method_files.write_probe(path, UNREAD, probe)
        if vocabulary:
            ranking = vocabulary_file.Ranking((), tuple(range(config.vocab_size)), 0, config.vocab_size)
            ranking.write(directory / vocabulary_file.VOCABULARY_NAME, UNREAD, {})
        yield directory


# Programs


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
        mesh = self.place.mesh
        placed: DecodeState = self.place.put(state, None if mesh is None else state_shardings(mesh, state))
        return placed

    def prefill(self) -> Built:
        """Compiles the prefill."""
        return self._built(compiled.prefill.lower, self.request, **self.static)

    def rounds(self) -> Built:
        """Compiles the loop of rounds."""
        limits = self.place.put((jnp.int32(0), jnp.zeros(self.request.length.shape[0], bool)))
        static = compiled.rounds_static(self.config, self.parts.drafter, self.static["mesh"])
        return self._built(compiled.run_rounds.lower, self.state, *limits, **static)

    def _built(self, lower: Callable[..., Any], *given: Any, **static: Any) -> Built:
        began = time.perf_counter()
        try:
            with tracing(self.weights):
                lowered = lower(self.weights, self.parts, *given, **static)
            program = lowered.compile(compiler_options=compiler_options(self.weights))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error)
            if "RESOURCE_EXHAUSTED" not in reason or "hbm" not in reason.lower():  # not the main memory
                raise
            refusal = next((line for line in reason.splitlines() if "hbm" in line.lower()), reason).strip()
            taken = part_bytes((self.weights, self.parts, given)) - self.shared_bytes
            return Built(time.perf_counter() - began, taken, refusal=refusal)
        seconds, memory = time.perf_counter() - began, program.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporary, peak = memory.temp_size_in_bytes, getattr(memory, "peak_memory_in_bytes", 0)
        if peak > 0 and self.place.devices[0].platform == "tpu":
            # The TPU's compiler adds up the temporaries of a loop's body and those around it, which are not alive at
            # once. Its peak, which contains arguments and results, does not.
            temporary = min(temporary, peak - memory.argument_size_in_bytes - results)
        return Built(
            seconds,
            memory.argument_size_in_bytes - self.shared_bytes,
            max(0, temporary),
            results + memory.generated_code_size_in_bytes,
            program.as_text(),
        )


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled program, or the record that it does not fit the device's memory.

    Attributes:
      seconds: wall time of tracing and compilation.
      argument_bytes: bytes per device.
      temporary_bytes: bytes per device of the temporaries that are alive at once; None if the program does not fit.
      other_bytes: bytes per device of the program itself and of results that do not reuse an argument's buffer.
      text: the optimised HLO; "" if the program does not fit.
      refusal: the compiler's message if the program does not fit.
    """

    seconds: float
    argument_bytes: int
    temporary_bytes: int | None = None
    other_bytes: int = 0
    text: str = ""
    refusal: str | None = None

    def report(self, accelerator: Accelerator) -> dict[str, Any]:
        """Returns whether the program fits a chip's memory, the compiler's message if not, its memory and seconds."""
        needed = self.argument_bytes + (self.temporary_bytes or 0) + self.other_bytes
        return {
            "fits": self.refusal is None and needed <= accelerator.memory_bytes,
            "refusal": self.refusal,
            "argument_bytes_per_device": self.argument_bytes,
            "temporary_bytes_per_device": self.temporary_bytes,
            "compile_seconds": self.seconds,
        }


def part_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of sharded arrays, without PRNG keys."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def make(
    target: ModelShape,
    method: Method,
    place: Place,
    *,
    batch: int = 1,
    capacity: int = 1024,
    dtype: DTypeLike = jnp.bfloat16,
) -> Programs:
    """Returns the programs of a method at these sizes; they serve all options of generation.

    Files of the method (a plan, a probe, a ranking) are replaced by stand-ins, since their numbers are data of the
    program. A static mask is that of the stand-in plan, which skips every other sublayer of the later layers.

    Args:
      target: the model.
      method: the method, as `methods.registry.make` returns it.
      place: the devices.
      batch: number of rows.
      capacity: tokens per row; rounded up to a power of two, as in generation.
      dtype: type of weights, and of the cache if the target's `kv_cache_dtype` is auto.

    Raises:
      ValueError, FileNotFoundError: an option does not fit the model or the sizes; one line.
    """
    for name, number in {"batch": batch, "capacity": capacity}.items():
        check_count(name, number)
    if capacity > LARGEST_CAPACITY:
        raise ValueError(f"capacity is {capacity}; give at most {LARGEST_CAPACITY}")
    capacity, target = bucket(capacity), target.over(place.mesh)
    with _files(target.config, getattr(method, "draft_vocab", None) is not None) as directory:
        drafter, own, shared = _build(target, method, directory, place, dtype)
        if drafter.static:
            path = directory / method_files.PLAN_NAME
            drafter = drafter.specialised(method_files.read_plan(path, UNREAD, target.config.num_layers))
    if drafter.reach >= capacity:
        raise ValueError(
            f"capacity is {capacity}, and a round of {method.name} writes {drafter.reach} slots; give more than "
            f"{drafter.reach}"
        )
    platform = place.devices[0].platform
    row = RowRequest(prompt=(0,), max_new_tokens=1)
    rows, shapes = [row] * batch, Shapes.from_requests([row])
    parts = Parts(
        drafter,
        BlockAcceptor(),
        distribution_of(rows),
        one_width=platform != "cpu",
        penalties=shapes.penalties(rows),
        log_probs=jnp.zeros(batch, jnp.int32),
    )

    def asked() -> Request:
        zeros, ends = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, shapes.num_eos), jnp.int32)
        keys = jax.random.split(seed_key(0), batch)
        return Request(jnp.zeros((batch, capacity), jnp.int32), zeros, zeros, ends, keys)

    request = place.put(jax.eval_shape(asked))
    weights = Weights(place.put_params(target.params(dtype), target.config), own)
    static = compiled.prefill_static(target.config, capacity, platform, place.mesh)
    return Programs(target.config, weights, place.put(parts), request, place, static, part_bytes(shared))


def _build(
    target: ModelShape, method: Method, directory: Path, place: Place, dtype: DTypeLike
) -> tuple[Drafter, Any, Any]:
    """Returns the drafter, its parameters, and those that it shares with the target, all as sharded shapes."""
    shared: list[bool] = []
    drafts: list[LlamaConfig] = []

    def load_draft(draft: ModelLike) -> LoadedModel:
        found = _draft_shape(draft).over(place.mesh)
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
            (_GREEDY,),
            place.devices[0].platform,
            load_head=lambda path, _: _loaded_head(Path(path), directory, target.config, dtype),
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
