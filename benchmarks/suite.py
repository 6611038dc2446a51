"""Which method is how fast on which kind of work? For one or several targets, beside plain decoding:

    python -m benchmarks.suite --model checkpoints/small --run ngram --run "layerskip --exit-layer 3"

Each run is a method in the words of `jaxspec generate --method`. All go on from the project's own prompts, one at
a time and in turns. Speeds are those after a text's first token, as everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.suite_report import Record, average, show, target_report
from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.carry import carrying
from jaxspec.bench.compare import BASELINE
from jaxspec.bench.suite_options import check_budget
from jaxspec.bench.timing import OnProgress, Run, measure_runs
from jaxspec.cli.options import Placement, SamplingOptions
from jaxspec.console.errors import option_names
from jaxspec.console.parsing import parse_as
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.io.method_files import law_name
from jaxspec.methods import Method, registry
from jaxspec.methods.flat import all_options, flat_options, given_options


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure methods on several kinds of work, beside plain decoding.

    Where sampling is not given, texts are greedy, whatever the model's own defaults are.

    Attributes:
      models: a target, as in `jaxspec generate`. Default: the embedded model. All are loaded at the start.
      runs: a method and its options, as in "layerskip --exit-layer 3".
      num_prompts: how many prompts of each kind: stories, mathematics, code, copy-edit.
      max_new_tokens: of each text, which may end before.
      repeats: timed turns; another one before them compiles. When sampling, each has a seed of its own.
      carry_gamma: start each text of a run from the γ that its last one ended with, as Draft & Verify evaluates. The
        turns of a prompt follow one another, so that γ moves from text to text only with --repeats 1.
      json: print one JSON object and nothing else.
    """

    models: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--model", "metavar": "DIR|ID"}
    )
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    num_prompts: int = dataclasses.field(default=10, metadata={"aliases": ("--prompts",)})
    max_new_tokens: int = 64
    repeats: int = 3
    carry_gamma: bool = False
    json: bool = False
    sampling: SamplingOptions = SamplingOptions()  # noqa: RUF009
    placement: Placement = Placement()  # noqa: RUF009


def parse_run(words: str) -> Method:
    """A run as typed → the method with its options.

    Raises:
      ValueError: an unknown method or option, or a value that is none; one line.
    """
    try:
        name, *rest = shlex.split(words) or [""]
        options = flat_options([registry.find(name)])
        return registry.make(
            name, given_options(parse_as(options, f"jaxspec generate --method {name}", rest))
        )
    except ValueError as error:
        raise ValueError(f"`runs` {words!r}: {error}") from None


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Generates after each prompt by every run; interrupted (Ctrl-C), it ends with the prompts that were done.

    Returns:
      `machine`, `options`, `law`, `targets` (see `suite_report.target_report`), `average_speedup` (by run and
      kind, see `suite_report.average`) and `interrupted`.

    Raises:
      ValueError, FileNotFoundError: no run, a number outside its range, or what `load` and `generate` raise for
        a run that a target cannot do; before anything is measured.
      KeyboardInterrupt: interrupted before the first prompt was done.
    """
    check_budget(options.max_new_tokens)
    known = prompt_set.load()
    most = min(map(len, known.values()))
    if not 1 <= options.num_prompts <= most:
        raise ValueError(f"num_prompts is {options.num_prompts}; give 1 to {most}")
    if options.repeats < 1:
        raise ValueError(f"repeats is {options.repeats}; give at least 1")
    if not options.runs:
        raise ValueError("there is nothing to measure; give at least one of `runs`, such as 'ngram'")
    runs: dict[str, dict[str, Any]] = {
        words: {"method": parse_run(words)} for words in (BASELINE, *options.runs)
    }
    law = options.sampling.numbers()
    given = {**law, "max_new_tokens": options.max_new_tokens}
    # One of each kind, then the next of each, so that an interrupted suite has some of all.
    tasks = [(kind, texts[at]) for at in range(options.num_prompts) for kind, texts in known.items()]
    measured: list[tuple[LanguageModel, list[Record]]] = []
    for model in dict.fromkeys(options.models) or (None,):
        on_progress(f"loading {model or 'the embedded model'}")
        lm = load(model, dtype=options.placement.dtype, device=options.placement.device)
        for chosen in runs.values():  # what is wrong with any of them is raised here; nothing runs yet
            lm.stream([prompt for _, prompt in tasks], max_batch=1, **given, **chosen)
        measured.append((lm, []))
    interrupted = False
    try:
        for lm, records in measured:
            measured_runs = measure_runs(
                [lm],
                {run: _run(lm, options, given | chosen) for run, chosen in runs.items()},
                [prompt for _, prompt in tasks],
                options.repeats,
                on_progress=functools.partial(_by, on_progress, lm.name),
            )
            for (kind, _), taken in zip(tasks, measured_runs, strict=True):
                records.append((kind, taken))
    except KeyboardInterrupt:
        interrupted = True
        if not measured[0][1]:
            raise
    targets = [target_report(lm, records, law["temperature"] > 0) for lm, records in measured if records]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "options": dataclasses.asdict(options),
        "law": law_name(**law),
        "targets": targets,
        "average_speedup": average(targets),
        "interrupted": interrupted,
    }


def _by(on_progress: OnProgress, name: str, what: str) -> None:
    on_progress(f"{name}: {what}")


def _run(lm: LanguageModel, options: Options, given: dict[str, Any]) -> Run:
    generate = carrying(lm.generate) if options.carry_gamma else lm.generate
    return lambda prompt, turn: generate(prompt, seed=options.sampling.seed + turn, **given)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints tables, or JSON; returns the exit status."""
    # A run's own options are refused by their parameters too, once its model is known.
    return command.run("benchmarks.suite", Options, measure, show, argv, names=option_names(all_options()))


if __name__ == "__main__":
    sys.exit(main())
