"""Which method is how fast on which kind of work? For one or several targets, beside plain decoding:

    python -m jaxspec.bench.suite --model checkpoints/small --run ngram --run "layerskip --exit-layer 3"

Each run is a method in the words of `jaxspec generate --method`. All go on from the project's own prompts, one at
a time and in turns. Speeds are those after a text's first token, as everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.bench import prompts as prompt_set
from jaxspec.bench.compare import BASELINE
from jaxspec.bench.suite_report import Record, average, show, target_report
from jaxspec.bench.timing import check_budget, interleaved
from jaxspec.cli.errors import in_options, one_line, option_names
from jaxspec.cli.parsing import parse_as
from jaxspec.cli.status import INTERRUPTED
from jaxspec.cli.terminal import Progress
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.engine.results import Result
from jaxspec.io.method_files import law_name
from jaxspec.method_options import MethodOptions, check_method, options_given


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure methods on several kinds of work, beside plain decoding.

    Attributes:
      models: a target, as in `jaxspec generate`. Default: the embedded model. All are loaded at the start.
      runs: a method and its options, as in "layerskip --exit-layer 3".
      prompts: of each kind: stories, mathematics, code, copy-edit.
      max_new_tokens: of each text, which may end before.
      temperature: 0 for greedy.
      top_p: of the law, where temperature is above 0.
      repeats: timed turns; another one before them compiles. When sampling, each has a seed of its own.
      dtype: of weights and cache. Default float32 on CPU, bfloat16 elsewhere.
      device: cpu, gpu or tpu. Default: the fastest that JAX sees.
      json: print one JSON object and nothing else.
    """

    models: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--model", "metavar": "DIR|ID"}
    )
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    prompts: int = dataclasses.field(default=10, metadata={"metavar": "N"})
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    repeats: int = 3
    dtype: str | None = None
    device: str | None = None
    json: bool = False


def parse_run(words: str) -> dict[str, Any]:
    """A run as typed → `method` and its options, as `lm.generate` takes them.

    Raises:
      ValueError: an unknown method or option, or a value that is none; one line.
    """
    try:
        method, *rest = shlex.split(words) or [""]
        chosen = parse_as(MethodOptions, f"jaxspec generate --method {check_method(method)}", rest)
    except ValueError as error:
        raise ValueError(f"`runs` {words!r}: {error}") from None
    return {"method": method, **options_given(chosen)}


def measure(options: Options, on_progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
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
    if not 1 <= options.prompts <= most:
        raise ValueError(f"prompts is {options.prompts}; give 1 to {most}")
    if options.repeats < 1:
        raise ValueError(f"repeats is {options.repeats}; give at least 1")
    if not options.runs:
        raise ValueError("there is nothing to measure; give at least one of `runs`, such as 'ngram'")
    runs = {BASELINE: {"method": BASELINE}} | {words: parse_run(words) for words in options.runs}
    top_p = options.top_p if options.temperature else 1.0
    # Not the model's own defaults: the law is the one that is named.
    law: dict[str, Any] = {"temperature": options.temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0}
    given = {**law, "max_new_tokens": options.max_new_tokens}
    # One of each kind, then the next of each, so that an interrupted suite has some of all.
    tasks = [(kind, texts[at]) for at in range(options.prompts) for kind, texts in known.items()]
    measured: list[tuple[LanguageModel, list[Record]]] = []
    for model in dict.fromkeys(options.models) or (None,):
        on_progress(f"loading {model or 'the embedded model'}")
        lm = load(model, dtype=options.dtype, device=options.device)
        for chosen in runs.values():  # what is wrong with any of them is told here; nothing runs yet
            lm.stream([prompt for _, prompt in tasks], max_batch=1, **given, **chosen)
        measured.append((lm, []))
    interrupted = False
    try:
        for lm, records in measured:
            for done, (kind, prompt) in enumerate(tasks):
                on_progress(f"{lm.name}: {kind}, prompt {done + 1} of {len(tasks)}")
                generate = functools.partial(lm.generate, prompt, **given)
                records.append((kind, _turns(lm, generate, runs, options.repeats)))
    except KeyboardInterrupt:
        interrupted = True
        if not measured[0][1]:
            raise
    targets = [target_report(lm, records, options.temperature > 0) for lm, records in measured if records]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "options": dataclasses.asdict(options),
        "law": law_name(options.temperature, top_p=top_p),
        "targets": targets,
        "average_speedup": average(targets),
        "interrupted": interrupted,
    }


def _turns(
    lm: LanguageModel, generate: Callable[..., Result], runs: Mapping[str, dict[str, Any]], repeats: int
) -> dict[str, list[Result]]:
    """What each run generates after one prompt, turn by turn; a turn that compiles comes before those."""
    results: dict[str, list[Result]] = {run: [] for run in runs}

    def take(run: str) -> None:
        results[run].append(generate(seed=len(results[run]), **runs[run]))

    functions = {run: functools.partial(take, run) for run in runs}
    interleaved(functions, 1)
    lm.executables.wait()
    for taken in results.values():
        taken.clear()
    interleaved(functions, repeats)
    return results


def main() -> None:
    """Prints tables, or JSON."""
    try:
        options = parse_as(Options, "python -m jaxspec.bench.suite", sys.argv[1:])
        with Progress() as progress:
            report = measure(options, progress)
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        sys.exit(f"jaxspec: error: {in_options(one_line(error), option_names(Options))}")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    if report["interrupted"]:
        print("jaxspec: interrupted; above is what was measured", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
