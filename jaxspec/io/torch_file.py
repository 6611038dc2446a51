"""PyTorch's `.bin` files, read without PyTorch and without running anything that is in them.

Such a file is a zip archive: `data.pkl`, a pickle that says what lies where, and the numbers of each storage as
`data/KEY`. A pickle may name any function to be called; here only those that make tensors are known, and any other
one ends the reading. Nor does a small file take much memory: PyTorch neither compresses nor, in what it saves of a
model, lets a tensor be larger than its numbers.
"""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.io.tensors import Tensors

_STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "BoolStorage": np.dtype(bool),
}
_CONVERT = "save it as safetensors with PyTorch: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"


class _Storage(NamedTuple):
    """Names the numbers of some tensors, in a file or in a class's place."""

    dtype: np.dtype
    key: str = ""


def read(path: str | os.PathLike[str]) -> Tensors:
    """Every tensor of a file by name.

    Raises:
      ValueError: the file is truncated, of the format before PyTorch 1.6, or holds more than tensors; one line.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except zipfile.BadZipFile:
        raise ValueError(f"{path} is truncated, or no archive of PyTorch 1.6 or later; {_CONVERT}") from None


def _read(path: Path, archive: zipfile.ZipFile) -> Tensors:
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise ValueError(f"{path} is compressed, which PyTorch does not do; {_CONVERT}")
    names = {name.partition("/")[2]: name for name in archive.namelist()}
    storages: dict[str, np.ndarray] = {}

    def numbers(storage: _Storage) -> np.ndarray:
        if storage.key not in storages:
            storages[storage.key] = np.frombuffer(archive.read(names[f"data/{storage.key}"]), storage.dtype)
        return storages[storage.key]

    def tensor(
        storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any
    ) -> np.ndarray:
        whole = numbers(storage)
        end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        if min((offset, *shape, *strides)) < 0 or (0 not in shape and end > whole.size):
            raise ValueError("a tensor reaches past its numbers")
        if math.prod(shape) > whole.size:
            raise ValueError("a tensor repeats its numbers")
        steps = [stride * whole.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(whole[offset:], shape, steps, writeable=False)

    known: dict[str, Callable[..., Any] | _Storage] = {
        "collections.OrderedDict": collections.OrderedDict,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_parameter": lambda data, *rest: data,
        **{f"torch.{name}": _Storage(dtype) for name, dtype in _STORAGES.items()},
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in known:
                raise _MoreThanTensorsError(f"{module}.{name}")
            return known[f"{module}.{name}"]

        def persistent_load(self, pid: Any) -> _Storage:
            _, storage, key, *_ = pid
            return _Storage(storage.dtype, str(key))

    try:
        pickled = archive.read(names["data.pkl"])
        _check_memo(pickled)
        content = Unpickler(io.BytesIO(pickled)).load()
        found = Tensors()
        found.update(_tensors_of(content))
    except _MoreThanTensorsError as error:
        raise ValueError(f"{path} holds more than tensors ({error}), which is not run; {_CONVERT}") from None
    except zipfile.BadZipFile:
        raise
    except Exception as error:  # whatever a pickle that was made to harm can raise
        raise ValueError(f"{path} is no file of PyTorch tensors ({type(error).__name__})") from None
    return found


def _check_memo(pickled: bytes) -> None:
    """Refuses numbers of remembered objects past their count, for which `pickle` would make room."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(pickled):
            raise ValueError("a pickle asks for too much memory")


class _MoreThanTensorsError(Exception):
    """A pickle names something that makes no tensor."""


def _tensors_of(content: Any) -> Mapping[str, np.ndarray]:
    """What a file holds, which must be tensors by name, perhaps under the name that trainers give it."""
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(one, np.ndarray) for name, one in content.items()
    ):
        raise TypeError("expected tensors by name")
    return content
