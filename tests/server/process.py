"""`jaxspec serve` as a process, for tests and the load test."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from jaxspec.console.errors import Failed
from tests import variables

# The seconds in which a server must start.
_START_S = 600


class ServerProcess:
    """`jaxspec serve` in a process of its own, from its start to the end of the context.

    Args:
      *options: the options of the command.
      **environment: further variables of its environment.

    Attributes:
      url: the address of the API, up to `/v1`.
      lines: the lines on standard error so far.

    Raises:
      Failed: the server has not started.
    """

    def __init__(self, *options: object, **environment: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxspec", "serve", *map(str, options)],
            env=variables(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started = threading.Event()
        self.url = ""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if not self._started.wait(_START_S) or not self.url:
            self._process.kill()
            raise Failed(f"the server has not started: {' '.join(map(str.strip, self.lines))}")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if found := re.search(r" is at (http://\S+/v1);", line):
                self.url = found[1]
                self._started.set()
        self._started.set()

    @property
    def port(self) -> int:
        """The port of the API."""
        return int(self.url.rpartition(":")[2].partition("/")[0])

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the process, on Linux."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(text.partition("VmRSS:")[2].split()[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        """Waits for the end and the last line; returns the exit status."""
        status = self._process.wait(timeout)
        self._listener.join(timeout)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
