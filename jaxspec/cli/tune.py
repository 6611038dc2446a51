"""`jaxspec tune`: the numbers of a method that suit a model."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, Literal

from jaxspec.cli.bar import Bar
from jaxspec.cli.options import ModelOptions
from jaxspec.cli.output import output_file
from jaxspec.cli.status import INTERRUPTED

Tunable = Literal["asd"]
# Rows of the table; the JSON has all.
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Tune:
    """Measure which numbers of a method are fastest on given prompts, beside plain decoding.

    asd: alpha (skip attention of at least this cosine similarity), every (skip every so many-th layer whole),
    keep-last (keep so many last layers). Numbers that skip the same are measured once.

    Attributes:
      method: whose numbers.
      prompt_file: a file that holds one prompt. Default: a few short ones.
      alphas: an alpha to try, 1 for off. Default: quantiles of the similarities found, .985, and off.
      everys: an every to try, 0 for off. Default: 0, 2, 3, 4, 5.
      keep_lasts: a keep-last to try, 0 for off. Default: 0, 1, 2, 3.
      max_new_tokens: how many tokens to generate after each prompt.
      repeats: how often the fastest are measured anew.
      output: the file to write. Default: jaxspec.asd.json beside the model, where the method finds it.
      json: print one JSON object and nothing else.
    """

    method: Tunable = dataclasses.field(metadata={"metavar": "{asd}"})
    prompt_file: tuple[str, ...] = ()
    alphas: tuple[float, ...] = dataclasses.field(default=(), metadata={"option": "--alpha"})
    everys: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--every"})
    keep_lasts: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--keep-last"})
    max_new_tokens: int = 32
    repeats: int = 5
    output: str | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Measures; returns the exit status."""
        return {"asd": self._asd}[self.method]()

    def _asd(self) -> int:
        with Bar() as bar:
            bar("loading the model")
            from jaxspec.bench.calibration import read_prompts
            from jaxspec.bench.tune import ASDOptions, tune_asd
            from jaxspec.io.method_files import ASD_NAME, ASDNumbers, write_asd

            given = {"alphas": self.alphas, "everys": self.everys, "keep_lasts": self.keep_lasts}
            options = ASDOptions(
                max_new_tokens=self.max_new_tokens,
                repeats=self.repeats,
                **{name: values for name, values in given.items() if values},  # type: ignore[arg-type]
            )
            lm = self.model.load()
            output = output_file(self.output, lm.directory, ASD_NAME)
            prompts = read_prompts(lm, self.prompt_file, self.max_new_tokens)
            report = tune_asd(
                lm,
                prompts,
                options,
                on_progress=bar,
                on_measured=lambda done, total, best: bar.count(
                    "measuring", done, total, f"{best['score']:.2f}× ({_numbers(best)})"
                ),
            )
            best = report["results"][0]
            numbers = ASDNumbers(best["alpha"], best["every"], best["keep_last"])
            found_by = {
                "command": "jaxspec tune --method asd",
                "prompts": len(prompts),
                "max_new_tokens": self.max_new_tokens,
                "device": lm.device.device_kind,
                "dtype": lm.dtype,
                **{name: report[name] for name in ("settings", "distinct", "interrupted")},
                **{name: value for name, value in best.items() if name not in dataclasses.asdict(numbers)},
            }
            write_asd(output, lm.fingerprint, numbers, found_by)
        report = {
            "model": lm.name,
            "device": lm.device.device_kind,
            "dtype": lm.dtype,
            "method": self.method,
            "prompts": len(prompts),
            **report,
            "output": str(output),
        }
        if self.json:
            print(json.dumps(report))
        else:
            _print(report)
        if best["score"] < 1:
            print(
                f"jaxspec: warning: asd is slower here than plain decoding ({best['score']:.2f}×) with all of "
                "these numbers",
                file=sys.stderr,
            )
        if report["interrupted"]:
            print(f"jaxspec: interrupted; the best so far is in {output}", file=sys.stderr)
            return INTERRUPTED
        return 0


def _numbers(row: dict[str, Any]) -> str:
    return f"{row['alpha']:g}, {row['every']}, {row['keep_last']}"


def _print(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    title = f"{report['model']}, {report['dtype']}, {report['device']}"
    for rows, first, caption in (
        (report["results"][:_SHOWN], "turns", title),
        (report["ablation"], "rules", "which rules matter"),
    ):
        if not rows:
            continue
        table = Table(title=caption, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        table.add_column(first, no_wrap=True)
        headings = ("alpha", "every", "keep last", "skips attention + MLP", "acceptance rate")
        for heading in (*headings, "tokens/s", "speed-up"):
            table.add_column(heading, justify="right")
        for row in rows:
            rate = row["draft_acceptance_rate"]
            table.add_row(
                str(row[first]),
                "off" if row["alpha"] >= 1 else f"{row['alpha']:g}",
                str(row["every"] or "off"),
                str(row["keep_last"] or "off"),
                f"{row['skipped_attention']:.1f} + {row['skipped_mlp']:.1f}",
                "–" if rate is None else f"{rate:.2f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['score']:.2f}",
            )
        console.print(table)
    console.print(
        f"{report['settings']} settings, {report['distinct']} different on these prompts", highlight=False
    )
    console.print(f"written to {report['output']}, for --method asd", highlight=False, soft_wrap=True)
