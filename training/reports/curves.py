"""A run's loss and acceptance by step, drawn as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.io.extras import require
from training.reports import metrics

LOSS_FILE, ACCEPTANCE_FILE = "loss.png", "acceptance.png"


def smoothed(values: np.ndarray, half_life: float) -> np.ndarray:
    """Smooths values [N]: the mean of past ones, each counting half as much as one `half_life` places later."""
    decay = 0.5 ** (1 / half_life)
    mean = weight = 0.0
    out = np.empty_like(values)
    for index, value in enumerate(values):
        mean, weight = decay * mean + value, decay * weight + 1
        out[index] = mean / weight
    return out


def draw(run: Path) -> list[Path]:
    """Writes loss.png and, where acceptance was measured, acceptance.png into the run directory.

    Raises:
      ValueError: the run has written nothing yet.
      MissingExtra: matplotlib is not installed.
    """
    records = metrics.read(run)
    if not records:
        raise ValueError(f"no {metrics.METRICS_FILE} in {run}; give the run directory of a training command")
    require("plot", "matplotlib")
    # It takes a second to import, and training itself does not need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = np.array([record["step"] for record in records])
    losses = np.array([record["loss"] for record in records])
    axes.plot(steps, smoothed(losses, max(1.0, len(losses) / 60)), color="0.6", label="training, smoothed")
    _curves(axes, records, "held_out_loss", "held out", "held out: {}")
    axes.set(xlabel="step", ylabel="loss, nats per token", title=f"Loss of {run.name}")
    written = [_save(figure, axes, run / LOSS_FILE)]

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = 0
    for layers in _exits(records):
        for panel, name in ((left, "acceptance"), (right, "mean_acceptance_length")):
            drawn += _curves(panel, records, f"{name}/{layers}", f"exit {layers}", None)
    if drawn:
        left.set(xlabel="step", ylabel="share of tokens accepted", title="Acceptance", ylim=(0, 1))
        right.set(xlabel="step", ylabel="tokens per round", title="Mean acceptance length")
        left.grid(alpha=0.3)
        left.legend()
        written.append(_save(figure, right, run / ACCEPTANCE_FILE))
    return written


def _exits(records: Sequence[dict[str, float]]) -> list[int]:
    """Exits whose acceptance was measured; the deepest is its own judge where no target was given."""
    names = {name for record in records for name in record}
    return sorted(
        int(parts[1]) for name in names if len(parts := name.split("/")) == 2 and parts[0] == "acceptance"
    )


def _curves(axes, records, name: str, label: str, by_kind: str | None) -> int:
    """Draws the figure `name`, and thinner its kinds `name/…`; returns how many curves there are."""
    found = [record for record in records if name in record]
    if not found:
        return 0
    steps = [record["step"] for record in found]
    axes.plot(steps, [record[name] for record in found], marker=".", linewidth=2, label=label)
    if by_kind is not None:
        kinds = sorted(
            {key[len(name) + 1 :] for record in found for key in record if key.startswith(f"{name}/")}
        )
        for kind in kinds if len(kinds) > 1 else ():
            values = [record.get(f"{name}/{kind}", np.nan) for record in found]
            axes.plot(steps, values, linewidth=1, linestyle="--", label=by_kind.format(kind))
    return 1


def _save(figure, axes, file: Path) -> Path:
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    return file
