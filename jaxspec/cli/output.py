"""Where a command leaves the file that it makes for a model."""

from __future__ import annotations

import tempfile
from pathlib import Path


def output_file(given: str | None, directory: Path | None, name: str) -> Path:
    """The file named by --output, or else `name` beside the model; checked before long work begins.

    Raises:
      ValueError: it cannot be written, or there is no place beside the model.
    """
    if given is None and directory is None:
        raise ValueError("the model has no directory; say where to write with --output FILE")
    path = Path(given) if given is not None else Path(directory or ".") / name
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give --output FILE")
    try:
        if given is None:
            path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}); give another --output FILE") from None
    return path
