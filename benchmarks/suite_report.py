"""What a suite's texts come to: figures by run and kind of work, and tables of them."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxspec.bench.compare import BASELINE
from jaxspec.bench.speed import acceptance, speed_ratio, tokens_per_second
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result

ALL = "all kinds"
# Columns of a terminal in which a cell takes one line; else it takes two.
_WIDE = 120
# Of one prompt: its kind, and by run what was generated after it, turn by turn.
Record = tuple[str, dict[str, list[Result]]]


def target_report(lm: LanguageModel, records: Sequence[Record], sampling: bool) -> dict[str, Any]:
    """The figures of one model.

    Args:
      lm: the model.
      records: at least one, each with the same runs and as many turns; "autoregressive" is among the runs.
      sampling: whether tokens were drawn at random, so that texts differ.

    Returns:
      `model`, `device`, `dtype`; `runs`, by run and kind ("all kinds" is the last) the figures of `_figures`;
      `best`, by kind the run of the highest speed-up, plain decoding with its 1 among them.
    """
    groups: dict[str, list[dict[str, list[Result]]]] = {}
    for kind, by_run in records:
        groups.setdefault(kind, []).append(by_run)
    groups[ALL] = [by_run for _, by_run in records]
    runs = {
        run: {kind: _figures(run, group, sampling) for kind, group in groups.items()} for run in records[0][1]
    }
    best = {kind: max(runs, key=lambda run: runs[run][kind]["speedup"] or 0.0) for kind in groups}
    return {"model": lm.name, "device": lm.device.device_kind, "dtype": lm.dtype, "runs": runs, "best": best}


def _figures(run: str, group: Sequence[Mapping[str, Sequence[Result]]], sampling: bool) -> dict[str, Any]:
    """The figures of a run on some prompts.

    Returns:
      `prompts`, `tokens` (of the first turn), `tokens_per_second` and `speedup` as in `bench.speed`, with its
      `speedup_interval`; what `acceptance` gives; `identical_to_autoregressive`, null where tokens are drawn at
      random. A number that is not defined, such as the speed of texts of one token, is null.
    """
    mine, plain = ([by_run[name] for by_run in group] for name in (run, BASELINE))
    speedup, interval = speed_ratio(mine, plain)
    pairs = zip(itertools.chain(*mine), itertools.chain(*plain), strict=True)
    same = [one.tokens == other.tokens for one, other in pairs]
    return {
        "prompts": len(group),
        "tokens": sum(len(texts[0].tokens) for texts in mine),
        "tokens_per_second": tokens_per_second(mine),
        "speedup": speedup,
        "speedup_interval": interval,
        **acceptance(mine),
        "identical_to_autoregressive": None if sampling else all(same),
    }


def average(targets: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """By run and kind, the mean speed-up over the targets that have one, as the S2D paper compares methods."""

    def mean(run: str, kind: str) -> float | None:
        figures = [target["runs"][run][kind] for target in targets if kind in target["runs"][run]]
        speedups = [one["speedup"] for one in figures if one["speedup"] is not None]
        return statistics.mean(speedups) if speedups else None

    return {run: {kind: mean(run, kind) for kind in kinds} for run, kinds in targets[0]["runs"].items()}


def show(report: Mapping[str, Any]) -> None:
    """Prints what `suite.measure` returns: a table a target, and one of their average if there are several."""
    console, targets = Console(markup=False), report["targets"]
    separator = " " if console.width >= _WIDE else "\n"
    for target in targets:
        cells = {
            run: [
                ("*" if target["best"][kind] == run else "") + separator.join(_cell(run, figures))
                for kind, figures in kinds.items()
            ]
            for run, kinds in target["runs"].items()
        }
        title = f"{target['model']}, {target['dtype']}, {target['device']}"
        console.print(_table(title, target["best"], cells))
    if len(targets) > 1:
        averages = {run: map(_times, kinds.values()) for run, kinds in report["average_speedup"].items()}
        console.print(_table(f"mean speed-up of {len(targets)} targets", targets[0]["best"], averages))
    legend = (
        f"{report['law']}; × the speed of {BASELINE}, * the fastest; in brackets the mean acceptance length, "
        "tokens ÷ rounds (Spec-Bench) | 1 + accepted ÷ drafting rounds (vLLM)"
    )
    console.print(legend, highlight=False, soft_wrap=True)
    for target in targets:
        for run, kinds in target["runs"].items():
            if kinds[ALL]["identical_to_autoregressive"] is False:
                text = f"texts of {run} by {target['model']} are not those of {BASELINE}"
                print(f"jaxspec: warning: {text}", file=sys.stderr)


def _cell(run: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """A speed in words, and what explains it."""
    if figures["speedup"] is None:
        return ("–",)
    if run == BASELINE:
        return f"{figures['tokens_per_second']:.0f}", "tokens/s"
    lengths = (figures["mean_acceptance_length"], figures["mean_acceptance_length_drafting"])
    return _times(figures["speedup"]), "({}|{})".format(*("–" if n is None else f"{n:.1f}" for n in lengths))


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}×"


def _table(title: str, kinds: Iterable[str], cells: Mapping[str, Iterable[str]]) -> Table:
    """Rows are runs; the names of long ones take several lines."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("run")
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for run, row in cells.items():
        table.add_row(run, *row)
    return table
