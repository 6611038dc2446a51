"""Reads GGUF files: their metadata and the places of their tensors.

The header is parsed here and not by `gguf.GGUFReader`, which takes seconds for the vocabulary of a typical model and
reports a damaged file by a traceback. Types, block sizes and dequantisation come from the `gguf` package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.host.files import identity, refuse_pointer
from jaxspec.host.messages import brief_errors, shown
from jaxspec.io.gguf.bounds import check_vocabulary
from jaxspec.io.hf.values import MAX_INT

# The supported types of tensors.
PLAIN = ("F32", "F16", "BF16")
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_ALIGNMENT, _MAX_ALIGNMENT = 32, 2**16
# The `struct` format of each scalar metadata type, by its number; 8 is a string, 9 an array.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
# SentencePiece's defaults for ids that a file does not name.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file: `kind` is the name of its type, `stored` its mapped bytes, one row per row of `shape`."""

    kind: str
    shape: tuple[int, ...]
    stored: np.ndarray


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The content of a file; metadata scalars are Python's, metadata arrays are lists or NumPy arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, by its name or its first bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@brief_errors()
def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Returns the metadata and the tensors of a file; the tensors are mapped, not read.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a GGUF file, has another version, is one of several parts, is truncated or damaged, or
        contains a tensor of an unsupported type; one line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; give a model's .gguf file")
    return _read(path, identity(path))


def token_ids(file: GGUFFile) -> dict[str, int]:
    """Returns the ids of a file's special tokens, by llama.cpp's names: bos, eos, eot, eom, unknown, padding.

    Raises:
      ValueError: one of them is not a token id.
    """
    metadata = file.metadata
    ids = dict(_SENTENCEPIECE_IDS) if metadata.get("tokenizer.ggml.model") == "llama" else {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id", ids.get(name))
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id is {shown(value)}, expected a whole number from 0 to {MAX_INT}"
            )
        ids[name] = value
    return ids


