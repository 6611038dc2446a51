"""Counts of greedy texts, and the tables and claims that they give at the costs of several models.

Greedy texts and counts do not depend on the machine, so a table of counts can be checked anywhere. A round costs a step
of plain decoding, and a draft pass the sum of its parts. So rows are free, and loops, launches and attention over the
cache cost nothing. On a CPU, where each row costs time, speeds are lower.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.engine.language_model import LanguageModel
from jaxspec.host.files import read_json
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench.prompt_files import encoded, in_turn, own_tasks, read_tasks
from jaxspec.measuring.bench.prompts import Split
from jaxspec.measuring.bench.speed import spread, weights
from jaxspec.measuring.line_log import LineLog
from jaxspec.requests.results import Result

FORMAT = "jaxspec.paper-counts/1"
# The column of costs at which a pass costs the bytes of the weights that it reads, for any number of rows.
FREE = "free rows"


class Case(NamedTuple):
    """A row of a table with one of its settings, which is chosen on tuning prompts."""

    row: str
    setting: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


class Work(NamedTuple):
    """The counts of N texts.

    Attributes:
      tokens: int[N], tokens after the first.
      rounds: int[N], passes of the target after the prefill.
      passes: float[N, M], draft passes by part: M parts of a draft that have a price each.
    """

    tokens: Any
    rounds: Any
    passes: Any

    def speed(self, prices: Sequence[float], weighted: Any = 1.0) -> np.ndarray:
        """Returns the speed-up over plain decoding, float64[...].

        Args:
          prices: float[M], of a pass of each part, in steps of plain decoding.
          weighted: float64[..., N], the weight of each text.

        Examples:
          >>> float(Work([9, 9], [3, 3], [[6.0], [6.0]]).speed([0.5], np.ones(2)))
          1.5
        """
        cost = np.asarray(self.rounds) + np.asarray(self.passes, np.float64) @ np.asarray(prices, np.float64)
        weighted = np.broadcast_to(weighted, (*np.shape(weighted)[:-1], len(cost)))
        ratio: np.ndarray = (weighted @ np.asarray(self.tokens)) / (weighted @ cost)
        return ratio


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of a paper's rows for one model, as a file stores them.

    Attributes:
      paper, model, dtype: what was counted.
      kinds: the kind of work of each reporting text.
      columns: by heading, the price of a pass of each part, in steps of plain decoding.
      chosen: by row and heading, the case that is fastest on tuning texts at these costs.
      cases: by case, the `Work` on reporting texts.
      format: format of the JSON of `dataclasses.asdict`.
    """

    paper: str
    model: str
    dtype: str
    kinds: Sequence[str]
    columns: Mapping[str, Sequence[float]]
    chosen: Mapping[str, Mapping[str, str]]
    cases: Mapping[str, Sequence[Any]]
    format: str = FORMAT

    def speeds(self, row: str, heading: str, kind: str | None = None) -> np.ndarray:
        """Returns the speed-up of a row on the texts of a kind or of all, and on each draw of the bootstrap."""
        weighted = _weights(tuple(self.kinds)) * [kind in (None, one) for one in self.kinds]
        return Work(*self.cases[self.chosen[row][heading]]).speed(self.columns[heading], weighted)

    def ratio(self, row: str, other: str | None, heading: str, kind: str | None = None) -> np.ndarray:
        """Returns the same ÷ that of another row; None for plain decoding."""
        mine = self.speeds(row, heading, kind)
        return mine if other is None else mine / self.speeds(other, heading, kind)

    def alike(self, row: str, other: str | None, heading: str) -> np.ndarray:
        """Returns the geometric mean of the ratio over the kinds of work, which then weigh alike."""
        logs = [np.log(self.ratio(row, other, heading, kind)) for kind in dict.fromkeys(self.kinds)]
        mean: np.ndarray = np.exp(np.mean(logs, axis=0))
        return mean


@functools.cache
def _weights(kinds: tuple[str, ...]) -> np.ndarray:
    return weights(kinds)


