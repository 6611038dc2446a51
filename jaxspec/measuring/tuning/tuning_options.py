"""Options of `search` and `tune`, also used to build the commands' options; this module does not import JAX."""

from __future__ import annotations

import dataclasses

from jaxspec.measuring.bench.suite_options import Chat, check_budget, check_count


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options of a mask search.

    Attributes:
      keep_first_last: always run the first and the last layer. Default: yes.
      trials: the number of different masks to try.
      random: try masks at random instead.
      by_kind: also search a mask for each kind of prompts: the categories of a prompt set, else groups of similar
        prompts. The method then chooses the mask by the prompt.
      max_new_tokens: the number of tokens to generate after each prompt. Default 96.
      seed: seed of the search.

    Raises:
      ValueError: a number is outside its range.
    """

    keep_first_last: bool = True
    trials: int = 200
    random: bool = False
    by_kind: bool = False
    max_new_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("trials", self.trials)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; give a number from 0 to {2**32 - 1}")

    @property
    def tokens(self) -> int:
        """Tokens generated per prompt."""
        return 96 if self.max_new_tokens is None else self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """The prompts that the model reads.

    Attributes:
      prompt_file: a text file with one prompt, or JSON lines in a form of `jaxspec bench`. Default: prompts of each
        kind of work, none of which the suite reports on.
      limit: the maximum number of prompts, taken from the kinds in turn. Default: all of the files, else two per kind.
      chat: use of the model's chat template: on, off, or auto, which uses it if the model has a template and the
        prompts are messages: prompts with turns (only the first turn is read), and GSM8K.

    Raises:
      ValueError: a number is outside its range.
    """

    prompt_file: tuple[str, ...] = ()
    limit: int | None = None
    chat: Chat = "auto"

    def __post_init__(self) -> None:
        check_count("limit", self.limit)


@dataclasses.dataclass(frozen=True)
class ASDGrid:
    """The settings of ASD to try: all combinations of these values.

    Attributes:
      alphas: a value of alpha to try, 1 for off. Default: quantiles of the measured similarities, .985, and off.
      everys: a value of every to try, 0 for off. Default: 0, 2, 3, 4, 5.
      keep_lasts: a value of keep-last to try, 0 for off. Default: 0, 1, 2, 3.
    """

    alphas: tuple[float, ...] = dataclasses.field(default=(), metadata={"option": "--alpha"})
    everys: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--every"})
    keep_lasts: tuple[int, ...] = dataclasses.field(default=(), metadata={"option": "--keep-last"})


@dataclasses.dataclass(frozen=True)
class S2DGrid:
    """The thresholds of S2D to try at each exit but the last.

    Attributes:
      thresholds: a threshold to try; 0 always takes an exit, 1 never. Default: 0, .3, .5, .7, .9, 1.

    Raises:
      ValueError: a threshold is not from 0 to 1.
    """

    thresholds: tuple[float, ...] = dataclasses.field(default=(), metadata={"option": "--threshold"})

    def __post_init__(self) -> None:
        if not all(0 <= value <= 1 for value in self.thresholds):
            raise ValueError(f"`thresholds` has {self.thresholds}; give numbers from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Options of the measurement of settings.

    Attributes:
      max_new_tokens: the maximum number of new tokens per prompt.
      repeats: how many times the fastest settings are measured again.

    Raises:
      ValueError: a number is outside its range.
    """

    max_new_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        check_budget(self.max_new_tokens)
        check_count("repeats", self.repeats)
