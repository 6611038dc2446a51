"""The project's own prompts for measuring: ten of each kind of work on which drafters differ.

They have the form of the data on which the embedded models are trained, but none of its text.
"""

from __future__ import annotations

import functools
import json
from importlib import resources


@functools.cache
def load() -> dict[str, tuple[str, ...]]:
    """Prompts by kind of work: `stories`, `mathematics`, `code`, `copy-edit`."""
    text = resources.files("jaxspec.bench").joinpath("prompts.json").read_text(encoding="utf-8")
    return {kind: tuple(prompts) for kind, prompts in json.loads(text).items()}


def sample(each: int) -> tuple[str, ...]:
    """The first few of every kind: what is looked at where the user gives no prompt."""
    return tuple(prompt for prompts in load().values() for prompt in prompts[:each])
