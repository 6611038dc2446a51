"""`python -m benchmarks.papers`: the tables of one paper, its figures beside those of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks.papers import TAKES, PaperName, find
from benchmarks.papers.options import PaperOptions, TargetOptions
from jaxspec.cli import methods
from jaxspec.cli.methods import parse_run
from jaxspec.cli.options import ModelOptions
from jaxspec.console import frame
from jaxspec.console.output import check_directory
from jaxspec.console.parsing import Positional
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.terminal import tell
from jaxspec.host.progress import Progress
from jaxspec.measuring.bench.suite_options import Amount

if TYPE_CHECKING:
    from benchmarks.papers.tables import Report, Table
    from jaxspec.engine.language_model import LanguageModel

REPORT = "report.json"
# The header of the measurement that has an output directory.
MEASUREMENT = "measurement.jsonl"
# The beginning of every file of records; other files of the directory are the user's.
_RECORDS = b'{"format": "jaxspec.'


@dataclasses.dataclass(frozen=True)
class Papers:
    """Measure the tables of one paper: its figures, this model's beside them, and the claims that hold.

    Prompts and runs are the paper's (adaspeed, s2d and the counts of asd take --prompt-file). --limit applies to the
    tuning prompts and to the reporting prompts.

    Attributes:
      paper: asd (ASD and Draft & Verify), adaspeed (stop rules of early exits), s2d (a sorted draft; --draft names it,
        --run adds others, --target further targets) or sampling (speculative sampling and n-gram decoding).
      prompt_file: prompt sets in place of the project's own, in the form of `jaxspec bench`.
      draft: for paper s2d, the sorted draft: a directory, a hub id or an embedded name.
      runs: for paper s2d, a method and its options beside the paper's own, as in "draft-model --draft TWIN".
      counts: for papers adaspeed, asd and s2d, only the tables of exact counts, which do not depend on the machine.
      untuned: for paper asd with --counts, leave out its tuned numbers, whose grid is most of the work.
      seed: seed of the first repeat, for sampled tokens.
      output: a directory for the records and report.json, made if missing.
      resume: resume from the records in --output; --no-resume starts again. Default: yes.
      json: print one JSON object and nothing else.
    """

    paper: Annotated[PaperName, Positional]
    prompt_file: tuple[str, ...] = ()
    draft: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})
    runs: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"option": "--run", "metavar": '"METHOD --OPTION ..."'}
    )
    counts: bool = False
    untuned: bool = False
    seed: int = 0
    output: str | None = None
    resume: bool = True
    json: bool = False
    amount: Amount = Amount()  # noqa: RUF009
    served: TargetOptions = TargetOptions()  # noqa: RUF009
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Measures; returns the exit status."""
        options = self._options()
        from jaxspec.programs import compilation_cache, jax_settings

        compilation_cache.enable()
        jax_settings.keep_needed()
        return self._run(options)

    def _options(self) -> PaperOptions:
        """Returns the amount of measurement.

        Raises:
          ValueError: an option belongs to another paper, or several processes are requested.
        """
        if self.model.processes.asked:
            raise ValueError(
                "a paper is measured by one process; leave out `distributed` and `coordinator_address`, and give a "
                "mesh of this machine's devices"
            )
        own: dict[str, Any] = {
            name: getattr(self, name) for name in ("prompt_file", "draft", "runs", "counts", "untuned")
        }
        own |= {name: getattr(self.served, name) for name in ("targets", "sorted_target")}
        foreign = [
            f"`{name}`" for name, value in own.items() if value and name not in TAKES.get(self.paper, ())
        ]
        if foreign:
            raise ValueError(f"paper {self.paper} has no option {', '.join(foreign)}; leave it out")
        if self.output is not None:
            check_directory(Path(self.output))
        return PaperOptions(
            **dataclasses.asdict(self.amount),
            **dataclasses.asdict(self.served),
            seed=self.seed,
            prompt_file=self.prompt_file,
            draft=self.draft,
            runs={words: parse_run(words) for words in self.runs},
            counts=self.counts,
            untuned=self.untuned,
            directory=None if self.output is None else Path(self.output),
            resume=self.resume,
        )

    def _run(self, options: PaperOptions) -> int:
        with contextlib.ExitStack() as held:
            try:
                with Progress() as progress:
                    progress("loading the model")
                    lm = self.model.load()
                    self._hold(held, options, lm)
                    report = find(self.paper)(lm, options, progress)
            except KeyboardInterrupt:
                kept = "no measurements were stored; give --output to be able to resume"
                if options.directory is not None:
                    kept = "no measurements were stored"
                    if _stored(options.directory):
                        same = "the same command" + ("" if options.resume else ", without --no-resume,")
                        kept = f"the measurements are in {options.directory}; {same} resumes them"
                print(f"jaxspec: interrupted; {kept}", file=sys.stderr)
                return INTERRUPTED
            return self._write(options, report)

    def _hold(self, held: contextlib.ExitStack, options: PaperOptions, lm: LanguageModel) -> None:
        """Locks the output, if there is one, for this measurement. Without a record, nothing stays of it.

        Raises:
          ValueError: it has another paper, form or model, whose report would be replaced.
        """
        directory = options.directory
        if directory is None:
            return
        from jaxspec.host import lock
        from jaxspec.measuring.line_log import LineLog

        if not directory.exists():
            held.callback(_remove_empty, directory)
        held.enter_context(lock.exclusive(directory, tell, "output"))
        header, report = directory / MEASUREMENT, directory / REPORT
        if report.exists() and not header.exists():
            raise ValueError(
                f"{report} has no {MEASUREMENT} beside it, which names its paper and model; move it away, or give "
                "another `output`"
            )
        measurement = {
            "format": "jaxspec.paper-records/1",
            "paper": self.paper,
            "form": "counts" if options.counts else "times",
            "model": lm.fingerprint,
            "dtype": lm.precision,
        }
        if header.exists() and not options.resume:
            _begin_again(directory)
        LineLog(header, measurement, of="measurement", resume=options.resume)
        held.callback(lambda: None if _stored(directory) else header.unlink(missing_ok=True))

    def _write(self, options: PaperOptions, report: Report) -> int:
        # The pages print at most three digits, and six keep the stored reports small.
        found = json.loads(
            json.dumps(dataclasses.asdict(report)), parse_float=lambda digits: float(f"{float(digits):.6g}")
        )
        if options.directory is not None:
            from jaxspec.host.files import write_atomic

            text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
            write_atomic(options.directory / REPORT, f"{text}\n")
            print(f"jaxspec: wrote {options.directory / REPORT}", file=sys.stderr)
        if self.json:
            print(json.dumps(found))
        else:
            show(report)
        return 0


