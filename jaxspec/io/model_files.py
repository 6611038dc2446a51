"""Finds the files of a model in a directory, so that they are not overwritten."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxspec.io.hf.config_json import GENERATION
from jaxspec.io.tokenizers import tokenizer

_NAMES = ("config.json", GENERATION, *tokenizer.FILES)
# A link counts even if its weights are gone, because the files of a hub's cache are links.
_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|bin|pt|pth)(\.index\.json)?|manifest\.ocdbt|_METADATA", re.IGNORECASE
)


def held(directory: str | os.PathLike[str], *, weights_only: bool = False) -> str | None:
    """Returns a file of a model, or of a part of one, directly in a directory.

    Args:
      directory: the directory; it need not exist.
      weights_only: ignore configuration and tokenizer files, which other directories have too.

    Returns:
      The name of the first file found; None if there is none.
    """
    if not Path(directory).is_dir():
        return None
    names = sorted(os.listdir(directory))
    found = [] if weights_only else [name for name in _NAMES if name in names]
    found += [name for name in names if _WEIGHTS.fullmatch(name)]
    return found[0] if found else None
