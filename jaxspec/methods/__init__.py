"""The drafting methods by name: the options of each, and how its drafter is built from them.

    lm.generate(prompt, method=jaxspec.methods.LayerSkip(exit_layer=3))

is the typed form of `lm.generate(prompt, method="layerskip", exit_layer=3)`. The classes are imported when they are
first used; `registry` finds them in the files of this folder and in `jaxspec/heads/*/method.py`. The imports below tell
editors and type checkers where they are.
"""

from typing import TYPE_CHECKING, Any

from jaxspec.methods import registry
from jaxspec.methods.base import Method
from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.resources import LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.heads.dflash.method import DFlash
    from jaxspec.heads.dspark.method import DSpark
    from jaxspec.heads.eagle.method import Eagle, Eagle3
    from jaxspec.heads.hydra.method import Hydra
    from jaxspec.heads.kangaroo.method import Kangaroo
    from jaxspec.heads.medusa.method import Medusa
    from jaxspec.heads.uno.method import Uno
    from jaxspec.methods.adaspeed import AdaSPEED, AdaSPEEDProbe
    from jaxspec.methods.asd import ASD
    from jaxspec.methods.auto import Auto
    from jaxspec.methods.autoregressive import Autoregressive
    from jaxspec.methods.clasp import CLaSp
    from jaxspec.methods.draft_model import DraftModel
    from jaxspec.methods.draft_verify import DraftVerify
    from jaxspec.methods.grammar import Grammar
    from jaxspec.methods.hybrid import Hybrid
    from jaxspec.methods.knapspec import KnapSpec
    from jaxspec.methods.layerskip import LayerSkip
    from jaxspec.methods.ngram import NGram
    from jaxspec.methods.quantised import Quantised
    from jaxspec.methods.s2d import S2D
    from jaxspec.methods.suffix import Suffix
    from jaxspec.methods.token_recycling import TokenRecycling

    # Every name that `method=` and `--method` accept; the names of other packages come last.
    METHODS: tuple[str, ...]

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
    "DSpark",
    "DraftModel",
    "DraftVerify",
    "Eagle",
    "Eagle3",
    "Grammar",
    "Hybrid",
    "Hydra",
    "Kangaroo",
    "KnapSpec",
    "LayerSkip",
    "LoadedModel",
    "Medusa",
    "Method",
    "NGram",
    "Quantised",
    "Resources",
    "Suffix",
    "TokenRecycling",
    "Uno",
]


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        return registry.names()
    if name[:1].isupper():  # a class; a module may be asked for while the methods are being imported
        for method in registry.built_in().values():
            if method.__name__ == name:
                return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
