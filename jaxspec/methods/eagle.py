"""EAGLE-1: a layer that predicts what the target's own head reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import Method
from jaxspec.methods.resources import LoadedModel, Resources
from jaxspec.methods.tree_heads import TreeHeadMethod

if TYPE_CHECKING:
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(TreeHeadMethod):
    """A one-layer head predicts the model's last hidden states (EAGLE-1, Li et al. 2024).

    The heads of EAGLE-2 are the same; with `tree` they draft its trees.

    Examples:
      >>> Eagle(draft="yuhuili/EAGLE-llama2-chat-7B")
      Eagle(draft='yuhuili/EAGLE-llama2-chat-7B')
    """

    name: ClassVar[str] = "eagle"
    trainable: ClassVar[bool] = True
    needs: ClassVar[str] = "an EAGLE head: draft=DIR, or heads/eagle beside the model"

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of EAGLE."""
        from jaxspec.drafting.eagle import Eagle as Drafting

        return Drafting(target.config, head, *self.stopping())

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method, where there is a head for the model."""
        return cls.beside(target, resources)
