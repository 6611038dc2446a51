"""The common option of methods that skip sublayers by a mask."""

from __future__ import annotations

import dataclasses

from jaxspec.methods.chain import ModelMethod
from jaxspec.methods.resources import Resources


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
