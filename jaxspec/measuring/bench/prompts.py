"""The default prompts by kind of work, in two splits: tuning and reporting.

A setting looks better on the prompts that it was tuned on, so speeds are reported on other prompts. A model that was
trained for its own kinds of work can have its own prompts, as `jaxspec.prompts.json` in its directory; the project's
prompts are used for all other models.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from jaxspec.host.files import read_json

# Prompts to choose settings with, or to report speeds on.
Split = Literal["tuning", "reporting"]
# Kinds of work in the project's prompts.
KINDS = ("stories", "mathematics", "code", "copy-edit")
# File name in a model's directory, and in this package.
NAME, _OWN = "jaxspec.prompts.json", "prompts.json"


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
    if directory is None or not (directory / NAME).is_file():
        return _own()[split]
    content = read_json(directory / NAME)
    for part in get_args(Split):
        if not _is_by_kind(content.get(part)):
            raise ValueError(
                f"{directory / NAME}: {part} is not a list of prompts for each kind of work; correct "
                "it, or delete it to use the project's prompts"
            )
    return _tuples(content[split])


def sample(each: int, directory: Path | None = None, split: Split = "reporting") -> tuple[str, ...]:
    """The first `each` prompts of every kind; see `load` for the other arguments."""
    return tuple(prompt for prompts in load(split, directory).values() for prompt in prompts[:each])


def is_text(value: Any) -> bool:
    """Whether a value is a non-blank text without lone surrogates, which JSON can contain.

    Examples:
      >>> [is_text(value) for value in ("a", " ", 3)]
      [True, False, False]
    """
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


@functools.cache
def _own() -> dict[str, dict[str, tuple[str, ...]]]:
    content = json.loads(
        resources.files("jaxspec.measuring.bench").joinpath(_OWN).read_text(encoding="utf-8")
    )
    return {split: _tuples(kinds) for split, kinds in content.items()}


def _tuples(kinds: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(texts) for kind, texts in kinds.items()}


def _is_by_kind(part: Any) -> bool:
    lists = list(part.values()) if isinstance(part, dict) else []
    return bool(lists) and all(
        isinstance(texts, list) and texts and all(is_text(text) for text in texts) for texts in lists
    )
