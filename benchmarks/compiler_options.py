"""The gain by the compiler's options on a CPU: `python -m benchmarks.compiler_options --model smollm2`.

The prefill and the rounds of plain decoding are compiled with each set of options. Then all programs are called in
turns, with the arguments of a real text.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from benchmarks import command
from jaxspec.engine.language_model import load
from jaxspec.host.progress import OnProgress
from jaxspec.programs import compiled

# The first one is the default, by which the others are divided.
SETS: tuple[dict[str, int | bool], ...] = (
    {},
    *({"xla_backend_optimization_level": level} for level in (0, 1, 2)),
    *({"xla_cpu_parallel_codegen_split_count": count} for count in (1, 2, 8)),
    {"xla_llvm_disable_expensive_passes": True},
)
PROGRAMS: tuple[Any, ...] = (compiled.prefill, compiled.run_rounds)


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile, load and run time of the programs of plain decoding with several options of the compiler.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      prompt: the tokens of the prompt.
      compiles: how often each program is compiled.
      repeats: how often each program is called.
    """

    model: str = "smollm2"
    prompt: int = 40
    compiles: int = 2
    repeats: int = 8


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns for each program and set of options the seconds to compile, to load and to run, and CPU seconds."""
    lm = load(options.model, compilation_cache=False)
    calls: dict[Any, tuple[Any, dict[str, Any]]] = {}
    call = lm.executables.call

    def record(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        if function in PROGRAMS and function not in calls:
            calls[function] = (
                jax.tree.map(jnp.copy, args),
                static,
            )  # because a call may take the memory of some
        return call(function, *args, **static)

    lm.executables.call = record  # type: ignore[method-assign]
    prompt = np.random.default_rng(0).integers(10, 1000, options.prompt).tolist()
    lm.generate(prompt, method="autoregressive", max_new_tokens=16, ignore_eos=True)
    lm.executables.wait()
    rows = []
    for function in PROGRAMS:
        args, static = calls[function]
        of, programs = [], []
        for given in SETS:
            on_progress(f"compiling {function.__name__} with {named(given)}")
            compiles = []
            for _ in range(options.compiles):
                function.clear_cache()
                lowered = function.lower(*args, **static)
                program, *seconds = _timed(lowered.compile, compiler_options=given)
                compiles.append(seconds)
            stored = serialize_executable.serialize(program)
            _, load_s, load_cpu_s = _timed(serialize_executable.deserialize_and_load, *stored)
            best = min(compiles)
            of.append(
                {
                    "program": function.__name__,
                    "options": given,
                    "compile_s": best[0],
                    "compile_cpu_s": best[1],
                }
            )
            of[-1] |= {"load_s": load_s, "load_cpu_s": load_cpu_s, "runs": []}
            programs.append(program)
        on_progress(f"calling {function.__name__}")
        for turn in range(options.repeats + 1):
            pairs = list(zip(of, programs, strict=True))
            first = turn % len(pairs)  # the first call of a turn is slower
            for row, program in pairs[first:] + pairs[:first]:
                copied = jax.block_until_ready(jax.tree.map(jnp.copy, args))
                _, *seconds = _timed(
                    lambda copied, program: jax.block_until_ready(program(*copied)), copied, program
                )
                if turn:
                    row["runs"].append(seconds)
        rows += of
    return {"model": options.model, "rows": rows}


def named(given: dict[str, int | bool]) -> str:
    """Returns a set of options as text."""
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "the defaults"


def table(report: dict[str, Any]) -> str:
    """Returns the report as a Markdown table; run times are medians of the quotients of each turn."""
    lines = [
        "| program | options | compile, s | CPU s | load, s | CPU s | call ÷ default | CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        base = next(one["runs"] for one in report["rows"] if one["program"] == row["program"])
        quotients = [
            statistics.median(own[at] / other[at] for own, other in zip(row["runs"], base, strict=True))
            for at in (0, 1)
        ]
        figures = [row["compile_s"], row["compile_cpu_s"], row["load_s"], row["load_cpu_s"], *quotients]
        cells = [f"`{row['program']}`", named(row["options"]), *(f"{one:.2f}" for one in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _timed(function: Callable[..., Any], *args: Any, **more: Any) -> tuple[Any, float, float]:
    """Returns the result, the seconds and the CPU seconds of a call."""
    began, cpu = time.perf_counter(), time.process_time()
    result = function(*args, **more)
    return result, time.perf_counter() - began, time.process_time() - cpu


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    show = lambda report: print(table(report), file=sys.stderr)  # noqa: E731
    return command.run("benchmarks.compiler_options", Options, measure, argv, show)


if __name__ == "__main__":
    sys.exit(main())
