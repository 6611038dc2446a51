"""Where files that were found out about a model go when they cannot lie beside it, and are found again from there."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from jaxspec.io.embedded import comes_along


def user_data() -> Path:
    """The directory of what jaxspec keeps for its user: `JAXSPEC_DATA`, or this system's for user data.

    It need not exist.

    Raises:
      ValueError: there is no home directory, and `JAXSPEC_DATA` names no other place.
    """
    try:
        return Path(os.environ.get("JAXSPEC_DATA") or platformdirs.user_data_dir("jaxspec")).expanduser()
    except RuntimeError:  # of `expanduser`
        raise ValueError(
            "there is no home directory, and so no place for the user's data; name one in the environment variable "
            "JAXSPEC_DATA"
        ) from None


def has_user_data() -> bool:
    """Whether anything is in `user_data` that this user can read."""
    try:
        return os.path.isdir(model_data(""))  # unlike `Path.is_dir` no error where a home is not the user's
    except ValueError:
        return False


def model_data(fingerprint: str) -> Path:
    """The part of `user_data` that belongs to the model of this fingerprint; it need not exist.

    Raises:
      ValueError: as `user_data`.
    """
    return user_data() / "models" / fingerprint


def home(directory: Path | None, name: str, fingerprint: str) -> Path:
    """The directory for files that belong to a model: its own, if it is the user's and can be written, else one in
    the user's data directory.

    Args:
      directory: the model's own; None for a model made in memory.
      name: by which it was loaded.
      fingerprint: of the model, see `method_files.fingerprint`.

    Raises:
      ValueError: as `user_data`.
    """
    if directory is None or comes_along(directory, name) or not os.access(directory, os.W_OK | os.X_OK):
        return model_data(fingerprint)
    return directory
