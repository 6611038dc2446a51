"""Keeps the weights that were made from a model's files, so that the next process maps them instead of making them.

Only weights that take time to make are kept: dequantised ones of a GGUF file, and int8 ones with the channels that
their products compute apart. Only a CPU uses them in place. There is one file for each model and form, in the user's
cache beside the stored programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.host import files
from jaxspec.host.user_cache import drop_unused, mark_used, user_cache
from jaxspec.io.gguf.container import is_gguf
from jaxspec.io.methods.method_files import Sampled
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.programs import stored_programs

# JAX takes an array with this alignment to a CPU device without a copy.
_ALIGNED = 64
# The most of the disk's free space that the files may take; those that were used least recently are removed.
_SHARE = 0.1


class ReadyWeights:
    """The file of a model's weights in one form.

    Args:
      source: the model's directory or GGUF file.
      config: its configuration.
      dtype: of the weights.
      device: on which they are put.
      bits: of quantised matrices; None if they are in `dtype`.
    """

    def __init__(
        self, source: Path, config: LlamaConfig, dtype: np.dtype, device: jax.Device, bits: int | None
    ) -> None:
        self._device = device
        self._path: Path | None = None
        cache, version = user_cache(), stored_programs.version()
        if cache is None or not version or device.platform != "cpu" or not (bits or is_gguf(source)):
            return
        source = source.resolve()
        name = repr((str(source), str(dtype), device.platform, bits))
        self._path = cache / "weights" / hashlib.sha256(name.encode()).hexdigest()[:32]
        # The dtype of the cache is no property of the weights.
        plain = dataclasses.replace(config.plain, kv_cache_dtype="auto")
        self._made_from = repr((version, plain, files.identity(source, 1)))

    def read(self) -> tuple[Params, Sampled | None] | None:
        """Returns the weights and the rows sampled for the fingerprint; None if none are kept of these files."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            with open(self._path, "rb") as file:
                digest, size = file.read(32), int.from_bytes(file.read(8), "little")
                header = file.read(size)
                if hashlib.sha256(header).digest() != digest:
                    return None  # damaged: the weights are made and kept again
                made_from, tree, arrays, sampled, end = pickle.loads(header)
                # The open file is mapped, because another process may replace the one of this name.
                content = np.asarray(np.memmap(file, np.uint8, "r"))[_aligned(40 + size) :]
        except Exception:  # it cannot be read, or its classes are those of another version
            return None
        if made_from != self._made_from or content.size != end:
            return None
        mark_used(self._path)

        def leaf(index: int) -> jax.Array:
            dtype, shape, begin = arrays[index]
            part = content[begin : begin + math.prod(shape) * dtype.itemsize]
            placed: jax.Array = jax.device_put(part.view(dtype).reshape(shape), self._device)
            return placed

        return jax.tree.map(leaf, tree), sampled

    def keep(self, params: Params, sampled: Sampled | None) -> None:
        """Writes the weights in a thread that does not delay the end of the process, if there is room for them."""
        if self._path is not None and files.written_here():
            leaves, structure = jax.tree.flatten(params)
            tree = jax.tree.unflatten(structure, range(len(leaves)))
            arguments = [np.asarray(one) for one in leaves], tree, sampled
            threading.Thread(target=self._write, args=arguments, name="jaxspec-weights", daemon=True).start()

    def _write(self, leaves: list[np.ndarray], tree: Any, sampled: Sampled | None) -> None:
        assert self._path is not None
        arrays, end = [], 0
        for one in leaves:
            arrays.append((one.dtype, one.shape, end))
            end += _aligned(one.nbytes)
        header = pickle.dumps((self._made_from, tree, arrays, sampled, end))
        begin = hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header
        begin = begin.ljust(_aligned(len(begin)), b"\0")
        # A full disk costs the next process the time to make them.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            size = len(begin) + end
            if (others := self._budget() - size) < 0:
                return
            drop_unused(self._path.parent, others)
            with files.atomic(self._path) as file:
                file.write(begin)
                for one in leaves:
                    file.write(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data)
                    file.write(bytes(_aligned(one.nbytes) - one.nbytes))

    def _budget(self) -> int:
        """Returns the most bytes that the files of all models may have."""
        assert self._path is not None
        directory = self._path.parent
        used = sum(one.stat().st_size for one in directory.iterdir())
        return int(_SHARE * (shutil.disk_usage(directory).free + used))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
