"""The acceptance rates of a head's drafts by its target, which the training of the head measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.io.records import ModelRecord

# The file's name beside a head.
NAME = "jaxspec.acceptance.json"


@dataclasses.dataclass(frozen=True)
class Accepted:
    """The acceptance of a method's drafts.

    Attributes:
      accept: the share of the draft tokens at position i that the model accepted, given that it accepted those before.
    """

    accept: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.accept or not all(0 <= share <= 1 for share in self.accept):
            raise ValueError(f"`accept` is {list(self.accept)[:9]}; expected numbers from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Acceptances(ModelRecord):
    """The acceptance of each method, by name."""

    FORMAT, MADE_BY = "jaxspec.acceptance/2", "python -m training.heads"
    candidates: Mapping[str, Accepted]
