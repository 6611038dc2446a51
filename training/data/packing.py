"""Documents to packed windows: held out, packed, mixed by weight, shuffled, batched.

Every document is laid whole into one window where it fits (best fit, longest first); a longer one is cut into
windows. Segments tell documents apart, so that none attends to another, and positions start at 0 in each.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain.python as grain
import numpy as np

from jaxspec.io import files
from jaxspec.io.archives import refuse_larger
from training.data.formats import Document

# Windows of packed documents, [N, T] each:
#   tokens     int32, padded with 0 at the end of a window
#   segments   int32, 1, 2, … for the documents of a window; 0 is padding
#   positions  int32, 0, 1, … within each document (or its piece)
#   learn      bool, whether the token is to be predicted
Windows = dict[str, np.ndarray]


# Where `cached` keeps a run's windows, in its directory.
TOKENS_FILE = "tokens.npz"


class Encoded(NamedTuple):
    """A document as tokens, int32[n], with a mask of those to be learned, bool[n]."""

    tokens: np.ndarray
    learn: np.ndarray


def is_held_out(origin: str, one_in: int) -> bool:
    """Whether a document belongs to the held-out part: by a hash of its own, whatever else is in the data."""
    return _hash(origin) % one_in == 0


def split(documents: Sequence[Document], one_in: int) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents), about one in `one_in` held out, and at least one in each part.

    Raises:
      ValueError: there are not two documents of different origins.
    """
    origins = sorted({document.origin for document in documents}, key=_hash)
    if len(origins) < 2:
        raise ValueError(
            f"the data has {len(documents)} documents of {len(origins)} origins; training needs two, of which one is "
            "held out to measure on: in a text file <|endoftext|> separates documents"
        )
    held_out = {origin for origin in origins if is_held_out(origin, one_in)} or {origins[0]}
    if len(held_out) == len(origins):
        held_out.remove(origins[-1])
    parts: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        parts[document.origin in held_out].append(document)
    return parts


def _hash(origin: str) -> int:
    return int.from_bytes(hashlib.sha256(origin.encode()).digest()[:8], "big")


def pack(documents: Sequence[Encoded], window: int) -> Windows:
    """Lays documents into windows of `window` tokens; no token is lost or repeated.

    A document longer than a window is cut; its pieces count as documents of their own.
    """
    pieces = [
        Encoded(document.tokens[start : start + window], document.learn[start : start + window])
        for document in documents
        for start in range(0, len(document.tokens), window)
    ]
    pieces.sort(key=lambda piece: len(piece.tokens), reverse=True)
    contents: list[list[Encoded]] = []
    # Open windows by free space, ascending: the first that is large enough fits best.
    open_windows: list[tuple[int, int]] = []
    for piece in pieces:
        length = len(piece.tokens)
        place = bisect.bisect_left(open_windows, (length, -1))
        if place < len(open_windows):
            free, index = open_windows.pop(place)
        else:
            free, index = window, len(contents)
            contents.append([])
        contents[index].append(piece)
        if free > length:
            bisect.insort(open_windows, (free - length, index))
    shape = (len(contents), window)
    windows = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    windows["learn"] = np.zeros(shape, bool)
    for row, parts in enumerate(contents):
        begin = 0
        for segment, part in enumerate(parts, start=1):
            here = slice(begin, begin + len(part.tokens))
            windows["tokens"][row, here] = part.tokens
            windows["segments"][row, here] = segment
            windows["positions"][row, here] = np.arange(len(part.tokens))
            windows["learn"][row, here] = part.learn
            begin += len(part.tokens)
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


