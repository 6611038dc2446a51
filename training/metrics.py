"""What a run writes down while it goes: metrics.jsonl, TensorBoard's event files, and curves as PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def read(run: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl, one a step; a line that was being written is left out."""
    file = run / METRICS_FILE
    records = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that was being written when the run was killed
        if "step" in record:
            records.append(record)
    return records


class Metrics:
    """Writes one record a step, without those that a resumed run is about to repeat."""

    def __init__(self, run: Path, step: int):
        """`step` is the last one that stands; later ones are forgotten."""
        kept = [record for record in read(run) if record["step"] <= step]
        partial = (run / METRICS_FILE).with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(run / METRICS_FILE)
        self._stream = (run / METRICS_FILE).open("a")
        self._events = SummaryWriter(str(run / TENSORBOARD), purge_step=step + 1, write_to_disk=True)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Adds the figures of a step."""
        self._stream.write(json.dumps({"step": step, **record}) + "\n")
        self._stream.flush()
        for name, value in record.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Ends the files."""
        self._stream.close()
        self._events.close()
