"""What a suite generates, and how often; apart from the suite, so that a command line is made without JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

# Use of the chat template. `auto` uses it for prompts that are messages, if the model has a template.
Chat = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class Amount:
    """How much is generated.

    Attributes:
      limit: prompts at most, taken from the categories in turn. Default: all.
      max_new_tokens: of each text, which may end before.
      repeats: timed turns of each prompt. When sampling, each has a seed of its own.

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
    """What is generated, and how often.

    Attributes:
      batch: prompts generated together, of one category. A speed is then that of the batch: all its new tokens, in the
        time from the first token of any of its texts to the last of any.
      chat: whether prompts go through the model's chat template: on, off, or auto, where the model has one and the
        prompts are messages: those with turns, and GSM8K. Without it the turns follow one another as plain text.
      carry_gamma: start each text of a method from the γ that its last one ended with, as Draft & Verify evaluates. All
        repeats of a prompt start from the same γ, and the last one's goes on.

    Raises:
      ValueError: a number is outside its range, or γ is to be carried in batches.
    """

    batch: int = 1
    chat: Chat = "auto"
    carry_gamma: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("batch", self.batch)
        if self.carry_gamma and self.batch > 1:
            raise ValueError(
                f"got carry_gamma=True and batch={self.batch}, and γ goes from text to text; leave out one of them"
            )


def check_count(name: str, value: int | None) -> None:
    """Refuses less than one of what is counted."""
    if value is not None and value < 1:
        raise ValueError(f"{name} is {value}; give at least 1")


def check_budget(max_new_tokens: int) -> None:
    """Refuses texts too short to be timed: speeds are of the tokens after the first."""
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; give at least 2")
