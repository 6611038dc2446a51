"""EAGLE-3: a layer that reads three of the target's layers, and was trained on its own output."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxspec.methods.tree_heads import TreeHeadMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(TreeHeadMethod):
    """A head reads three of the model's layers and foretells what follows (EAGLE-3, Li et al. 2025).

    Examples:
      >>> Eagle3(draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", num_draft_tokens=7)
      Eagle3(num_draft_tokens=7, draft='yuhuili/EAGLE3-LLaMA3.1-Instruct-8B')
    """

    name: ClassVar[str] = "eagle3"
    needs: ClassVar[str] = "an EAGLE-3 head: draft=DIR, or heads/eagle3 beside the model"
