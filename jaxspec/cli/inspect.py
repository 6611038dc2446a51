"""`jaxspec inspect`: what a model looks like to self-speculation."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from jaxspec.cli.options import ModelOptions
from jaxspec.console.output import check_directory
from jaxspec.console.terminal import Progress
from jaxspec.io.asd_numbers import ASDNumbers
from jaxspec.io.extras import require


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show which sublayers of a model matter, and how early it knows its next token.

    Cosine similarity: how little attention or an MLP turns what passes through it; near 1 it might be skipped.

    Mask: what ASD would skip for each prompt, and how much of the weights its draft still reads.

    Exits: how often the first layers alone have the next token of the whole model.

    Fitness (--fitness): loss, agreement and confidence by exit on text that the model was not trained on, and whether
    it needs its depth; of one that does not, drafts by skipped layers look better than they are.

    Two figures are written beside what is printed: inspect-similarity.png and inspect-exits.png.

    Attributes:
      prompts: texts to look at the model with. Default: a few of different kinds.
      prompt_file: a file that holds one more text; one newline at its end is left out.
      max_new_tokens: how many tokens the model goes on for after each prompt, to look at its exits.
        Default 64, or what the context leaves.
      fitness: a text file that the model was not trained on; adds the fitness test, one kind of work per file.
      output: a directory for two figures, made if missing; without it none are drawn. Needs the extra `plot`.
      json: print one JSON object and nothing else.
    """

    prompts: Annotated[tuple[str, ...], Positional] = ()
    prompt_file: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    fitness: tuple[str, ...] = dataclasses.field(default=(), metadata={"metavar": "FILE"})
    output: str | None = None
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009
    asd: ASDNumbers = ASDNumbers()  # noqa: RUF009

    def run(self) -> int:
        """Inspects; returns the exit status."""
        prompts = self.read_prompts()
        if self.output is not None:
            require("plot", "matplotlib")
            check_directory(Path(self.output))
        with Progress() as progress:
            progress("loading the model")
            from jaxspec.tuning.fitness_report import measure, read_texts
            from jaxspec.tuning.inspect import inspect_model

            lm = self.model.load()
            texts = read_texts(lm, self.fitness)
            report = inspect_model(
                lm,
                prompts or None,
                asd=self.asd,
                max_new_tokens=self.max_new_tokens,
                on_progress=progress,
            )
            if texts:
                progress("testing the fitness")
                report["fitness"] = measure(lm, texts)
            report["figures"] = {}
            if self.output is not None:
                from jaxspec.tuning.figures import save_figures

                progress("drawing")
                report["figures"] = save_figures(report, self.output)
        if self.json:
            print(json.dumps(report))
            return 0
        _print(report)
        for path in report["figures"].values():
            print(f"jaxspec: wrote {path}", file=sys.stderr)
        return 0

    def read_prompts(self) -> list[str]:
        """The prompts that were given, files after texts; none if none was.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: one is empty or not text.
        """
        from jaxspec.io.files import read_text

        prompts = [*self.prompts]
        for path in self.prompt_file:
            prompts.append(read_text(path, "--prompt-file must be a text file").removesuffix("\n"))
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt is empty; give at least one character")
            if any("\ud800" <= c <= "\udfff" for c in prompt):
                raise ValueError("PROMPT is not text in UTF-8")
        return prompts


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout)
    console.print(
        f"{report['model']}, {report['dtype']}, {report['device']}\n", markup=False, highlight=False
    )
    number = len(report["prompts"])
    titled = {
        f"Average cosine similarity (ACS) over {number} prompt{'s' if number > 1 else ''}": _summary_table,
        "ACS by layer, and how often an exit after it has the whole model's next token": _layer_table,
        f"Masks by ADMG, α {report['alpha']:g}, m {report['every']}, n {report['keep_last']}; "
        "one mark per layer: █ runs, ▄ MLP alone, · skipped": _mask_table,
    }
    for title, table in titled.items():
        # Not the table's own title, which would be as narrow as the table.
        console.print(title, highlight=False)
        console.print(table(report))
    if "fitness" in report:
        _print_fitness(report["fitness"], console)


