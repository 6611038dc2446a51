"""How fast is jaxspec beside transformers and llama.cpp? `python -m benchmarks.peers --model FILE.gguf` measures it.

All run in one process, on all cores, after the same token ids, one text at a time, greedily, in turns: every run
generates after a prompt before the next prompt begins, and the first run and the direction change with each prompt. The
weights are those of the model's file, in float32 and int8 in jaxspec, in float32 in transformers, and as the file has
them, in Q8_0 and in float32 in llama.cpp. A text has as many tokens as that of plain decoding in float32 up to its end
token, at most `--max-new-tokens`, in every run.

The tables go to standard error and the report to standard output, see `benchmarks.peers_report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import command, peers_report
from benchmarks.transformers_runs import transformers_runs
from jaxspec.cli.methods import parse_run
from jaxspec.console.output import check_directory
from jaxspec.console.terminal import tell
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host import lock
from jaxspec.host.progress import OnProgress
from jaxspec.io.gguf.container import is_gguf
from jaxspec.loading.loading import find_model
from jaxspec.measuring.bench import speed
from jaxspec.measuring.bench.bench_records import Record
from jaxspec.measuring.bench.prompt_files import Task, encoded, in_turn, own_tasks
from jaxspec.measuring.bench.suite import check_tokenizer
from jaxspec.measuring.bench.suite_options import Amount, Chat
from jaxspec.measuring.bench.timing import measure_runs, warm_up
from jaxspec.measuring.line_log import LineLog
from jaxspec.methods import DraftModel, Method
from jaxspec.texts.results import Result

RECORDS = "records.jsonl"
FORMAT = "jaxspec.peers/1"
# The run that others are compared with: plain decoding.
BASELINE = "jaxspec float32"
# Measured by default: the choice of a method, and the method that needs no head, as the other programs have it.
_USUAL = ("auto", "ngram")
_PACKAGES = ("jaxspec-decoding", "jax", "torch", "transformers", "xllamacpp")


class Prompt(NamedTuple):
    """The token ids of a prompt, and the number of tokens to generate after it."""

    tokens: list[int]
    max_new_tokens: int


# (prompt, number of the turn) → the text.
Run = Callable[[Prompt, int], Result]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Amount):
    """Compares jaxspec with transformers and llama.cpp: speeds by kind of work, and ratios with intervals.

    The prompts are those of `jaxspec bench`, as chats if the model has a chat template. Interrupted with --output, the
    same command continues after the last prompt that was recorded.

    Attributes:
      model: a GGUF file or a directory that holds one; llama.cpp is left out for other models.
      runs: a method of jaxspec and its options, as in "eagle3 --draft DIR". Default: auto and ngram. With layerskip,
        transformers also exits early.
      draft: a draft model for draft-model and for assisted generation in transformers.
      peers: the other programs.
      repeats: turns per prompt.
      output: a directory for the records, one line per prompt.
      resume: continue the records in the directory of --output.
    """

    model: str
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    draft: str | None = None
    peers: tuple[Literal["transformers", "llama.cpp"], ...] = ("transformers", "llama.cpp")
    repeats: int = 1
    output: Path | None = None
    resume: bool = True


@dataclasses.dataclass
class Engines:
    """The runs of all programs.

    Attributes:
      models: jaxspec's models by the dtype of their weights, float32 first.
      runs: all runs by name, plain decoding in float32 first.
      methods: the method of each run of jaxspec.
      left_out: one line for each program that is not measured.
    """

    models: dict[str, LanguageModel]
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    methods: dict[str, Method] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def lm(self) -> LanguageModel:
        """The model in float32."""
        return self.models["float32"]


def measure(options: Options, on_progress: OnProgress) -> dict[str, Any]:
    """Measures all runs on all prompts; returns the report of `peers_report.report`.

    Raises:
      ValueError, FileNotFoundError: the model or an option cannot be used; one line.
    """
    given = {words: parse_run(words) for words in options.runs}
    if options.output is not None:
        check_directory(options.output)
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="jaxspec-peers-")))
        engines = open_engines(options, given, folder, on_progress)
        log = None
        if options.output is not None:
            held.enter_context(lock.exclusive(options.output, tell, "output"))
            header = _header(options, engines)
            log = LineLog(options.output / RECORDS, header, of="comparison", resume=options.resume)
        records = [
            Record.from_json(one) for entry in (log.entries if log else ()) for one in entry["records"]
        ]
        interrupted = False
        try:
            _measure(options, engines, log, records, on_progress)
        except KeyboardInterrupt:
            if not records:
                raise
            interrupted = True
        found = peers_report.report(records, engines.runs, engines.methods, BASELINE)
    return {
        "model": engines.lm.name,
        "device": engines.lm.device_kind,
        "threads": threads(),
        "versions": _versions(),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "left_out": engines.left_out,
        "interrupted": interrupted,
        **found,
    }


def open_engines(
    options: Options, given: Mapping[str, Method], folder: Path, on_progress: OnProgress
) -> Engines:
    """Loads the model into all programs.

    Args:
      options: the options.
      given: the user's methods by their words; the usual ones if there are none.
      folder: a directory for converted files.
      on_progress: called with the current step.
    """
    on_progress("loading the model")
    engines = Engines(
        {
            "float32": load(options.model, dtype="float32", device="cpu"),
            "int8": load(options.model, dtype="float32", weights="int8", device="cpu"),
        }
    )
    check_tokenizer(engines.lm)
    methods = dict(given) or {words: parse_run(words) for words in _USUAL}
    if options.draft is not None:
        methods["draft-model"] = DraftModel(draft=options.draft)
    for weights, lm in engines.models.items():
        engines.runs[f"jaxspec {weights}"] = _ours(lm, parse_run("autoregressive"))
        for name, method in methods.items():
            lm.drafter(method)  # raises the errors of its options
            run = f"jaxspec {weights} {name}"
            engines.runs[run], engines.methods[run] = _ours(lm, method), method
    for peer, opened in {"transformers": _transformers, "llama.cpp": _llama_cpp}.items():
        if peer in options.peers:
            try:
                engines.runs |= opened(options, engines, methods, folder, on_progress)
            except ValueError as error:
                engines.left_out.append(f"{peer} is left out: {error}")
                tell(engines.left_out[-1])
    return engines


def _ours(lm: LanguageModel, method: Method) -> Run:
    def run(prompt: Prompt, turn: int) -> Result:
        budget = prompt.max_new_tokens
        found: Result = lm.generate(
            prompt.tokens, method=method, max_new_tokens=budget, temperature=0.0, ignore_eos=True
        )
        return found

    return run


def _transformers(
    options: Options,
    engines: Engines,
    methods: Mapping[str, Method],
    folder: Path,
    on_progress: OnProgress,
) -> dict[str, Run]:
    on_progress("loading the model into transformers")
    lm = engines.lm
    # Counterparts are found by class. Equal weights give equal texts, so they end at the same token.
    made = transformers_runs(lm, options.model, methods, options.max_new_tokens)

    def run(generate: Callable[..., Result], prompt: Prompt, turn: int) -> Result:
        return generate(prompt.tokens, max_new_tokens=prompt.max_new_tokens)

    return {name: functools.partial(run, generate) for name, generate in made.items()}


def _llama_cpp(
    options: Options,
    engines: Engines,
    methods: Mapping[str, Method],
    folder: Path,
    on_progress: OnProgress,
) -> dict[str, Run]:
    from benchmarks.llama_cpp import llama_cpp_runs

    file = find_model(options.model)
    if not is_gguf(file):
        raise ValueError(f"{file} is no GGUF file")
    context = engines.lm.config.context_length
    made = llama_cpp_runs(file, folder, min(context, 4096), threads(), on_progress)

    def run(generate: Callable[[Sequence[int], int], Result], prompt: Prompt, turn: int) -> Result:
        return generate(prompt.tokens, prompt.max_new_tokens)

    return {name: functools.partial(run, generate) for name, generate in made.items()}


def _measure(
    options: Options,
    engines: Engines,
    log: LineLog | None,
    records: list[Record],
    on_progress: OnProgress,
) -> None:
    """Measures the prompts without records; adds theirs to `records` and the log."""
    lm, models = engines.lm, [*engines.models.values()]
    chat: Chat = "on" if lm.tokenizer is not None and lm.tokenizer.has_chat_template else "off"
    done = {record.id for record in records}
    tasks = in_turn(own_tasks(directory=lm.directory), lambda task: task.category)[: options.limit]
    todo = [(number, task) for number, task in enumerate(tasks) if task.id not in done]

    @functools.cache
    def prompt_of(task: Task) -> Prompt:
        tokens = encoded(lm, task, chat=chat)
        text = lm.generate(
            tokens, method="autoregressive", max_new_tokens=options.max_new_tokens, temperature=0.0
        )
        return Prompt(tokens, max(2, len(text.tokens)))

    for name, run in engines.runs.items() if todo else ():
        text = warm_up(models, {name: run}, [prompt_of(todo[0][1])], on_progress)[name]
        tell(f"{name}: {speed.tokens_per_second([[text]]):.1f} tokens per second after one prompt")
    for number, task in todo:
        prompt = prompt_of(task)
        names = [*engines.runs]
        names = names[number % len(names) :] + names[: number % len(names)]
        where = f", prompt {number + 1} of {len(tasks)}"
        (taken,) = measure_runs(
            models,
            {name: engines.runs[name] for name in names},
            [prompt],
            options.repeats,
            first_turn=number,
            warm=True,
            on_progress=lambda step, where=where: on_progress(step + where),  # type: ignore[misc]
        )
        made = [
            Record(task.id, task.category, 0, number, name, len(prompt.tokens), tuple(taken[name]))
            for name in engines.runs
        ]
        if log is not None:
            log.add({"records": [record.to_json() for record in made]})
        records += made


def threads() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _header(options: Options, engines: Engines) -> dict[str, Any]:
    """Returns the inputs on which all records depend, without the number of prompts, which may grow."""
    tasks = own_tasks(directory=engines.lm.directory)
    texts = json.dumps([dataclasses.asdict(task) for task in tasks])
    return {
        "format": FORMAT,
        "model": engines.lm.fingerprint,
        "device": engines.lm.device_kind,
        "threads": threads(),
        "runs": [*engines.runs],
        "methods": {name: str(method) for name, method in engines.methods.items()},
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables to standard error and the report as JSON; returns the exit status."""
    return command.run("benchmarks.peers", Options, measure, argv, peers_report.print_tables)


if __name__ == "__main__":
    sys.exit(main())
