"""`jaxspec tune`: measures the parameters of a method that are fastest for a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxspec.cli.options import ModelOptions
from jaxspec.console.output import output_file
from jaxspec.console.status import INTERRUPTED
from jaxspec.console.tables import Table
from jaxspec.console.terminal import tell
from jaxspec.host.progress import Progress
from jaxspec.measuring.output import figure, show
from jaxspec.measuring.tuning.tuning_options import ASDGrid, PromptOptions, S2DGrid, Sweep

if TYPE_CHECKING:
    from jaxspec.engine.language_model import LanguageModel

Tunable = Literal["asd", "s2d"]
# Number of rows in the printed table; the JSON contains all rows.
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Tune:
    """Measure the fastest parameters of a method on given prompts, relative to plain decoding.

    asd: alpha (skip attention of at least this cosine similarity), every (skip every M-th layer), keep-last (keep the
    last N layers). Settings that skip the same sublayers are measured once.

    s2d: the threshold of each exit of a sorted draft; the exit is taken if its probability is at least this. The
    thresholds are for this model and this draft.

    Attributes:
      method: the method to tune.
      draft: [s2d] the sorted draft: a directory or a hub id. Default: the model itself.
      output: the file to write. Default: in the model's directory or, if that is not writable or belongs to jaxspec,
        in the user's data directory; the method finds it in both.
      into_draft: [s2d] write the thresholds into the config.json of the draft too, which uses them for every target
        without thresholds of its own.
      json: print one JSON object and nothing else.
    """

    method: Tunable = dataclasses.field(metadata={"metavar": "{asd,s2d}"})
    draft: str | None = dataclasses.field(default=None, metadata={"metavar": "DIR|ID"})
    output: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    into_draft: bool = False
    json: bool = False
    asd: ASDGrid = ASDGrid()  # noqa: RUF009
    s2d: S2DGrid = S2DGrid()  # noqa: RUF009
    sweep: Sweep = Sweep()  # noqa: RUF009
    prompts: PromptOptions = PromptOptions()  # noqa: RUF009
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Measures; returns the exit status.

        Raises:
          ValueError: an option belongs to another method, or a number is out of range.
        """
        grids = {"asd": self.asd, "s2d": self.s2d}
        foreign: list[Any] = [grid for name, grid in grids.items() if name != self.method]
        unread = ["--draft"] if self.draft and self.method != "s2d" else []
        unread += ["--into-draft"] if self.into_draft and self.method != "s2d" else []
        unread += [
            field.metadata["option"]
            for grid in foreign
            for field in dataclasses.fields(grid)
            if getattr(grid, field.name)
        ]
        if unread:
            raise ValueError(f"tune --method {self.method} has no option {unread[0]}; leave it out")
        tune = self._asd if self.method == "asd" else self._s2d
        with Progress() as progress:
            progress("loading the model")
            lm = self.model.load()
            output, report = tune(lm, progress)
        report = {
            "model": lm.name,
            "device": lm.device_kind,
            "dtype": lm.precision,
            "method": self.method,
            **report,
            "output": str(output),
        }
        show(report, self.json, _parts)
        best = report["results"][0]
        if best["score"] < 1:
            slower = f"slower here than plain decoding ({best['score']:.2f}×)"
            tell(f"warning: {self.method} is {slower} with all of these settings")
        if report["interrupted"]:
            tell(f"interrupted; the best so far is in {output}")
            return INTERRUPTED
        return 0

    def _asd(self, lm: LanguageModel, progress: Progress) -> tuple[Path, dict[str, Any]]:
        from jaxspec.io.methods.asd_numbers import ASDNumbers
        from jaxspec.io.methods.method_files import ASD_NAME
        from jaxspec.measuring.tuning.asd_sweep import tune_asd
        from jaxspec.measuring.tuning.texts import read_prompts

        output = output_file(self.output, lm, ASD_NAME)
        prompts = read_prompts(lm, self.sweep.max_new_tokens, self.prompts)
        report = tune_asd(
            lm, prompts, self.asd, self.sweep, on_progress=progress, on_measured=_shown(progress)
        )
        best = report["results"][0]
        numbers = ASDNumbers(best["alpha"], best["every"], best["keep_last"])
        found_by = self._found_by(lm, prompts, report, dataclasses.asdict(numbers))
        numbers.write(output, lm.fingerprint, found_by)
        return output, {"prompts": len(prompts), **report}

    def _s2d(self, lm: LanguageModel, progress: Progress) -> tuple[Path, dict[str, Any]]:
        from jaxspec.host.files import read_json, write_json
        from jaxspec.io.methods.method_files import thresholds_name, write_thresholds
        from jaxspec.measuring.tuning.s2d_sweep import sorted_draft, tune_s2d
        from jaxspec.measuring.tuning.texts import read_prompts

        config = Path(self.draft or "") / "config.json"
        if self.into_draft and (self.draft is None or not config.is_file()):
            raise ValueError(
                f"--into-draft writes into a draft's directory, and --draft is {self.draft}; give --draft DIR"
            )
        drafter, params, draft = sorted_draft(lm, self.draft)
        output = output_file(self.output, lm, thresholds_name(draft))
        prompts = read_prompts(lm, self.sweep.max_new_tokens, self.prompts)
        report = tune_s2d(
            lm,
            prompts,
            drafter,
            params,
            self.s2d,
            self.sweep,
            on_progress=progress,
            on_measured=_shown(progress),
        )
        found = report["results"][0]["thresholds"]
        found_by = self._found_by(lm, prompts, report, {"thresholds": found})
        write_thresholds(output, lm.fingerprint, draft, drafter.exits, found, found_by)
        if self.into_draft:
            content = read_json(config)
            content["jaxspec"] |= {"thresholds": found, "target": lm.fingerprint}
            write_json(config, content)
        return output, {"prompts": len(prompts), "exits": list(drafter.exits), **report}

    def _found_by(
        self, lm: LanguageModel, prompts: Sequence[Any], report: dict[str, Any], numbers: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the record, stored in the file, of how its numbers were measured."""
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


def _shown(progress: Progress) -> Callable[[int, int, dict[str, Any]], None]:
    return lambda done, total, best: progress.count(
        "measuring", done, total, f"best {best['score']:.2f}× ({_numbers(best)})"
    )


def _numbers(row: dict[str, Any]) -> str:
    """Formats the parameters of a row."""
    if "thresholds" in row:
        return ", ".join(f"{number:g}" for number in row["thresholds"])
    return f"{row['alpha']:g}, {row['every']}, {row['keep_last']}"


# Formatters of the table's columns by heading, for each method; the columns common to all methods follow them.
_COLUMNS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "asd": {
        "alpha": lambda row: "off" if row["alpha"] >= 1 else f"{row['alpha']:g}",
        "every": lambda row: str(row["every"] or "off"),
        "keep last": lambda row: str(row["keep_last"] or "off"),
        "skips attention + MLP": lambda row: f"{row['skipped_attention']:.1f} + {row['skipped_mlp']:.1f}",
    },
    "s2d": {"thresholds": _numbers},
}


def _parts(report: dict[str, Any]) -> Iterator[str | Table]:
    title = f"{report['model']}, {report['dtype']}, {report['device']}"
    if "exits" in report:
        title += f", exits after {', '.join(map(str, report['exits']))} layers"
    columns = _COLUMNS[report["method"]]
    digits = {"draft_acceptance_rate": 2, "tokens_per_second": 1, "score": 2}
    yield title
    rows = [
        [
            str(row["turns"]),
            *(cell(row) for cell in columns.values()),
            *(figure(row[name], count) for name, count in digits.items()),
        ]
        for row in report["results"][:_SHOWN]
    ]
    yield Table(("turns", *columns, "acceptance rate", "tokens/s", "speed-up"), rows, name=30)
    different = f", {report['distinct']} different on these prompts" if "distinct" in report else ""
    yield f"{report['settings']} settings{different}"
    yield f"written to {report['output']}, for --method {report['method']}"
