"""Measures a paper's figures: several runs on prompt sets in turns, with a file of records for each set."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.papers.options import PaperOptions
from benchmarks.papers.tables import FORMAT, Cell, Claim, Counts, Report, Row, Table
from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.progress import OnProgress
from jaxspec.io.methods.method_files import FITNESS_FORMAT, FITNESS_NAME, check_model, read_format
from jaxspec.measuring.bench import prompts, speed
from jaxspec.measuring.bench.bench_records import Record
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.prompt_files import Task, encoded, in_turn, own_tasks, read_tasks
from jaxspec.measuring.bench.speed import Taken
from jaxspec.measuring.bench.suite import Peer, Suite, check_tokenizer
from jaxspec.measuring.bench.suite_options import SuiteOptions
from jaxspec.measuring.line_log import LineLog
from jaxspec.methods import Method

SPLITS: tuple[prompts.Split, ...] = ("tuning", "reporting")


def distribution(temperature: float = 0.0) -> dict[str, Any]:
    """Returns the sampling distribution: greedy at temperature 0, otherwise without filters."""
    return {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def fitness_beside(lm: LanguageModel) -> dict[str, Any] | None:
    """Reads the fitness report in a model's directory; None without a report.

    Raises:
      ValueError: the file is not a fitness report, or belongs to another model; one line.
    """
    path = None if lm.directory is None else lm.directory / FITNESS_NAME
    if path is None or not path.is_file():
        return None
    report = read_format(path, FITNESS_FORMAT, "a report of the fitness test")
    check_model(path, report.get("model"), lm.fingerprint, "python -m training.export")
    return report


@dataclasses.dataclass(frozen=True)
class Measured:
    """The texts of several runs after the same prompts.

    Attributes:
      suite: the suite with its records.
    """

    suite: Suite

    def taken(self, run: str, kinds: Sequence[str] = ()) -> Taken:
        """Returns the texts of a run, by prompt and turn; with `kinds`, only of these task types."""
        return [record.texts for record in self._records(run, kinds)]

    def kinds(self, run: str, kinds: Sequence[str] = ()) -> list[str]:
        """Returns the task type of each entry of `taken`."""
        return [record.category for record in self._records(run, kinds)]

    def _records(self, run: str, kinds: Sequence[str]) -> list[Record]:
        return [
            record
            for record in self.suite.records
            if record.run == run and (not kinds or record.category in kinds)
        ]

    def ratio(
        self, run: str, over: str = BASELINE, *, kinds: Sequence[str] = (), paper: float | None = None
    ) -> Cell:
        """Returns the speed of a run divided by that of another, by default plain decoding; see `speed.speed_ratio`."""
        mine, work = self.taken(run, kinds), self.kinds(run, kinds)
        ours, interval = (
            speed.speed_ratio(mine, self.taken(over, kinds), kinds=work) if mine else (None, None)
        )
        return Cell(paper, ours, interval if len(mine) > 1 else None)

    def drawn(self, run: str, over: str = BASELINE) -> np.ndarray:
        """Returns the ratio, and its bootstrap draws over prompts, float64[1 + draws]; see `speed.drawn_ratios`."""
        return speed.drawn_ratios(self.taken(run), self.taken(over), kinds=self.kinds(run))

    def acceptance(self, run: str, kinds: Sequence[str] = ()) -> dict[str, float | None]:
        """Returns the acceptance figures of a run; see `speed.acceptance`."""
        return speed.acceptance(self.taken(run, kinds))

    def best(self, runs: Sequence[str]) -> str:
        """Returns the fastest of some runs."""
        return max(runs, key=lambda run: self.ratio(run).ours or 0.0)

    def different(self, runs: Sequence[str]) -> tuple[str, ...]:
        """Returns a note for each run with greedy texts that differ from plain decoding's."""
        found = []
        for run in runs:
            apart = [record.difference for record in self.suite.records if record.run == run]
            count = sum(one is not None for one in apart)
            if count:
                margins = [abs(one.margin) for one in apart if one is not None and one.margin is not None]
                far = f" (largest margin {max(margins):.1g} logits)" if margins else ""
                found.append(f"{count} of {len(apart)} texts of {run} differ from plain decoding's{far}.")
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Column:
    """The source of a column of speeds.

    Attributes:
      measured: the runs.
      kinds: task types of the prompts that count; empty for all.
    """

    measured: Measured
    kinds: tuple[str, ...] = ()


