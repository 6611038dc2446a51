"""`python -m benchmarks.papers`: the tables of one paper, its figures beside those of a model."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxspec.cli.options import ModelOptions
from jaxspec.console import frame
from jaxspec.console.output import check_directory
from jaxspec.console.parsing import Positional
from jaxspec.console.tables import Table
from jaxspec.console.terminal import tell
from jaxspec.host.files import write_atomic
from jaxspec.host.progress import Progress
from jaxspec.measuring.bench.suite_options import check_budget, check_count
from jaxspec.measuring.output import show

COUNTS = "counts.json"


@dataclasses.dataclass(frozen=True)
class Papers:
    """Print the tables of one paper from exact counts of greedy texts, which do not depend on the machine.

    The numbers of a method are chosen on tuning prompts for each column and reported on others, `--limit` of each.

    Attributes:
      paper: asd (ASD beside Draft & Verify), adaspeed (stop rules of early exits) or s2d (a sorted draft).
      counts: stored counts, such as docs/results/adaspeed-large.json: print their tables, and count nothing.
      prompt_file: prompt sets in place of the project's own, in the form of `jaxspec bench`; those of a category
        alternate between tuning and reporting, conversations with their first turn.
      draft: for paper s2d, the sorted draft. Default: the embedded one.
      unsorted: for paper s2d, a draft of the same layers that was trained without sorting.
      limit: the maximum number of prompts. Default: all.
      max_new_tokens: the maximum number of new tokens per text.
      output: a directory for logs, which the same command continues, and counts.json.
      resume: continue the logs; --no-resume begins again. Default: yes.
      json: print one JSON object and nothing else.
    """

    paper: Annotated[Literal["asd", "adaspeed", "s2d"], Positional]
    counts: str | None = None
    prompt_file: tuple[str, ...] = ()
    draft: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})
    unsorted: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})
    limit: int | None = None
    max_new_tokens: int = 128
    output: str | None = None
    resume: bool = True
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> None:
        """Counts, and prints the tables.

        Raises:
          ValueError: an option is outside its range or of another paper; one line.
        """
        check_count("limit", self.limit)
        check_budget(self.max_new_tokens)
        if self.paper != "s2d" and (self.draft or self.unsorted):
            raise ValueError(f"paper {self.paper} has no option `draft` or `unsorted`; leave it out")
        if self.model.processes.asked:
            raise ValueError(
                "a paper is counted by one process; leave out `distributed` and `coordinator_address`"
            )
        from benchmarks.papers import counts

        module = importlib.import_module(f"benchmarks.papers.{self.paper}")
        if self.counts is not None:
            found = counts.read_counts(Path(self.counts))
            if found.paper != self.paper:
                raise ValueError(f"{self.counts} has the counts of paper {found.paper}; give that name")
        else:
            found = self._counted(module)
        report = {"model": found.model, "dtype": found.dtype, **counts.report(module.PAPER, found)}
        show(report, self.json, _parts)

    def _counted(self, module: Any) -> Any:
        from benchmarks.papers.counts import Bench
        from jaxspec.host import lock
        from jaxspec.programs import compilation_cache

        compilation_cache.enable()
        if self.output is not None:
            check_directory(Path(self.output))
        with tempfile.TemporaryDirectory() as temporary, Progress() as progress:
            progress("loading the model")
            lm = self.model.load()
            directory = Path(self.output or temporary)
            with lock.exclusive(directory, tell, "output"):
                bench = Bench(
                    lm,
                    directory,
                    self.max_new_tokens,
                    self.limit,
                    self.prompt_file,
                    self.draft or "sorted",
                    self.unsorted,
                    self.resume,
                    progress,
                )
                found = module.measure(bench)
                if self.output is not None:
                    write_atomic(directory / COUNTS, json.dumps(dataclasses.asdict(found)) + "\n")
        return found


def _parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    yield f"{report['paper']}\n{report['model']}, {report['dtype']}"
    for table in report["tables"]:
        headings = ["", *next(iter(table["rows"].values()))]
        rows = [[row, *map(_cell, cells.values())] for row, cells in table["rows"].items()]
        yield f"\n{table['title']}"
        yield Table(headings, rows, name=24)
    yield "\ncells: ours (95 % interval by the bootstrap over prompts)\nthe paper's\n"
    for row, by_heading in report["settings"].items():
        for setting in dict.fromkeys(by_heading.values()):
            at = ", ".join(name for name, one in by_heading.items() if one == setting)
            yield f"{row}: {setting} ({at})"
    yield ""
    for claim in report["claims"]:
        verdict = {True: "holds", False: "does not hold", None: "cannot be told"}[claim["holds"]]
        yield f"{verdict} at the costs of {claim['costs']}: {claim['says']} {_words(claim['ratio'])}"


def _cell(figure: Mapping[str, Any]) -> str:
    printed = "" if figure["paper"] is None else f"\n{figure['paper']:.2f}"
    return _words(figure) + printed


def _words(figure: Mapping[str, Any]) -> str:
    if figure["ours"] is None:
        return "–"
    interval = figure["interval"]
    return f"{figure['ours']:.2f}" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, see `jaxspec.console.frame.run_command`."""
    return frame.run_command("benchmarks.papers", Papers, Papers.run, argv)


if __name__ == "__main__":
    sys.exit(main())
