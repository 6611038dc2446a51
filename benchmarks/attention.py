"""The bytes that attention moves, by the compilers: `python -m benchmarks.attention` prints a line of JSON a figure.

Devices whose compiler is not installed are left out. Each array in main memory counts once for each kernel that reads
or writes it, and in part if the kernel takes slices of it. On a GPU, the second-level cache may serve a part of these
bytes. The benchmark needs no device and measures nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.console import frame
from jaxspec.console.environment import compile_only
from jaxspec.host.extras import MissingExtra
from jaxspec.host.progress import Progress
from jaxspec.measuring.aot import hlo
from jaxspec.measuring.aot.accelerators import parse_topology
from jaxspec.measuring.aot.compiled_rounds import HANDED_ON
from jaxspec.measuring.aot.programs import Place, devices
from jaxspec.measuring.aot.reads import Reads
from jaxspec.measuring.aot.report import Program, build
from jaxspec.measuring.aot.stand_ins import ModelShape
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.config import KVCacheDtype, LlamaConfig
from jaxspec.model.numerics import stream_dtype
from jaxspec.programs.buckets import MAX_CHUNK
from jaxspec.programs.compiler_options import compiler_options, tracing

# The live length of a decoding step, and the capacities that are compared.
LIVE, SHORT, LONG = 1024, 2048, 32768
CACHES: tuple[KVCacheDtype, ...] = ("auto", "int8")
# The steps on a device without bfloat16: shape and bits of the weights.
STEPS = (("1.2b", None), ("8b", 8))


@dataclasses.dataclass(frozen=True)
class Options:
    """Counts the bytes of attention, and of whole steps on GPUs without bfloat16.

    Attributes:
      topologies: names of single devices, as in `jaxspec compile`, with commas between.
      shape: one of profile's shapes, of whose attention one layer is compiled.
      lengths: tokens of the prompt whose last chunk is compiled, with commas between.
    """

    topologies: str = "v5e:1x1,h100,t4"
    shape: str = "8b"
    lengths: str = "8192,32768,131072"


def figures(options: Options, on_progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yields a figure for each compiled program: the bytes, those of the temporaries, and a ratio.

    `ratio` is, for a chunk of a prompt, the bytes ÷ those of the keys, values and queries; for a decoding step, the
    bytes ÷ those with the short capacity; and for a whole step, the bytes ÷ those of the weights that it reads.
    """
    for name in options.topologies.split(","):
        topology = parse_topology(name)
        try:
            place = Place(devices(topology), None)
        except MissingExtra as error:
            on_progress(f"{name} is left out: {error}")
            continue
        dtype = topology.accelerator.dtype
        for kv_cache_dtype in CACHES:
            config = dataclasses.replace(SHAPES[options.shape], kv_cache_dtype=kv_cache_dtype)
            base = {"device": name, "shape": options.shape, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
            for length in map(int, options.lengths.split(",")):
                on_progress(f"a chunk at {length} tokens, {kv_cache_dtype} cache, {name}")
                rows = min(MAX_CHUNK, length)
                found, size = attention(place, config, dtype, rows, length, length)
                yield {**base, "figure": "chunk", "length": length, **found, "ratio": found["bytes"] / size}
            short = None
            for capacity in (SHORT, LONG):
                on_progress(f"a step in a capacity of {capacity}, {kv_cache_dtype} cache, {name}")
                found, _ = attention(place, config, dtype, 1, LIVE, capacity)
                short = short or found["bytes"]
                step = {"figure": "step", "live": LIVE, "capacity": capacity}
                yield {**base, **step, **found, "ratio": found["bytes"] / short}
        if dtype == "float16":
            for shape, bits in STEPS:
                for rows in (1, 5):
                    on_progress(f"a step of {rows} rows of {shape}, {name}")
                    found = whole_step(place, ModelShape(shape, SHAPES[shape], bits=bits), dtype, rows)
                    yield {
                        "device": name,
                        "shape": shape,
                        "dtype": dtype,
                        "bits": bits,
                        "rows": rows,
                        **found,
                    }


def attention(
    place: Place, config: LlamaConfig, dtype: str, rows: int, live: int, capacity: int
) -> tuple[dict[str, int], int]:
    """Returns the bytes of a layer's attention for the last `rows` of `live` tokens, and of what it must read."""
    stream = stream_dtype(dtype)
    heads, group, width = config.num_kv_heads, config.group_size, config.head_dim

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, layer: kv.Layer) -> Any:
        slots = start[:, None] + jnp.arange(rows)
        return llama.Cached(start, slots, None, True)(q, k, v, layer)

    def arguments() -> tuple[Any, ...]:
        q = jnp.zeros((1, rows, heads, group, width), stream)
        k = jnp.zeros((1, rows, heads, width), stream)
        return q, k, k, jnp.zeros(1, jnp.int32), kv.create(config, 1, capacity, dtype).layers[0]

    given = place.put(jax.eval_shape(arguments))
    program = _compiled(attend, given, 4)
    width = kv.block_on_accelerator(rows * config.num_heads)
    found = {
        "bytes": moved_bytes(program, -(-live // width), (live - 1) // kv.SHORTEST),
        "temporaries": program.temporary_bytes or 0,
    }
    return found, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given))


