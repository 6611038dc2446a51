"""The head types that can be trained: the trainable rows of `jaxspec.heads.kinds`.

The file of this folder with the name of the head's folder in `jaxspec/heads` says how each is trained.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal

from jaxspec.heads import kinds
from training.heads.head_type import Kind


def _trained(name: str) -> Kind:
    """Returns the row `KINDS[name]` of the file for a head type."""
    found: Kind = importlib.import_module(f"training.heads.{kinds.KINDS[name].folder}").KINDS[name]
    return found


KINDS: dict[str, Kind] = {name: _trained(name) for name, head in kinds.KINDS.items() if head.trainable}

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]  # the parser offers these names
