"""How fast is jaxspec beside transformers and llama.cpp? `python -m benchmarks.peers --model FILE.gguf` measures it.

All run in one process, on all cores, after the same token ids, one text at a time, greedily, in turns: every run
generates after a prompt before the next prompt begins, and the first run and the direction change with each prompt. The
weights are those of the model's file, in float32 and int8 in jaxspec, in float32 in transformers, and as the file has
them, in Q8_0 and in float32 in llama.cpp. A text has as many tokens as that of plain decoding in float32 up to its end
token, at most `--max-new-tokens`, in every run.

The tables go to standard error and the report to standard output, see `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import importlib.metadata
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from jaxspec.cli.methods import parse_run
from jaxspec.console import frame
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import tell
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.host.extras import require
from jaxspec.host.progress import OnProgress, Progress
from jaxspec.io.gguf.container import is_gguf
from jaxspec.loading.loading import find_model
from jaxspec.measuring.bench import speed
from jaxspec.measuring.bench.bench_records import Record
from jaxspec.measuring.bench.prompt_files import Task, encoded, in_turn, own_tasks
from jaxspec.measuring.bench.suite import check_tokenizer
from jaxspec.measuring.bench.suite_options import Amount, Chat
from jaxspec.measuring.bench.timing import measure_runs, warm_up
from jaxspec.methods import DraftModel, LayerSkip, Method, NGram
from jaxspec.requests.results import Result, Statistics
from jaxspec.requests.text import Token

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

    The prompts are those of `jaxspec bench`, as chats if the model has a chat template. An interrupted command reports
    the prompts before.

    Attributes:
      model: a GGUF file or a directory that holds one; llama.cpp is left out for other models.
      runs: a method of jaxspec and its options, as in "eagle3 --draft DIR". Default: auto and ngram. With layerskip,
        transformers also exits early.
      draft: a draft model for draft-model and for assisted generation in transformers.
      peers: the other programs.
      repeats: turns per prompt.
    """

    model: str
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    draft: str | None = None
    peers: tuple[Literal["transformers", "llama.cpp"], ...] = ("transformers", "llama.cpp")
    repeats: int = 1


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
    """Measures all runs on all prompts; returns the report of `report`.

    Raises:
      ValueError, FileNotFoundError: the model or an option cannot be used; one line.
    """
    given = {words: parse_run(words) for words in options.runs}
    records: list[Record] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="jaxspec-peers-") as folder:
        engines = open_engines(options, given, Path(folder), on_progress)
        try:
            _measure(options, engines, records, on_progress)
        except KeyboardInterrupt:
            if not records:
                raise
            interrupted = True
    found = report(records, engines.runs, engines.methods, BASELINE)
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
    records: list[Record],
    on_progress: OnProgress,
) -> None:
    """Measures the prompts and adds theirs to `records`."""
    lm, models = engines.lm, [*engines.models.values()]
    chat: Chat = "on" if lm.tokenizer is not None and lm.tokenizer.has_chat_template else "off"
    tasks = in_turn(own_tasks(directory=lm.directory), lambda task: task.category)[: options.limit]

    @functools.cache
    def prompt_of(task: Task) -> Prompt:
        tokens = encoded(lm, task, chat=chat)
        text = lm.generate(
            tokens, method="autoregressive", max_new_tokens=options.max_new_tokens, temperature=0.0
        )
        return Prompt(tokens, max(2, len(text.tokens)))

    for name, run in engines.runs.items():
        text = warm_up(models, {name: run}, [prompt_of(tasks[0])], on_progress)[name]
        tell(f"{name}: {speed.tokens_per_second([[text]]):.1f} tokens per second after one prompt")
    for number, task in enumerate(tasks):
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
        records += [
            Record(task.id, task.category, 0, number, name, len(prompt.tokens), tuple(taken[name]))
            for name in engines.runs
        ]


def threads() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# The report.