def read_counts(path: Path) -> Counts:
    """Reads stored counts.

    Raises:
      ValueError: the file has another format.
    """
    found = read_json(path)
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of counts with format {FORMAT}; count again")
    return Counts(**found)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a paper: rows ÷ another row, None for plain decoding; without `rows` all rows."""

    title: str
    other: str | None = None
    rows: tuple[str, ...] = ()
    by_kind: bool = False


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper: a row ÷ another (None for plain decoding) is above a bound."""

    says: str
    row: str
    other: str | None = None
    bound: float = 1.0


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper's tables, claims and figures.

    Attributes:
      title: its title.
      tables, claims: see there; those of rows that were not counted are left out.
      printed: the paper's speed-ups by row and heading, over the row `over`; None for over plain decoding.
      over: see `printed`.
      average: the headings of a claim that one draft serves all of its targets; () without one.
    """

    title: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    printed: Mapping[str, Mapping[str, float]]
    over: str | None = None
    average: tuple[str, ...] = ()

    def figure(self, row: str, other: str | None, heading: str) -> float | None:
        """Returns the paper's figure of a ratio; None if it has none."""
        mine = self.printed.get(row, {}).get(heading)
        if other == self.over:
            return mine
        its = self.printed.get(other or "", {}).get(heading)
        return None if mine is None or its is None else mine / its


def report(paper: Paper, counts: Counts) -> dict[str, Any]:
    """Returns the tables and claims.

    Returns:
      `tables`: `title` and by row and heading a figure: `ours`, `interval`, `paper`; `claims`: `says`, `costs`, `ratio`
      (a figure), `alike` and `holds`, None if the interval has the bound; `settings` by row and heading.
    """

    def figure(drawn: np.ndarray, printed: float | None = None) -> dict[str, Any]:
        ours, interval = spread(drawn)
        return {"ours": ours, "interval": interval if len(counts.kinds) > 1 else None, "paper": printed}

    tables: list[dict[str, Any]] = []
    for table in paper.tables:
        rows = [row for row in table.rows or counts.chosen if row in counts.chosen]
        if not rows or (table.other is not None and table.other not in counts.chosen):
            continue
        if table.by_kind:
            (row,) = rows
            cells = {
                kind: {name: figure(counts.ratio(row, table.other, name, kind)) for name in counts.columns}
                for kind in dict.fromkeys(counts.kinds)
            }
        else:
            cells = {
                row: {
                    name: figure(counts.ratio(row, table.other, name), paper.figure(row, table.other, name))
                    for name in counts.columns
                }
                for row in rows
            }
        tables.append({"title": table.title, "rows": cells})
    claims = []
    for claim in paper.claims:
        if not {claim.row, claim.other or claim.row} <= counts.chosen.keys():
            continue
        for name in counts.columns:
            ratio = figure(
                counts.ratio(claim.row, claim.other, name), paper.figure(claim.row, claim.other, name)
            )
            alike = figure(counts.alike(claim.row, claim.other, name)) if len({*counts.kinds}) > 1 else None
            claims.append(
                {
                    "says": claim.says,
                    "costs": name,
                    "ratio": ratio,
                    "alike": alike,
                    "holds": _holds(ratio, claim.bound),
                }
            )
    if paper.average and {*paper.average} <= counts.columns.keys():
        claims.append(_average(paper, counts, figure))
    return {"paper": paper.title, "settings": counts.chosen, "tables": tables, "claims": claims}


def _holds(ratio: Mapping[str, Any], bound: float) -> bool | None:
    low, high = ratio["interval"] or (bound, bound)
    return None if low <= bound <= high else bool(low > bound)


