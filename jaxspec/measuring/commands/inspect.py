"""`jaxspec inspect`: measures which sublayers and exits of a model suit self-speculation."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.parsing import Positional
from jaxspec.console.tables import Table
from jaxspec.host.progress import Progress
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.output import show


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Show the effect of each sublayer of a model, and the agreement of early exits with the whole model.

    Cosine similarity: between the hidden states before and after attention or an MLP; a sublayer near 1 may be skipped.

    Mask: the sublayers that ASD would skip for each prompt, and the share of the weights that its draft still reads.

    Exits: how often the first layers alone have the next token of the whole model.

    Attributes:
      prompts: texts to measure on. Default: a few of different kinds.
      prompt_file: a file with one more text; one newline at its end is ignored.
      max_new_tokens: the number of tokens to generate after each prompt, to measure the exits.
        Default 64, or fewer if the context is shorter.
      json: print one JSON object and nothing else.
    """

    prompts: Annotated[tuple[str, ...], Positional] = ()
    prompt_file: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009
    asd: ASDNumbers = ASDNumbers()  # noqa: RUF009

    def run(self) -> int:
        """Inspects; returns the exit status."""
        prompts = self.read_prompts()
        with Progress() as progress:
            progress("loading the model")
            from jaxspec.measuring.tuning.inspection import inspect_model

            report = inspect_model(
                self.model.load(),
                prompts or None,
                asd=self.asd,
                max_new_tokens=self.max_new_tokens,
                on_progress=progress,
            )
        show(report, self.json, _parts)
        return 0

    def read_prompts(self) -> list[str]:
        """Returns the given prompts, texts before files; an empty list if none is given.

        Raises:
          FileNotFoundError: a prompt file does not exist.
          ValueError: a prompt is empty or not UTF-8 text.
        """
        from jaxspec.host.files import read_text

        prompts = [*self.prompts]
        for path in self.prompt_file:
            prompts.append(read_text(path, "--prompt-file must be a text file").removesuffix("\n"))
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt is empty; give at least one character")
            if any("\ud800" <= c <= "\udfff" for c in prompt):
                raise ValueError("PROMPT is not text in UTF-8")
        return prompts


def _parts(report: dict[str, Any]) -> Iterator[str | Table]:
    yield f"{report['model']}, {report['dtype']}, {report['device']}\n"
    number = len(report["prompts"])
    yield f"Average cosine similarity (ACS) over {number} prompt{'s' if number > 1 else ''}"
    yield _summary_table(report)
    yield "ACS by layer, and how often the exit after it has the whole model's next token"
    yield _layer_table(report)
    yield f"Masks by ADMG, α {report['alpha']:g}, m {report['every']}, n {report['keep_last']}"
    yield "one mark per layer: █ runs, ▄ MLP alone, · skipped"
    yield _mask_table(report)


def _summary_table(report: dict[str, Any]) -> Table:
    """Returns the statistics of Table 1 of the ASD paper."""
    kinds = {"attention": "attention", "mlp": "MLP"}
    keys = {"minimum ACS": "min", "maximum ACS": "max", "mean ACS": "mean", "median ACS": "median"}
    rows = [
        [label, *(f"{report['similarity'][kind][key]:.3f}" for kind in kinds)] for label, key in keys.items()
    ]
    label = f"mean time, one token after {report['live_tokens'] - 1} (ms)"
    rows.append([label, *(f"{report['time_ms'][kind]:.4f}" for kind in kinds)])
    return Table(("over layers", *kinds.values()), rows, name=40)


def _layer_table(report: dict[str, Any]) -> Table:
    attention, mlp = (report["similarity"][kind]["by_layer"] for kind in ("attention", "mlp"))
    by_layer = zip(attention, mlp, report["exit_agreement"], strict=True)
    rows = [[str(layer), *(f"{value:.3f}" for value in row)] for layer, row in enumerate(by_layer, 1)]
    return Table(("layer", "attention", "MLP", "exit agrees"), rows)


def _mask_table(report: dict[str, Any]) -> Table:
    depth = report["num_layers"]
    entries = [(prompt["prompt"], prompt["mask"]) for prompt in report["prompts"]]
    if len(entries) > 1:
        entries.append(("(mean of all)", report["mask"]))
    rows = [
        [
            textwrap.shorten(label, 20, placeholder="…") or "…",
            _marks(mask, depth),
            f"{len(mask['skip_attention'])} of {depth}",
            f"{len(mask['skip_mlp'])} of {depth}",
            f"{100 * mask['weights_read']:.0f} %",
        ]
        for label, mask in entries
    ]
    return Table(
        ("prompt", "mask", "attention skipped", "MLP skipped", "weights read"), rows, name=20, left=2
    )


def _marks(mask: dict[str, Any], depth: int) -> str:
    """Returns one mark per layer (upper half attention, lower half MLP), in groups of ten and lines of twenty."""
    attention, mlp = set(mask["skip_attention"]), set(mask["skip_mlp"])
    runs = ((layer not in attention, layer not in mlp) for layer in range(depth))
    shown = {(True, True): "█", (False, True): "▄", (True, False): "▀", (False, False): "·"}
    marks = [shown[run] for run in runs]
    tens = ["".join(marks[first : first + 10]) for first in range(0, depth, 10)]
    return "\n".join(" ".join(tens[at : at + 2]) for at in range(0, len(tens), 2))
