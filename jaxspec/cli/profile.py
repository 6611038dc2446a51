"""`jaxspec profile`: what this device makes of a model."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from jaxspec.cli.options import ModelOptions
from jaxspec.console.terminal import Progress


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measure how fast this device could decode a model, and how near it comes.

    The floor is the time in which this device read every weight once, the best of several. It is measured, and so
    noisy: where the weights stay in the processor's cache, a step may come out below it.

    A step of several rows verifies as many tokens; it should cost little more.

    Attributes:
      shape: random weights of a usual shape instead: 31m, 134m, 1b, 1.2b, 7b, 8b, 13b, 70b or 405b.
      json: print one JSON object and nothing else.
    """

    shape: str | None = None
    json: bool = False
    model: ModelOptions = ModelOptions()  # noqa: RUF009

    def run(self) -> int:
        """Measures; returns the exit status."""
        from jaxspec.bench.profile import profile

        with Progress() as progress:
            given = self.model
            model, dtype, device, mesh = given.model, given.dtype, given.device, given.mesh
            report = profile(model, self.shape, dtype, device, mesh, on_progress=progress)
        if self.json:
            print(json.dumps(report))
        else:
            _print(report)
        return 0


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "", title=f"{report['model']}, {report['dtype']}, {report['device']}", show_header=False
    )
    table.columns[1].justify = "right"
    floor, fraction = report["floor_ms"], report["floor_fraction"]
    table.add_row("floor: all weights read once", f"{floor:.3f} ms")
    steps: dict[str, float] = report["step_ms"]
    for rows, step_ms in steps.items():
        table.add_row(f"step of {rows} row{'s' if rows != '1' else ''}", f"{step_ms:.3f} ms")
    table.add_row("floor ÷ step of 1 row, the best of each", f"{fraction:.2f}")
    table.add_row("step with a cache 8 times larger ÷ without", f"{report['capacity_ratio']:.2f}")
    table.add_row("each token before it, from 100 to 1,000", f"{report['live_token_us']:.2f} µs")
    table.add_row("  its keys and values, as fast as the floor", f"{report['live_token_floor_us']:.2f} µs")
    table.add_row("prefill", f"{report['prefill_tokens_per_second']:.0f} tokens/s")
    table.add_row("compiling the plain loop", f"{1e-3 * report['compile_ms']:.1f} s")
    Console(file=sys.stdout).print(table)
