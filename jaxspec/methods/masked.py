"""The option that methods share whose mask of skipped sublayers is data."""

from __future__ import annotations

import dataclasses

from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.resources import Resources


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedMethod(ChainMethod):
    """The base of methods that skip sublayers by a mask.

    Attributes:
      static: compile a program for the mask at hand, in the background, and use it once it is there; otherwise one
        program serves all masks. Default: on a GPU, which would wait for the host at each sublayer.

    Examples:
      >>> from jaxspec.methods import ASD
      >>> on_a_gpu = Resources(load_draft=lambda model: model.loaded, encode=list, platform="gpu")
      >>> ASD().is_static(on_a_gpu), ASD(static=False).is_static(on_a_gpu)
      (True, False)
    """

    static: bool | None = None

    def is_static(self, resources: Resources) -> bool:
        """Returns whether masks are compiled: as given, else on a GPU."""
        return resources.platform == "gpu" if self.static is None else self.static
