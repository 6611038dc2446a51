"""What a run writes down at each step: metrics.jsonl and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxspec.io import files

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def read(run: Path) -> list[dict[str, float]]:
    """Reads the records of metrics.jsonl, one per step; damaged lines are left out."""
    file = run / METRICS_FILE
    records = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            record = files.parse_json(line)
        except ValueError:
            continue  # as is the line that was being written when the run was killed
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
    return records


class Metrics:
    """Writes one record per step, after dropping those that a resumed run is about to repeat."""

    def __init__(self, run: Path, step: int):
        """Opens the files; records after `step` are dropped."""
        if not files.written_here():
            return
        kept = [record for record in read(run) if record["step"] <= step]
        files.write_atomic(run / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in kept))
        self._stream = (run / METRICS_FILE).open("a")
        (run / TENSORBOARD).mkdir(exist_ok=True)
        # Not tensorboardX's SummaryWriter: it writes in a thread, which a full disk ends, and then waits for ever.
        self._events = EventsWriter(str(run / TENSORBOARD / "events"))
        # TensorBoard forgets what an earlier file says of the steps from here on.
        self._add(step=step + 1, file_version="brain.Event:2")
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.flush()

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Appends the figures of a step.

        Raises:
          OSError: they cannot be written, as where the disk is full.
        """
        if not files.written_here():
            return
        self._stream.write(json.dumps({"step": step, **record}) + "\n")
        self._stream.flush()
        for name, value in record.items():
            self._add(step=step, summary=summary.scalar(name, value))
        if "held_out_loss" in record:  # flushing waits for the disk: not at every step
            self._events.flush()

    def _add(self, **content: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), **content))

    def close(self) -> None:
        """Closes the files; raises nothing, so that the error that ended the run is not hidden."""
        for file in (self._stream, self._events) if files.written_here() else ():
            with contextlib.suppress(OSError):
                file.close()
