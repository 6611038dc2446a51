"""The head types that can be trained: the rows of `jaxspec.heads.kinds` with a module for training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal

from jaxspec.heads import kinds
from training.heads.head_type import Kind

KINDS: dict[str, Kind] = {
    name: importlib.import_module(head.training).KINDS[name]
    for name, head in kinds.known().items()
    if head.training is not None
}

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]  # the parser offers these names
