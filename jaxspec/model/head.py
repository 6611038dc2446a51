"""The interface of a trained head of any type."""

from __future__ import annotations

from typing import Protocol

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params


class HeadConfig(Protocol):
    """The configuration of a head: a frozen dataclass, hashable, without arrays."""

    @property
    def kind(self) -> str:
        """The head type; also the name of the method that drafts with it."""

    @property
    def shapes(self) -> Params:
        """The tree of parameters, a shape tuple at each leaf."""


def aux_layers_within(aux_layers: tuple[int, ...], target: LlamaConfig) -> tuple[int, ...]:
    """Returns the auxiliary layers clipped to 0 … L, for a target with fewer layers than the head expects."""
    return tuple(min(max(layer, 0), target.num_layers) for layer in aux_layers)