# Cached, because configuration, tokenizer and weights are read one after the other.
@functools.lru_cache(maxsize=2)
def _read(path: Path, status: tuple[Any, ...]) -> GGUFFile:
    with open(path, "rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        refuse_pointer(path)
        found = "is empty" if not magic else f"begins with {magic!r}, not with GGUF"
        raise ValueError(f"{path} is not a GGUF file: it {found}; download it again, or give another file")
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    try:
        return _parse(path, content)
    except (struct.error, OverflowError, MemoryError, RecursionError):
        raise ValueError(
            f"{path} is truncated or damaged: its {content.size} bytes end within its header; download it again"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is damaged: a name in its header is not UTF-8; download it again") from None


def _parse(path: Path, content: np.ndarray) -> GGUFFile:
    cursor = _Cursor(path, content, len(_MAGIC))
    version = cursor.scalar("<I")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise ValueError(f"{path} is a big-endian GGUF file; supported: little-endian ones")
        raise ValueError(f"{path} is GGUF of version {version}; supported: 2 and 3; convert the model again")
    tensor_count, entries = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(entries):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"{path} is damaged: it has the metadata {shown(name)} twice; download it again")
        metadata[name] = cursor.value(cursor.scalar("<I"))
    parts = metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ValueError(
            f"{path} is one part of {parts}; put them together with "
            "`llama-gguf-split --merge FIRST_PART OUT.gguf`"
        )
    try:
        check_vocabulary(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: its tokenizer is damaged: {error}; download it again") from None
    placed = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"{path} is damaged: its alignment is {shown(alignment)}; download it again")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {entry.name: _mapped(path, content, begin, entry) for entry in placed}
    _check_overlaps(path, placed, tensors)
    return GGUFFile(path, metadata, tensors)


def _check_overlaps(path: Path, placed: list[_Entry], tensors: dict[str, Tensor]) -> None:
    """Refuses two tensors with the same name or in the same place."""
    if len(tensors) < len(placed):
        raise ValueError(f"{path} is damaged: it has two tensors of one name; download it again")
    end, before = 0, ""
    for entry in sorted(placed, key=lambda entry: entry.at):
        if entry.at < end:
            raise ValueError(
                f"{path} is damaged: the tensors {before} and {entry.name} overlap; download it again"
            )
        end, before = entry.at + tensors[entry.name].stored.nbytes, entry.name


class _Entry(NamedTuple):
    """A tensor's entry in the header: name, number of its type, offset in the tensor data, and shape, rows first."""

    name: str
    number: int
    at: int
    shape: tuple[int, ...]


def _entry(cursor: _Cursor) -> _Entry:
    name, dimensions = cursor.string(), cursor.scalar("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(
            f"{cursor.path} is damaged: tensor {name} has {dimensions} dimensions; download it again"
        )
    shape = tuple(cursor.scalar("<Q") for _ in range(dimensions))[::-1]
    if not all(1 <= size <= MAX_INT for size in shape):
        raise ValueError(f"{cursor.path} is damaged: tensor {name} has shape {shape}; download it again")
    number = cursor.scalar("<I")
    return _Entry(name, number, cursor.scalar("<Q"), shape)


def _mapped(path: Path, content: np.ndarray, begin: int, entry: _Entry) -> Tensor:
    name, shape, at = entry.name, entry.shape, begin + entry.at
    kind, block, block_bytes = _tensor_type(entry.number)
    if kind not in PLAIN + BLOCKS:
        raise ValueError(
            f"{path}: tensor {name} has type {kind}, which is not supported; supported: "
            f"{', '.join(PLAIN + BLOCKS)}; take the model in one of them"
        )
    if shape[-1] % block:
        raise ValueError(
            f"{path} is damaged: tensor {name} of type {kind} has rows of {shape[-1]}, not a multiple of {block}"
        )
    row_bytes = shape[-1] // block * block_bytes
    size = math.prod(shape[:-1]) * row_bytes
    if at + size > content.size:
        raise ValueError(
            f"{path} is truncated: tensor {name} ends at byte {at + size}, the file at {content.size}; "
            "download it again"
        )
    return Tensor(kind, shape, content[at : at + size].reshape(*shape[:-1], row_bytes))


def _tensor_type(number: int) -> tuple[str, int, int]:
    """Returns a type's name, elements per block and bytes per block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return f"number {number}", 1, 1
    return kind.name, *GGML_QUANT_SIZES[kind]


class _Cursor:
    """Reads a header from its beginning to its end; raises `struct.error` if the file ends first."""

    def __init__(self, path: Path, content: np.ndarray, at: int) -> None:
        self.path, self.at = path, at
        self._content = memoryview(content)  # type: ignore[arg-type]

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._content, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        return str(self._bytes(self.scalar("<Q")), "utf-8")

    def value(self, number: int) -> Any:
        if number == _STRING:
            return self.string()
        if number in _SCALARS:
            return self.scalar(_SCALARS[number])
        if number != _ARRAY:
            raise ValueError(f"{self.path} is damaged: metadata of type {number}; download it again")
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner == _ARRAY:
            raise ValueError(f"{self.path} is damaged: metadata has a list of lists; download it again")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
        if inner != _STRING:
            raise ValueError(f"{self.path} is damaged: metadata of type {inner}; download it again")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Returns the strings of a list, as often as `string` and in a third of the time: a vocabulary has 10^5."""
        content, at, size = self._content, self.at, struct.Struct("<Q")
        found, last = [], len(content)
        for _ in range(count):
            (length,) = size.unpack_from(content, at)
            at += size.size
            if length > last - at:
                raise struct.error
            found.append(str(content[at : at + length], "utf-8"))
            at += length
        self.at = at
        return found

    def _bytes(self, count: int) -> memoryview:
        if count > len(self._content) - self.at:
            raise struct.error
        begin, self.at = self.at, self.at + count
        return self._content[begin : self.at]
