"""`jaxspec compile`: compiles a model and a method ahead of time, without the accelerator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jaxspec.cli.options import Dtype, SamplingOptions, Weights
from jaxspec.console.environment import compile_only
from jaxspec.console.output import writable
from jaxspec.console.tables import Table
from jaxspec.host.files import write_atomic
from jaxspec.host.progress import Progress
from jaxspec.measuring.aot.accelerators import mesh_axes, parse_topology
from jaxspec.measuring.output import show
from jaxspec.model.config import KVCacheDtype


@dataclasses.dataclass(frozen=True)
class Compile:
    """Compile a method's programs for an accelerator that is not attached, and report on them.

    Only the shape of the model is used: no weights are read or created. Files of a method (a plan, a probe) are
    replaced by arbitrary values, because they are data to the program.

    Copies are copies of whole caches or weights in one round; there should be none. A cache is written back if the
    program moves all of it to fast memory, changes it there and moves it back. Collectives and GPU kernels are counted
    over one round, including a full draft. Cycles are estimates of the TPU's compiler, not times. The floor is the
    number of cycles to read memory at the published bandwidth; lower estimates are raised to it. The speed is a
    prediction: for a TPU from these cycles, for a GPU from published figures.

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
      weights: int8 for int8 matrices with one scale per output channel, also in a draft model. Products convert them
        to dtype; whole weights that the compiler converts are counted, and there should be none. Only a CPU rounds
        activations to int8 too. Default: weights of dtype.
      kv_cache_dtype: auto, keys and values in dtype, or int8, with a scale for each token and head.
      prefill: compile the prefill too; --no-prefill skips it.
      hlo: write the optimised program of the rounds to this file.
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
    prefill: bool = True
    hlo: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    json: bool = False
    sampling: SamplingOptions = SamplingOptions()  # noqa: RUF009
    drafting: Any = None

    def run(self) -> int:
        """Compiles; returns the exit status."""
        topology = parse_topology(self.topology)
        axes = mesh_axes(self.mesh, topology.num_devices)
        method = self.drafting
        hlo = None if self.hlo is None else writable(self.hlo, "hlo")
        compile_only()
        with Progress() as progress:
            from jaxspec.loading.loading import dtype_named, resolve_weights
            from jaxspec.measuring.aot.programs import Place, devices, make
            from jaxspec.measuring.aot.report import build, report
            from jaxspec.measuring.aot.stand_ins import model_shape

            place = Place.of(devices(topology), axes)
            dtype = dtype_named(self.dtype, place.devices[0])
            target = model_shape(self.model, self.shape)
            config = dataclasses.replace(target.config, kv_cache_dtype=self.kv_cache_dtype)
            target = dataclasses.replace(target, config=config, bits=resolve_weights(self.weights))
            programs = make(
                target,
                method,
                place,
                batch=self.batch,
                capacity=self.capacity,
                dtype=dtype,
                distribution=self.sampling.numbers(),
            )
            progress("compiling the rounds")
            rounds = build(programs.rounds, programs.options)
            if hlo is not None:
                # The compiler returns no program if the rounds do not fit.
                write_atomic(hlo, rounds.text or "the rounds do not fit the memory of a chip\n")
            if self.prefill:
                progress("compiling the prefill")
            prefill = build(programs.prefill, programs.options) if self.prefill else None
            found = report(programs, topology.accelerator, rounds, prefill)
        record = {
            "model": target.name,
            "topology": self.topology,
            "mesh": axes,
            "method": str(method),
            "batch": self.batch,
            "capacity": programs.request.tokens.shape[1],
            "dtype": dtype.name,
            "weights": self.weights,
            "kv_cache_dtype": self.kv_cache_dtype,
            **found,
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
    rows = [("fits the memory of a chip", "yes" if record["fits"] else "no")]
    if record["refusal"] is not None:
        rows.append(("the compiler's message", record["refusal"]))
    for name, part in {"rounds": record, "prefill": record["prefill"]}.items():
        if part is not None:
            rows.append((f"{name}: arguments per chip", _size(part["argument_bytes_per_device"])))
            rows.append((f"{name}: temporaries per chip", _size(part["temporary_bytes_per_device"])))
            rows.append((f"{name}: tracing and compiling", f"{part['compile_seconds']:.1f} s"))
    rows.append(("copies of a cache in a round", _number(record["cache_copies"])))
    rows.append(("caches written back in a round", _number(record["cache_write_backs"])))
    rows.append(("copies of a weight in a round", _number(record["weight_copies"])))
    if record["weights"] is not None:
        rows.append(("products", f"{record['weights']} weights × {record['dtype']} activations"))
    rows.append(("quantised weights written as floats", _number(record["dequantised_weights"])))
    for kind, count in (record["collectives"] or {}).items():
        rows.append((f"{kind} in a round", _number(count)))
    if record["cycles"] is not None:
        rows.append(("weights and caches multiplied by the vector unit", _number(record["vector_products"])))
    if record["kernels_per_round"] is not None:
        rows.append(("kernels started in a round", _number(record["kernels_per_round"])))
        per_layer = record["kernels_per_layer"]
        rows.append(("kernels of a layer", "unknown" if per_layer is None else f"{per_layer:g}"))
    if record.get("bandwidth_share") is not None:
        rows.append(("share of the bandwidth, by a fit", f"{record['bandwidth_share']:.2f}"))
    speed = record["predicted_tokens_per_second"]
    if speed is not None or record["cycles"] is None:
        predicted = "unknown" if speed is None else f"{speed:,.0f} tokens/s"
        rows.append(("plain decoding, predicted upper bound", predicted))
    yield Table((), rows, name=60)
    if record["cycles"] is not None:
        yield from _cycles(record["cycles"], (record["prefill"] or {}).get("cycles"))
    yield f"predicted from the figures of {source}"


def _cycles(cycles: dict[str, Any], prefill: dict[str, Any] | None) -> Iterator[str | Table]:
    """Yields the compiler's estimates in thousands of cycles, one column for each part of a round."""
    from jaxspec.measuring.aot.cycles import EXCHANGES

    columns = {"round": cycles["round"], **cycles["stages"]}
    if cycles["draft_step"] is not None:
        columns["draft step"] = cycles["draft_step"]
    if prefill is not None:
        columns["prompt chunk"] = prefill["round"]
    figures = [{**part["split"], "all": part["cycles"], "floor": part["floor"]} for part in columns.values()]
    # The compiler does not estimate the cycles of collectives; their bytes are printed below.
    names = [name for name in figures[0] if name != EXCHANGES]
    rows = [[name, *(f"{part[name] / 1e3:,.0f}" for part in figures)] for name in names]
    rows.append(["floor ÷ all", *(f"{part['of_floor']:.2f}" for part in columns.values())])
    yield "\nthe compiler's estimate, not a time"
    yield Table(("thousands of cycles", *columns), rows, name=20)
    for name, loop in cycles["loops"].items():
        count = "once or never" if loop["trips"] is None else f"{loop['trips']} ×"
        yield f"{name}: {count} {loop['cycles']:,} cycles"
    if cycles["exchanged_bytes"]:
        yield f"exchanged in a round: {_size(cycles['exchanged_bytes'])}; its cycles are not estimated"
    milliseconds = f"{1e3 / cycles['clock'] * cycles['round']['cycles']:.2f} ms"
    yield f"a round at {cycles['clock'] / 1e9:.2f} GHz: {milliseconds}"


def _size(size: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def _number(count: float | None) -> str:
    return "unknown" if count is None else f"{count:,.0f}"
