"""The comparison of stop rules as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def show(report: Mapping[str, Any]) -> None:
    """Prints what `stop_rules.measure` returns."""
    console = Console(markup=False)
    title = f"{report['model']}, {report['device']}, {report['law']}"
    # Fits 80 columns.
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False, pad_edge=False)
    for heading in (
        "rule",
        "exit",
        "K or γ",
        "× plain",
        "× best K",
        "tokens ÷ rounds",
        "1+acc. ÷ drafts",
        "acc. rate",
    ):
        table.add_column(heading, justify="left" if heading == "rule" else "right", no_wrap=heading == "rule")
    for rule, row in report["rules"].items():
        table.add_row(
            rule,
            str(row["exit_layer"]),
            "–" if row["number"] is None else f"{row['number']:g}",
            _with_interval(row["speedup"], row["speedup_interval"]),
            _with_interval(row["over_constant"], row["over_constant_interval"]),
            _number(row["mean_acceptance_length"], 2),
            _number(row["mean_acceptance_length_drafting"], 2),
            _number(row["draft_acceptance_rate"], 2),
        )
    console.print(table)
    console.print(
        f"plain decoding: {_number(report['plain_tokens_per_second'], 0)} tokens/s. K or γ: the fastest of the "
        "tuning prompts; speeds are those on other prompts, with a 95 % bootstrap interval over these. Mean acceptance "
        "length: tokens ÷ rounds (Spec-Bench), 1 + accepted ÷ drafting rounds (vLLM). γ "
        + ("is carried from text to text." if report["carry"] else "starts again in every text."),
        highlight=False,
    )


def _with_interval(ratio: float | None, interval: tuple[float, float] | None) -> str:
    if ratio is None or interval is None:
        return "–"
    return f"{ratio:.2f}\n{interval[0]:.2f}–{interval[1]:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
