"""Packs documents into windows and makes batches: held out, packed, mixed by weight, shuffled, batched.

Packing is best fit, longest first: a document that fits a window is not cut; a longer one is cut into windows.
Segments keep documents from attending to each other, and positions start at 0 in each document.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import io
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import grain.python as grain
import numpy as np

from jaxspec.host import files, processes
from jaxspec.host.messages import counted
from jaxspec.io.archives import refuse_larger
from training.data.formats import Document
from training.data.spool import Spool

# Windows of packed documents, [N, T] each:
#   tokens     int32, padded with 0 at the end of a window
#   segments   int32, 1, 2, … for the documents of a window; 0 is padding
#   positions  int32, 0, 1, … within each document (or its piece)
#   learn      bool, whether the token is predicted
Windows = dict[str, np.ndarray]


# The file in the run directory in which `cached` keeps the windows.
TOKENS_FILE = "tokens.npz"


class Encoded(NamedTuple):
    """A document's tokens, int32[n], and a mask of the learned ones, bool[n]."""

    tokens: np.ndarray
    learn: np.ndarray


def is_held_out(origin: str, one_in: int) -> bool:
    """Whether a document is held out. This depends only on a hash of its origin, not on the other data."""
    return _hash(origin) % one_in == 0


def split(documents: Sequence[Document], one_in: int) -> tuple[Spool[Document], Spool[Document]]:
    """Splits documents into training and held-out ones: about one in `one_in` held out, at least one in each part.

    Raises:
      ValueError: all documents have the same origin.
    """
    documents = Spool.from_values(documents)
    hashes = [_hash(document.origin) for document in documents]
    origins = sorted(set(hashes))
    if len(origins) < 2:
        raise ValueError(
            f"the data has {counted(len(documents), 'document')} of {counted(len(origins), 'origin')}; training needs "
            "two, of which one is held out to measure on: in a text file <|endoftext|> separates documents"
        )
    held_out = {origin for origin in origins if origin % one_in == 0} or {origins[0]}
    if len(held_out) == len(origins):
        held_out.remove(origins[-1])
    parts: tuple[list[int], list[int]] = ([], [])
    for index, origin in enumerate(hashes):
        parts[origin in held_out].append(index)
    return documents.chosen(parts[0]), documents.chosen(parts[1])


def _hash(origin: str) -> int:
    return int.from_bytes(hashlib.sha256(origin.encode()).digest()[:8], "big")


def pack(documents: Iterable[Encoded], window: int) -> Windows:
    """Packs documents into windows of `window` tokens; no token is lost or repeated.

    A document longer than a window is cut; its pieces count as documents of their own. Documents and windows are kept
    in temporary files; memory holds a few numbers for each piece.
    """
    documents = Spool.from_values(documents)
    sizes = [
        min(window, len(document.tokens) - start)
        for document in documents
        for start in range(0, len(document.tokens), window)
    ]
    # Row, first slot and segment of each piece.
    places = np.zeros((len(sizes), 3), np.int64)
    counts: list[int] = []  # pieces in each window
    # Open windows by free space, ascending: the first window that is large enough is the best fit.
    open_windows: list[tuple[int, int]] = []
    for piece in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = bisect.bisect_left(open_windows, (sizes[piece], -1))
        if place < len(open_windows):
            free, row = open_windows.pop(place)
        else:
            free, row = window, len(counts)
            counts.append(0)
        counts[row] += 1
        places[piece] = row, window - free, counts[row]
        if free > sizes[piece]:
            bisect.insort(open_windows, (free - sizes[piece], row))
    shape = (len(counts), window)
    windows = {name: _on_disk(shape, np.int32) for name in ("tokens", "segments", "positions")}
    windows["learn"] = _on_disk(shape, bool)
    piece = 0
    # In the order of the documents, so that each of them is read once more, whatever its length.
    for document in documents:
        for start in range(0, len(document.tokens), window):
            (row, begin, segment), length = places[piece], sizes[piece]
            here, read = np.s_[row, begin : begin + length], slice(start, start + length)
            windows["tokens"][here] = document.tokens[read]
            windows["segments"][here] = segment
            windows["positions"][here] = np.arange(length)
            windows["learn"][here] = document.learn[read]
            piece += 1
    return windows


