"""`jaxspec tune`: the numbers of a method that suit a model."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.cli.options import ModelOptions
from jaxspec.console.bar import Bar
from jaxspec.console.output import output_file
from jaxspec.console.status import INTERRUPTED
from jaxspec.tuning.options import ASDGrid, PromptOptions, S2DGrid, Sweep

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

Tunable = Literal["asd", "s2d", "auto"]
# Rows of the table; the JSON has all.
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Tune:
    """Measure which numbers of a method are fastest on given prompts, beside plain decoding.

    asd: alpha (skip attention of at least this cosine similarity), every (skip every M-th layer whole),
    keep-last (keep the N last layers). Numbers that skip the same are measured once.

    s2d: for each exit of a sorted draft the probability from which on it is taken. They belong to this model and
    this draft.

    auto: what is accepted of the drafts of each method that auto chooses among, by position; auto then begins each
    text with that. No times are taken.

    Attributes:
      method: whose numbers.
      draft: [s2d] the sorted draft: a directory or a hub id. Default: the model itself.
      output: the file to write. Default: beside the model or, where that cannot be written or comes with jaxspec, in
        the user's data directory; the method finds it in both.
      json: print one JSON object and nothing else.
    """

    method: Tunable = dataclasses.field(metadata={"metavar": "{asd,s2d,auto}"})
    draft: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})
    output: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    json: bool = False
    asd: ASDGrid = ASDGrid()  # noqa: RUF009
    s2d: S2DGrid = S2DGrid()  # noqa: RUF009
    sweep: Sweep = Sweep()  # noqa: RUF009
    prompts: PromptOptions = PromptOptions()  # noqa: RUF009
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Measures; returns the exit status.

        Raises:
          ValueError: an option of another method, or a number outside its range.
        """
        grids = {"asd": self.asd, "s2d": self.s2d}
        foreign: list[Any] = [grid for name, grid in grids.items() if name != self.method]
        unread = ["--draft"] if self.draft and self.method != "s2d" else []
        unread += [
            field.metadata["option"]
            for grid in foreign
            for field in dataclasses.fields(grid)
            if getattr(grid, field.name)
        ]
        if unread:
            raise ValueError(f"tune --method {self.method} has no option {unread[0]}; leave it out")
        if self.method == "auto":
            return self._auto()
        tune = self._asd if self.method == "asd" else self._s2d
        with Bar() as bar:
            bar("loading the model")
            lm = self.model.load()
            output, report = tune(lm, bar)
        report = {
            "model": lm.name,
            "device": lm.device_kind,
            "dtype": lm.precision,
            "method": self.method,
            **report,
            "output": str(output),
        }
        if self.json:
            print(json.dumps(report))
        else:
            _print(report)
        best = report["results"][0]
        if best["score"] < 1:
            print(
                f"jaxspec: warning: {self.method} is slower here than plain decoding ({best['score']:.2f}×) with "
                "all of these numbers",
                file=sys.stderr,
            )
        if report["interrupted"]:
            print(f"jaxspec: interrupted; the best so far is in {output}", file=sys.stderr)
            return INTERRUPTED
        return 0

    def _auto(self) -> int:
        """Measures what is accepted; returns the exit status."""
        from jaxspec.io import acceptance_file
        from jaxspec.methods import Auto
        from jaxspec.tuning.acceptance import measure_acceptance
        from jaxspec.tuning.texts import read_prompts

        with Bar() as bar:
            bar("loading the model")
            lm = self.model.load()
            output = output_file(self.output, lm, acceptance_file.NAME)
            prompts = read_prompts(lm, self.sweep.max_new_tokens, self.prompts)
            expected, results = measure_acceptance(
                lm, lm.candidates(Auto()), prompts, self.sweep.max_new_tokens, on_progress=bar
            )
        about = {
            "prompts": len(prompts),
            "chat": self.prompts.chat,
            "max_new_tokens": self.sweep.max_new_tokens,
            "dtype": lm.precision,
        }
        found_by = {"command": "jaxspec tune --method auto", **about}
        acceptance_file.write_acceptance(output, lm.fingerprint, expected, found_by)
        report = {"model": lm.name, "method": self.method, **about, "results": results, "output": str(output)}
        if self.json:
            print(json.dumps(report))
        else:
            _print_acceptance(report)
        return 0

    def _asd(self, lm: LanguageModel, bar: Bar) -> tuple[Path, dict[str, Any]]:
        from jaxspec.io.asd_numbers import ASDNumbers
        from jaxspec.io.method_files import ASD_NAME, write_asd
        from jaxspec.tuning.asd import tune_asd
        from jaxspec.tuning.texts import read_prompts

        output = output_file(self.output, lm, ASD_NAME)
        prompts = read_prompts(lm, self.sweep.max_new_tokens, self.prompts)
        report = tune_asd(lm, prompts, self.asd, self.sweep, on_progress=bar, on_measured=_shown(bar))
        best = report["results"][0]
        numbers = ASDNumbers(best["alpha"], best["every"], best["keep_last"])
        found_by = self._found_by(lm, prompts, report, dataclasses.asdict(numbers))
        write_asd(output, lm.fingerprint, numbers, found_by)
        return output, {"prompts": len(prompts), **report}

    def _s2d(self, lm: LanguageModel, bar: Bar) -> tuple[Path, dict[str, Any]]:
        from jaxspec.io.method_files import thresholds_name, write_thresholds
        from jaxspec.tuning.s2d import sorted_draft, tune_s2d
        from jaxspec.tuning.texts import read_prompts

        drafter, params, draft = sorted_draft(lm, self.draft)
        output = output_file(self.output, lm, thresholds_name(draft))
        prompts = read_prompts(lm, self.sweep.max_new_tokens, self.prompts)
        report = tune_s2d(
            lm, prompts, drafter, params, self.s2d, self.sweep, on_progress=bar, on_measured=_shown(bar)
        )
        found = report["results"][0]["thresholds"]
        found_by = self._found_by(lm, prompts, report, {"thresholds": found})
        write_thresholds(output, lm.fingerprint, draft, drafter.exits, found, found_by)
        return output, {"prompts": len(prompts), "exits": list(drafter.exits), **report}

    def _found_by(
        self, lm: LanguageModel, prompts: Sequence[Any], report: dict[str, Any], numbers: dict[str, Any]
    ) -> dict[str, Any]:
        """What a file says of how its numbers were found."""
        about = {name: report[name] for name in ("settings", "distinct", "interrupted") if name in report}
        best = {name: value for name, value in report["results"][0].items() if name not in numbers}
        return {
            "command": f"jaxspec tune --method {self.method}",
            "prompts": len(prompts),
            "max_new_tokens": self.sweep.max_new_tokens,
            "device": lm.device_kind,
            "dtype": lm.precision,
            **about,
            **best,
        }