def whole_step(place: Place, shape: ModelShape, dtype: str, rows: int) -> dict[str, Any]:
    """Returns the bytes of a greedy step of one text of `LIVE` tokens, from those through one and two layers."""

    def moved(num_layers: int) -> int:
        few = dataclasses.replace(shape, config=shape.config.truncated(num_layers))

        def step(params: llama.Params, tokens: jax.Array, start: jax.Array, cache: kv.KVCache) -> Any:
            logits, _, cache = llama.forward(few.config, params, tokens, start, cache)
            return jnp.argmax(logits, axis=-1), cache

        beside = jax.eval_shape(
            lambda: (
                jnp.zeros((1, rows), jnp.int32),
                jnp.zeros(1, jnp.int32),
                kv.create(few.config, 1, LIVE, dtype),
            )
        )
        return moved_bytes(_compiled(step, place.put((few.params(dtype), *beside)), 3))

    one, two = moved(1), moved(2)
    size, weights = one + (shape.config.num_layers - 1) * (two - one), shape.params(dtype)
    read = weights if shape.config.tie_embeddings else {**weights, "embed": ()}
    floor = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
    return {"figure": "whole step", "bytes": size, "ratio": size / floor}


def _compiled(function: Callable[..., Any], given: tuple[Any, ...], donated: int) -> Program:
    with tracing(given):
        lowered = jax.jit(function, donate_argnums=donated).lower(*given)
    return build(lambda: lowered, compiler_options(given))


def moved_bytes(program: Program, trips: int = 1, branch: int = 0) -> int:
    """Returns the bytes that a program reads from main memory and writes to it.

    Args:
      program: the compiled program.
      trips: how often it runs the body of each loop.
      branch: the branch of each condition that it enters.
    """
    module = hlo.parse(program.text)
    reads = Reads(module, lambda one: "all")

    def of(at: str) -> int:
        total = 0
        for one in module.computations[at]:
            if one.opcode == "while":
                total += trips * of(one.called["body"][0])
            elif one.opcode == "conditional":
                total += of(one.called["branch_computations"][branch])
            elif one.opcode == "call":
                total += of(one.called["to_apply"][0])
            elif one.opcode not in (*HANDED_ON, "constant") and not one.opcode.endswith("-done"):
                total += sum(reads.taken(at, one, number)[0] for number in range(len(one.operands)))
                # A transfer has its source among its results. A write in place is as small as the new slots.
                made = one.results[:1] if one.opcode.endswith("-start") else one.results
                total += sum(
                    0 if buffer.space or _in_place(reads, one, part) else buffer.size_bytes
                    for part, buffer in enumerate(made)
                )
        return total

    return of(module.entry)


def _in_place(reads: Reads, one: hlo.Instruction, part: int) -> bool:
    if one.opcode == "fusion":
        return reads.written(one, part) is not None
    return one.opcode == "dynamic-update-slice"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures; returns the exit status."""

    def work(options: Options) -> int:
        compile_only()
        with Progress() as progress:
            for figure in figures(options, progress):
                print(json.dumps(figure), flush=True)
        return 0

    return frame.run("benchmarks.attention", Options, work, argv)


if __name__ == "__main__":
    sys.exit(main())
