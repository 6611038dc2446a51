"""Sequences of values in a temporary file, so that texts need not fit into memory."""

from __future__ import annotations

import copy
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# A smaller sequence stays in memory.
_IN_MEMORY_BYTES = 1 << 26


class Spool(Sequence[T]):
    """A read-only sequence, in a file that the system deletes with the process. `TMPDIR` chooses its directory.

    Args:
      values: the values, read once and in order.
    """

    def __init__(self, values: Iterable[T]) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
        self._begins = array("q")
        for value in values:
            self._begins.append(self._file.tell())
            pickle.dump(value, self._file, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def from_values(cls, values: Iterable[T]) -> Spool[T]:
        """Returns the values themselves if they are in a file already, else a copy in a file."""
        return values if isinstance(values, cls) else cls(values)

    def chosen(self, indices: Iterable[int]) -> Spool[T]:
        """Returns the values at some indices, in the same file."""
        found = copy.copy(self)
        found._begins = array("q", (self._begins[index] for index in indices))
        return found

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.chosen(range(len(self))[index])
        self._file.seek(self._begins[index])
        return pickle.load(self._file)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
