"""Reads PyTorch's `.bin` files without PyTorch and without running code from them.

Such a file is a zip archive. `data.pkl` is a pickle that describes the tensors, and `data/KEY` contains the numbers of
each storage. The pickle may call only the functions that make tensors, see `pickle_values`. A small file needs little
memory: PyTorch does not compress, and a tensor of a saved model is not larger than its storage.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.host.files import refuse_pointer
from jaxspec.host.messages import brief_errors
from jaxspec.io.archives import refuse_larger
from jaxspec.io.pickle_values import ByName, ForeignError, Maker, load
from jaxspec.io.tensors import Tensors

_STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.BoolStorage": np.dtype(bool),
}
_CONVERT = "save it as safetensors with PyTorch: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
# A pickle needs about 150 bytes for each tensor.
_MAX_PICKLE_BYTES = 4_000_000
_MAX_DIMENSIONS, _MAX_SIZE = 8, 2**31


class _Storage(NamedTuple):
    """A block of numbers that tensors share, identified by its key in the archive."""

    dtype: np.dtype
    key: str


@brief_errors()
def read_torch(path: str | os.PathLike[str]) -> Tensors:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: the file is truncated, has the format before PyTorch 1.6, or contains other objects; one line.
    """
    path = Path(path)
    refuse_pointer(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except ForeignError as error:
        raise ValueError(f"{path} has more than tensors ({error}), which is not run; {_CONVERT}") from None
    # `zipfile` raises these for a damaged archive, encryption, a later version, and an offset before the file.
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ValueError(f"{path} is truncated, or no archive of PyTorch 1.6 or later; {_CONVERT}") from None
    except (ValueError, KeyError, EOFError, OverflowError) as error:
        raise ValueError(f"{path} is not a file of PyTorch tensors: {error}") from None


def _read(path: Path, archive: zipfile.ZipFile) -> Tensors:
    refuse_larger(archive, path)
    parts = _Parts(archive)
    if parts.size("data.pkl") > _MAX_PICKLE_BYTES:
        raise ValueError(f"its data.pkl has more than {_MAX_PICKLE_BYTES} bytes")
    makers: dict[str, Callable[..., Any]] = {
        "collections.OrderedDict": lambda: ByName(),
        "torch._utils._rebuild_tensor_v2": parts.tensor,
        "torch._utils._rebuild_parameter": lambda data, requires_grad, hooks: data,
        **dict.fromkeys(_STORAGES, _refuse),
    }
    found = Tensors()
    found.update(_tensors_of(load(parts.read("data.pkl"), makers, _storage)))
    return found


def _refuse(*arguments: Any) -> None:
    """Replaces a storage type: a pickle may name it in a persistent id, but not call it."""
    raise ValueError("its pickle creates numbers outside the storages")


def _storage(pid: Any) -> _Storage:
    kind, key = pid[1:3] if isinstance(pid, tuple) and len(pid) > 2 else (None, None)
    if not (isinstance(kind, Maker) and kind.name in _STORAGES and isinstance(key, str)):
        raise ValueError("its pickle refers to storages in another way than PyTorch")
    return _Storage(_STORAGES[kind.name], key)


class _Parts:
    """The files of an archive by name, without the archive's top directory."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        self._numbers: dict[_Storage, np.ndarray] = {}

    def size(self, name: str) -> int:
        return self._entry(name).file_size

    def read(self, name: str) -> bytes:
        return self._archive.read(self._entry(name))

    def _entry(self, name: str) -> zipfile.ZipInfo:
        if name not in self._entries:
            raise ValueError(f"it lacks {name}")
        return self._entries[name]

    def _numbers_of(self, storage: _Storage) -> np.ndarray:
        if storage not in self._numbers:
            self._numbers[storage] = np.frombuffer(self.read(f"data/{storage.key}"), storage.dtype)
        return self._numbers[storage]

    def tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        requires_grad: Any = None,
        hooks: Any = None,
        metadata: Any = None,
    ) -> np.ndarray:
        """Returns a view of a storage, checked to stay within it and not to repeat its numbers.

        The last three arguments have no effect on the numbers. A pickle could repeat a call with many more of them.
        """
        if (
            not isinstance(storage, _Storage)
            or not isinstance(shape, tuple)
            or not isinstance(strides, tuple)
        ):
            raise TypeError
        if len(shape) > _MAX_DIMENSIONS or len(shape) != len(strides):
            raise ValueError("a tensor has too many dimensions")
        if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in (offset, *shape, *strides)):
            raise ValueError("a tensor has an offset, size or stride out of range")
        whole = self._numbers_of(storage)
        end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        if 0 not in shape and end > whole.size:
            raise ValueError("a tensor reaches past the end of its storage")
        if math.prod(shape) > whole.size:
            raise ValueError("a tensor is larger than its storage")
        steps = [stride * whole.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(whole[offset:], shape, steps, writeable=False)


def _tensors_of(content: Any) -> Mapping[str, np.ndarray]:
    """Returns the tensors by name, which trainers may store under `state_dict`."""
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(one, np.ndarray) for one in content.values()):
        raise ValueError("expected tensors by name")
    return content
