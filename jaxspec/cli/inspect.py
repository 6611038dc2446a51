"""`jaxspec inspect`: what a model looks like to self-speculation."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from jaxspec.cli.options import Device, Dtype
from jaxspec.console.terminal import Progress
from jaxspec.io.extras import require


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show which sublayers of a model matter, and how early it knows its next token.

    Cosine similarity: how little attention or an MLP turns what passes through it; near 1 it might be skipped.

    Mask: what ASD would skip for each prompt, and how much of the weights its draft still reads.

    Exits: how often the first layers alone have the next token of the whole model.

    Two figures are written beside what is printed: inspect-similarity.png and inspect-exits.png.

    Attributes:
      prompts: texts to look at the model with. Default: a few of different kinds.
      prompt_file: a file that holds one more text; one newline at its end is left out.
      model: a directory as Hugging Face lays it out, a hub id such as owner/model, or the name of a model that
        comes with jaxspec.
      dtype: of weights and cache. Default float32 on CPU, bfloat16 elsewhere.
      device: Default: the fastest that JAX sees.
      alpha: ASD skips attention of at least this cosine similarity; 1 for none.
      every: ASD skips every M-th layer whole; 0 for none.
      keep_last: ASD keeps this many last layers.
      max_new_tokens: how many tokens the model goes on for after each prompt, to look at its exits.
        Default 64, or what the context leaves.
      output: where the figures go, a directory; made if missing.
      json: print one JSON object and nothing else.
    """

    prompts: Annotated[tuple[str, ...], Positional] = ()
    prompt_file: tuple[str, ...] = ()
    model: str | None = None
    dtype: Dtype | None = None
    device: Device | None = None
    alpha: float = 0.985
    every: int = 3
    keep_last: int = 2
    max_new_tokens: int | None = None
    output: str = "."
    json: bool = False

    def run(self) -> int:
        """Inspects; returns the exit status."""
        require("plot", "matplotlib")
        prompts = self.read_prompts()
        _check_writable(Path(self.output))
        with Progress() as progress:
            progress("loading the model")
            from jaxspec.engine.language_model import load
            from jaxspec.tuning.figures import save_figures
            from jaxspec.tuning.inspect import PROMPTS, check_mask_options, inspect_model

            check_mask_options(self.alpha, self.every, self.keep_last)
            report = inspect_model(
                load(self.model, dtype=self.dtype, device=self.device),
                prompts or PROMPTS,
                alpha=self.alpha,
                every=self.every,
                keep_last=self.keep_last,
                max_new_tokens=self.max_new_tokens,
                on_progress=progress,
            )
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


def _check_writable(directory: Path) -> None:
    """Refuses a place for the figures before anything is computed; makes nothing."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"--output {directory} cannot be a directory: {existing} is a file; give another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output {directory}: {existing} is not writable; give another directory")


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
        "a mark a layer: █ runs, ▄ MLP alone, · skipped": _mask_table,
    }
    for title, table in titled.items():
        # Not the table's own title, which would be as narrow as the table.
        console.print(title, highlight=False)
        console.print(table(report))


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
    """One mark a layer, upper half attention, lower half MLP; in tens, and lines of twenty."""
    attention, mlp = set(mask["skip_attention"]), set(mask["skip_mlp"])
    runs = ((layer not in attention, layer not in mlp) for layer in range(depth))
    shown = {(True, True): "█", (False, True): "▄", (True, False): "▀", (False, False): "·"}
    marks = [shown[run] for run in runs]
    tens = ["".join(marks[first : first + 10]) for first in range(0, depth, 10)]
    return "\n".join(" ".join(tens[at : at + 2]) for at in range(0, len(tens), 2))
