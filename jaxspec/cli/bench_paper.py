"""`jaxspec bench --paper`: the tables of one paper, its figures beside ours."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import Progress, tell
from jaxspec.papers import PaperName, find
from jaxspec.papers.options import PaperOptions

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel
    from jaxspec.papers.tables import Report, Table

REPORT = "report.json"


def run(load: Callable[[], LanguageModel], paper: PaperName, options: PaperOptions, *, as_json: bool) -> int:
    """Measures the tables of a paper; returns the exit status.

    Args:
      load: loads the target.
      paper: whose tables.
      options: how much is measured, and where records go.
      as_json: print one JSON object and nothing else.
    """
    if options.directory is None:
        return _run(load, paper, options, as_json)
    from jaxspec.io import lock

    with lock.exclusive(options.directory, tell, "output"):
        return _run(load, paper, options, as_json)


def _run(load: Callable[[], LanguageModel], paper: PaperName, options: PaperOptions, as_json: bool) -> int:
    try:
        with Progress() as progress:
            progress("loading the model")
            report = find(paper)(load(), options, progress)
    except KeyboardInterrupt:
        kept = "nothing was kept; with --output it would go on from here"
        if options.directory is not None:
            kept = f"what was measured is in {options.directory}, and the same command goes on from here"
        print(f"jaxspec: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    found = dataclasses.asdict(report)
    if options.directory is not None:
        from jaxspec.io.files import write_atomic

        write_atomic(options.directory / REPORT, json.dumps(found, indent=2) + "\n")
        print(f"jaxspec: wrote {options.directory / REPORT}", file=sys.stderr)
    if as_json:
        print(json.dumps(found))
    else:
        show(report)
    return 0


def show(report: Report) -> None:
    """Prints a report's tables and claims, in 80 columns."""
    from rich.console import Console

    console = Console(file=sys.stdout)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(report.paper)
    counts = ", ".join(f"{count} {split}" for split, count in report.prompts.items() if count)
    turns = report.amount["repeats"]
    amount = f"{report.amount['max_new_tokens']} tokens, {turns} {'turn' if turns == 1 else 'turns'}"
    say(f"{report.model}, {report.dtype}, {report.device}; prompts: {counts}; {amount}")
    say(_fitness(report))
    for table in report.tables:
        say(f"\n{table.title}")
        console.print(_rows(table))
        for note in table.notes:
            say(note)
    say("\ncells: the paper's | ours (95 % interval by the bootstrap over prompts)\n")
    for claim in report.claims:
        verdict = {True: "holds", False: "does not hold", None: "cannot be told"}[claim.holds]
        say(f"{verdict}: {claim.says}\n  {claim.because}")


def _fitness(report: Report) -> str:
    if report.fitness is None:
        return "fitness: not tested; no report lies beside the model, so its depth may be empty"
    if not report.fitness:
        return "fitness: passed"
    return f"fitness: FAILED ({', '.join(report.fitness)}); read no figure of skipped layers as a gain"


def _rows(table: Table) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Drawn
    from rich.text import Text

    from jaxspec.papers.tables import Cell, number

    made = Drawn(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False, pad_edge=False)
    made.add_column("", min_width=14)
    for column in table.columns:
        made.add_column(column, justify="right")

    def cell(one: Cell) -> str:
        if one == Cell():
            return ""
        paper = "–" if one.paper is None else f"{one.paper:,g}"
        ours = "–" if one.ours is None else number(one.ours, table.digits)
        interval = "" if one.interval is None else "\n({}–{})"
        return f"{paper} | {ours}" + interval.format(*(number(n, table.digits) for n in one.interval or ()))

    for row in table.rows:
        made.add_row(Text(row.name), *(cell(row.cells.get(column, Cell())) for column in table.columns))
    return made
