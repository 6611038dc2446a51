"""Locks an output for one command at a time. The kernel releases the lock when the process ends for any reason."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxspec.host import files

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

FILE = "lock"


@contextlib.contextmanager
def exclusive(
    directory: Path, report: Callable[[str], None], option: str = "run", file_name: str = FILE
) -> Iterator[None]:
    """Locks a directory, which is created if necessary, and removes the temporary files that killed writers left in it.

    The lock is the kernel's (flock) and not the file's existence, so a killed process leaves no lock behind. The file
    names the process that holds the lock, which removes it before the release.

    Args:
      directory: the directory.
      report: called with a line if the system or the file system has no locks; the command continues without one.
      option: the parameter by which the user chose the directory, for the message.
      file_name: name of the lock file, for a command whose output is one file of the directory.

    Raises:
      ValueError: a process of another command holds the lock; the message names it.
    """
    if not files.written_here():
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        report(f"no lock on {directory}: this system has none; do not start a second command there")
        yield
        return
    path = directory / file_name
    while True:
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ValueError(
                    f"{directory} is in use by {holder}; wait until it has ended or stop it, or give another `{option}`"
                ) from None
            except OSError as error:
                report(f"no lock on {directory} ({error.strerror}); do not start a second command there")
            # Between the opening and the lock, the former holder may have removed the file.
            if os.fstat(file.fileno()).st_nlink == 0:
                continue
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
            file.flush()
            files.remove_abandoned(directory)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
            return
