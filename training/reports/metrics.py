"""Reads and writes the figures of each step: metrics.jsonl and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxspec.host import files

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Reads the records of metrics.jsonl, one per step; damaged lines are left out."""
    file = run / METRICS_FILE
    records = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            record = files.parse_json(line)
        except ValueError:
            continue  # damaged, such as the last line of a killed run
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
    return records


class Metrics:
    """Writes one record per step; records that a resumed run will repeat are deleted first."""

    def __init__(self, run: Path, step: int):
        """Opens the files and deletes the records after `step`.

        Args:
          run: the run directory.
          step: number of finished steps.
        """
        if not files.written_here():
            return
        kept = [record for record in read_metrics(run) if record["step"] <= step]
        files.write_atomic(run / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in kept))
        self._stream = (run / METRICS_FILE).open("a")
        (run / TENSORBOARD).mkdir(exist_ok=True)
        # Not tensorboardX's SummaryWriter: a full disk ends its thread, and then it waits for ever.
        self._events = EventsWriter(str(run / TENSORBOARD / "events"))
        # TensorBoard then discards the steps from here on in earlier files.
        self._add(step=step + 1, file_version="brain.Event:2")
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.flush()

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Appends the figures of a step.

        Raises:
          OSError: the figures cannot be written, for example because the disk is full.
        """
        if not files.written_here():
            return
        self._stream.write(json.dumps({"step": step, **record}) + "\n")
        self._stream.flush()
        for name, value in record.items():
            self._add(step=step, summary=summary.scalar(name, value))
        if "held_out_loss" in record:  # flushing waits for the disk, so not at every step
            self._events.flush()

    def _add(self, **content: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), **content))

    def close(self) -> None:
        """Closes the files. It raises nothing, so that the error that ended the run is not hidden."""
        for file in (self._stream, self._events) if files.written_here() else ():
            with contextlib.suppress(OSError):
                file.close()