def _on_disk(shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Returns zeros in a temporary file, which the system writes to the disk if memory is short."""
    if 0 in shape:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.asarray(
            np.memmap(file, dtype, "w+", shape=shape)
        )  # whose rows are read faster than a memmap's


@dataclasses.dataclass(frozen=True)
class PackedSource:
    """Random access to packed windows, as grain requires it.

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


class Batches(Iterator[Windows]):
    """An endless iterator of batches [A, B, T] that resumes after the last window, also with other rows a step.

    Args:
      stream: the batches.
      rows: windows of a batch.
    """

    def __init__(self, stream: grain.DatasetIterator, rows: int) -> None:
        self._stream, self._rows = stream, rows

    def __next__(self) -> Windows:
        batch: Windows = next(self._stream)
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position, for JSON."""
        return self._stream.get_state() | {"rows": self._rows}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a position; windows of an incomplete batch are read again."""
        # Earlier versions did not record the rows, which were then those of this run.
        windows = state["next_index"] * state.get("rows", self._rows)
        self._stream.set_state({"next_index": windows // self._rows})


def batches(
    kinds: Mapping[str, Windows], weights: Mapping[str, float], batch: int, accumulate: int, seed: int
) -> Batches:
    """Returns an endless iterator of batches [A, B, T]; `get_state` and `set_state` resume it.

    Args:
      kinds: packed training data by task type. Each is shuffled separately, and again after each pass.
      weights: relative frequency of the windows of each task type.
      batch: B, windows per micro-batch.
      accumulate: A, micro-batches per step.
      seed: seed of the shuffling.

    Raises:
      ValueError: there are fewer windows than one step needs.
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
    # No reader threads: the windows are in memory, and the training step uses all cores.
    stream = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    return Batches(stream, batch * accumulate)


def fixed_batches(windows: Windows, batch: int, limit: int) -> list[Windows]:
    """Chooses at most `limit` windows, spread evenly over all, in batches [B, T]; the last one is padded."""
    chosen = spread(windows, limit)
    parts = []
    for begin in range(0, len(chosen["tokens"]), batch):
        part = {name: array[begin : begin + batch] for name, array in chosen.items()}
        padding = ((0, batch - len(part["tokens"])), (0, 0))
        parts.append({name: np.pad(array, padding) for name, array in part.items()})
    return parts


def spread(windows: Windows, limit: int) -> Windows:
    """Chooses at most `limit` windows, spread evenly over all, because packing puts long documents first."""
    total = len(windows["tokens"])
    count = min(limit, total)
    rows = np.arange(count) * total // count
    return {name: array[rows] for name, array in windows.items()}


def stored(file: Path) -> tuple[dict[str, dict[str, Windows]], str]:
    """Reads the file of `cached`: windows by part (`training`, `held_out`) and task type, and the file's key.

    The checksums are compared. The arrays are then mapped from the file, and need no memory of their own.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is damaged.
    """
    found: dict[str, dict[str, Windows]] = {}
    key = ""
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            refuse_larger(archive, file)
            if archive.testzip() is not None:
                raise ValueError("it has another checksum")
            for entry in archive.infolist():
                path, array = entry.filename.removesuffix(".npy"), _mapped(stream, entry)
                if path == "key":
                    key = str(array)
                else:
                    part, kind, name = path.split("|")
                    found.setdefault(part, {}).setdefault(kind, {})[name] = array
        if not key or set(found) != {"training", "held_out"} or not all(map(_are_windows, _all(found))):
            raise ValueError("it lacks windows")
    except FileNotFoundError:
        raise
    # The exceptions of NumPy and `zipfile` for a damaged file.
    except (
        ValueError,
        KeyError,
        OSError,
        EOFError,
        MemoryError,
        TypeError,
        RuntimeError,
        OverflowError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ):
        raise ValueError(f"{file} is damaged; resume the run, which makes it again") from None
    return found, key


def _mapped(stream: IO[bytes], entry: zipfile.ZipInfo) -> np.ndarray:
    """Maps an array of an uncompressed archive of `numpy.savez`."""
    stream.seek(entry.header_offset)
    name_and_extra = struct.unpack("<26x2H", stream.read(30))
    stream.seek(sum(name_and_extra), io.SEEK_CUR)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, by_columns, dtype = read[version](stream)
    return np.asarray(np.memmap(stream, dtype, "r", stream.tell(), shape, "F" if by_columns else "C"))


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
    """Returns the windows of `make()`, by part and task type, mapped from `file`, which keeps them for this key.

    One process makes and writes them, and the others wait for its file.

    Raises:
      ValueError: process 0 has another key, because it reads other text.
    """
    found, stored_key = _kept(file)
    if processes.any_of(stored_key != key):
        if files.written_here():
            made: dict[str, Any] = {
                f"{part}|{kind}|{name}": array
                for part, kinds in make().items()
                for kind, windows in kinds.items()
                for name, array in windows.items()
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            with files.atomic(file) as stream:
                np.savez(stream, **made, key=np.array(key))
        processes.wait_for_all("the windows are written")
        found, stored_key = stored(file)
        if stored_key != key:
            raise ValueError(f"{file} has other text than this process; give the same --data to each process")
    return found


def _kept(file: Path) -> tuple[dict[str, dict[str, Windows]], str | None]:
    if file.is_file():
        try:
            return stored(file)
        except ValueError:
            warnings.warn(f"{file} is damaged, and is made again", RuntimeWarning, stacklevel=3)
    return {}, None
