"""`jaxspec compile`: compiles a model and a method ahead of time, without the accelerator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jaxspec.cli.options import Dtype, Weights
from jaxspec.console.environment import compile_only
from jaxspec.console.tables import Table
from jaxspec.host.progress import Progress
from jaxspec.measuring.accelerators import mesh_axes, parse_topology
from jaxspec.measuring.output import show
from jaxspec.model.config import KVCacheDtype


@dataclasses.dataclass(frozen=True)
class Compile:
    """Compile a method's programs for an accelerator that is not attached: do they compile, and do they fit?

    Only the shape of the model is used: no weights are read or created. Files of a method (a plan, a probe) are
    replaced by arbitrary values, because they are data to the program.

    Attributes:
      topology: type and number of chips: v5e:1x1, v5e:2x2, v6e:2x4, v5p:2x2x1 and so on; or up to 8 GPUs of type
        h100, h200, a100, l4, v100 or t4, such as h100:4.
      shape: a common shape: 31m, 134m, 1b, 1.2b, 7b, 8b, 13b, 70b or 405b; --draft takes these names too.
      model: a directory, .gguf file or hub id whose config gives the shape, or the name of a model that comes with
        jaxspec.
      mesh: the arrangement of the chips, such as data=1,model=4: rows are split over data, heads over model. Default:
        all chips along model.
      method: as in `jaxspec generate`.
      batch: rows decoded together.
      capacity: the maximum length of a row in tokens; rounded up to a power of two.
      dtype: dtype of weights. Default auto: float16 for v100 and t4, else bfloat16.
      weights: int8 for int8 matrices with one scale per output channel, also in a draft model. Default: weights of
        dtype.
      kv_cache_dtype: auto, keys and values in dtype, or int8, with a scale for each token and head.
      json: print one JSON object and nothing else.
    """

    topology: str
    shape: str | None = None
    model: str | None = None
    mesh: str | None = dataclasses.field(default=None, metadata={"metavar": "AXES"})
    method: str = dataclasses.field(default="autoregressive", metadata={"metavar": "NAME"})
    batch: int = 1
    capacity: int = 1024
    dtype: Dtype = "auto"
    weights: Weights | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    json: bool = False
    drafting: Any = None

    def run(self) -> int:
        """Compiles; returns the exit status."""
        topology = parse_topology(self.topology)
        axes = mesh_axes(self.mesh, topology.num_devices)
        compile_only()
        with Progress() as progress:
            from jaxspec.loading.loading import dtype_named, resolve_weights
            from jaxspec.measuring.aot import Place, devices, make, model_shape

            place = Place.from_devices(devices(topology), axes)
            dtype = dtype_named(self.dtype, place.devices[0])
            target = model_shape(self.model, self.shape)
            config = dataclasses.replace(target.config, kv_cache_dtype=self.kv_cache_dtype)
            target = dataclasses.replace(target, config=config, bits=resolve_weights(self.weights))
            sizes = {"batch": self.batch, "capacity": self.capacity}
            programs = make(target, self.drafting, place, dtype=dtype, **sizes)
            progress("compiling the rounds")
            rounds = programs.rounds().report(topology.accelerator)
            progress("compiling the prefill")
            prefill = programs.prefill().report(topology.accelerator)
        record = {
            "model": target.name,
            "topology": self.topology,
            "mesh": axes,
            "method": str(self.drafting),
            "batch": self.batch,
            "capacity": programs.request.tokens.shape[1],
            "dtype": dtype.name,
            "weights": self.weights,
            "kv_cache_dtype": self.kv_cache_dtype,
            "fits": rounds["fits"] and prefill["fits"],
            "memory_bytes": topology.accelerator.memory_bytes,
            "rounds": rounds,
            "prefill": prefill,
        }
        show(record, self.json, functools.partial(_parts, topology.accelerator.source))
        return 0


def _parts(source: str, record: dict[str, Any]) -> Iterator[str | Table]:
    axes = " × ".join(f"{name} {size}" for name, size in record["mesh"].items())
    held = "" if record["weights"] is None else f" with {record['weights']} weights"
    held += "" if record["kv_cache_dtype"] == "auto" else f", {record['kv_cache_dtype']} cache"
    yield (
        f"{record['model']}, {record['dtype']}{held}, {record['topology']} ({axes}), {record['method']}, batch "
        f"{record['batch']}, capacity {record['capacity']}"
    )
    rows = [
        (
            "fits the memory of a chip",
            f"{'yes' if record['fits'] else 'no'}, of {_size(record['memory_bytes'])}",
        )
    ]
    for name in ("rounds", "prefill"):
        part = record[name]
        if part["refusal"] is not None:
            rows.append((f"{name}: the compiler's message", part["refusal"]))
        rows.append((f"{name}: arguments per chip", _size(part["argument_bytes_per_device"])))
        rows.append((f"{name}: temporaries per chip", _size(part["temporary_bytes_per_device"])))
        rows.append((f"{name}: tracing and compiling", f"{part['compile_seconds']:.1f} s"))
    yield Table((), rows, name=60)
    yield f"the memory of a chip: {source}"


def _size(size: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"
