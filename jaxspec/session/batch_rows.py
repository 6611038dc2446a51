"""The rows of a batch: how many there are, which request has which row, and how far it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.model.quantisation import is_quantised
from jaxspec.programs import buckets, memory
from jaxspec.programs.compiled import Loop
from jaxspec.protocol import Drafter, Weights
from jaxspec.requests.reading import RowRequest


@dataclasses.dataclass(frozen=True)
class Held:
    """A request, its index, and the time at which it got a row.

    Examples:
      >>> Held(3, RowRequest((5,), 1, ())).began
      0.0
    """

    index: int
    request: RowRequest
    began: float = 0.0


class Rows:
    """The rows of a batch.

    Attributes:
      held: the request of each row; None for a free row, and once its text has ended.
      lengths: int64[B], the committed tokens of each row.
      halt: bool[B], the rows to end before the next round.
    """

    def __init__(self, held: Sequence[Held | None] = ()) -> None:
        self.held = list(held)
        self.lengths = np.zeros(len(held), np.int64)
        self.halt = np.zeros(len(held), bool)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def busy(self) -> bool:
        """Whether a row has a request."""
        return any(held is not None for held in self.held)

    @property
    def num_used(self) -> int:
        """The number of rows up to the last one with a request."""
        return max((row + 1 for row, held in enumerate(self.held) if held is not None), default=0)

    @property
    def remaining(self) -> np.ndarray:
        """int64[B], the tokens that each row may still gain; 0 for a free row."""
        limits = [len(one.request.prompt) + one.request.max_new_tokens if one else 0 for one in self.held]
        return np.maximum(np.array(limits) - self.lengths, 0)

    def requests(self, default: RowRequest) -> list[RowRequest]:
        """Returns the request of each row; `default` for free ones, whose tokens are discarded."""
        return [default if held is None else held.request for held in self.held]

    def put(self, row: int, held: Held) -> None:
        """Gives a row to a request, whose prompt is in the row's caches."""
        self.held[row], self.halt[row] = held, False

    def stop(self, row: int) -> None:
        """Takes a row from its request, whose text ends before the next round."""
        self.held[row], self.halt[row] = None, True

    def resize(self, batch: int) -> None:
        """Keeps the first `batch` rows, or adds free ones."""
        new = max(batch - len(self.held), 0)
        self.held = [*self.held[:batch], *[None] * new]
        self.lengths = np.pad(self.lengths[:batch], (0, new), constant_values=1)
        self.halt = np.pad(self.halt[:batch], (0, new), constant_values=True)


@dataclasses.dataclass(frozen=True)
class Widths:
    """The numbers of rows that a batch may have.

    Args:
      loop: the compiled loop.
      params, drafter: the parameters and the drafter, whose caches a row needs beside the target's.
      most: the most rows.
    """

    loop: Loop
    params: Weights
    drafter: Drafter
    most: int

    def width_for(self, count: int) -> int:
        """Returns the number of rows for `count` requests that run together."""
        smallest = 1 if self.loop.mesh is None else self.loop.mesh.shape.get("data", 1)
        return buckets.rows_for(count, self.most, smallest)

    def affordable(self, width: int, least: int, capacity: int) -> int:
        """Returns the number of rows up to `width` whose caches fit into memory now, at least `least`."""
        if self.loop.mesh is None and width > least:
            row_bytes = self.loop.row_bytes(self.params, self.drafter, capacity)
            while width > least and not memory.is_free(width * row_bytes, self._device):
                width = max(buckets.rows_below(width), least)
        return width

    def check(self, count: int, first: int, capacity: int) -> None:
        """Raises ValueError if the caches of `count` requests do not fit into memory, at most `most` at a time.

        Their capacity is `first` for the prompts, and `capacity` for whole texts.
        """
        if self.loop.mesh is None:
            rows = self.width_for(min(self.most, count))
            # Refilled rows have a cache of their own until their prompts have been processed.
            rows += min(rows, count - rows)
            target, row_bytes = self.params.target, self.loop.row_bytes(self.params, self.drafter, capacity)
            leaves = jax.tree.leaves(target, is_leaf=is_quantised)
            bits = next((leaf.bits for leaf in leaves if is_quantised(leaf)), None)
            texts = memory.Texts(self.loop.config, target["embed"].dtype, rows, self._device, bits)
            drafts = (row_bytes - texts.slots(capacity) // rows) // capacity
            texts = dataclasses.replace(texts, draft_bytes=drafts, reach=self.drafter.reach)
            grown_from = buckets.before(capacity, self.loop.platform) if first < capacity else 0
            memory.check_cache_fits(texts, capacity, grown_from)

    @property
    def _device(self) -> jax.Device:
        return self.loop.device or jax.local_devices()[0]
