"""The directory in which jaxspec keeps what it can make again: compiled functions, device profiles."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """That directory, which need not exist: `JAXSPEC_CACHE`, or the user's cache directory of this system."""
    return Path(os.environ.get("JAXSPEC_CACHE") or platformdirs.user_cache_dir("jaxspec")).expanduser()
