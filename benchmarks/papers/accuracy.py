"""Measures the accuracy of models, which a training for speed may reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.papers.tables import Cell, Claim, more_than
from benchmarks.papers.workbench import Measured, Workbench
from jaxspec.io.methods.method_files import FITNESS_NAME
from jaxspec.measuring.bench.comparison import BASELINE
from jaxspec.measuring.bench.speed import spread, weights

COLUMN = "right, %"
DRAWS = 2000


class Accuracies(NamedTuple):
    """The accuracies of several models on the same questions.

    Attributes:
      drawn: accuracies by model, percent: float64[1 + draws], the figure and its bootstrap draws; float64[1] without
        draws; None if it is unknown.
      note: the source of the figures, or the reason that there are none.
    """

    drawn: tuple[np.ndarray | None, ...]
    note: str

    def cell(self, model: int, paper: float | None = None) -> Cell:
        """Returns the accuracy of a model, with its interval if there is one."""
        drawn = self.drawn[model]
        return Cell(paper) if drawn is None else _cell(drawn, paper)

    def more(self, says: str, models: tuple[int, int], names: tuple[str, str]) -> Claim:
        """Judges whether the first of two models has the higher accuracy."""
        mine, other = (self.drawn[model] for model in models)
        what = f"{names[0]} − {names[1]}, in percentage points,"
        if mine is None or other is None:
            return Claim(says, None, f"{what} is not known: {self.note}")
        if min(len(mine), len(other)) == 1:
            return Claim(says, None, f"{what} is {mine[0] - other[0]:.1f}, without an interval: {self.note}")
        return more_than(says, what, _cell(mine - other), 0.0)


def accuracies(models: Sequence[tuple[Workbench, Measured]]) -> Accuracies:
    """Returns the accuracy of each model's greedy texts.

    If the measured prompts have certain answers (GSM8K), the texts are compared with them. Otherwise see `of_reports`.

    Args:
      models: each with its greedy runs on reporting prompts.
    """
    answered = [_answered(measured) for _, measured in models]
    right = [one for one, _ in answered]
    if all(map(len, right)):
        drawn = [100 * weights(kinds, DRAWS) @ one / len(one) for one, kinds in answered]
        count = f"{len(right[0])} prompts" if len(right[0]) > 1 else "1 prompt"
        return Accuracies(
            tuple(
                one if len(one_right) > 1 else one[:1] for one, one_right in zip(drawn, right, strict=True)
            ),
            f"{COLUMN}: plain decoding's answers to {count}, by the number that a text ends with.",
        )
    return of_reports([bench for bench, _ in models])


def of_reports(benches: Sequence[Workbench]) -> Accuracies:
    """Returns the mean accuracy over the common task types in the fitness reports beside the models.

    Greedy decoding writes exactly the answers that are right there.
    """
    missing = [bench.lm.name for bench in benches if bench.fitness is None]
    if missing:
        return _none(
            len(benches),
            f"there is no {FITNESS_NAME} beside {missing[0]}, and the prompts have no certain answers",
        )
    reports = [_by_kind(bench.fitness or {}) for bench in benches]
    common = [kind for kind in reports[0] if all(kind in one for one in reports)]
    if not common:
        return _none(len(benches), f"the {FITNESS_NAME} beside the models have no kind of answers in common")
    return Accuracies(
        tuple(_of_report([one[kind] for kind in common], number) for number, one in enumerate(reports)),
        f"{COLUMN}: held-out answers of {FITNESS_NAME} beside each model, the mean over {', '.join(common)}.",
    )


def _none(models: int, why: str) -> Accuracies:
    return Accuracies((None,) * models, f"{COLUMN}: {why}.")


def _answered(measured: Measured) -> tuple[np.ndarray, list[str]]:
    """Returns the share of right texts of plain decoding by prompt with an answer, float64[N], and the task types."""
    found = [(record.right, record.category) for record in measured.suite.records if record.run == BASELINE]
    right = [(np.mean(its), kind) for its, kind in found if its is not None]
    return np.array([share for share, _ in right], np.float64), [kind for _, kind in right]


def _by_kind(report: Mapping[str, Any]) -> dict[str, tuple[float, int | None]]:
    """Returns the accuracy of a whole model by task type with answers, and their number if the report has it."""
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
    # Answers drawn with replacement: the number of right ones is binomial. The report does not contain the single
    # answers, so the draws of the models are independent.
    draws = np.random.default_rng(seed).binomial(counts, shares, size=(DRAWS, len(counts))) / np.array(counts)
    return np.asarray(100 * np.concatenate([mean, draws.mean(axis=1)]))


def _cell(drawn: np.ndarray, paper: float | None = None) -> Cell:
    if len(drawn) == 1:
        return Cell(paper, float(drawn[0]))
    return Cell(paper, *spread(drawn))
