"""Lossless (self-)speculative decoding of Llama-type language models in JAX: the same text, faster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec import methods
    from jaxspec.engine.conversation import Conversation
    from jaxspec.engine.language_model import LanguageModel, load
    from jaxspec.io.embedded import embedded_model
    from jaxspec.methods import METHODS
    from jaxspec.requests.generation_options import GenerationOptions
    from jaxspec.requests.results import Piece, Result, Score, Statistics
    from jaxspec.requests.text import Token

__all__ = [
    "METHODS",
    "Conversation",
    "GenerationOptions",
    "LanguageModel",
    "Piece",
    "Result",
    "Score",
    "Statistics",
    "Token",
    "embedded_model",
    "load",
    "methods",
]
__version__ = "0.1.0"

_HOMES = {
    "jaxspec.engine.conversation": ("Conversation",),
    "jaxspec.requests.generation_options": ("GenerationOptions",),
    "jaxspec.engine.language_model": ("LanguageModel", "load"),
    "jaxspec.requests.results": ("Piece", "Result", "Score", "Statistics"),
    "jaxspec.requests.text": ("Token",),
    "jaxspec.io.embedded": ("embedded_model",),
    "jaxspec.methods": ("METHODS",),
}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return import_module("jaxspec.methods")
    # JAX takes seconds to import; `jaxspec --help` and whoever needs one small part should not wait for it.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
