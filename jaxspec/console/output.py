"""Where a command leaves the files that it makes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

from jaxspec.io.files import make_directory as make
from jaxspec.io.files import written_here
from jaxspec.io.user_data import home


class Model(Protocol):
    """A model that says where it came from, as a `LanguageModel` does."""

    directory: Path | None
    name: str

    @property
    def fingerprint(self) -> str:
        """Of its config and weights."""
        ...


def output_file(given: str | None, lm: Model, name: str) -> Path:
    """The file named by --output, or else `name` where the model's methods find it: beside the model, or in the
    user's data directory if it comes with jaxspec or cannot be written. Checked before long work begins.

    Raises:
      ValueError: it cannot be written.
    """
    if given is not None:
        return writable(given, "output")
    return writable(home(lm.directory, lm.name, lm.fingerprint) / name, "output", make_directory=True)


def writable(path: str | os.PathLike[str], option: str, make_directory: bool = False) -> Path:
    """The path of a file that is to be written, checked before long work begins; nothing is left there.

    Where another process of the command writes it, that one checks.

    Raises:
      ValueError: it cannot be written; the line names the option that gave it.
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
    """Refuses a place for several files before anything is computed; makes nothing.

    Raises:
      ValueError: it cannot be a directory, or is not writable; the line names its option.
    """
    if not written_here():
        return
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    given = f"`{option}` {directory}"
    if not existing.is_dir():
        kind = "a link to nothing" if existing.is_symlink() and not existing.exists() else "a file"
        raise ValueError(f"{given} cannot be a directory: {existing} is {kind}; give another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{given}: {existing} is not writable; give another directory")