ALL, PLAIN = "all", "plain"
MADE = "<!-- Made by `python -m benchmarks.results` from docs/measurements/peers.json; do not edit. -->"
# The end of a run's name → its column in `table`, where any other name is plain decoding's.
COLUMNS = {" ngram": "lookup", " prompt lookup": "lookup", " lookup": "lookup", " auto": "`auto`"}
DEFINITION = (
    "A speed is new tokens after the first of each text ÷ their time, over all prompts, without the prompt's pass and "
    "without compilation. A ratio is that of two speeds on the same prompts in the same turns, the median over the "
    "turns, with its 95 % interval by the bootstrap over the prompts of each kind, drawn for both runs together."
)


def report(
    records: Sequence[Record], runs: Iterable[str], ours: Iterable[str], baseline: str
) -> dict[str, Any]:
    """The figures of some prompts.

    Args:
      records: one for each prompt and run.
      runs: the names of all runs.
      ours: jaxspec's runs, besides the baseline.
      baseline: plain decoding of jaxspec in float32.

    Returns:
      `prompts`, their number; `definition`; `runs`: by run and kind of work ("all" is the last) the figures of
      `_figures`; `ratios`: by run of jaxspec, other run and kind `[ratio, low, high]`, None for low and high with a
      single prompt.
    """
    kinds = [*dict.fromkeys(record.category for record in records)]
    kinds = [*kinds, ALL] if len(kinds) > 1 else [ALL]
    chosen = {
        kind: {
            run: [record for record in records if record.run == run and kind in (ALL, record.category)]
            for run in runs
        }
        for kind in kinds
    }
    figures = {
        run: {kind: _figures(chosen[kind][run], chosen[kind][baseline]) for kind in kinds} for run in runs
    }
    ratios = {
        mine: {
            other: {kind: _ratio(chosen[kind][mine], chosen[kind][other]) for kind in kinds}
            for other in runs
            if other != mine
        }
        for mine in (baseline, *ours)
    }
    count = len({record.id for record in records})
    return {"prompts": count, "definition": DEFINITION, "runs": figures, "ratios": ratios}


def _figures(records: Sequence[Record], plain: Sequence[Record]) -> dict[str, float | None]:
    """The figures of a run.

    Returns:
      `tokens`, in all texts; `tokens_per_second`; `prompt_tokens_per_second`, of the time to the first token;
      `first_token_ms`, the median; `mean_acceptance_length`, tokens ÷ passes of the target; `same_texts`, the share
      that equal plain decoding's in float32, without the last token, which is an end token in some runs only.
    """
    texts = [text for record in records for text in record.texts]
    first = [speed.first_token_ms(text) for text in texts]
    read = sum(record.prompt_tokens * len(record.texts) for record in records)
    same = [
        mine.tokens[:-1] == other.tokens[:-1]
        for record, reference in zip(records, plain, strict=True)
        for mine, other in zip(record.texts, reference.texts, strict=True)
    ]
    return {
        "tokens": sum(text.statistics.num_tokens for text in texts),
        "tokens_per_second": speed.tokens_per_second(_taken(records)),
        "prompt_tokens_per_second": 1e3 * read / sum(first) if sum(first) > 0 else None,
        "first_token_ms": statistics.median(first),
        "mean_acceptance_length": speed.acceptance(_taken(records))["mean_acceptance_length"],
        "same_texts": statistics.mean(same),
    }


def _ratio(mine: Sequence[Record], others: Sequence[Record]) -> list[float | None]:
    kinds = [record.category for record in mine]
    ratio, interval = speed.speed_ratio(_taken(mine), _taken(others), kinds=kinds)
    low, high = interval if interval is not None and len(mine) > 1 else (None, None)
    return [ratio, low, high]


def _taken(records: Sequence[Record]) -> list[Sequence[Result]]:
    return [record.texts for record in records]


