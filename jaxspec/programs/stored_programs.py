"""Keeps the executables of the decode loop in the user's cache, so that the next process need not trace them either.

JAX's persistent cache finds a program by its HLO, which takes a trace of the whole loop: seconds of Python. A stored
program is found by everything that the trace depends on: the function, the structure and shapes of its arguments, the
static arguments, the source code of jaxspec, versions, settings and processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from jaxspec.host import files
from jaxspec.host.processor import processor
from jaxspec.host.user_cache import drop_unused, keep, kept, mark_used, user_cache
from jaxspec.programs import compilation_cache
from jaxspec.programs.background import Worker
from jaxspec.programs.compiler_options import compiler_options

# Packages whose code is part of the key. A program with a drafter of another package is not stored.
_OWN = ("jaxspec", "jax", "jaxlib", "builtins", "collections", "flax", "numpy")
# When the sources were imported, about: a source that changed later is not what is traced.
_IMPORTED = time.time()
# The programs that `load_ahead` loads for a process.
_MOST_AHEAD = 3
# The use of this process, see `load_ahead`, followed by the names of its first programs.
_first: list[Any] = []
# The loads that `load_ahead` has begun.
_ahead: dict[tuple[Path, jax.Device], Future[Any]] = {}
# Seconds after which the programs of another version are removed.
_OLD = 14 * 86400


class Key:
    """The key of a program.

    Attributes:
      path: the file; None if the program cannot be stored.
      device: the device that it runs on.
    """

    def __init__(self, function: Callable[..., Any], args: Any, static: dict[str, Any]) -> None:
        self.path: Path | None = None
        leaves, tree = jax.tree.flatten((args, {}))
        self.device = _device(leaves)
        directory = _directory()
        if directory is None or self.device is None or not _is_own(tree):
            return
        described = repr(
            (
                function.__module__,
                getattr(function, "__qualname__", ""),
                str(tree),
                [(one.shape, str(one.dtype), bool(getattr(one, "weak_type", False))) for one in leaves],
                sorted(static.items(), key=lambda item: item[0]),
                (
                    self.device.platform,
                    self.device.device_kind,
                    self.device.id,
                    self.device.client.platform_version,
                ),
                compiler_options(args),
                [(name, getattr(jax.config, name, None)) for name in _setting_names()],
            )
        )
        if " at 0x" not in described:  # else an object without a value of its own
            self.path = (
                directory / f"{function.__name__}-{hashlib.sha256(described.encode()).hexdigest()[:32]}"
            )

    @property
    def is_stored(self) -> bool:
        """Whether there is a file."""
        return self.path is not None and self.path.is_file()

    def read(self) -> Any:
        """Returns the stored program; None if there is none. A damaged file is removed."""
        if self.path is None or self.device is None:
            return None
        ahead = _ahead.pop((self.path, self.device), None)
        program = _loaded(self.path, self.device) if ahead is None else ahead.result()
        if program is not None:
            _note(self.path)
        return program

    def shapes(self) -> Any:
        """Returns the `jax.ShapeDtypeStruct`s of the stored program's results; None if there is none."""
        return None if self.path is None else _read(self.path, lambda shapes, program: pickle.loads(shapes))

    def write(self, program: Any, shapes: Any) -> None:
        """Stores a program that was compiled without JAX's cache; nothing happens if it cannot be written.

        Args:
          program: the executable.
          shapes: of its results, a tree of `jax.ShapeDtypeStruct`s.
        """
        if self.path is None:
            return
        # A program that the backend cannot serialise, or a full disk, costs the next process a compilation.
        with contextlib.suppress(Exception):
            leaves, tree = jax.tree.flatten(shapes)
            plain = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in leaves]
            parts = jax.tree.unflatten(tree, plain), serialize_executable.serialize(program)
            content = pickle.dumps(tuple(map(pickle.dumps, parts)))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(self.path, hashlib.sha256(content).digest() + content)
            drop_unused(self.path.parents[1])  # the programs of all versions
            _note(self.path)


