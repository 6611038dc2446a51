"""Options of a suite; this module does not import JAX, so that the command line starts fast."""

from __future__ import annotations

import dataclasses
from typing import Literal

# Use of the chat template. `auto` uses it for prompts that are messages, if the model has a template.
Chat = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class Amount:
    """The number of prompts, tokens and repeats.

    Attributes:
      limit: the maximum number of prompts, taken from the categories in turn. Default: all.
      max_new_tokens: the maximum number of new tokens per text.
      repeats: the number of timed turns per prompt. When sampling, each turn has its own seed.

    Raises:
      ValueError: a number is outside its range.
    """

    limit: int | None = None
    max_new_tokens: int = 128
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("limit", "repeats"):
            check_count(name, getattr(self, name))
        check_budget(self.max_new_tokens)


@dataclasses.dataclass(frozen=True)
class SuiteOptions(Amount):
    """Options of a suite.

    Attributes:
      batch: the number of prompts of one category generated together. A speed is then that of the batch: all its new
        tokens, in the time from the first token of any of its texts to the last of any.
      chat: use of the model's chat template: on, off, or auto, which uses it if the model has a template and the
        prompts are messages: prompts with turns, and GSM8K. Without it, turns are joined as plain text.
      carry_gamma: start each text of a method from the final γ of its last text, as Draft & Verify evaluates. All
        repeats of a prompt start from the same γ; the last repeat's final γ is carried.

    Raises:
      ValueError: a number is outside its range, or `carry_gamma` is used with batches.
    """

    batch: int = 1
    chat: Chat = "auto"
    carry_gamma: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("batch", self.batch)
        if self.carry_gamma and self.batch > 1:
            raise ValueError(
                f"got carry_gamma=True and batch={self.batch}, but γ is carried between texts; leave out one of them"
            )


def check_count(name: str, value: int | None) -> None:
    """Rejects a count below 1."""
    if value is not None and value < 1:
        raise ValueError(f"{name} is {value}; give at least 1")


def check_budget(max_new_tokens: int) -> None:
    """Rejects texts that are too short for a speed, which covers the tokens after the first."""
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; give at least 2")
