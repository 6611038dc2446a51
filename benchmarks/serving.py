"""Throughput of many requests: `python -m benchmarks.serving --model smollm2` prints a table and JSON.

It compares rows that are refilled at once with batches that wait for their longest text, and speculation with plain
decoding at several numbers of rows, with the weights as they are and in int8. All programs are compiled before, and all
ways run in alternating turns. Each ratio has a 95 % interval from a bootstrap over the workloads.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from jaxspec.cli.options import ModelOptions
from jaxspec.engine.keywords import MethodName
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.speed import ratio_of_counts
from jaxspec.measuring.bench.timing import warm_up

PLAIN: MethodName = "autoregressive"
# A workload: prompts, and the number of tokens to generate after each.
Work = Sequence[tuple[Sequence[int], int]]
# Runs a workload; the number of the turn is not used.
Way = Callable[[Work, int], None]
# Tokens and milliseconds by way, float[workloads, turns, 2].
Counts = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
    """Throughput of refilled rows and of speculation.

    Attributes:
      rows: the numbers of rows of speculation, separated by commas.
      refilled: the number of rows of the comparison with fixed batches.
      methods: the methods beside plain decoding, separated by commas.
      formats: formats of the weights, separated by commas; `as-is` for those of the model.
      requests: requests per row of a workload with mixed lengths.
      shortest, longest: tokens of its texts, uniform on a logarithmic scale.
      max_new_tokens: of each text for speculation.
      workloads: workloads with other lengths and prompts.
      repeats: turns of each workload.
    """

    rows: str = "1,4,8,16"
    refilled: int = 8
    methods: str = "ngram,auto"
    formats: str = "as-is,int8"
    requests: int = 6
    shortest: int = 8
    longest: int = 256
    max_new_tokens: int = 64
    workloads: int = 6
    repeats: int = 3
    model: ModelOptions = ModelOptions()  # noqa: RUF009


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Measures both comparisons.

    Returns:
      `model`, `device`; `refilled_over_fixed`: the ratio of the speeds with its interval; `useful_rows_of_fixed`: the
      share of the rows' rounds in fixed batches that give tokens; `speculation`: for each format and number of rows,
      the speed of plain decoding, and the ratio to it of each method, with its interval.

    Raises:
      ValueError: the model has no tokenizer.
    """
    report: dict[str, Any] = {"speculation": {}}
    names = [PLAIN, *(name.strip() for name in options.methods.split(","))]
    for weights in options.formats.split(","):
        own: dict[str, Any] = {} if weights == "as-is" else {"weights": weights}
        lm = dataclasses.replace(options.model, **own).load()
        report |= {"model": lm.name, "device": lm.device_kind}
        texts = [lm.encode(text) for text in prompts.sample(8)]
        if "refilled_over_fixed" not in report:
            ways: dict[str, Way] = {
                "refilled": functools.partial(_refilled, lm, options.refilled),
                "fixed": functools.partial(_fixed, lm, options.refilled),
            }
            works = [_mixed(options, texts, seed) for seed in range(options.workloads)]
            taken = _measured(lm, ways, works, options.repeats, on_progress)
            report["refilled_over_fixed"] = ratio_of_counts(taken["refilled"], taken["fixed"])
            report["useful_rows_of_fixed"] = float(
                np.mean([_useful(work, options.refilled) for work in works])
            )
        cells = report["speculation"][lm.precision] = {}
        for rows in map(int, options.rows.split(",")):
            ways = {name: functools.partial(_generated, lm, name, rows) for name in names}
            works = [_equal(options, texts, rows, seed) for seed in range(options.workloads)]
            taken = _measured(lm, ways, works, options.repeats, on_progress)
            tokens, took_ms = taken[PLAIN].sum(axis=(0, 1))
            ratios = {name: ratio_of_counts(taken[name], taken[PLAIN]) for name in names if name != PLAIN}
            cells[rows] = {"plain_tokens_per_second": 1e3 * tokens / took_ms} | ratios
    return report