def table(report: Mapping[str, Any]) -> str:
    """Returns the speeds on all prompts in Markdown: a row for each program and its weights."""
    rows: dict[str, dict[str, str]] = {}
    for run, figures in report["runs"].items():
        end = next((end for end in COLUMNS if run.endswith(end)), "")
        cells = rows.setdefault(run.removesuffix(end), {})
        cells[COLUMNS.get(end, PLAIN)] = _number(figures[ALL]["tokens_per_second"], 0)
    columns = [PLAIN, *dict.fromkeys(COLUMNS.values())]
    lines = [["tokens per second", *columns], ["---", *("--:" for _ in columns)]]
    lines += [[name, *(cells.get(column, "") for column in columns)] for name, cells in rows.items()]
    return _markdown(lines)


def table_of_ratios(report: Mapping[str, Any]) -> str:
    """Returns speeds on all prompts in Markdown, and each run ÷ plain decoding in float32 with its interval."""
    baseline = next(iter(report["ratios"]))
    lines = [["tokens per second", ALL, f"÷ {baseline}", "the same text"], ["---", *["--:"] * 3]]
    for run, kinds in report["runs"].items():
        figures, ratio = kinds[ALL], report["ratios"][baseline].get(run, {}).get(ALL)
        inverse = "1" if ratio is None else _with_interval([1 / ratio[0], *(1 / end for end in ratio[:0:-1])])
        lines.append(
            [run, _number(figures["tokens_per_second"], 0), inverse, _number(figures["same_texts"], 2)]
        )
    return _markdown(lines)


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_tables(report: Mapping[str, Any]) -> None:
    """Prints speeds by run, and the ratios of each run of `auto` to all others, to standard error."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr, width=150)
    kinds = [*next(iter(report["runs"].values()))]
    baseline, *others = report["ratios"]
    where = f"{report['model']}, {report['device']}, {report['threads']} threads, {report['prompts']} prompts"
    speeds = Table("run", *kinds, "prompt", "tok.÷passes", "same", title=f"tokens per second: {where}")
    for run, figures in report["runs"].items():
        over_all = figures[ALL]
        cells = [_number(figures[kind]["tokens_per_second"], 1) for kind in kinds]
        cells.append(_number(over_all["prompt_tokens_per_second"], 0))
        cells += [_number(over_all[name], 2) for name in ("mean_acceptance_length", "same_texts")]
        speeds.add_row(run, *cells)
    console.print(speeds)
    for mine in [run for run in others if run.endswith(" auto")] or [baseline]:
        table = Table("run", *kinds, title=f"{mine} ÷ run")
        for other, ratios in report["ratios"][mine].items():
            table.add_row(other, *map(_with_interval, ratios.values()))
        console.print(table)
    console.print(report["definition"], *report["left_out"], sep="\n", highlight=False, markup=False)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _with_interval(ratio: Sequence[float | None]) -> str:
    middle, low, high = (_number(value, 2) for value in ratio)
    return middle if low == "–" else f"{middle} ({low}–{high})"


# llama.cpp, through the Python package xllamacpp, whose wheels contain it.

# Types of weights besides that of the given file. The file is the source of both, so all runs have the same model.
CONVERTED = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32)
# llama.cpp's own drafts from the text so far, with its default options.
_LOOKUP = "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"
# Keys that the writer writes itself.
_WRITTEN = ("general.architecture", "general.file_type")
# (token ids of a prompt, number of new tokens) → the text.
_Generate = Callable[[Sequence[int], int], Result]


def llama_cpp_runs(
    file: Path, folder: Path, context: int, threads: int, on_progress: OnProgress
) -> dict[str, _Generate]:
    """Loads a file into llama.cpp as it is, in Q8_0 and in float32, each without and with llama.cpp's lookup.

    Decoding is greedy, one text at a time, without reuse of prefixes. End tokens are suppressed, so each text has the
    asked number of tokens.

    Args:
      file: a GGUF file.
      folder: a directory for the files in Q8_0 and float32.
      context: the largest number of tokens of a prompt and its text.
      threads: number of threads.
      on_progress: called with the current step.

    Returns:
      Functions (token ids of a prompt, number of new tokens) → `Result`, by the name of their run.

    Raises:
      ValueError: xllamacpp is not installed.
    """
    try:
        import xllamacpp
    except ImportError:
        raise ValueError("it needs the package xllamacpp: pip install xllamacpp") from None
    files = {file_type(file): file}
    for wanted in CONVERTED:
        if wanted.name not in files:
            on_progress(f"writing the weights in {wanted.name}")
            files[wanted.name] = folder / f"{wanted.name}.gguf"
            convert(file, files[wanted.name], wanted)
    runs: dict[str, _Generate] = {}
    for name, path in files.items():
        for suffix, lookup in {"": False, " lookup": True}.items():
            on_progress(f"loading {name} into llama.cpp")
            server = xllamacpp.Server(_params(xllamacpp, path, context, threads, lookup))
            runs[f"llama.cpp {name}{suffix}"] = functools.partial(_in_llama_cpp, server)
    return runs


def file_type(file: Path) -> str:
    """The type of most weights of a GGUF file, such as "Q4_1"."""
    field = gguf.GGUFReader(file).fields.get("general.file_type")
    if field is None:
        return file.stem
    return gguf.LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def convert(source: Path, target: Path, wanted: GGMLQuantizationType) -> None:
    """Copies a GGUF file with its matrices in another type; vectors, and rows that do not fit into blocks, in float32.

    Args:
      source: a GGUF file.
      target: the file to write.
      wanted: F32, or a type that the package gguf can quantise, such as Q8_0.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _WRITTEN:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if len(shape) > 1 and shape[-1] % block == 0 and wanted != GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if wanted == GGMLQuantizationType.F32 else 'MOSTLY'}_{wanted.name}"]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def result_of(answer: dict[str, Any]) -> Result:
    """The text and counts of an answer of llama.cpp's server.

    The first token comes from the prompt's pass. Its time is `prompt_ms`, and `predicted_ms` is the time of the others.

    Examples:
      >>> timings = {"prompt_ms": 20.0, "predicted_n": 11, "predicted_ms": 100.0}
      >>> result_of({"content": "a", "tokens": [3] * 11, "timings": timings}).statistics.tokens_per_second
      100.0
    """
    timings = answer["timings"]
    count, drafted, accepted = (
        timings.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted")
    )
    spent = Statistics(
        num_tokens=count,
        num_rounds=count - 1 - accepted,
        num_drafts=0,  # not reported
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        acceptance_histogram=(),
        elapsed_ms=timings["prompt_ms"] + timings["predicted_ms"],
        decode_ms=timings["predicted_ms"],
        compile_ms=0.0,
    )
    return Result(answer["content"], list(map(Token, answer["tokens"])), "length", spent)


