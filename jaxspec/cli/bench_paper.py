"""`jaxspec bench --paper`: the tables of one paper, its figures beside ours."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.bench.suite_options import Amount
from jaxspec.cli.runs import parse_run
from jaxspec.console.output import check_directory
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import Progress
from jaxspec.papers import TAKES, PaperName, find
from jaxspec.papers.options import PaperOptions, TargetOptions

if TYPE_CHECKING:
    from jaxspec.cli.bench import Bench
    from jaxspec.papers.tables import Report, Table

REPORT = "report.json"
# The options that every paper leaves to the user; others stand in `TAKES`.
_TAKEN = {field.name for field in dataclasses.fields(Amount)} | {"seed", "resume", "output", "json"}
_TAKEN |= {"paper", "model", "dtype", "device", "mesh"}


def run(command: Bench, paper: PaperName) -> int:
    """Measures the tables of a paper; returns the exit status.

    Raises:
      ValueError: an option is given that belongs to prompt sets and runs.
    """
    if command.model.processes.asked:
        raise ValueError(
            "`paper` is measured by one process; leave out `distributed` and `coordinator_address`, and give it a mesh "
            "of this machine's devices"
        )
    taken = {*_TAKEN, *TAKES.get(paper, ())}
    foreign = [f"`{name}`" for name in _given(command) if name not in taken]
    if foreign:
        raise ValueError(
            f"paper={paper} measures the paper's own runs and has no option {', '.join(foreign)}; leave it out"
        )
    if command.output is not None:
        check_directory(Path(command.output))
    options = PaperOptions(
        **{field.name: getattr(command.suite, field.name) for field in dataclasses.fields(Amount)},
        **{field.name: getattr(command.served, field.name) for field in dataclasses.fields(TargetOptions)},
        seed=command.sampling.seed,
        prompt_file=command.prompt_file,
        draft=getattr(command.drafting, "draft", None),
        runs={words: parse_run(words) for words in command.runs},
        directory=None if command.output is None else Path(command.output),
        resume=command.resume,
    )
    try:
        with Progress() as progress:
            progress("loading the model")
            lm = command.model.load()
            report = find(paper)(lm, options, progress)
    except KeyboardInterrupt:
        kept = "nothing was kept; with --output it would go on from here"
        if command.output is not None:
            kept = f"what was measured is in {command.output}, and the same command goes on from here"
        print(f"jaxspec: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    found = dataclasses.asdict(report)
    if command.output is not None:
        from jaxspec.io.files import write_atomic

        write_atomic(Path(command.output) / REPORT, json.dumps(found, indent=2) + "\n")
        print(f"jaxspec: wrote {Path(command.output) / REPORT}", file=sys.stderr)
    if command.json:
        print(json.dumps(found))
    else:
        show(report)
    return 0


def _given(options: Any) -> Iterator[str]:
    """The names of the options that are not at their defaults, those of the dataclasses in a command too."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(field.default):
            yield from _given(value)
        elif value != field.default:
            yield field.name


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
