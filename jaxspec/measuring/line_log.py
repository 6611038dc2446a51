"""Writes the results of a long measurement line by line, so that a killed measurement can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxspec.host import processes
from jaxspec.host.files import named_errors, parse_json, write_atomic, written_here
from jaxspec.host.messages import brief_errors, shown


class LineLog:
    """A file of JSON lines: a header that describes the measurement, then the added entries.

    If there are several processes, process 0 reads and writes the file, and the others receive its entries.

    Args:
      path: the file; its entries are read if it belongs to the same measurement.
      header: its format, the model, and every option that an entry depends on.
      of: the name of the measurement in messages, such as "search".
      resume: whether to continue the file; otherwise it starts empty.

    Attributes:
      entries: the entries added so far, by this process or an earlier one.

    Raises:
      ValueError: the file belongs to another measurement, or is not a log.
      OSError: the file cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, of: str, resume: bool = True) -> None:
        self.path, self._of = path, of
        # A round trip through JSON, for the comparison with the file's header: tuples become lists.
        header = json.loads(json.dumps(header))
        self.entries: list[dict[str, Any]] = []
        if resume and written_here() and path.exists():
            found, *self.entries = self._read()
            self._check(found, header)
        if processes.several():
            self.entries = json.loads(processes.of_first(json.dumps(self.entries)))
        kept = [header, *self.entries]
        # The file is always rewritten, which removes a line that a killed process left incomplete.
        write_atomic(path, "".join(_line(entry) for entry in kept))

    def add(self, entry: dict[str, Any]) -> None:
        """Appends a line. If the process is killed meanwhile, the next one reads all of the line or nothing."""
        self.entries.append(entry)
        if not written_here():
            return
        # Without O_CREAT: a file that was removed is not created again.
        appended = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        with named_errors(self.path), os.fdopen(appended, "wb") as file:
            file.write(_line(entry).encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[dict[str, Any]]:
        try:
            # The text after the last line break is a line that a killed process left incomplete.
            lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
            entries = [parse_json(line) for line in lines]
        except ValueError:
            entries = []
        if not all(isinstance(entry, dict) for entry in entries) or not entries:
            raise ValueError(f"{self.path} is not a log of a {self._of}; move it away, or add resume=False")
        return entries

    @brief_errors()
    def _check(self, found: dict[str, Any], header: dict[str, Any]) -> None:
        for name in dict.fromkeys((*found, *header)):
            if found.get(name) != header.get(name):
                raise ValueError(
                    f"{self.path} belongs to another {self._of}: its {name.replace('_', ' ')} is "
                    f"{_value(found.get(name))}, now {_value(header.get(name))}; give the same, "
                    "add resume=False to begin again, or give another `output`"
                )


def _value(value: Any) -> str:
    return "not set" if value is None else shown(value)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"
