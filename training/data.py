"""Plain text to packed windows: documents are split off, held out, tokenised, packed, shuffled, batched.

A text file holds documents with `<|endoftext|>` between them. Every document is laid whole into one window
where it fits (best fit, longest first); a longer one is cut into windows. Segments tell documents apart, so
that none attends to another, and positions start anew with each.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain.python as grain
import numpy as np

SEPARATOR = "<|endoftext|>"
# Windows of packed documents, int32[N, T] each:
#   tokens     padded with 0 at the end of a window
#   segments   1, 2, … for the documents of a window; 0 is padding
#   positions  0, 1, … within each document (or its piece)
Windows = dict[str, np.ndarray]


def read_documents(files: Sequence[Path]) -> list[str]:
    """The documents of all files, in order, without the blank lines around them; empty ones are dropped.

    Raises:
      ValueError: a file cannot be read as UTF-8 text, or nothing is in them.
    """
    documents: list[str] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot read {file} ({error.strerror}); give an existing text file") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 at byte {error.start}; convert it first") from None
        documents += [part.strip() for part in text.split(SEPARATOR) if part.strip()]
    if not documents:
        names = ", ".join(map(str, files)) or "no file"
        raise ValueError(f"no document in {names}; expected text with {SEPARATOR} between documents")
    return documents


def is_held_out(document: str, one_in: int) -> bool:
    """Whether a document belongs to the held-out part: by its own hash, whatever else is in the data."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def split(documents: Sequence[str], one_in: int) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents), about one in `one_in` held out.

    Raises:
      ValueError: one of the parts is empty.
    """
    held_out = [document for document in documents if is_held_out(document, one_in)]
    training = [document for document in documents if not is_held_out(document, one_in)]
    if not held_out or not training:
        raise ValueError(
            f"of {len(documents)} documents, {len(held_out)} are held out by one in {one_in}, "
            f"{len(training)} left to train on; both need at least one: give more documents or another share"
        )
    return training, held_out


def pack(documents: Sequence[np.ndarray], window: int) -> Windows:
    """Lays documents (int32[n] each) into windows of `window` tokens; no token is lost or repeated.

    A document longer than a window is cut; its pieces count as documents of their own.
    """
    pieces = [
        document[start : start + window]
        for document in documents
        for start in range(0, len(document), window)
    ]
    pieces.sort(key=len, reverse=True)
    contents: list[list[np.ndarray]] = []
    # Open windows by free space, ascending: the first that is large enough fits best.
    open_windows: list[tuple[int, int]] = []
    for piece in pieces:
        place = bisect.bisect_left(open_windows, (len(piece), -1))
        if place < len(open_windows):
            free, index = open_windows.pop(place)
        else:
            free, index = window, len(contents)
            contents.append([])
        contents[index].append(piece)
        if free > len(piece):
            bisect.insort(open_windows, (free - len(piece), index))
    shape = (len(contents), window)
    windows = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    for row, parts in enumerate(contents):
        begin = 0
        for segment, part in enumerate(parts, start=1):
            here = slice(begin, begin + len(part))
            windows["tokens"][row, here] = part
            windows["segments"][row, here] = segment
            windows["positions"][row, here] = np.arange(len(part))
            begin += len(part)
    return windows


@dataclasses.dataclass(frozen=True)
class PackedSource:
    """Random access to packed windows, as grain wants it.

    Attributes:
      windows: see `Windows`.
    """

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows["tokens"])

    def __getitem__(self, index: Any) -> Windows:
        return {name: array[index] for name, array in self.windows.items()}

    def __repr__(self) -> str:
        return f"PackedSource({len(self)} windows)"


def batches(windows: Windows, batch: int, accumulate: int, seed: int) -> grain.DatasetIterator:
    """Endless batches int32[A, B, T], each epoch in its own order; `get_state` and `set_state` resume it.

    Args:
      windows: the packed training data.
      batch: B, windows a micro-batch.
      accumulate: A, micro-batches a step.
      seed: of the shuffling.

    Raises:
      ValueError: fewer windows than one step takes.
    """
    source = PackedSource(windows)
    if len(source) < batch * accumulate:
        raise ValueError(
            f"{len(source)} windows of training data, one step takes {batch} × {accumulate}; "
            "give more data or a smaller batch"
        )
    dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat(None)
    dataset = dataset.batch(batch, drop_remainder=True).batch(accumulate, drop_remainder=True)
    # No reading threads: the windows lie in memory, and the cores are the step's.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def fixed_batches(windows: Windows, batch: int, limit: int) -> list[Windows]:
    """At most `limit` windows, spread evenly over all, in batches of [B, T]; the last is padded."""
    total = len(windows["tokens"])
    count = min(limit, total)
    # Packing puts long documents first: a plain slice would measure those alone.
    rows = np.arange(count) * total // count
    parts = []
    for begin in range(0, count, batch):
        chosen = rows[begin : begin + batch]
        padding = ((0, batch - len(chosen)), (0, 0))
        parts.append({name: np.pad(array[chosen], padding) for name, array in windows.items()})
    return parts


def cached(file: Path, key: str, make: Callable[[], dict[str, Windows]]) -> dict[str, Windows]:
    """What `make()` gives, windows by the name of their part, kept in `file` as long as `key` is the same."""
    if file.is_file():
        with np.load(file) as stored:
            if str(stored["key"]) == key:
                names = [name.split("/") for name in stored.files if "/" in name]
                parts: dict[str, Windows] = {part: {} for part, _ in names}
                for part, name in names:
                    parts[part][name] = stored[f"{part}/{name}"]
                return parts
    made = make()
    flat: dict[str, Any] = {
        f"{part}/{name}": array for part, windows in made.items() for name, array in windows.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.npz")
    np.savez_compressed(partial, **flat, key=np.array(key))
    partial.replace(file)
    return made
