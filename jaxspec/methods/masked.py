"""The common options of methods that skip sublayers by a mask."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxspec.host.messages import shown
from jaxspec.methods.base import option
from jaxspec.methods.chain import ModelMethod
from jaxspec.methods.resources import Resources

if TYPE_CHECKING:
    from jaxspec.drafting.knapsack_drafter import KnapsackDrafter

# Rounds are counted in int32.
_MOST_ROUNDS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedMethod(ModelMethod):
    """The base of methods that skip sublayers by a mask.

    Attributes:
      static: compile a program for the current mask in the background and use it when it is ready; otherwise all masks
        share one program. Default: on a GPU, where that program would wait for the host at each sublayer.
    """

    static: bool | None = None

    def is_static(self, resources: Resources) -> bool:
        """Returns whether masks are compiled; by default on a GPU."""
        return resources.platform == "gpu" if self.static is None else self.static


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshingMethod(ModelMethod):
    """The base of methods that choose what a draft skips again as the text grows.

    Attributes:
      refresh: the number of rounds between choices.
    """

    refresh: int | None = option(None, metavar="ROUNDS")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh is not None and not 1 <= self.refresh <= _MOST_ROUNDS:
            raise ValueError(f"refresh is {shown(self.refresh)}; give 1 to {_MOST_ROUNDS}")

    def rounds(self, kind: type[KnapsackDrafter]) -> int:
        """Returns the rounds between choices, as given or the default of a class of drafters."""
        return int(kind.refresh) if self.refresh is None else self.refresh
