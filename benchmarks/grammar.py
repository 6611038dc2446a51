"""The cost of a grammar in a step: `python -m benchmarks.grammar --model smollm2` prints JSON.

The grammar allows every token and has many states, so texts and drafts are the same with it and without it. With
`--topology v5e:1x1` or `h100` nothing runs: the compiler of that accelerator estimates the cost for `--shape`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import command
from jaxspec.console.environment import compile_only
from jaxspec.engine.keywords import MethodName
from jaxspec.engine.language_model import load
from jaxspec.grammar.table import TokenTable
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.aot.accelerators import parse_topology
from jaxspec.measuring.aot.compiled_rounds import kernels, main_loop
from jaxspec.measuring.bench.speed import ratio_of_counts
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.methods import registry
from jaxspec.penalties import Penalties
from jaxspec.texts.grammars import Tables
from jaxspec.texts.requests import RowRequest

# The states of the grammar, and its classes of tokens.
STATES, CLASSES = 512, 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """Times of a step with a grammar and without one.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      weights: int8 or int4 for quantised weights.
      methods: their rounds are timed.
      new: the tokens of a text.
      repeats: texts of each kind.
      topology: an accelerator to compile for, such as v5e:1x1 or h100; the default measures here.
      shape: the model that is compiled for it.
      batch: the rows of a batch.
    """

    model: str = "smollm2"
    weights: str | None = None
    methods: tuple[MethodName, ...] = ("autoregressive", "ngram")
    new: int = 64
    repeats: int = 9
    topology: str | None = None
    shape: str = "8b"
    batch: int = 1


def free(vocab_size: int) -> TokenTable:
    """Returns a grammar that allows every token in each of its states."""
    rng = np.random.default_rng(0)
    following = rng.integers(0, STATES, (STATES, CLASSES)).astype(np.int32)
    class_of = rng.integers(0, CLASSES, vocab_size).astype(np.uint16)
    return TokenTable(class_of, following, np.ones(STATES, bool), "free")


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns the median time of a round with and without a grammar, and the ratio with its 95 % interval.

    The ratio of the processor's times, which include the prefill, is less disturbed by other processes.
    """
    if options.topology is not None:
        return estimate(options, on_progress)
    lm = load(options.model, weights=options.weights)
    table = free(lm.config.vocab_size)
    prompts = [[*range(1000, 1000 + 32), *range(1000 + row, 1016 + row)] for row in range(options.batch)]
    report: dict[str, Any] = {"options": dataclasses.asdict(options)}
    for method in options.methods:
        rounds: dict[str, list[list[float]]] = {"without": [], "with": []}

        def run(kind: str, method: MethodName = method, rounds: dict[str, Any] = rounds) -> None:
            began = time.process_time()
            grammar = table if kind == "with" else None
            found = lm.generate(
                *(prompts,), method=method, max_new_tokens=options.new, ignore_eos=True, grammar=grammar
            )
            last = max(found, key=lambda one: one.statistics.num_rounds).statistics
            cpu_ms = 1e3 * (time.process_time() - began)
            rounds[kind].append([1, last.decode_ms / last.num_rounds, cpu_ms / last.num_rounds])

        functions = {kind: (lambda kind=kind: run(kind)) for kind in rounds}
        on_progress(f"timing {method}")
        interleaved(functions, 2)
        lm.executables.wait()
        for times in rounds.values():
            times.clear()
        interleaved(functions, options.repeats, on_progress)
        without, mine = (np.array([rounds[kind]]) for kind in ("without", "with"))  # [1, turns, 3]
        report[method] = {"without": np.median(without[..., 1]), "with": np.median(mine[..., 1])}
        for at, name in enumerate(("ratio", "processor_ratio"), start=1):
            report[method][name] = ratio_of_counts(without[..., [0, at]], mine[..., [0, at]])
    return report


def estimate(options: Options, on_progress: OnProgress) -> dict[str, Any]:
    """Returns the compiler's cycles of a round, or for a GPU its kernels and a time, with and without a grammar."""
    assert options.topology is not None
    topology = parse_topology(options.topology)
    compile_only()
    from jaxspec.measuring.aot import hlo
    from jaxspec.measuring.aot.programs import Place, devices, make
    from jaxspec.measuring.aot.report import build, predicted, report
    from jaxspec.measuring.aot.stand_ins import model_shape

    place, accelerator = Place.of(devices(topology), {}), topology.accelerator
    target = model_shape(None, options.shape)
    size = target.config.vocab_size
    found: dict[str, Any] = {"options": dataclasses.asdict(options)}
    for name in options.methods:
        programs = make(target, registry.make(name, {}), place, batch=options.batch)
        table = RowRequest((0,), 1, grammar=free(size))
        grammar = Tables(None, size).of([table] * options.batch)
        settings = place.put(Penalties(jnp.ones(options.batch, jnp.int32), grammar=grammar))
        kinds = {"without": programs.parts, "with": dataclasses.replace(programs.parts, penalties=settings)}
        own: dict[str, float] = {}
        for kind, parts in kinds.items():
            on_progress(f"compiling {name} {kind} a grammar")
            one = dataclasses.replace(programs, parts=parts)
            built = build(one.rounds, one.options)
            if accelerator.is_gpu:
                module = hlo.parse(built.text)
                own[kind] = float(kernels(module, main_loop(module)))
            else:
                own[kind] = report(one, accelerator, built)["cycles"]["round"]["cycles"]
        if accelerator.is_gpu:
            # A step of plain decoding, and the kernels that a grammar adds.
            ms = 1e3 * options.batch / predicted(programs, accelerator)
            more = 1e-3 * accelerator.launch_us * (own["with"] - own["without"])
            own |= {"step_ms": ms, "ratio": 1 + more / ms}
        else:
            own["ratio"] = own["with"] / own["without"]
        found[name] = own
    return found


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.grammar", Options, measure))
