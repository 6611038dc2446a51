"""The masks a search may propose: which sublayers a draft skips, under what must stay and how many go."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from jaxspec.model.plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class MaskSpace:
    """Masks of a model's 2L sublayers that skip some of them: not all, and not none.

    A search moves in the box (0, 1)^n over the n free sublayers, in the order attention, MLP of each layer.
    As in Draft & Verify (Zhang et al. 2023, §3.2) a coordinate above .5 skips its sublayer; with a skip
    ratio, as in SWIFT (Xia et al. 2024), those with the highest coordinates go, as many as the ratio says.

    Attributes:
      num_layers: L.
      keep_first_last: whether both sublayers of the first and the last layer always run.
      skip_ratio: the share of all 2L sublayers that every mask skips, rounded to whole ones; None for any.
    """

    num_layers: int
    keep_first_last: bool = True
    skip_ratio: float | None = None

    def __post_init__(self) -> None:
        if not len(self.free):
            raise ValueError(
                f"the model has {self.num_layers} layers, and the first and the last are kept: nothing is left "
                "to skip; add keep_first_last=False"
            )
        if self.skip_ratio is None:
            return
        if not 0 < self.skip_ratio < 1:
            raise ValueError(f"skip_ratio is {self.skip_ratio}; give a share between 0 and 1")
        most = min(len(self.free), 2 * self.num_layers - 1)
        if not 1 <= self._num_skipped <= most:
            many = self.keep_first_last and self._num_skipped > most
            hint = ", or add keep_first_last=False" if many else ""
            raise ValueError(
                f"skip_ratio={self.skip_ratio} skips {self._num_skipped} of {2 * self.num_layers} sublayers; "
                f"1 to {most} can be skipped: give {1 / (2 * self.num_layers):.2g} to "
                f"{most / (2 * self.num_layers):.2g}{hint}"
            )

    @property
    def free(self) -> np.ndarray:
        """Numbers 2·layer + (0 attention, 1 MLP) of the sublayers that may be skipped, int[n]."""
        kept = 1 if self.keep_first_last else 0
        return np.arange(2 * kept, 2 * (self.num_layers - kept))

    @property
    def size(self) -> int:
        """How many masks there are."""
        free = len(self.free)
        if self.skip_ratio is not None:
            return math.comb(free, self._num_skipped)
        count: int = 2**free - 1 - (free == 2 * self.num_layers)
        return count

    @property
    def _num_skipped(self) -> int:
        assert self.skip_ratio is not None
        return round(self.skip_ratio * 2 * self.num_layers)

    def nearest(self, point: np.ndarray) -> LayerPlan:
        """The mask that a point float[n] of the box stands for."""
        falling = np.argsort(-point, kind="stable")
        if self.skip_ratio is not None:
            many = self._num_skipped
        else:
            many = min(max(int((point > 0.5).sum()), 1), 2 * self.num_layers - 1)
        return self._plan(self.free[falling[:many]])

    def corner(self, plan: LayerPlan) -> np.ndarray:
        """The corner of the box that is a mask, float[n]: 1 for what is skipped."""
        corner: np.ndarray = 1.0 - np.asarray(plan.run, float).reshape(-1)[self.free]
        return corner

    def neighbour(self, plan: LayerPlan, moves: int, rng: np.random.Generator) -> LayerPlan:
        """A mask some moves away: a move turns one sublayer over, or with a skip ratio exchanges two."""
        corner = self.corner(plan)
        for _ in range(moves):
            if self.skip_ratio is None:
                at = rng.integers(len(corner))
                corner[at] = 1 - corner[at]
            elif 0 < corner.sum() < len(corner):
                leaves, enters = (rng.choice(np.flatnonzero(corner == value)) for value in (1, 0))
                corner[leaves], corner[enters] = 0, 1
        return self.nearest(corner)

    def __iter__(self) -> Iterator[LayerPlan]:
        """Every mask, each once, in a fixed order."""
        if self.skip_ratio is not None:
            yield from map(self._plan, itertools.combinations(self.free, self._num_skipped))
            return
        for choice in itertools.product((False, True), repeat=len(self.free)):
            if 0 < sum(choice) < 2 * self.num_layers:
                yield self._plan(self.free[list(choice)])

    def _plan(self, skipped: Iterable[int]) -> LayerPlan:
        run = np.ones(2 * self.num_layers, bool)
        run[list(skipped)] = False
        return LayerPlan.of(run.reshape(-1, 2))