def _shown(bar: Bar) -> Callable[[int, int, dict[str, Any]], None]:
    return lambda done, total, best: bar.count(
        "measuring", done, total, f"{best['score']:.2f}× ({_numbers(best)})"
    )


def _numbers(row: dict[str, Any]) -> str:
    """The numbers of a row, in few words."""
    if "thresholds" in row:
        return ", ".join(f"{number:g}" for number in row["thresholds"])
    return f"{row['alpha']:g}, {row['every']}, {row['keep_last']}"


# Heading → cell, by method; what all have in common follows them.
_COLUMNS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "asd": {
        "alpha": lambda row: "off" if row["alpha"] >= 1 else f"{row['alpha']:g}",
        "every": lambda row: str(row["every"] or "off"),
        "keep last": lambda row: str(row["keep_last"] or "off"),
        "skips attention + MLP": lambda row: f"{row['skipped_attention']:.1f} + {row['skipped_mlp']:.1f}",
    },
    "s2d": {"thresholds": _numbers},
}


def _print_acceptance(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    table = Table(title=f"{report['model']}, {report['dtype']}", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("candidate", no_wrap=True)
    for heading in ("rounds", "drafted", "acceptance rate", "tokens a round"):
        table.add_column(heading, justify="right")
    for row in report["results"]:
        shares = (row["draft_acceptance_rate"], row["tokens_per_round"])
        counts = (str(row["rounds"]), str(row["num_draft_tokens"]))
        table.add_row(row["candidate"], *counts, *("–" if one is None else f"{one:.2f}" for one in shares))
    console.print(table)
    console.print(f"written to {report['output']}, for --method auto", highlight=False, soft_wrap=True)


def _print(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    title = f"{report['model']}, {report['dtype']}, {report['device']}"
    if "exits" in report:
        title += f", exits after {', '.join(map(str, report['exits']))} layers"
    columns = _COLUMNS[report["method"]]
    for rows, first, caption in (
        (report["results"][:_SHOWN], "turns", title),
        (report.get("ablation"), "rules", "which rules matter"),
    ):
        if not rows:
            continue
        table = Table(title=caption, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        table.add_column(first, no_wrap=True)
        for heading in (*columns, "acceptance rate", "tokens/s", "speed-up"):
            table.add_column(heading, justify="right")
        for row in rows:
            rate = row["draft_acceptance_rate"]
            table.add_row(
                str(row[first]),
                *(cell(row) for cell in columns.values()),
                "–" if rate is None else f"{rate:.2f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['score']:.2f}",
            )
        console.print(table)
    different = f", {report['distinct']} different on these prompts" if "distinct" in report else ""
    console.print(f"{report['settings']} settings{different}", highlight=False)
    console.print(
        f"written to {report['output']}, for --method {report['method']}", highlight=False, soft_wrap=True
    )
