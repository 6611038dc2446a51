"""AdaSPEED: early-exit drafts that end at a low probability of the whole draft, with and without linear probes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxspec.methods.chain import ProbedName
from jaxspec.methods.layerskip import LayerSkip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaSPEED(LayerSkip):
    """The model's first E layers, until the product of the draft's probabilities falls below γ.

    AdaSPEED, §II.A: `layerskip` with another default stop rule.

    Examples:
      >>> print(AdaSPEED(exit_layer=3, gamma=0.7))
      adaspeed gamma=0.7 exit_layer=3
    """

    name: ClassVar[str] = "adaspeed"
    usual_rule: ClassVar[ProbedName] = "product"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaSPEEDProbe(LayerSkip):
    """The model's first E layers, until the product of a linear probe's estimates falls below γ.

    AdaSPEED with linear probes, §II.B: `layerskip` with another default stop rule.

    Examples:
      >>> AdaSPEEDProbe(exit_layer=3, probe="probe.safetensors")
      AdaSPEEDProbe(exit_layer=3, probe='probe.safetensors')
    """

    name: ClassVar[str] = "adaspeed-probe"
    needs: ClassVar[str] = "a probe: `python -m training.probe`, or probe=FILE"
    usual_rule: ClassVar[ProbedName] = "probe"
