"""Measurements of a model with a tokenizer, and a training, by commands that continue from files of their own."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from benchmarks import auto_guarantee
from benchmarks.papers.command import Papers
from benchmarks.parts import Record, UnfinishedError
from jaxspec.console.errors import Failed
from jaxspec.console.parsing import parse_as
from jaxspec.host.files import parse_json, read_json, read_text, write_atomic
from jaxspec.host.progress import OnProgress
from jaxspec.io import checkpoint
from jaxspec.loading.loading import find_model
from jaxspec.measuring.commands.bench import REPORT, Bench
from jaxspec.measuring.commands.vocab import Vocab

RECIPE = Path(__file__).parents[1] / "training" / "recipes" / "smollm2-draft.yaml"
# The shared files that the draft learns from beside the model's own texts: (file, kind, format, weight).
SOURCES = (
    ("prompts/gsm8k_train.jsonl", "mathematics", "chat", 0.35),
    ("prompts/mbpp.jsonl", "code", "chat", 0.25),
    ("prompts/self_instruct_user_oriented_instructions.jsonl", "instructions", "auto", 0.15),
    ("text/tinystories.txt", "stories", "auto", 0.25),
)
# In their place without these files: the tasks of the embedded models.
TASKS = ("sums", "code", "edits", "facts", "labels")
# The weight of the model's own texts beside all of these.
OWN = 0.8
# The first problems of GSM8K are for reports; the draft learns from the others.
REPORTED = 1000
# The most tokens among which the draft chooses.
VOCABULARY = 8192
# The share of the time left that the training uses; the rest is for its export.
TRAINED = 0.75


class RealTexts:
    """The measurements of one model; all files are in one directory.

    Args:
      model: a directory, a GGUF file or the name of an embedded model.
      data: the directory of the shared files; None without one.
      directory: the directory to write.
      ends: the time at which the budget is spent, by `time.monotonic`.
    """

    def __init__(self, model: str, data: Path | None, directory: Path, ends: float) -> None:
        self._model, self._data, self._directory, self._ends = model, data, directory, ends

    def bench(self, name: str, words: Sequence[str], on_progress: OnProgress) -> Record:
        """Measures methods by `jaxspec bench`, with options such as --dtype.

        Returns:
          `command`; `dtype`; by method `runs`: the number of `texts`, how many are not plain decoding's
          (`num_different`) and the `largest_margin` between the logits at the first difference, `tokens_per_second`,
          `speedup` and its interval, and `mean_acceptance_length`.
        """
        output = self._directory / name
        given = ["--model", self._model, *words, "--output", str(output)]
        on_progress("loading the model")
        self._run("jaxspec bench", given, lambda: parse_as(Bench, given, "jaxspec bench").run())
        report = read_json(output / REPORT)
        kept = (
            *("texts", "num_different", "largest_margin", "tokens_per_second"),
            *("speedup", "speedup_interval", "mean_acceptance_length"),
        )
        runs = {run: {one: kinds["all"][one] for one in kept} for run, kinds in report["runs"].items()}
        return {"command": _typed("jaxspec bench", given), "dtype": report["dtype"], "runs": runs}

    def auto(self, words: Sequence[str], on_progress: OnProgress) -> Record:
        """Measures the guarantee of `auto` by `benchmarks.auto_guarantee`; returns its report and `command`."""
        given = ["--model", self._model, *words]
        options = parse_as(auto_guarantee.Options, given, "benchmarks.auto_guarantee")
        found = auto_guarantee.measure(options, on_progress)
        return {"command": _typed("python -m benchmarks.auto_guarantee", given), **found}

    def own_texts(self, count: int, new_tokens: int, on_progress: OnProgress) -> Record:
        """Writes the model's own texts after prompts of the sources, and ranks their tokens.

        Returns:
          `commands`, and the number of `texts`.
        """
        texts = self._directory / "texts.jsonl"
        sources = self._sources()
        given = [
            "--model",
            self._model,
            "--prompts",
            str(count),
            "--new-tokens",
            str(new_tokens),
            "--batch",
            "64",
        ]
        given += ["--output", str(texts), "--data", *(_source(*one) for one in sources)]
        on_progress("writing texts")
        self._train("training.own_text", given)
        written = len(texts.read_text(encoding="utf-8").splitlines())
        files = [texts.with_suffix(".txt"), *(Path(path) for path, *_ in sources if Path(path).exists())]
        ranked = ["--model", self._model, "--output", str(self._directory / "vocab.json")]
        # Other vocabularies are smaller, or fewer of their tokens are in the texts.
        if (
            self._data is not None
            and checkpoint.read_config(find_model(self._model)).vocab_size > 4 * VOCABULARY
        ):
            ranked += ["--size", str(VOCABULARY)]
        ranked += [word for file in files for word in ("--data", str(file))]
        on_progress("ranking tokens")
        self._run("jaxspec vocab", ranked, lambda: parse_as(Vocab, ranked, "jaxspec vocab").run())
        commands = [_typed("python -m training.own_text", given), _typed("jaxspec vocab", ranked)]
        return {"commands": commands, "texts": written}

    def train(self, steps: int, words: Sequence[str], on_progress: OnProgress) -> Record:
        """Trains a sorted draft by SoFT: the first three tenths of the model, with an exit after each tenth.

        Returns:
          `command`, and the figures of the last step: losses and acceptance by exit. The weights are in the directory
          `draft`, and the run in `run`.

        Raises:
          UnfinishedError: the time is up; the run has a checkpoint.
        """
        layers = checkpoint.read_config(find_model(self._model)).num_layers
        exits = [max(tenths, layers * tenths // 10) for tenths in (1, 2, 3)]
        sources = [(str(self._directory / "texts.jsonl"), "own", "auto", OWN), *self._sources()]
        settings = {
            "start": self._model,
            "target": self._model,
            "exits": exits,
            "draft_vocab": str(self._directory / "vocab.json"),
            "data": [dict(zip(("path", "kind", "format", "weight"), one, strict=True)) for one in sources],
        }
        file, run = self._directory / "train.yaml", self._directory / "run"
        write_atomic(file, yaml.safe_dump(settings))
        given = ["--config", str(RECIPE), "--config", str(file), *words, "--run", str(run)]
        given += ["--output", str(self._directory / "draft"), "--samples", "0"]
        minutes = max(1.0, TRAINED * (self._ends - time.monotonic())) / 60
        on_progress("training")
        self._train("training.soft", [*given, "--steps", str(steps), "--minutes", f"{minutes:.2f}"])
        last = parse_json((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        if last["step"] < steps:
            raise UnfinishedError(f"step {last['step']} of {steps}")
        typed = _typed("python -m training.soft", [*given, "--steps", str(steps)])
        return {"command": typed, **last}

    def s2d(self, words: Sequence[str], on_progress: OnProgress) -> Record:
        """Compares S2D with each exit of the trained draft by `benchmarks.papers`; returns `command` and the claims."""
        output = self._directory / "s2d"
        given = ["s2d", "--model", self._model, "--draft", str(self._directory / "draft"), *words]
        given += ["--output", str(output)]
        on_progress("loading the model")
        self._run("benchmarks.papers", given, lambda: parse_as(Papers, given, "benchmarks.papers").run())
        claims = read_json(output / REPORT)["claims"]
        return {"command": _typed("python -m benchmarks.papers", given), "claims": claims}

    def _train(self, module: str, words: Sequence[str]) -> None:
        """Runs a command of the package `training`, whose errors are on standard error."""
        main: Callable[[Sequence[str]], int] = importlib.import_module(module).main
        self._run(f"python -m {module}", words, lambda: main(words))

    def _run(self, prog: str, words: Sequence[str], run: Callable[[], int]) -> None:
        """Runs a command, with its output in the file log.txt."""
        with (
            (self._directory / "log.txt").open("a", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
        ):
            print(f"\n$ {_typed(prog, words)}", flush=True)
            if status := run():
                raise Failed(f"{prog} ended with status {status}")

    def _sources(self) -> list[tuple[str, str, str, float]]:
        """Returns the sources beside the model's own texts."""
        if self._data is None:
            return [(f"tasks:{name}", name.partition(":")[0], "auto", 1 / len(TASKS)) for name in TASKS]
        found = []
        for name, kind, form, weight in SOURCES:
            path = self._data / name
            if path.name.startswith("gsm8k"):
                lines = read_text(path, "the problems must be text").splitlines(keepends=True)
                path = self._directory / "gsm8k_learn.jsonl"
                write_atomic(path, "".join(lines[REPORTED:]))
            found.append((str(path), kind, form, weight))
        return found


def _source(path: str, kind: str, form: str, weight: float) -> str:
    return f"{path},kind={kind},format={form},weight={weight}"


def _typed(prog: str, words: Sequence[str]) -> str:
    return shlex.join([*prog.split(), *words])
