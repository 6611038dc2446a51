"""The replayed comparison of stop rules as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_TITLES = {"measured": "rounds as timed on this device", "free_rows": "rows free, as on an accelerator"}


def show(report: Mapping[str, Any]) -> None:
    """Prints what `replay.measure` returns."""
    console = Console(markup=False)
    for name, priced in report["pricing"].items():
        title = f"{report['model']}, greedy, {_TITLES[name]}"
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False, pad_edge=False)
        table.add_column("rule", no_wrap=True)
        for heading in ("exit", "K or γ0", "× plain", "× best K", "× K = 5", "drafted", "accepted"):
            table.add_column(heading, justify="right")
        for row in priced["rules"].values():
            _add(table, row["case"]["rule"], row)
        table.add_section()
        for row in priced["untuned"]:
            _add(table, f"{row['case']['rule']}, the paper's", row)
        console.print(table)
    texts = report["num_prompts"]
    console.print(
        f"tuned on {texts['tuning']} texts, reported on {texts['reporting']} others, with 95 % bootstrap intervals "
        "over these; c: γ is carried from text to text. drafted: per round; accepted: share of them.",
        highlight=False,
    )


def _add(table: Table, name: str, row: Mapping[str, Any]) -> None:
    case = row["case"]
    number = "–" if case["number"] is None else f"{case['number']:g}{' c' if case['carried'] else ''}"
    ratios = (_interval(row[key]) for key in ("speedup", "over_constant", "over_paper_constant"))
    share = f"{row['draft_acceptance_rate']:.2f}"
    table.add_row(name, str(case["exit_layer"]), number, *ratios, f"{row['mean_draft_length']:.1f}", share)


def _interval(ratio: Sequence[float]) -> str:
    return f"{ratio[0]:.2f}\n{ratio[1]:.2f}–{ratio[2]:.2f}"