def batches(
    kinds: Mapping[str, Windows], weights: Mapping[str, float], batch: int, accumulate: int, seed: int
) -> grain.DatasetIterator:
    """Endless batches [A, B, T]; `get_state` and `set_state` resume it.

    Args:
      kinds: the packed training data by kind. Each kind is read in an order of its own, shuffled again after
        each pass.
      weights: how often a window of each kind is drawn; only their ratios count.
      batch: B, windows a micro-batch.
      accumulate: A, micro-batches a step.
      seed: of the shuffling.

    Raises:
      ValueError: fewer windows than one step takes.
    """
    total = sum(len(windows["tokens"]) for windows in kinds.values())
    if total < batch * accumulate:
        raise ValueError(
            f"{total} windows of training data, one step takes {batch} × {accumulate}; "
            "give more data or a smaller batch"
        )
    shuffled = [
        grain.MapDataset.source(PackedSource(windows)).shuffle(seed=seed + number).repeat(None)
        for number, windows in enumerate(kinds.values())
    ]
    mixed = grain.MapDataset.mix(shuffled, [weights[kind] for kind in kinds])
    dataset = mixed.batch(batch, drop_remainder=True).batch(accumulate, drop_remainder=True)
    # No reading threads: the windows lie in memory, and the cores are the step's.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def fixed_batches(windows: Windows, batch: int, limit: int) -> list[Windows]:
    """At most `limit` windows, spread evenly over all, in batches of [B, T]; the last is padded."""
    chosen = spread(windows, limit)
    parts = []
    for begin in range(0, len(chosen["tokens"]), batch):
        part = {name: array[begin : begin + batch] for name, array in chosen.items()}
        padding = ((0, batch - len(part["tokens"])), (0, 0))
        parts.append({name: np.pad(array, padding) for name, array in part.items()})
    return parts


def spread(windows: Windows, limit: int) -> Windows:
    """Chooses at most `limit` windows, spread evenly over all: packing puts long documents first."""
    total = len(windows["tokens"])
    count = min(limit, total)
    rows = np.arange(count) * total // count
    return {name: array[rows] for name, array in windows.items()}


def stored(file: Path) -> tuple[dict[str, dict[str, Windows]], str]:
    """Reads the file that `cached` wrote: windows by part (`training`, `held_out`) and kind, and the file's key.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged; one line.
    """
    found: dict[str, dict[str, Windows]] = {}
    try:
        with np.load(file) as arrays:
            refuse_larger(arrays.zip, file)
            for path in arrays.files:
                if path != "key":
                    part, kind, name = path.split("|")
                    found.setdefault(part, {}).setdefault(kind, {})[name] = arrays[path]
            key = str(arrays["key"])
        if set(found) != {"training", "held_out"} or not all(map(_are_windows, _all(found))):
            raise ValueError("it lacks windows")
    except FileNotFoundError:
        raise
    # The errors of NumPy and `zipfile` for other contents.
    except (
        ValueError,
        KeyError,
        OSError,
        EOFError,
        MemoryError,
        TypeError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ):
        raise ValueError(f"{file} is damaged; resume the run, which makes it again") from None
    return found, key


def _all(parts: dict[str, dict[str, Windows]]) -> list[Windows]:
    return [windows for kinds in parts.values() for windows in kinds.values()]


def _are_windows(windows: Windows) -> bool:
    """Whether these are the arrays of a `Windows`, with equal shapes."""
    kinds = {name: array.dtype.kind for name, array in windows.items()}
    whole = kinds == {"tokens": "i", "segments": "i", "positions": "i", "learn": "b"}
    return whole and len({array.shape for array in windows.values()}) == 1 and windows["learn"].ndim == 2


def cached(
    file: Path, key: str, make: Callable[[], Mapping[str, Mapping[str, Windows]]]
) -> dict[str, dict[str, Windows]]:
    """Returns what `make()` gives, windows by part and kind; kept in `file` as long as `key` is the same."""
    if file.is_file():
        try:
            found, stored_key = stored(file)
        except ValueError:
            warnings.warn(f"{file} is damaged, and is made again", RuntimeWarning, stacklevel=2)
        else:
            if stored_key == key:
                return found
    made = {part: dict(kinds) for part, kinds in make().items()}
    if not files.written_here():
        return made
    flat: dict[str, Any] = {
        f"{part}|{kind}|{name}": array
        for part, kinds in made.items()
        for kind, windows in kinds.items()
        for name, array in windows.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic(file) as stream:
        np.savez(stream, **flat, key=np.array(key))
    return made
