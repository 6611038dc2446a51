"""The directory for files that jaxspec can make again, such as compiled functions."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import platformdirs

from jaxspec.host.files import read_json, write_json


def user_cache() -> Path | None:
    """Returns the cache directory, which need not exist; None if there is none.

    The default is the system's cache directory for the user. The environment variable `JAXSPEC_CACHE` names another
    one, or is `off`. Without a home directory there is no default.
    """
    named = os.environ.get("JAXSPEC_CACHE")
    if named == "off":
        return None
    try:
        return Path(named or platformdirs.user_cache_dir("jaxspec")).expanduser()
    except RuntimeError:  # from `expanduser`: there is no home directory
        return None


def kept(path: Path | None) -> Any:
    """Returns the JSON value of a file in the cache; None if there is no file, or it is damaged."""
    try:
        return None if path is None else read_json(path)
    except (OSError, ValueError):
        return None


def keep(path: Path | None, value: Any) -> None:
    """Writes a JSON value to a file in the cache. Without a path or if the file cannot be written, nothing is kept."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, value)
