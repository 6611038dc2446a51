"""Reports memory, copies, collectives and predicted speed of the compiled programs of a model and a method."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.measuring.aot import hlo
from jaxspec.measuring.aot.accelerators import LAYER_OPERATIONS, OTHER_OPERATIONS, Accelerator
from jaxspec.measuring.aot.compiled_rounds import (
    collectives,
    copies,
    dequantised,
    kernels,
    kernels_per_layer,
    main_loop,
    vector_products,
    write_backs,
)
from jaxspec.measuring.aot.cycles import estimate
from jaxspec.measuring.aot.programs import Programs, part, part_bytes

# Keys about the rounds' program; None if it does not fit. The keys of `_OF_A_GPU` are also None on other devices.
_OF_ROUNDS = (
    "cache_copies",
    "cache_write_backs",
    "weight_copies",
    "dequantised_weights",
    "vector_products",
    "collectives",
)
_OF_A_GPU = ("kernels_per_round", "kernels_per_layer", "bandwidth_share")
# Bytes per second, and microseconds to start a kernel, that fit the two steps measured on an H100, with command buffers
# (docs/laboratory.md).
_FIT = {"h100": (3.09e12, 1.79)}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, or the record that it does not fit the device's memory.

    Attributes:
      seconds: wall time of tracing and compilation.
      text: the optimised HLO; "" if the program does not fit.
      argument_bytes: bytes per device; None if the program does not fit.
      temporary_bytes: bytes per device of the temporaries that are alive at once, likewise.
      other_bytes: bytes per device of the program itself and of results that do not reuse an argument's buffer.
      flops: the compiler's count of operations, with each inner loop counted once; None if it gives no count.
      refusal: the compiler's message if the program does not fit.
      processor_seconds: processor time of this process for tracing and compilation, summed over all cores.
    """

    seconds: float
    text: str = ""
    argument_bytes: int | None = None
    temporary_bytes: int | None = None
    other_bytes: int = 0
    flops: float | None = None
    refusal: str | None = None
    processor_seconds: float = 0.0


def build(lower: Callable[[], Any], options: dict[str, str] | None = None) -> Program:
    """Traces and compiles a program.

    Args:
      lower: returns the `jax.stages.Lowered`.
      options: compiler options, see `Programs.options`.
    """
    began, spent = time.perf_counter(), time.process_time()
    try:
        compiled = lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error)
        if "RESOURCE_EXHAUSTED" not in reason or "hbm" not in reason.lower():  # not the main memory
            raise
        refusal = next((line for line in reason.splitlines() if "hbm" in line.lower()), reason)
        seconds, used = time.perf_counter() - began, time.process_time() - spent
        return Program(seconds, refusal=refusal.strip(), processor_seconds=used)
    seconds, used = time.perf_counter() - began, time.process_time() - spent
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary, peak = memory.temp_size_in_bytes, getattr(memory, "peak_memory_in_bytes", 0)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for one in shardings[:1] for device in one.device_set}
    if peak > 0 and platforms == {"tpu"}:
        # The TPU's compiler adds up the temporaries of a loop's body and those around it, which are not alive at once.
        # Its peak, which contains arguments and results, does not.
        temporary = min(temporary, peak - memory.argument_size_in_bytes - results)
    return Program(
        seconds,
        compiled.as_text(),
        memory.argument_size_in_bytes,
        max(0, temporary),
        results + memory.generated_code_size_in_bytes,
        costs.get("flops"),
        processor_seconds=used,
    )


