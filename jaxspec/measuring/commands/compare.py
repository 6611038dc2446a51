"""`jaxspec compare`: the same prompt by several methods."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from jaxspec.cli.options import MethodsOptions, TextOptions
from jaxspec.console.tables import Table
from jaxspec.console.terminal import printable, tell
from jaxspec.host.progress import Progress
from jaxspec.measuring.output import show

# A speed-up from here on is no loss: a few timings differ by as much.
_NO_LOSS = 0.95


@dataclasses.dataclass(frozen=True)
class Compare(TextOptions):
    """Generate the same text by several methods, and compare their speed.

    Each method runs once to compile, which may take a minute for all of them, then --repeats times in turn with
    the others.

    Speeds are of the tokens after the first; a speed-up is the median of the turns' ratios to plain decoding. The
    mean acceptance length stands twice: tokens ÷ rounds, as Spec-Bench counts, and 1 + accepted ÷ drafts (drafting
    rounds), as vLLM counts. The text is printed below the table, once if all agree.

    Attributes:
      repeats: how often each method runs, timed.
    """

    repeats: int = 3
    compared: MethodsOptions = MethodsOptions()  # noqa: RUF009

    def run(self) -> int:
        """Compares; returns the exit status."""
        self.compared.made  # noqa: B018, checked before the model is loaded
        prompt = self.read_prompt()
        with Progress() as progress:
            progress("loading the model")
            lm = self.load()
            from jaxspec.measuring.bench.comparison import compare

            report = compare(
                lm,
                prompt,
                self.compared.chosen(lm.config.num_layers),
                repeats=self.repeats,
                on_progress=progress,
                **self.generation(),
            )
        show(report, self.json, _parts)
        for entry in report["results"]:
            if entry["speedup"] is not None and entry["speedup"] < _NO_LOSS:
                slower = f"slower here than plain decoding ({entry['speedup']:.2f}×)"
                tell(f"warning: {entry['method']} is {slower}")
        return 0


def _parts(report: dict[str, Any]) -> Iterator[str | Table]:
    from jaxspec.measuring.bench.comparison import table

    yield f"{report['model']}, {report['dtype']}, {report['device']}\n"
    yield table(report)
    yield "times plain: the median over turns, each against plain decoding in the same turn"
    if any(entry["lossy"] for entry in report["results"]):
        yield "lossy: the text does not follow the model's own distribution"
    yield ""
    for line in _texts(report["results"]):
        yield printable(line, sys.stdout)


def _texts(results: list[dict[str, Any]]) -> list[str]:
    """The text, once if all methods have the same; else that of plain decoding, and of the others from where they
    differ, or whole where texts are drawn at random."""
    from jaxspec.measuring.bench.margins import first_difference

    plain = results[0]
    if plain["text"] is None:
        return []
    if all(entry["text"] == plain["text"] for entry in results):
        return [f"text{', the same by all methods' if len(results) > 1 else ''}:", plain["text"]]
    shown = [f"text by {plain['method']}:", plain["text"]]
    for entry in results[1:]:
        if entry["identical_to_autoregressive"] is None:
            shown += [f"\ntext by {entry['method']}, drawn at random:", entry["text"]]
        elif entry["text"] != plain["text"]:
            at = first_difference(entry["text"], plain["text"]) or 0
            shown += [
                f"\ntext by {entry['method']}, from character {at + 1} where it differs:",
                entry["text"][at:],
            ]
    return shown