def _in_llama_cpp(server: Any, prompt: Sequence[int], max_new_tokens: int) -> Result:
    request = {
        "prompt": list(prompt),
        "n_predict": max_new_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    # Only this request returns token ids. The times in the answer do not include the transfer.
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)
    connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "timings" not in answer:
        raise ValueError(f"llama.cpp answers {str(answer)[:200]}; leave it out of `peers`")
    return result_of(answer)


def _params(xllamacpp: Any, file: Path, context: int, threads: int, lookup: bool) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.verbosity = context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    if lookup:
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, _LOOKUP)]
    return params


# transformers on PyTorch, which is imported on demand.

# Our method → the name of the run of its counterpart in transformers.
_NAMES: dict[type[Method], str] = {
    NGram: "transformers prompt lookup",
    DraftModel: "transformers assisted",
    LayerSkip: "transformers early exit",
}


def transformers_runs(
    lm: LanguageModel,
    model: str,
    methods: Mapping[str, Method],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Loads a model into transformers and returns its ways to generate.

    Plain decoding and prompt lookup are always included, assisted generation if a method has a draft model, and early
    exit if `layerskip` is among the methods. Draft model, exit and number of draft tokens (constant) are the method's.

    The first round of assisted generation reads the prompt and verifies a draft, and returns several tokens at once.
    They count as the first token, because a speed covers only the tokens after it.

    Args:
      lm: the model in jaxspec, for its EOS, dtype and drafters.
      model: as in `load`.
      methods: the measured methods, by the name of their run; the last one of each class is used.
      max_new_tokens: the maximum number of new tokens per text.

    Returns:
      Functions (token ids of a prompt) → `Result`, by the name of their run; their keyword `max_new_tokens`
      replaces the maximum.

    Raises:
      MissingExtra: PyTorch is not installed.
      ValueError: transformers cannot load the model.
    """
    require("peers", "torch", "accelerate")
    target = _load_in_transformers(model, lm)
    generate = functools.partial(_in_transformers, lm, target, max_new_tokens=max_new_tokens)
    runs = {"transformers": generate}
    by_class: dict[type[Method], Method] = {NGram: NGram()}
    by_class |= {type(method): method for method in methods.values()}
    for cls, method in by_class.items():
        if cls not in _NAMES or (isinstance(method, DraftModel) and method.draft is None):
            continue
        drafter, _ = lm.drafter(method)
        drafts = drafter.num_draft_tokens
        extra: dict[str, Any] = {"prompt_lookup_num_tokens": drafts}
        if isinstance(method, DraftModel):
            extra = {"assistant_model": _constant(_load_in_transformers(str(method.draft), lm), drafts)}
        elif isinstance(method, LayerSkip):
            _constant(target, drafts)  # the target is its own assistant
            extra = {"assistant_early_exit": drafter.exit_layer}  # type: ignore[attr-defined]
        runs[_NAMES[cls]] = functools.partial(generate, extra=extra)
    return runs


def _load_in_transformers(model: str, lm: LanguageModel) -> Any:
    """Loads the model into transformers, in the same dtype as in jaxspec."""
    import torch
    import transformers

    path = find_model(model)
    where, extra = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                str(where), dtype=getattr(torch, lm.dtype), local_files_only=True, **extra
            )
    except Exception as error:  # transformers raises many types here, some with many lines
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"transformers cannot load {path}: {reason}") from None
    # Replaces the checkpoint's defaults: greedy unless a call sets sampling parameters.
    loaded.generation_config = transformers.GenerationConfig(
        eos_token_id=list(lm.config.eos_token_ids) or None, pad_token_id=0
    )
    return loaded.eval()


def _constant(assistant: Any, num_draft_tokens: int) -> Any:
    """Makes an assistant draft the same number of tokens in every round."""
    assistant.generation_config.num_assistant_tokens = num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


class _Clock:
    """A streamer of transformers that records the time and size of each piece; the prompt is the first piece."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: Any) -> None:
        """Called with new tokens."""
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Called at the end."""


def _in_transformers(
    lm: LanguageModel,
    target: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    extra: Mapping[str, Any] | None = None,
) -> Result:
    import torch

    ids = torch.tensor([list(prompt)], device=target.device)
    clock = _Clock()
    began = time.perf_counter()
    with torch.inference_mode():
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            do_sample=False,
            **(extra or {}),
        )
        tokens = out[0, len(prompt) :].tolist()
    ended = time.perf_counter()
    first, size = clock.times[1], clock.sizes[1]
    counts = (len(tokens) - size + 1, len(clock.times) - 2, 0, 0, 0, ())
    spent = Statistics(*counts, 1e3 * (ended - began), 1e3 * (ended - first), 0.0)
    reason = "eos" if tokens[-1] in lm.config.eos_token_ids else "length"
    text = lm.tokenizer.decode(tokens) if lm.tokenizer is not None else None
    return Result(text, list(map(Token, tokens)), reason, spent)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables to standard error and the report as JSON; returns the exit status."""

    def run(options: Options) -> int:
        with Progress() as progress:
            found = measure(options, progress)
        print_tables(found)
        print(json.dumps(found, indent=2))
        return INTERRUPTED if found["interrupted"] else 0

    return frame.run_command("benchmarks.peers", Options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
