"""The prompts that are measured with where none are given: of each kind of work some to tune with, and others.

What is tuned on a prompt looks better there than elsewhere, so speeds are reported on prompts that nothing was tuned
on. A model that was trained for work of its own brings prompts of it, as `jaxspec.prompts.json` beside it; every other
one is measured on the project's.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from jaxspec.io.files import read_json

# What numbers are chosen with, and what speeds are reported on.
Split = Literal["tuning", "reporting"]
# Of the project's own.
KINDS = ("stories", "mathematics", "code", "copy-edit")
# Beside a model, and of the project's own in this package.
NAME, _OWN = "jaxspec.prompts.json", "prompts.json"


def load(split: Split = "reporting", directory: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Prompts by kind of work.

    Args:
      split: for what.
      directory: of a model; its own prompts count if it has some.

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
                f"{directory / NAME}: {part} is no list of prompts for each kind of work; write it by "
                "python -m training.tasks --model DIR, or take it away to have the project's prompts"
            )
    return _tuples(content[split])


def sample(each: int, directory: Path | None = None, split: Split = "reporting") -> tuple[str, ...]:
    """The first few of every kind; the other arguments are those of `load`."""
    return tuple(prompt for prompts in load(split, directory).values() for prompt in prompts[:each])


def is_text(value: Any) -> bool:
    """Whether it is a text with something in it, and without half characters, which JSON can hold.

    Examples:
      >>> [is_text(value) for value in ("a", " ", 3)]
      [True, False, False]
    """
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


@functools.cache
def _own() -> dict[str, dict[str, tuple[str, ...]]]:
    content = json.loads(resources.files("jaxspec.bench").joinpath(_OWN).read_text(encoding="utf-8"))
    return {split: _tuples(kinds) for split, kinds in content.items()}


def _tuples(kinds: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(texts) for kind, texts in kinds.items()}


def _is_by_kind(part: Any) -> bool:
    lists = list(part.values()) if isinstance(part, dict) else []
    return bool(lists) and all(
        isinstance(texts, list) and texts and all(is_text(text) for text in texts) for texts in lists
    )
