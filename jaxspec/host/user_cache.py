"""The directory for files that jaxspec can make again, such as compiled functions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import platformdirs

from jaxspec.host.files import read_json, write_json

# The most bytes of compiled programs in each directory of them.
MAX_BYTES = 2 * 2**30


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


def mark_used(path: Path) -> None:
    """Sets the time of a file, which `drop_unused` reads, to now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def drop_unused(directory: Path, limit: int | None = None) -> None:
    """Removes the files within a directory that were used least recently while all have more bytes than a limit.

    The limit is `MAX_BYTES` by default.

    Clients of a server and lines of a batch choose options of methods, and each choice has programs of its own.
    """
    found = []
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove it
            status = path.stat()
            found += [(status.st_mtime, status.st_size, path)] if path.is_file() else []
    size = sum(size for _, size, _ in found)
    for _, own, path in sorted(found):
        if size <= (MAX_BYTES if limit is None else limit):
            return
        size -= own
        with contextlib.suppress(OSError):
            path.unlink()


def kept(folder: str, key: Any) -> Any:
    """Returns the JSON value that was kept for a key; None if there is none, or its file is damaged."""
    text = json.dumps(key, sort_keys=True)
    path = _file(folder, text)
    try:
        content = {} if path is None else read_json(path)
    except (OSError, ValueError):
        return None
    return content.get("value") if content.get("key") == text else None


def keep(folder: str, key: Any, value: Any) -> None:
    """Keeps a JSON value for a key in a folder of the cache. A file that cannot be written is left out."""
    text = json.dumps(key, sort_keys=True)
    path = _file(folder, text)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"key": text, "value": value})


def _file(folder: str, key: str) -> Path | None:
    cache = user_cache()
    digest = hashlib.sha256(key.encode()).hexdigest()
    return None if cache is None else cache / folder / f"{digest[:16]}.json"
