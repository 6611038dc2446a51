"""How often models are right: what a training may cost that makes them faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.compare import BASELINE
from jaxspec.bench.speed import indices, spread
from jaxspec.papers.tables import Cell, Claim, more_than
from jaxspec.papers.workbench import Measured, Workbench
from jaxspec.tuning.fitness_report import FITNESS_NAME

COLUMN = "right, %"
DRAWS = 2000


class Accuracies(NamedTuple):
    """The accuracies of some models, all by the same questions.

    Attributes:
      drawn: by model, percent: float64[1 + draws], the figure, then the same of each draw of the bootstrap; float64[1]
        where there are none; None where nothing is known.
      note: what they rest on, or why there is none.
    """

    drawn: tuple[np.ndarray | None, ...]
    note: str

    def cell(self, model: int, paper: float | None = None) -> Cell:
        """The accuracy of a model, with its interval where there is one."""
        drawn = self.drawn[model]
        return Cell(paper) if drawn is None else _cell(drawn, paper)

    def more(self, says: str, models: tuple[int, int], names: tuple[str, str]) -> Claim:
        """Judges whether the first of two models is more often right than the second."""
        mine, other = (self.drawn[model] for model in models)
        what = f"{names[0]} − {names[1]}, in percentage points,"
        if mine is None or other is None:
            return Claim(says, None, f"{what} is not known: {self.note}")
        if min(len(mine), len(other)) == 1:
            return Claim(says, None, f"{what} is {mine[0] - other[0]:.1f}, without an interval: {self.note}")
        return more_than(says, what, _cell(mine - other), 0.0)


def accuracies(models: Sequence[tuple[Workbench, Measured]]) -> Accuracies:
    """The accuracy of each model's greedy texts.

    By the prompts that were measured, where they have an answer to be found (GSM8K). Else by the reports of the fitness
    test beside the models, the mean over the kinds of work that all of them have: a greedy decoder writes exactly the
    answers that are right there.

    Args:
      models: each with its greedy runs on reporting prompts.
    """
    answered = [_answered(measured) for _, measured in models]
    right = [one for one, _ in answered]
    if all(map(len, right)):
        drawn = [100 * one[indices(kinds, DRAWS)].mean(axis=1) for one, kinds in answered]
        count = f"{len(right[0])} prompts" if len(right[0]) > 1 else "1 prompt"
        return Accuracies(
            tuple(
                one if len(one_right) > 1 else one[:1] for one, one_right in zip(drawn, right, strict=True)
            ),
            f"{COLUMN}: plain decoding's answers to {count}, by the number that a text ends with.",
        )
    missing = [bench.lm.name for bench, _ in models if bench.fitness is None]
    if missing:
        return _none(
            len(models),
            f"no {FITNESS_NAME} lies beside {missing[0]}, and the prompts have no certain answers",
        )
    reports = [_by_kind(bench.fitness or {}) for bench, _ in models]
    common = [kind for kind in reports[0] if all(kind in one for one in reports)]
    if not common:
        return _none(len(models), f"the {FITNESS_NAME} beside the models have no kind of answers in common")
    return Accuracies(
        tuple(_of_report([one[kind] for kind in common], number) for number, one in enumerate(reports)),
        f"{COLUMN}: held-out answers of {FITNESS_NAME} beside each model, the mean over {', '.join(common)}.",
    )


def _none(models: int, why: str) -> Accuracies:
    return Accuracies((None,) * models, f"{COLUMN}: {why}.")


def _answered(measured: Measured) -> tuple[np.ndarray, list[str]]:
    """float64[N], the share of plain decoding's texts that are right, by prompt with an answer; and their kinds."""
    found = [(record.right, record.category) for record in measured.suite.records if record.run == BASELINE]
    right = [(np.mean(its), kind) for its, kind in found if its is not None]
    return np.array([share for share, _ in right], np.float64), [kind for _, kind in right]


def _by_kind(report: Mapping[str, Any]) -> dict[str, tuple[float, int | None]]:
    """The accuracy of a whole model by kind of work with answers, and how many these are where the report says so."""
    return {
        kind: (one["accuracy"][-1], one.get("answers"))
        for kind, one in report["kinds"].items()
        if one.get("accuracy") is not None
    }


def _of_report(kinds: Sequence[tuple[float, int | None]], seed: int) -> np.ndarray:
    shares, counts = zip(*kinds, strict=True)
    mean = np.mean(shares, keepdims=True)
    if not all(counts):
        return np.asarray(100 * mean)
    # Answers drawn with replacement: all that matters is how many of them are right. Which of them are is not written
    # down, so each model has draws of its own.
    draws = np.random.default_rng(seed).binomial(counts, shares, size=(DRAWS, len(counts))) / np.array(counts)
    return np.asarray(100 * np.concatenate([mean, draws.mean(axis=1)]))


def _cell(drawn: np.ndarray, paper: float | None = None) -> Cell:
    if len(drawn) == 1:
        return Cell(paper, float(drawn[0]))
    return Cell(paper, *spread(drawn))
