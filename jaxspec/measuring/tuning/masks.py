"""The search space of masks: the sublayers that a draft may skip, with optional constraints."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from jaxspec.model.plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class MaskSpace:
    """Masks of a model's 2L sublayers that skip at least one sublayer and run at least one.

    A search moves in the box (0, 1)^n over the n free sublayers, in the order attention, MLP of each layer.
    A coordinate above .5 skips its sublayer, as in Draft & Verify (Zhang et al. 2023, §3.2).

    Attributes:
      num_layers: L.
      keep_first_last: whether both sublayers of the first and the last layer always run.

    Raises:
      ValueError: no sublayer is free.
    """

    num_layers: int
    keep_first_last: bool = True

    def __post_init__(self) -> None:
        if not len(self.free):
            raise ValueError(
                f"the model has {self.num_layers} layers, and the first and the last are kept: no layer is left "
                "to skip; add keep_first_last=False"
            )

    @property
    def free(self) -> np.ndarray:
        """Indices 2·layer + (0 attention, 1 MLP) of the sublayers that may be skipped, int[n]."""
        kept = 1 if self.keep_first_last else 0
        return np.arange(2 * kept, 2 * (self.num_layers - kept))

    @property
    def size(self) -> int:
        """The number of masks."""
        free = len(self.free)
        count: int = 2**free - 1 - (free == 2 * self.num_layers)
        return count

    def nearest(self, point: np.ndarray) -> LayerPlan:
        """The mask of a point float[n] of the box."""
        falling = np.argsort(-point, kind="stable")
        many = min(max(int((point > 0.5).sum()), 1), 2 * self.num_layers - 1)
        return self._plan(self.free[falling[:many]])

    def corner(self, plan: LayerPlan) -> np.ndarray:
        """The corner of the box that represents a mask, float[n]; 1 for a skipped sublayer."""
        corner: np.ndarray = 1.0 - np.asarray(plan.run, float).reshape(-1)[self.free]
        return corner

    def neighbour(self, plan: LayerPlan, moves: int, rng: np.random.Generator) -> LayerPlan:
        """A random mask at most `moves` moves away; a move flips one sublayer."""
        corner = self.corner(plan)
        for _ in range(moves):
            at = rng.integers(len(corner))
            corner[at] = 1 - corner[at]
        return self.nearest(corner)

    def __iter__(self) -> Iterator[LayerPlan]:
        """Yields every mask once, in a fixed order."""
        for choice in itertools.product((False, True), repeat=len(self.free)):
            if 0 < sum(choice) < 2 * self.num_layers:
                yield self._plan(self.free[list(choice)])

    def _plan(self, skipped: Iterable[int]) -> LayerPlan:
        run = np.ones(2 * self.num_layers, bool)
        run[list(skipped)] = False
        return LayerPlan.from_array(run.reshape(-1, 2))