def _average(paper: Paper, counts: Counts, figure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Judges whether the last table's first row is faster on average over the targets than the best other row."""
    mine, *others = paper.tables[-1].rows

    def mean(row: str) -> np.ndarray:
        drawn: np.ndarray = np.mean([counts.speeds(row, name) for name in paper.average], axis=0)
        return drawn

    def printed(row: str) -> float:
        return sum(paper.printed[row][name] for name in paper.average)

    # The fastest on reporting prompts: this favours the other row.
    rival = max((row for row in others if row in counts.chosen), key=lambda row: float(mean(row)[0]))
    ratio = figure(mean(mine) / mean(rival), printed(mine) / max(map(printed, others)))
    says = f"On average over its targets, {mine} is faster than the best other row for all of them."
    return {
        "says": says,
        "costs": "the average",
        "ratio": ratio,
        "alike": None,
        "holds": _holds(ratio, 1.0),
    }


# Generates one greedy text after a prompt: the result, and its draft passes by part.
Counting = Callable[[Sequence[int]], tuple[Result, Sequence[float]]]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model and the amount of a measurement.

    Attributes:
      lm: the model.
      directory: for the logs, from which an interrupted measurement continues.
      max_new_tokens: the maximum number of new tokens per text.
      limit: the maximum number of prompts of a split; None for all.
      prompt_file: prompt sets in place of the project's own; those of a category alternate between the splits.
      draft: of paper s2d, the sorted draft.
      unsorted: of paper s2d, a draft of the same layers without sorting.
      resume: continue the logs.
      on_progress: called with the current step.
    """

    lm: LanguageModel
    directory: Path
    max_new_tokens: int = 128
    limit: int | None = None
    prompt_file: tuple[str, ...] = ()
    draft: str = "sorted"
    unsorted: str | None = None
    resume: bool = True
    on_progress: OnProgress = lambda step: None

    def prompts(self, split: Split) -> list[tuple[str, list[int]]]:
        """Returns the kind and the tokens of the prompts of a split that fit into the context with their texts.

        Raises:
          ValueError: none fits.
        """
        tasks = own_tasks(split, self.lm.directory)
        if self.prompt_file:
            by_kind: dict[str, list[Any]] = {}
            for task in read_tasks(self.prompt_file):
                first = dataclasses.replace(task, turns=task.turns[:1])
                by_kind.setdefault(task.category, []).append(first)
            tasks = [task for own in by_kind.values() for task in own[split != "tuning" :: 2]]
        tasks = in_turn(tasks, lambda task: task.category)[: self.limit]
        room = self.lm.config.context_length - self.max_new_tokens
        found = [(task.category, tokens) for task in tasks if len(tokens := encoded(self.lm, task)) <= room]
        if not found:
            raise ValueError(
                f"no {split} prompt fits into the context of {self.lm.config.context_length} tokens with "
                f"max_new_tokens={self.max_new_tokens}; give fewer, or two prompts of a category"
            )
        return found

    def generate(self, prompt: Sequence[int], method: Any) -> Result:
        """Generates a greedy text."""
        result: Result = self.lm.generate(
            prompt, method=method, max_new_tokens=self.max_new_tokens, temperature=0.0
        )
        return result

    def count(self, split: Split, cases: Mapping[Case, Counting], parts: str) -> dict[str, Work]:
        """Counts cases on the prompts of a split; those of the log are not counted again.

        Args:
          split: the split.
          cases: the counting of each case.
          parts: names of the parts of a draft; a change of these or of the drafts begins another measurement.
        """
        prompts = self.prompts(split)
        header = {
            "format": FORMAT,
            "model": self.lm.fingerprint,
            "dtype": self.lm.precision,
            "parts": parts,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
            "max_new_tokens": self.max_new_tokens,
        }
        log = LineLog(self.directory / f"{split}.jsonl", header, of="count", resume=self.resume)
        known = {entry["case"]: entry["work"] for entry in log.entries}
        for number, (case, counting) in enumerate(cases.items(), 1):
            if str(case) not in known:
                self.on_progress(f"{split}: {case}, {number} of {len(cases)}")
                texts = [counting(tokens) for _, tokens in prompts]
                known[str(case)] = [
                    [max(result.statistics.num_tokens - 1, 0) for result, _ in texts],
                    [result.statistics.num_rounds for result, _ in texts],
                    [list(map(float, passes)) for _, passes in texts],
                ]
                log.add({"case": str(case), "work": known[str(case)]})
        return {str(case): Work(*known[str(case)]) for case in cases}

    def counts(
        self,
        paper: str,
        columns: Mapping[str, Sequence[float]],
        chosen: Mapping[str, Mapping[str, Case]],
        cases: Mapping[Case, Counting],
        parts: str,
    ) -> Counts:
        """Counts the chosen cases on the reporting prompts."""
        needed = {case for by_heading in chosen.values() for case in by_heading.values()}
        found = self.count("reporting", {case: cases[case] for case in cases if case in needed}, parts)
        return Counts(
            paper,
            self.lm.name,
            self.lm.precision,
            [kind for kind, _ in self.prompts("reporting")],
            {name: [*map(float, prices)] for name, prices in columns.items()},
            {row: {name: str(case) for name, case in by.items()} for row, by in chosen.items()},
            {case: [*work] for case, work in found.items()},
        )


def choose(
    works: Mapping[str, Work], cases: Sequence[Case], columns: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Case]]:
    """Returns the fastest case of each row on tuning texts, for the costs of each column.

    Examples:
      >>> slow, fast = (Work([9], [n], [[0.0]]) for n in (9, 3))
      >>> works = {"x, K 1": slow, "x, K 2": fast}
      >>> choose(works, [Case("x", "K 1"), Case("x", "K 2")], {"free": [0.1]})["x"]["free"].setting
      'K 2'
    """
    rows: dict[str, list[Case]] = {}
    for case in cases:
        rows.setdefault(case.row, []).append(case)
    return {
        row: {
            name: max(own, key=lambda case: float(works[str(case)].speed(prices, 1.0)))
            for name, prices in columns.items()
        }
        for row, own in rows.items()
    }
