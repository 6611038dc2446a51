"""The three numbers of ASD, with defaults and ranges. This module does not import JAX."""

from __future__ import annotations

import dataclasses

from jaxspec.io.records import ModelRecord
from jaxspec.model.config import MAX_LAYERS


@dataclasses.dataclass(frozen=True)
class ASDNumbers(ModelRecord):
    """The parameters of ASD's layer skipping: α, m and n of Metel et al. 2024, Algorithm 1.

    Attributes:
      alpha: ASD skips attention of at least this cosine similarity; 1 for none.
      every: ASD skips every M-th layer whole; 0 for none.
      keep_last: ASD keeps this many last layers.

    Raises:
      ValueError: α is not in (0, 1], or m or n is negative or more than any model's layers.
    """

    FORMAT, MADE_BY = "jaxspec.asd/1", "jaxspec tune --method asd"
    alpha: float = 0.985
    every: int = dataclasses.field(default=3, metadata={"metavar": "M"})
    keep_last: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(
                f"alpha is {self.alpha}; give a cosine similarity above 0 and at most 1 (1: rule off)"
            )
        for name in ("every", "keep_last"):
            if not 0 <= getattr(self, name) <= MAX_LAYERS:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; give 0 (rule off) or a number of layers, at most {MAX_LAYERS}"
                )

    @property
    def rules(self) -> int:
        """The number of the three rules that are on."""
        return (self.alpha < 1) + (self.every > 0) + (self.keep_last > 0)
