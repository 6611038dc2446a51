"""Refuses zip bombs: archives whose parts have more bytes than the file."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path


def refuse_larger(archive: zipfile.ZipFile, path: str | os.PathLike[str]) -> None:
    """Refuses an archive with compressed or overlapping parts.

    Raises:
      ValueError: a part is compressed, or the parts have more bytes than the file.
    """
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, expected plain bytes")
    if sum(max(entry.file_size, entry.compress_size) for entry in entries) > Path(path).stat().st_size:
        raise ValueError("the parts of its archive have more bytes than the file")
