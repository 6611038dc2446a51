"""Chooses and checks the paths of a command's output files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

from jaxspec.console.terminal import tell
from jaxspec.host.files import make_directory as make
from jaxspec.host.files import written_here
from jaxspec.io.user_data import home


class Model(Protocol):
    """A model with its origin, such as a `LanguageModel`."""

    directory: Path | None
    name: str

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its config and weights."""
        ...


def output_file(given: str | None, lm: Model, name: str) -> Path:
    """Returns the file named by --output, or else `name` in the model's `user_data.home`, checked before long work.

    Reports on standard error that the command will replace a file of the user's, such as one of another precision.

    Raises:
      ValueError: the file cannot be written.
    """
    if given is not None:
        return writable(given, "output")
    path = writable(home(lm.directory, lm.name, lm.fingerprint) / name, "output", make_directory=True)
    if path.exists() and written_here():
        tell(f"will replace {path}; give --output FILE to keep it")
    return path


def writable(path: str | os.PathLike[str], option: str, make_directory: bool = False) -> Path:
    """Returns the path of an output file after the check that it can be written; creates no file.

    If another process of the command writes the file, that process checks.

    Raises:
      ValueError: the file cannot be written; the message names its option.
    """
    path = Path(path)
    if not written_here():
        return path
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give {option}=FILE")
    try:
        if make_directory:
            make(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}); give another {option}=FILE") from None
    return path


def check_directory(directory: Path, option: str = "output") -> None:
    """Checks an output directory before anything is computed; creates nothing.

    Raises:
      ValueError: it cannot be a directory, or is not writable; the message names its option.
    """
    if not written_here():
        return
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    given = f"`{option}` {directory}"
    if not existing.is_dir():
        kind = "a broken link" if existing.is_symlink() and not existing.exists() else "a file"
        raise ValueError(f"{given} cannot be a directory: {existing} is {kind}; give another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{given}: {existing} is not writable; give another directory")
