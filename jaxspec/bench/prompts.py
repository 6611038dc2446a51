"""The project's own prompts for measuring: of each kind of work on which drafters differ, ten to tune with, ten others.

What is tuned on a prompt looks better there than elsewhere, so speeds are reported on prompts that nothing was tuned
on. All have the form of the data on which the embedded models are trained, but none of its text.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Literal

# What numbers are chosen with, and what speeds are reported on.
Split = Literal["tuning", "reporting"]
KINDS = ("stories", "mathematics", "code", "copy-edit")


@functools.cache
def load(split: Split = "reporting") -> dict[str, tuple[str, ...]]:
    """Prompts by kind of work, those of `KINDS`."""
    text = resources.files("jaxspec.bench").joinpath("prompts.json").read_text(encoding="utf-8")
    return {kind: tuple(json.loads(text)[split][kind]) for kind in KINDS}


def sample(each: int, split: Split = "reporting") -> tuple[str, ...]:
    """The first few of every kind: what is looked at where the user gives no prompt."""
    return tuple(prompt for prompts in load(split).values() for prompt in prompts[:each])