def _print_fitness(report: dict[str, Any], console: Any) -> None:
    from jaxspec.tuning.fitness_report import by_exit

    layers, cells = by_exit(report)
    console.print(f"Fitness by exit after {', '.join(map(str, layers))} layers", highlight=False)
    table = _table()
    for heading in ("text", "loss", "agreement", "confidence", "answers right"):
        table.add_column(heading)
    for kind, row in cells.items():
        table.add_row(kind, *row.values())
    console.print(table)
    console.print(f"The gate: {'passed' if report['passed'] else 'failed'}", highlight=False)
    table = _table()
    for heading in ("condition", "found", "wanted", ""):
        table.add_column(heading)
    for check in report["checks"]:
        value = "–" if check["value"] is None else f"{check['value']:.3f}"
        table.add_row(check["name"], value, check["wanted"], "passed" if check["passed"] else "failed")
    console.print(table)


def _table() -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))  # fits 80 columns


def _summary_table(report: dict[str, Any]) -> Any:
    """The paper's Table 1."""
    table = _table()
    table.add_column("over layers", no_wrap=True)
    kinds = {"attention": "attention", "mlp": "MLP"}
    for heading in kinds.values():
        table.add_column(heading, justify="right")
    rows = {"minimum ACS": "min", "maximum ACS": "max", "mean ACS": "mean", "median ACS": "median"}
    for label, key in rows.items():
        table.add_row(label, *(f"{report['similarity'][kind][key]:.3f}" for kind in kinds))
    label = f"mean time, one token after {report['live_tokens'] - 1} (ms)"
    table.add_row(label, *(f"{report['time_ms'][kind]:.4f}" for kind in kinds))
    return table


def _layer_table(report: dict[str, Any]) -> Any:
    table = _table()
    for heading in ("layer", "attention", "MLP", "exit agrees"):
        table.add_column(heading, justify="right")
    attention, mlp = (report["similarity"][kind]["by_layer"] for kind in ("attention", "mlp"))
    for layer, row in enumerate(zip(attention, mlp, report["exit_agreement"], strict=True)):
        table.add_row(str(layer + 1), *(f"{value:.3f}" for value in row))
    return table


def _mask_table(report: dict[str, Any]) -> Any:
    from rich.text import Text

    table = _table()
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column("mask", no_wrap=True)
    for heading in ("attention skipped", "MLP skipped", "weights read"):
        table.add_column(heading, justify="right")
    depth = report["num_layers"]
    entries = [(prompt["prompt"], prompt["mask"]) for prompt in report["prompts"]]
    if len(entries) > 1:
        entries.append(("(mean of all)", report["mask"]))
    for label, mask in entries:
        table.add_row(
            Text(" ".join(label.split())),
            _marks(mask, depth),
            f"{len(mask['skip_attention'])} of {depth}",
            f"{len(mask['skip_mlp'])} of {depth}",
            f"{100 * mask['weights_read']:.0f} %",
        )
    return table


def _marks(mask: dict[str, Any], depth: int) -> str:
    """One mark per layer, upper half attention, lower half MLP; in tens, and lines of twenty."""
    attention, mlp = set(mask["skip_attention"]), set(mask["skip_mlp"])
    runs = ((layer not in attention, layer not in mlp) for layer in range(depth))
    shown = {(True, True): "█", (False, True): "▄", (True, False): "▀", (False, False): "·"}
    marks = [shown[run] for run in runs]
    tens = ["".join(marks[first : first + 10]) for first in range(0, depth, 10)]
    return "\n".join(" ".join(tens[at : at + 2]) for at in range(0, len(tens), 2))