def speeds(
    title: str,
    columns: Mapping[str, Column],
    paper: Mapping[str, Mapping[str, float]],
    runs: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """Returns a table of speed-ups over plain decoding.

    Args:
      title: see `Table`.
      columns: by heading; a run that a column does not have gives an empty cell.
      paper: the paper's figures by run and heading.
      runs: the rows. Default: plain decoding and all others.
      notes: see `Table`.
    """
    names = runs or list(dict.fromkeys(run for one in columns.values() for run in one.measured.suite.runs))
    rows = []
    for run in names:
        cells = {
            heading: one.measured.ratio(run, kinds=one.kinds, paper=paper.get(run, {}).get(heading))
            for heading, one in columns.items()
            if run in one.measured.suite.runs
        }
        if run == BASELINE:
            cells = {heading: Cell(1.0, 1.0) for heading in cells}
        rows.append(Row("plain" if run == BASELINE else run, cells))
    return Table(title, tuple(columns), tuple(rows), tuple(notes))


class Workbench:
    """Measures for one paper, on one model; a context manager, because it may need temporary files.

    Args:
      lm: the model, with a tokenizer.
      options: see `PaperOptions`.
      on_progress: called with the current activity.
      beside: the directory of the model whose prompts are used, so that several models have the same. Default: this
        model's.

    Attributes:
      lm, options, on_progress: as given.
      fitness: the fitness report beside the model; None if there is none.
      directory: directory for records and the methods' files: that of the options, made if missing, or a temporary one.

    Raises:
      ValueError: the model has no tokenizer, or only one layer, so that a draft cannot leave out any, or the fitness
        report beside it belongs to another model.
    """

    def __init__(
        self,
        lm: LanguageModel,
        options: PaperOptions,
        on_progress: OnProgress = lambda what: None,
        beside: Path | None = None,
    ) -> None:
        check_tokenizer(lm)
        if lm.config.num_layers == 1:
            raise ValueError(
                "the model has one layer, and the papers' drafts leave layers out; choose another model"
            )
        self.lm, self.options, self.on_progress = lm, options, on_progress
        self._beside = beside or lm.directory
        # Checked before hours of measurement.
        self.fitness = fitness_beside(lm)
        self._temporary = None if options.directory is not None else tempfile.TemporaryDirectory()
        self.directory = options.directory or Path(self._temporary.name if self._temporary else "")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._prompts: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def __enter__(self) -> Workbench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def tasks(self, split: prompts.Split, kinds: Sequence[str] | None = None) -> list[Task]:
        """Returns the prompts of a split, of each task type in turn, limited by the options."""
        return in_turn(self._known(split, kinds), lambda task: task.category)[: self.options.limit]

    def fitting(self, split: prompts.Split, kinds: Sequence[str] | None = None) -> dict[str, list[int]]:
        """Returns the tokens of the prompts that fit into the context with their texts, by the ids of their tasks."""
        room = self.lm.config.context_length - self.options.max_new_tokens
        read = {task.id: encoded(self.lm, task) for task in self.tasks(split, kinds)}
        return {name: tokens for name, tokens in read.items() if len(tokens) <= room}

    def kinds(self, split: prompts.Split, kinds: Sequence[str] | None = None) -> list[str]:
        """Returns the task type of each prompt that fits, in the order of `fitting`."""
        fitting = self.fitting(split, kinds)
        return [task.category for task in self.tasks(split, kinds) if task.id in fitting]

    def encoded(
        self, split: prompts.Split, kinds: Sequence[str] | None = None, most: int | None = None
    ) -> list[list[int]]:
        """Returns the tokens of at most `most` prompts that fit into the context with their texts.

        Raises:
          ValueError: no prompt fits.
        """
        fitting = list(self.fitting(split, kinds).values())[:most]
        if not fitting:
            raise ValueError(
                f"none of the prompts fits into the context of {self.lm.config.context_length} tokens with "
                f"max_new_tokens={self.options.max_new_tokens}; give fewer"
            )
        self._count(split, len(fitting))
        return fitting

    def _count(self, split: prompts.Split, measured: int) -> None:
        """Records the number of prompts that fit."""
        self._prompts[split] = max(self._prompts[split], measured)

    def _known(self, split: prompts.Split, kinds: Sequence[str] | None = None) -> list[Task]:
        if not self.options.prompt_file:
            return own_tasks(split, kinds, self._beside)
        if kinds is not None:
            raise ValueError(
                "prompt_file is given, and the paper compares kinds of the project's own prompts; leave it out"
            )
        first: dict[str, list[Task]] = {}
        for task in read_tasks(self.options.prompt_file):
            first.setdefault(task.category, []).append(dataclasses.replace(task, turns=task.turns[:1]))
        begin = 0 if split == "tuning" else 1
        found = [task for some in first.values() for task in some[begin::2]]
        if not found:
            raise ValueError(
                "prompt_file has no category of two prompts, and tuning and reporting need one each; give more"
            )
        return found

    def measure(
        self,
        name: str,
        split: prompts.Split,
        methods: Mapping[str, Method],
        *,
        kinds: Sequence[str] | None = None,
        sampling: Mapping[str, Any] | None = None,
        carry_gamma: bool = False,
        peers: Mapping[str, Peer] | None = None,
        models: Sequence[LanguageModel] = (),
    ) -> Measured:
        """Generates after each prompt by plain decoding and by every run, in turns; resumes from stored records.

        Args:
          name: name of the file of records, unique in the paper.
          split: split of the prompts. Numbers are tuned on tuning prompts, in one repeat; speeds are reported on the
            others.
          methods: by the name of their run.
          kinds: task types of the prompts; None for all.
          sampling: the sampling distribution, with all entries of `distribution`. Default: greedy.
          carry_gamma: start each text of a method from the last γ of the previous one.
          peers: other ways to generate, by the name of their run; see `Suite`.
          models: the models that peers generate with, besides the model itself.
        """
        amount = dataclasses.replace(self.options, repeats=1) if split == "tuning" else self.options
        suite = Suite(
            self.lm,
            self.tasks(split, kinds),
            methods,
            SuiteOptions(amount.limit, amount.max_new_tokens, amount.repeats, carry_gamma=carry_gamma),
            distribution=sampling or distribution(),
            seed=self.options.seed,
            peers=peers,
            models=models,
        )
        log = LineLog(
            self.directory / f"{name}.jsonl", suite.header(), of="benchmark", resume=self.options.resume
        )
        suite.resume(log)
        suite.measure(lambda what: self.on_progress(f"{name}: {what}"))
        self._count(split, len({record.id for record in suite.records}))
        return Measured(suite)

    def once(self, name: str, compute: Callable[[], dict[str, Any]], **given: Any) -> dict[str, Any]:
        """Computes a result, unless it is stored.

        Args:
          name: name of its file, unique in the paper.
          compute: returns the result, which must fit into JSON.
          **given: its inputs, besides the model and the options.
        """
        prompts_read = [[dataclasses.asdict(task) for task in self._known(split)] for split in SPLITS]
        header = {
            "format": f"{FORMAT}/{name}",
            "model": self.lm.fingerprint,
            "dtype": self.lm.precision,
            "device": self.lm.device_kind,
            "all_prompts": hashlib.sha256(json.dumps(prompts_read).encode()).hexdigest()[:16],
            **{field: getattr(self.options, field) for field in ("limit", "max_new_tokens", "seed")},
            **given,
        }
        log = LineLog(self.directory / f"{name}.jsonl", header, of="benchmark", resume=self.options.resume)
        if not log.entries:
            self.on_progress(name)
            log.add(compute())
        return log.entries[0]

    def report(
        self,
        paper: str,
        tables: Sequence[Table],
        claims: Sequence[Claim],
        counts: Counts | None = None,
    ) -> Report:
        """Returns the report of the tables, claims and counts, with the model's fitness."""
        lm, fitness = self.lm, self.fitness
        # Counts have no turns, and greedy texts no seed.
        limit = () if self.options.counts and self.options.limit is None else ("limit",)
        amount = (*limit, "max_new_tokens", *(() if self.options.counts else ("repeats", "seed")))
        failed = None if fitness is None else tuple(c["name"] for c in fitness["checks"] if not c["passed"])
        return Report(
            paper,
            lm.name,
            lm.device_kind,
            lm.precision,
            failed,
            dict(self._prompts),
            {name: getattr(self.options, name) for name in amount},
            tuple(tables),
            tuple(claims),
            tuple(self.options.runs),
            self.options.sorted_target,
            counts or {},
            (
                *(word for path in self.options.prompt_file for word in ("--prompt-file", path)),
                *(["--untuned"] if self.options.untuned else []),
            ),
        )