def _stored(directory: Path) -> bool:
    """Whether a directory has files of a measurement beside its header and its lock."""
    from jaxspec.host import lock

    return directory.exists() and any(
        path.name not in (MEASUREMENT, lock.FILE) for path in directory.iterdir()
    )


def _begin_again(directory: Path) -> None:
    """Removes the report and all records, so that a later command resumes none of an earlier measurement."""
    (directory / REPORT).unlink(missing_ok=True)
    for path in directory.glob("*.jsonl"):
        with path.open("rb") as file:
            ours = file.read(len(_RECORDS)) == _RECORDS
        if ours:
            path.unlink()


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # it has files
        directory.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, see `jaxspec.console.frame.run`."""
    return frame.run("benchmarks.papers", Papers, Papers.run, argv, names=methods.names())


def show(report: Report) -> None:
    """Prints a report's tables and claims, in 80 columns."""
    from rich.console import Console

    console = Console(file=sys.stdout)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(report.paper)
    counts = ", ".join(f"{count} {split}" for split, count in report.prompts.items() if count)
    turns = report.amount.get("repeats")
    amount = f"{report.amount['max_new_tokens']} tokens"
    amount += "" if turns is None else f", {turns} {'turn' if turns == 1 else 'turns'}"
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
        costs = f"at the costs of {claim.costs}: " if claim.costs else ""
        say(f"{verdict}: {claim.says}\n  {costs}{claim.because}")


def _fitness(report: Report) -> str:
    if report.fitness is None:
        return "fitness: not tested; there is no report beside the model, so its depth may be useless"
    if not report.fitness:
        return "fitness: passed"
    return f"fitness: FAILED ({', '.join(report.fitness)}); do not read figures of skipped layers as gains"


def _rows(table: Table) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Drawn
    from rich.text import Text

    from benchmarks.papers.tables import Cell, number

    made = Drawn(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False, pad_edge=False)
    made.add_column("", min_width=14)
    for column in table.columns:
        made.add_column(column, justify="right")

    def cell(one: Cell) -> str:
        if one == Cell():
            return ""
        paper = "–" if one.paper is None else f"{round(one.paper, 3):,g}"
        ours = "–" if one.ours is None else number(one.ours, table.digits)
        interval = "" if one.interval is None else "\n({}–{})"
        return f"{paper} | {ours}" + interval.format(*(number(n, table.digits) for n in one.interval or ()))

    for row in table.rows:
        made.add_row(Text(row.name), *(cell(row.cells.get(column, Cell())) for column in table.columns))
    return made
