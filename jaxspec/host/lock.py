"""Locks an output for one command at a time. The system releases the lock when the process ends for any reason."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from jaxspec.host import files

FILE = "lock"
# Seconds, in which a process that ends may remove the file; the errors of file systems without locks.
_WAIT_S, _NO_LOCKS = 0.1, (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextlib.contextmanager
def exclusive(
    directory: Path, report: Callable[[str], None], option: str = "run", file_name: str = FILE
) -> Iterator[None]:
    """Locks a directory, which is created if necessary, and removes the temporary files that killed writers left in it.

    The lock file names the process that holds the lock, which removes it before the release.

    Args:
      directory: the directory.
      report: called with a line if the file system has no locks; the command continues without one.
      option: the parameter by which the user chose the directory, for the message.
      file_name: name of the lock file, for a command whose output is one file of the directory.

    Raises:
      ValueError: a process of another command holds the lock; the message names it.
    """
    if not files.written_here():
        yield
        return
    path, since = directory / file_name, time.strftime("%Y-%m-%d %H:%M:%S")
    name = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode()
    lock = filelock.FileLock(
        path, _WAIT_S, thread_local=False, on_acquired=lambda file: os.truncate(file, os.write(file, name))
    )
    try:
        lock.acquire()
    except filelock.Timeout:
        holder = "another process"
        with contextlib.suppress(OSError):
            holder = path.read_text(errors="replace").strip() or holder
        raise ValueError(
            f"{directory} is in use by {holder}; wait until it has ended or stop it, or give another `{option}`"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        report(f"no lock on {directory} ({error.strerror}); do not start a second command there")
    try:
        files.remove_abandoned(directory)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()
