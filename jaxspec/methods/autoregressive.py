"""Plain decoding: the baseline of every comparison."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import Method
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Plain decoding: one token per step, without drafts.

    Examples:
      >>> Autoregressive().name
      'autoregressive'
    """

    name: ClassVar[str] = "autoregressive"

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter whose drafts are empty."""
        from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter

        return AutoregressiveDrafter(), None
