"""EAGLE-1: a layer that foretells what the target's own head reads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxspec.methods.tree_heads import TreeHeadMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(TreeHeadMethod):
    """A one-layer head foretells the model's last hidden states (EAGLE-1, Li et al. 2024).

    The heads of EAGLE-2 are the same; with `tree` they draft its trees.

    Examples:
      >>> Eagle(draft="yuhuili/EAGLE-llama2-chat-7B")
      Eagle(draft='yuhuili/EAGLE-llama2-chat-7B')
    """

    name: ClassVar[str] = "eagle"
    needs: ClassVar[str] = "an EAGLE head: draft=DIR, or heads/eagle beside the model"