def _measured(
    lm: LanguageModel, ways: Mapping[str, Way], works: Sequence[Work], repeats: int, on_progress: OnProgress
) -> Counts:
    """Runs each workload in all ways, in alternating order, after an uncounted turn that compiles."""
    warm_up([lm], ways, works, on_progress)
    taken: dict[str, list[list[tuple[float, float]]]] = {name: [[] for _ in works] for name in ways}
    for at, work in enumerate(works):
        tokens = sum(budget for _, budget in work)
        for turn in range(repeats):
            order = list(ways.items())
            for name, way in order if (at + turn) % 2 == 0 else reversed(order):
                on_progress(f"measuring {name}, workload {at + 1} of {len(works)}, turn {turn + 1}")
                began = time.perf_counter()
                way(work, turn)
                taken[name][at].append((tokens, 1e3 * (time.perf_counter() - began)))
            lm.executables.wait()
    return {name: np.array(of) for name, of in taken.items()}


def _mixed(options: Options, texts: Sequence[Sequence[int]], seed: int) -> Work:
    """Returns requests with texts of mixed lengths."""
    rng = np.random.default_rng(seed)
    size = options.requests * options.refilled
    lengths = np.exp(rng.uniform(np.log(options.shortest), np.log(options.longest), size)).astype(int)
    return [(texts[int(rng.integers(len(texts)))], int(length)) for length in lengths]


def _equal(options: Options, texts: Sequence[Sequence[int]], rows: int, seed: int) -> Work:
    """Returns one request for each row, with texts of one length."""
    rng = np.random.default_rng(seed)
    return [(texts[index], options.max_new_tokens) for index in rng.integers(len(texts), size=rows).tolist()]


def _useful(work: Work, rows: int) -> float:
    """Returns the share of the rows' rounds in fixed batches in which their text has not ended."""
    budgets = [budget for _, budget in work]
    batches = [budgets[at : at + rows] for at in range(0, len(budgets), rows)]
    return sum(budgets) / sum(len(batch) * max(batch) for batch in batches)


def _refilled(lm: LanguageModel, rows: int, work: Work, turn: int) -> None:
    scheduler = Scheduler(lm, max_batch=rows)
    for prompt, budget in work:
        scheduler.add(prompt, method=PLAIN, max_new_tokens=budget, ignore_eos=True)
    while not scheduler.idle:
        for event in scheduler.step():
            if event.error is not None:
                raise event.error


def _fixed(lm: LanguageModel, rows: int, work: Work, turn: int) -> None:
    for at in range(0, len(work), rows):
        _generated(lm, PLAIN, rows, work[at : at + rows], turn)


def _generated(lm: LanguageModel, method: Any, rows: int, work: Work, turn: int) -> None:
    given, budgets = zip(*work, strict=True)
    lm.generate(
        list(map(list, given)),
        method=method,
        max_new_tokens=list(budgets),
        max_batch=rows,
        ignore_eos=True,
        temperature=0,
    )


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr, width=120)
    names = [
        name
        for name in next(iter(next(iter(report["speculation"].values())).values()))
        if "plain" not in name
    ]
    table = Table(
        "weights", "rows", "plain, tokens/s", *names, title=f"{report['model']} on {report['device']}"
    )
    for weights, cells in report["speculation"].items():
        for rows, row in cells.items():
            figures = (_cell(row[name]) for name in names)
            table.add_row(weights, str(rows), f"{row['plain_tokens_per_second']:.1f}", *figures)
    console.print(table)
    share = report["useful_rows_of_fixed"]
    console.print(
        f"refilled ÷ fixed batches on mixed lengths: {_cell(report['refilled_over_fixed'])} "
        f"(in fixed batches {share:.0%} of the rows' rounds give tokens)",
        highlight=False,
    )


def _cell(ratio: tuple[float | None, tuple[float, float] | None]) -> str:
    figure, interval = ratio
    if figure is None or interval is None:
        return "–"
    return f"{figure:.2f} ({interval[0]:.2f} – {interval[1]:.2f})"


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.serving", Options, measure, show=_show))
