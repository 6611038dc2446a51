"""The directory in which jaxspec keeps what it can make again: compiled functions."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def user_cache() -> Path | None:
    """That directory, which need not exist; None where nothing may be kept.

    It is the user's cache directory of this system; the environment variable `JAXSPEC_CACHE` names another
    one, or says `off`. Whoever has no home directory has none, unless it is named.
    """
    named = os.environ.get("JAXSPEC_CACHE")
    if named == "off":
        return None
    try:
        return Path(named or platformdirs.user_cache_dir("jaxspec")).expanduser()
    except RuntimeError:  # of `expanduser`: there is no home directory
        return None