def report(
    programs: Programs, accelerator: Accelerator, rounds: Program, prefill: Program | None = None
) -> dict[str, Any]:
    """Returns the report on a method's compiled programs.

    Args:
      programs: the programs before compilation.
      accelerator: the chip for which they were compiled.
      rounds: the compiled loop of rounds.
      prefill: the compiled prefill, or None.

    Returns:
      A dict; the functions that it names are in `aot.compiled_rounds`.

      `fits`: whether arguments, temporaries, results and programs fit a chip's memory.
      `refusal`: the compiler's message if they do not fit; None if the programs compile.
      `argument_bytes_per_device`, `temporary_bytes_per_device`: memory of the rounds; the latter is None if they do
        not fit.
      `cache_copies`, `weight_copies`: number of whole arrays that a round copies, see `copies`.
      `dequantised_weights`: quantised weights that the rounds' program writes as floats, see `dequantised`.
      `cache_write_backs`: caches that a round moves whole from fast memory to main memory, see `write_backs`.
      `vector_products`: weights and caches that a round multiplies element by element, see `vector_products`.
      `collectives`: collectives of a round by opcode, see `collectives`.
      `kernels_per_round`, `kernels_per_layer`: see `kernels` and `kernels_per_layer`; None unless the
        device is a GPU.
      `bandwidth_share`: the share of the published bandwidth that a step of plain decoding reaches, by a fit of two
        measured steps to bytes and kernels; None for other methods and devices.
      `cycles`: the TPU compiler's estimate of a round, see `cycles.estimate`; None for other devices.
      `compile_seconds`, `compile_processor_seconds`: time to trace and compile the rounds, see `Program`.
      `prefill`: the prefill's `fits`, memory, `compile_seconds` and `cycles` (of a chunk of the prompts); None if it
        was not compiled.
      `predicted_tokens_per_second`: a prediction for plain decoding, all rows together: for a TPU from `cycles` and its
        clock, for other devices from published figures, see `predicted`. None if the program does not fit, and for
        other methods on a TPU.
    """
    shared = programs.shared_bytes
    given = (programs.weights, programs.parts, programs.state)
    counted: int | None = None
    compiled = {"rounds": rounds} | ({"prefill": prefill} if prefill is not None else {})
    record: dict[str, Any] = {"fits": all(_fits(one, accelerator, shared) for one in compiled.values())}
    record["refusal"] = next((one.refusal for one in compiled.values() if one.refusal is not None), None)
    record |= _memory(rounds, shared, part_bytes(given)) | dict.fromkeys((*_OF_ROUNDS, *_OF_A_GPU))
    if rounds.text:
        module = hlo.parse(rounds.text)
        loop = main_loop(module)
        caches = programs.cache_shapes()
        record |= {
            "cache_copies": copies(module, loop, caches),
            "cache_write_backs": write_backs(module, loop, caches),
            "weight_copies": copies(module, loop, programs.weight_shapes() - caches),
            "dequantised_weights": dequantised(module, programs.quantised_shapes()),
            "vector_products": vector_products(module, loop, programs.weight_shapes() | caches),
            "collectives": collectives(module, loop),
        }
        if accelerator.is_gpu:
            counted = kernels(module, loop)
            record |= {"kernels_per_round": counted, "kernels_per_layer": kernels_per_layer(module, loop)}
            if accelerator.name in _FIT and programs.parts.drafter.num_draft_tokens == 0:
                bandwidth, start_us = _FIT[accelerator.name]
                size = part_bytes(_read(programs))
                seconds = size / bandwidth + 1e-6 * start_us * counted
                record["bandwidth_share"] = size / accelerator.bandwidth / seconds
    record["cycles"] = cycles = _cycles(rounds, accelerator)
    record["compile_seconds"] = rounds.seconds
    record["compile_processor_seconds"] = rounds.processor_seconds
    record["prefill"] = None
    if prefill is not None:
        fed = part_bytes((programs.weights, programs.parts, programs.request))
        record["prefill"] = {
            "fits": _fits(prefill, accelerator, shared),
            **_memory(prefill, shared, fed),
            "compile_seconds": prefill.seconds,
            "cycles": _cycles(prefill, accelerator),
        }
    plain, speed = programs.parts.drafter.num_draft_tokens == 0, None
    if record["fits"] and cycles is None:
        speed = predicted(programs, accelerator, counted if plain else None)
    elif record["fits"] and plain and cycles is not None:
        speed = programs.state.length.shape[0] * accelerator.clock / cycles["round"]["cycles"]
    record["predicted_tokens_per_second"] = speed
    return record


def _cycles(program: Program, accelerator: Accelerator) -> dict[str, Any] | None:
    """Returns the TPU compiler's estimate of one trip of a program's main loop; None if it gives none."""
    if accelerator.is_gpu or not program.text:
        return None
    module = hlo.parse(program.text)
    return estimate(module, main_loop(module), accelerator)


def predicted(programs: Programs, accelerator: Accelerator, kernels: int | None = None) -> float:
    """Returns the predicted tokens per second of plain decoding with a full cache, summed over all rows.

    The time of a step is the larger of two times: reading a device's part of the weights (without an untied embedding)
    and of the target's cache, and multiplying by them. A GPU adds the time to start its kernels one after the other.
    Collectives and all other work are neglected, so the prediction is an upper bound.

    Args:
      programs: the programs; only the target and the rows are used.
      accelerator: the device.
      kernels: kernels of one step of plain decoding on a GPU; None for the number that `roofline` assumes.
    """
    config, state = programs.config, programs.state
    batch, rows = state.length.shape[0], part(state.length)[0]
    read, cache = _read(programs)
    matrices = sum(math.prod(part(leaf)) for leaf in jax.tree.leaves(read) if leaf.ndim > 1)
    slots = sum(math.prod(part(leaf)) for leaf in cache)
    flops = 2 * rows * matrices + 2 * config.group_size * slots
    seconds = max(part_bytes((read, cache)) / accelerator.bandwidth, flops / accelerator.flops)
    if accelerator.is_gpu:
        usual = LAYER_OPERATIONS * config.num_layers + OTHER_OPERATIONS
        seconds += 1e-6 * accelerator.launch_us * (usual if kernels is None else kernels)
    return batch / seconds


def _read(programs: Programs) -> tuple[Any, list[Any]]:
    """Returns the arrays that a step of plain decoding reads: the target's weights, and its cache."""
    target, tied = programs.weights.target, programs.config.tie_embeddings
    weights = {name: leaf for name, leaf in target.items() if tied or name != "embed"}
    return weights, [leaf for pair in programs.state.cache.layers for leaf in pair]


def _memory(program: Program, shared: int, arguments: int) -> dict[str, int | None]:
    """Returns a program's memory; `arguments` replaces the compiler's count of argument bytes if there is none."""
    taken = arguments if program.argument_bytes is None else program.argument_bytes
    return {
        "argument_bytes_per_device": taken - shared,
        "temporary_bytes_per_device": program.temporary_bytes,
    }


def _fits(program: Program, accelerator: Accelerator, shared: int) -> bool:
    if program.argument_bytes is None or program.temporary_bytes is None:
        return False
    needed = program.argument_bytes - shared + program.temporary_bytes + program.other_bytes
    return needed <= accelerator.memory_bytes
