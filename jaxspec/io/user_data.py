"""The user's data directory, for files about a model that cannot be stored beside it."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from jaxspec.io.embedded import comes_along


def user_data() -> Path:
    """Returns jaxspec's data directory: `JAXSPEC_DATA`, or the system's directory for user data.

    It need not exist.

    Raises:
      ValueError: there is no home directory, and `JAXSPEC_DATA` is not set.
    """
    try:
        return Path(os.environ.get("JAXSPEC_DATA") or platformdirs.user_data_dir("jaxspec")).expanduser()
    except RuntimeError:  # from `expanduser`
        raise ValueError(
            "there is no home directory for the user's data; set the environment variable JAXSPEC_DATA to a directory"
        ) from None


def has_user_data() -> bool:
    """Whether `user_data` contains data of any model that this user can read."""
    try:
        return os.path.isdir(model_data(""))  # unlike `Path.is_dir`, without an error for an unreadable home
    except ValueError:
        return False


def model_data(fingerprint: str) -> Path:
    """Returns the directory in `user_data` for the model of this fingerprint; it need not exist.

    Raises:
      ValueError: as `user_data`.
    """
    return user_data() / "models" / fingerprint


def home(directory: Path | None, name: str, fingerprint: str) -> Path:
    """Returns the directory for files that belong to a model.

    That is the model's own directory if it is writable and the model is not an embedded one, else one in `user_data`.

    Args:
      directory: the model's directory; None for a model made in memory.
      name: the name by which it was loaded.
      fingerprint: the model's fingerprint, see `method_files.fingerprint`.

    Raises:
      ValueError: as `user_data`.
    """
    if directory is None or comes_along(directory, name) or not os.access(directory, os.W_OK | os.X_OK):
        return model_data(fingerprint)
    return directory
