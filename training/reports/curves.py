"""Draws a run's loss and acceptance by step, as SVG."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxspec.console.notebook import Live
from jaxspec.host.files import write_atomic
from jaxspec.measuring.charts import COLOURS, Chart, beside, curves
from training.reports import metrics

LOSS_FILE, ACCEPTANCE_FILE = "loss.svg", "acceptance.svg"
Records = Sequence[dict[str, float]]
# Seconds between two drawings of a run in a notebook.
_REDRAW_S = 1.0


def smoothed(values: Sequence[float], half_life: float) -> list[float]:
    """Smooths values: a mean of past values, whose weight halves every `half_life` values."""
    decay = 0.5 ** (1 / half_life)
    mean = weight = 0.0
    found = []
    for value in values:
        mean, weight = decay * mean + value, decay * weight + 1
        found.append(mean / weight)
    return found


def draw(run: Path) -> list[Path]:
    """Writes loss.svg and, where acceptance was measured, acceptance.svg into the run directory.

    Raises:
      ValueError: the run has not written any figures.
    """
    records = metrics.read_metrics(run)
    if not records:
        raise ValueError(f"no {metrics.METRICS_FILE} in {run}; give the run directory of a training command")
    drawn = {run / LOSS_FILE: loss_chart(run.name, records)}
    if _exits(records):
        drawn[run / ACCEPTANCE_FILE] = acceptance_chart(records)
    for path, chart in drawn.items():
        write_atomic(path, str(chart))
    return list(drawn)


@contextlib.contextmanager
def watched(run: Path) -> Iterator[None]:
    """Draws the loss and the acceptance in a notebook while the block trains in this run directory."""
    live, ended = Live(), threading.Event()

    def redraw() -> None:
        records = metrics.read_metrics(run)
        loss = loss_chart(run.name, records, log=True)
        live(beside(loss, acceptance_chart(records)) if _exits(records) else loss)

    def follow() -> None:
        while not ended.wait(_REDRAW_S):
            redraw()

    redraw()
    thread = threading.Thread(target=follow, name="jaxspec-curves", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        redraw()


def loss_chart(run: str, records: Records, *, log: bool = False) -> Chart:
    """The loss of each step, smoothed, and the held-out loss, by step and by task type.

    Args:
      run: the name of the run.
      records: those of `metrics.read_metrics`; may be empty.
      log: whether the axis of the loss is logarithmic.
    """
    thin, prefix = "training, smoothed", "held_out_loss/"
    losses = smoothed([record["loss"] for record in records], max(1.0, len(records) / 60))
    series = {
        thin: [(record["step"], loss) for record, loss in zip(records, losses, strict=True)],
        "held out": _curve(records, "held_out_loss"),
    }
    kinds = sorted({key for record in records for key in record if key.startswith(prefix)})
    by_kind = {f"held out: {kind.removeprefix(prefix)}": _curve(records, kind) for kind in kinds}
    if len(by_kind) > 1:
        series |= by_kind
    colours = {thin: COLOURS[0], "held out": COLOURS[1]}
    return curves(
        series,
        x="step",
        y="loss, nats per token",
        title=f"Loss of {run}",
        colours=colours,
        faint={thin, *by_kind},
        log=log,
    )


def acceptance_chart(records: Records) -> Chart:
    """The acceptance of each exit, or of each draft token of a head, and the mean acceptance lengths, by step."""
    numbers, length = _exits(records), "mean_acceptance_length"
    is_head = any(length in record for record in records)
    word = "token" if is_head else "exit"
    lengths = {"head": length} if is_head else {f"exit {layers}": f"{length}/{layers}" for layers in numbers}
    panels = (
        ({f"{word} {one}": f"acceptance/{one}" for one in numbers}, "share accepted", "Acceptance", 1.0),
        (lengths, "tokens per round", "Mean acceptance length", None),
    )
    return beside(
        *(
            curves(
                {name: _curve(records, key) for name, key in series.items()},
                x="step",
                y=y,
                title=title,
                most=most,
            )
            for series, y, title, most in panels
        )
    )


def _exits(records: Records) -> list[int]:
    """Returns the exits, or the draft tokens of a head, whose acceptance was measured."""
    names = {name for record in records for name in record}
    return sorted(
        int(parts[1]) for name in names if len(parts := name.split("/")) == 2 and parts[0] == "acceptance"
    )


def _curve(records: Records, name: str) -> list[tuple[float, float]]:
    return [(record["step"], record[name]) for record in records if name in record]
