"""Where a paper's figures are measured: prompt sets by several runs in turns, each set written down by itself."""

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

from jaxspec.bench import prompts, speed
from jaxspec.bench.compare import BASELINE
from jaxspec.bench.prompt_files import Task, encoded, in_turn, own_tasks, read_tasks
from jaxspec.bench.records import Record
from jaxspec.bench.speed import Taken
from jaxspec.bench.suite import Peer, Suite, check_tokenizer
from jaxspec.bench.suite_options import SuiteOptions
from jaxspec.bench.timing import OnProgress
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.line_log import LineLog
from jaxspec.methods import Method
from jaxspec.papers.options import PaperOptions
from jaxspec.papers.tables import FORMAT, Cell, Claim, Report, Row, Table
from jaxspec.tuning import fitness_report

SPLITS: tuple[prompts.Split, ...] = ("tuning", "reporting")


def law(temperature: float = 0.0) -> dict[str, Any]:
    """How tokens are chosen: the likeliest at temperature 0, else drawn without filters."""
    return {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What several runs generated after the same prompts.

    Attributes:
      suite: with its records.
    """

    suite: Suite

    def taken(self, run: str, kinds: Sequence[str] = ()) -> Taken:
        """The texts of a run, by prompt, turn by turn; of some kinds of work only, where they are named."""
        return [record.texts for record in self._records(run, kinds)]

    def kinds(self, run: str, kinds: Sequence[str] = ()) -> list[str]:
        """The kind of work of each of `taken`."""
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
        """How many times faster a run is than another, by default than plain decoding; see `speed.speed_ratio`."""
        mine, work = self.taken(run, kinds), self.kinds(run, kinds)
        ours, interval = (
            speed.speed_ratio(mine, self.taken(over, kinds), kinds=work) if mine else (None, None)
        )
        return Cell(paper, ours, interval if len(mine) > 1 else None)

    def drawn(self, run: str, over: str = BASELINE) -> np.ndarray:
        """float64[1 + draws]: the same ratio, then that of each draw of prompts; see `speed.drawn_ratios`."""
        return speed.drawn_ratios(self.taken(run), self.taken(over), kinds=self.kinds(run))

    def acceptance(self, run: str, kinds: Sequence[str] = ()) -> dict[str, float | None]:
        """What became of a run's drafts; see `speed.acceptance`."""
        return speed.acceptance(self.taken(run, kinds))

    def best(self, runs: Sequence[str]) -> str:
        """The fastest of some runs."""
        return max(runs, key=lambda run: self.ratio(run).ours or 0.0)

    def different(self, runs: Sequence[str]) -> tuple[str, ...]:
        """A note for each of some runs whose greedy texts are not all plain decoding's."""
        found = []
        for run in runs:
            apart = [record.difference for record in self.suite.records if record.run == run]
            count = sum(one is not None for one in apart)
            if count:
                margins = [abs(one.margin) for one in apart if one is not None and one.margin is not None]
                far = f" (largest margin {max(margins):.1g} logits)" if margins else ""
                found.append(f"Of {run}, {count} of {len(apart)} texts are not plain decoding's{far}.")
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Column:
    """What a column of speeds rests on.

    Attributes:
      measured: the runs.
      kinds: of the prompts that count; all where none is named.
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
    """A table of speed-ups over plain decoding.

    Args:
      title: see `Table`.
      columns: by heading. A run that a column does not have is left empty there.
      paper: the paper's figures by run and heading.
      runs: the rows; by default plain decoding and all others.
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
    """Measures for one paper, on one model; used as a context, because files may be needed meanwhile.

    Args:
      lm: the model, with a tokenizer.
      options: see `PaperOptions`.
      on_progress: called with what is being done.
      beside: the directory of the model whose prompts are taken, so that several models have the same; by default
        this one's.

    Attributes:
      lm, options, on_progress: as given.
      fitness: the report of the fitness test that lies beside the model; None where there is none.
      directory: for records and whatever methods read, that of the options, made if missing, or a temporary one.

    Raises:
      ValueError: the model has no tokenizer, or one layer, of which a draft can leave out nothing, or the fitness
        report beside it is none of its own.
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
        # Before hours of measurement: whatever is wrong with it.
        self.fitness = fitness_report.beside(lm)
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
        """The prompts of a split, of each kind in turn, as many as the options say."""
        return in_turn(self._known(split, kinds), lambda task: task.category)[: self.options.limit]

    def fitting(self, split: prompts.Split, kinds: Sequence[str] | None = None) -> dict[str, list[int]]:
        """By the ids of their tasks, the prompts in tokens that fit into the context with their texts."""
        room = self.lm.config.context_length - self.options.max_new_tokens
        read = {task.id: encoded(self.lm, task) for task in self.tasks(split, kinds)}
        return {name: tokens for name, tokens in read.items() if len(tokens) <= room}

    def encoded(
        self, split: prompts.Split, kinds: Sequence[str] | None = None, most: int | None = None
    ) -> list[list[int]]:
        """The same in tokens, at most so many, as far as they fit into the context with their texts.

        Raises:
          ValueError: none of them fits.
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
        """Notes how many prompts there were that fit."""
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
        """Generates after each prompt by plain decoding and by every run, in turns; goes on with what is written down.

        Args:
          name: of the file of records, unique in the paper.
          split: of the prompts. Numbers are chosen on tuning prompts, once round; speeds are reported on the others.
          methods: by the name of their run.
          kinds: of the prompts; None for all.
          sampling: how tokens are chosen, with all that `law` names; by default greedily.
          carry_gamma: start each text of a method from the γ that its last one ended with.
          peers: other ways to generate, by the name of their run; see `Suite`.
          models: those that peers generate with, besides the model itself.
        """
        amount = dataclasses.replace(self.options, repeats=1) if split == "tuning" else self.options
        suite = Suite(
            self.lm,
            self.tasks(split, kinds),
            methods,
            SuiteOptions(amount.limit, amount.max_new_tokens, amount.repeats, carry_gamma=carry_gamma),
            law=sampling or law(),
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
        """Computes something, unless it is written down.

        Args:
          name: of its file, unique in the paper.
          compute: gives what JSON can hold.
          **given: what it depends on, besides the model and the options.
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

    def report(self, paper: str, tables: Sequence[Table], claims: Sequence[Claim]) -> Report:
        """What was measured, with what is known of the model."""
        lm, fitness = self.lm, self.fitness
        failed = None if fitness is None else tuple(c["name"] for c in fitness["checks"] if not c["passed"])
        return Report(
            paper,
            lm.name,
            lm.device_kind,
            lm.precision,
            failed,
            dict(self._prompts),
            {name: getattr(self.options, name) for name in ("max_new_tokens", "repeats", "seed")},
            tuple(tables),
            tuple(claims),
        )