def load_ahead(use: Any, device: jax.Device) -> None:
    """Begins to load, in the background, the programs with which the last process of the same use began.

    Only the first call in a process counts. A program that is not needed costs a second processor its time.

    Args:
      use: JSON values that say what the process runs.
      device: where it runs.
    """
    directory = _directory()
    if directory is None or _first:
        return
    _first.append([directory.name, use])
    names, worker = kept("first", _first[0]), Worker("jaxspec-load")
    for name in names if isinstance(names, list) else ():
        path = directory / str(name)
        _ahead[path, device] = worker.submit(_loaded, path, device)


def _note(path: Path) -> None:
    """Keeps the names of the first programs of this process for `load_ahead`."""
    if 0 < len(_first) <= _MOST_AHEAD:
        _first.append(path.name)
        keep("first", _first[0], _first[1:])


def _loaded(path: Path, device: jax.Device) -> Any:
    """Returns a stored program; None if there is none."""

    def load(shapes: bytes, program: bytes) -> Any:
        devices = {"backend": device.client, "execution_devices": [device]}
        return serialize_executable.deserialize_and_load(*pickle.loads(program), **devices)

    return _read(path, load)


def _read(path: Path, use: Callable[[bytes, bytes], Any]) -> Any:
    """Returns `use(shapes, program)` of a file; None if there is none. A damaged file is removed."""
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            raise ValueError("damaged")
        mark_used(path)
        return use(*pickle.loads(content[32:]))
    except Exception:  # from pickle or XLA: the program is compiled and written again
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def version() -> str:
    """Returns the name of the stored programs of this version; "" if programs are not kept."""
    directory = _directory()
    return "" if directory is None else directory.name


def _device(leaves: list[Any]) -> jax.Device | None:
    """Returns the device of a program's arguments; None if they are on several."""
    shardings = [one.sharding for one in leaves if getattr(one, "sharding", None) is not None]
    devices = {device for one in shardings for device in one.device_set} or {jax.local_devices()[0]}
    return next(iter(devices)) if len(devices) == 1 and jax.process_count() == 1 else None


def _is_own(tree: Any) -> bool:
    """Whether all types of a structure are of packages whose versions are part of the key."""
    found = tree.node_data()
    if found is not None and found[0].__module__.partition(".")[0] not in _OWN:
        return False
    return all(map(_is_own, tree.children()))


@functools.cache
def _setting_names() -> tuple[str, ...]:
    """Returns the names of JAX's settings that may change a program."""
    return tuple(sorted(name for name in jax.config.values if "cache" not in name and "log" not in name))


def _directory() -> Path | None:
    """Returns the directory of this version's programs; None if programs are not kept."""
    cache = user_cache()
    if cache is None or not compilation_cache.bypasses() or not files.written_here():
        return None
    return _of_this_version(cache / "programs")


@functools.cache
def _of_this_version(programs: Path) -> Path | None:
    """Returns the directory of this version's programs, after removing those of versions no longer used.

    None if a source has changed since it was imported: its programs would be stored as those of the new source.
    """
    found = hashlib.sha256()
    package = Path(__file__).parents[1]
    for source in sorted(package.rglob("*.py")):
        if source.stat().st_mtime > _IMPORTED:
            return None
        found.update(str(source.relative_to(package)).encode() + source.read_bytes())
    versions = (
        jax.__version__,
        jaxlib.__version__,
        flax.__version__,
        np.__version__,
        sys.version,
        processor(),
    )
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    found.update(repr((versions, flags)).encode())
    directory = programs / found.hexdigest()[:16]
    with contextlib.suppress(OSError):
        if directory.is_dir():
            os.utime(directory)
        for other in programs.iterdir():
            if other != directory and other.stat().st_mtime < time.time() - _OLD:
                shutil.rmtree(other, ignore_errors=True)
    return directory
