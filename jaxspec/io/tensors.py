"""Safetensors files, mapped for reading and streamed for writing, so that a model is never in memory twice.

The format is eight bytes with the header's length, the header (JSON: name → dtype, shape, byte range) and the numbers,
little-endian. The `safetensors` package copies each tensor on reading, and needs all tensors of a file in memory for
writing.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.host.files import atomic, parse_json, refuse_pointer
from jaxspec.host.messages import brief_errors

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# The dtypes of tables that are not weights.
INTEGERS: dict[str, np.dtype] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype(bool),
}
_CODES = {dtype: code for code, dtype in {**DTYPES, **INTEGERS}.items()}
# Enough for 300,000 tensors; the format allows three times as much. A parsed header can take thirty times its bytes.
_MAX_HEADER_BYTES = 30_000_000
# The numbers that are copied and checked at once, which fit in a processor's cache.
_BLOCK = 2**18
_MAX_DIMENSIONS, _MAX_SIZE = 8, 2**31


class Tensors(dict[str, np.ndarray]):
    """Tensors by name.

    Attributes:
      left_out: tensors that were not read because their dtype is not supported: the file's name of the dtype by tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}

    def add(self, others: Tensors) -> None:
        """Adds the tensors of another file."""
        self.update(others)
        self.left_out |= others.left_out


@brief_errors()
def read_tensors(path: str | os.PathLike[str], integers: bool = False) -> Tensors:
    """Returns the tensors of a file by name, as read-only views of the mapped file, which are read on first use.

    `integers`: whether to include integer and Boolean tables.

    Raises:
      ValueError: the file is truncated or not safetensors, or its tensors overlap.
    """
    path = Path(path)
    refuse_pointer(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or (length <= _MAX_HEADER_BYTES and 8 + length > size):
            raise ValueError(f"{path} is truncated: it has {size} bytes; fetch or save it again")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        try:
            header = parse_json(file.read(length))
            entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is not a safetensors file") from None
    numbers = (
        np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    )
    known = {**DTYPES, **INTEGERS} if integers else DTYPES
    tensors, reached, before = Tensors(), 0, ""
    for name, (code, shape, begin, end) in sorted(entries.items(), key=lambda entry: entry[1][2:]):
        if end > numbers.size:
            raise ValueError(
                f"{path} is truncated: {name} ends at byte {8 + length + end}, the file has {size}; "
                "fetch or save it again"
            )
        if begin < reached and begin < end:
            raise ValueError(f"{path}: the tensors {before} and {name} overlap; save the model again")
        reached, before = max(reached, end), name
        dtype = known.get(code)
        if dtype is None:
            tensors.left_out[name] = code
            continue
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: the header gives {name} a size that does not fit its shape {shape}")
        tensors[name] = np.asarray(numbers[begin:end]).view(dtype).reshape(shape)
    return tensors


def check_finite(name: str, tensor: np.ndarray) -> None:
    """Refuses a tensor of floats with NaN or infinity.

    Raises:
      ValueError: it has such a number; the message names the tensor.
    """
    if not _is_finite(tensor):
        raise ValueError(f"tensor {name} has numbers that are not finite; fetch or save it again")


def copy_finite(name: str, tensor: np.ndarray, into: np.ndarray) -> None:
    """Copies a tensor into an array of its shape, perhaps of another dtype, and refuses NaN and infinity.

    A block is checked while it is in the processor's cache: memory is not read again.

    Raises:
      ValueError: a number is not finite, or is too large for the dtype; the message names the tensor.
    """
    rows = max(1, _BLOCK * len(into) // max(1, into.size))
    with np.errstate(over="ignore"):
        for at in range(0, len(into), rows):
            given, block = tensor[at : at + rows], into[at : at + rows]
            block[...] = given
            if not _is_finite(min(block, given, key=lambda numbers: numbers.itemsize)):
                check_finite(name, tensor)
                raise ValueError(
                    f"tensor {name} has numbers beyond the range of {into.dtype}; give another dtype"
                )


@functools.cache
def _infinities(dtype: np.dtype) -> list[tuple[np.dtype, np.ndarray]]:
    bits = np.array([np.inf, -np.inf], dtype)
    kinds = (np.dtype(f"{sign}{dtype.itemsize}") for sign in "iu")
    return [(kind, bits.view(kind)[place]) for place, kind in enumerate(kinds)]


def _is_finite(tensor: np.ndarray) -> bool:
    """Whether no number is NaN or infinity: their bits, read as whole numbers, are at least those of infinity.

    The maxima of both signs are faster than `np.isfinite`, most of all in bfloat16.
    """
    return all(tensor.view(kind).max(initial=0) < infinity for kind, infinity in _infinities(tensor.dtype))


def _entry(value: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Returns a header's entry for a tensor: dtype, shape, first byte, and the byte after its last."""
    code, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if type(code) is not str or any(type(n) is not int or n < 0 for n in (*shape, begin, end)) or begin > end:
        raise ValueError("not an entry of a header")
    if len(shape) > _MAX_DIMENSIONS or any(n >= _MAX_SIZE for n in shape):
        raise ValueError("a shape that no array has")
    return code, shape, begin, end


def write_tensors(
    path: str | os.PathLike[str],
    shapes: Mapping[str, tuple[int, ...]],
    fetch: Callable[[str], np.ndarray],
    dtype: np.dtype | Mapping[str, np.dtype],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors one at a time; every safetensors file that jaxspec makes is written here.

    Args:
      path: the file, written whole or not at all.
      shapes: shape by name, in the order of the file.
      fetch: returns the tensor of a name, with its shape and `dtype`.
      dtype: one of the values of `DTYPES` or `INTEGERS`, or that of each name.
      metadata: texts by name; None for PyTorch's format.

    Raises:
      ValueError: the format does not support `dtype`, or a tensor has another shape or dtype.
    """
    dtypes = {name: np.dtype(dtype[name] if isinstance(dtype, Mapping) else dtype) for name in shapes}
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    # The largest numbers come first, so that all are aligned.
    for name in sorted(shapes, key=lambda name: -dtypes[name].itemsize):
        shape, own = shapes[name], dtypes[name]
        if own not in _CODES:
            raise ValueError(f"cannot save weights as {own}; choose float32, bfloat16, float16 or float64")
        end = offset + math.prod(shape) * own.itemsize
        header[name] = {"dtype": _CODES[own], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the numbers start aligned
    with atomic(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in list(header)[1:]:
            tensor, own, shape = np.asarray(fetch(name), order="C"), dtypes[name], tuple(shapes[name])
            if tensor.shape != shape or tensor.dtype != own:
                raise ValueError(f"{name} is {tensor.dtype}{tensor.shape}, expected {own}{shape}")
            file.write(tensor.reshape(-1).view(np.uint8).data)


def save(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays that are in memory, see `write_tensors`."""
    shapes = {name: array.shape for name, array in arrays.items()}
    write_tensors(
        path, shapes, arrays.__getitem__, {name: array.dtype for name, array in arrays.items()}, metadata
    )
