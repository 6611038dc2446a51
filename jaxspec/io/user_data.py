"""Where files that were found out about a model go when they cannot lie beside it, and are found again from there."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from jaxspec.io.embedded import comes_along


def user_data() -> Path:
    """The directory of what jaxspec keeps for its user: `JAXSPEC_DATA`, or this system's for user data.

    It need not exist.
    """
    return Path(os.environ.get("JAXSPEC_DATA") or platformdirs.user_data_dir("jaxspec")).expanduser()


def model_data(fingerprint: str) -> Path:
    """The part of `user_data` that belongs to the model of this fingerprint; it need not exist."""
    return user_data() / "models" / fingerprint


def home(directory: Path | None, name: str, fingerprint: str) -> Path:
    """The directory for files that belong to a model: its own, if it is the user's and can be written, else one in
    the user's data directory.

    Args:
      directory: the model's own; None for a model made in memory.
      name: by which it was loaded.
      fingerprint: of the model, see `method_files.fingerprint`.
    """
    if directory is None or comes_along(directory, name) or not os.access(directory, os.W_OK | os.X_OK):
        return model_data(fingerprint)
    return directory
