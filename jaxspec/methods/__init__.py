"""The methods of decoding by name, one file each: its options, and how its drafter is made of them.

    lm.generate(prompt, method=jaxspec.methods.LayerSkip(exit_layer=3))

is the typed form of `lm.generate(prompt, method="layerskip", exit_layer=3)`. A class in a file of this folder is found
without being imported below; the imports are for editors.
"""

from typing import Any

from jaxspec.methods.adaspeed import AdaSPEED, AdaSPEEDProbe
from jaxspec.methods.asd import ASD
from jaxspec.methods.auto import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Method
from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.clasp import CLaSp
from jaxspec.methods.dflash import DFlash
from jaxspec.methods.draft_model import DraftModel
from jaxspec.methods.draft_verify import DraftVerify
from jaxspec.methods.eagle import Eagle
from jaxspec.methods.eagle3 import Eagle3
from jaxspec.methods.hybrid import Hybrid
from jaxspec.methods.hydra import Hydra
from jaxspec.methods.kangaroo import Kangaroo
from jaxspec.methods.layerskip import LayerSkip
from jaxspec.methods.medusa import Medusa
from jaxspec.methods.ngram import NGram
from jaxspec.methods.quantised import Quantised
from jaxspec.methods.registry import names
from jaxspec.methods.resources import LoadedModel, Resources
from jaxspec.methods.s2d import S2D
from jaxspec.methods.suffix import Suffix
from jaxspec.methods.token_recycling import TokenRecycling

__all__ = [
    "ASD",
    "METHODS",
    "S2D",
    "AdaSPEED",
    "AdaSPEEDProbe",
    "Auto",
    "Autoregressive",
    "CLaSp",
    "ChainMethod",
    "DFlash",
    "DraftModel",
    "DraftVerify",
    "Eagle",
    "Eagle3",
    "Hybrid",
    "Hydra",
    "Kangaroo",
    "LayerSkip",
    "LoadedModel",
    "Medusa",
    "Method",
    "NGram",
    "Quantised",
    "Resources",
    "Suffix",
    "TokenRecycling",
]

# Every name that `method=` and `--method` take, those of other packages last.
METHODS = names()


def __getattr__(name: str) -> Any:
    from jaxspec.methods.registry import built_in

    for method in built_in().values():
        if method.__name__ == name:
            return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
