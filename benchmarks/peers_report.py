"""The figures of `benchmarks.peers`: speeds of each run, and ratios of jaxspec's runs to all others."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.measuring.bench import speed
from jaxspec.measuring.bench.bench_records import Record
from jaxspec.texts.results import Result

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
        _start(mine) == _start(other)
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


def _start(text: Result) -> list[int]:
    return text.tokens[:-1]


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


def table_by_kind(report: Mapping[str, Any]) -> str:
    """Returns the speeds by kind of work in Markdown, and each run ÷ plain decoding in float32 with its interval."""
    baseline = next(iter(report["ratios"]))
    kinds = [*next(iter(report["runs"].values()))]
    lines = [["tokens per second", *kinds, f"÷ {baseline}", "the same text"]]
    lines.append(["---", *("--:" for _ in lines[0][1:])])
    for run, figures in report["runs"].items():
        speeds = [_number(figures[kind]["tokens_per_second"], 0) for kind in kinds]
        ratio = report["ratios"][baseline].get(run, {}).get(ALL)
        inverse = "1" if ratio is None else _with_interval([1 / ratio[0], *(1 / end for end in ratio[:0:-1])])
        lines.append([run, *speeds, inverse, _number(figures[ALL]["same_texts"], 2)])
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
