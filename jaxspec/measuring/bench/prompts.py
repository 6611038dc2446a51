"""The default prompts by kind of work, in two splits: tuning and reporting.

A setting looks better on the prompts that it was tuned on, so speeds are reported on other prompts. A model that was
trained for its own kinds of work can have its own prompts, as `jaxspec.prompts.json` in its directory; the project's
prompts are used for all other models.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from jaxspec.host.files import read_json
from jaxspec.io.records import record

# Prompts to choose settings with, or to report speeds on.
Split = Literal["tuning", "reporting"]
# Kinds of work in the project's prompts.
KINDS = ("stories", "mathematics", "code", "copy-edit")
# File name in a model's directory, and in this package.
NAME, _OWN = "jaxspec.prompts.json", "prompts.json"


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """The content of a file of prompts: texts by kind of work, of each split."""

    tuning: Mapping[str, tuple[str, ...]]
    reporting: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for split, kinds in vars(self).items():
            if not kinds or not all(texts and all(map(is_text, texts)) for texts in kinds.values()):
                raise ValueError(
                    f"{split} is not a list of prompts for each kind of work; correct it, or delete it to use the "
                    "project's prompts"
                )


def load(split: Split = "reporting", directory: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Prompts by kind of work.

    Args:
      split: prompts for tuning or for reporting.
      directory: directory of a model; its own prompts are used if it has any.

    Raises:
      ValueError: the model's prompts are not lists of texts by kind, for tuning and for reporting; one line.

    Examples:
      >>> tuple(load()) == KINDS
      True
    """
    own = directory is not None and (directory / NAME).is_file()
    return dict(getattr(_read(directory / NAME) if directory and own else _projects(), split))


def is_text(value: Any) -> bool:
    """Whether a value is a non-blank text without lone surrogates, which JSON can contain.

    Examples:
      >>> [is_text(value) for value in ("a", " ", 3)]
      [True, False, False]
    """
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


def _read(path: Path) -> _Prompts:
    return record(_Prompts, read_json(path), str(path))


@functools.cache
def _projects() -> _Prompts:
    with resources.as_file(resources.files("jaxspec.measuring.bench") / _OWN) as path:
        return _read(path)
