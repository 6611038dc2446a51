"""Compiled functions outlive the process: the second run of a program does not compile again."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import warnings
from pathlib import Path
from typing import Any

import jax

from jaxspec.io.user_cache import user_cache


def enable() -> None:
    """Switches JAX's persistent compilation cache on, in the user's cache directory (see `io.user_cache`).

    A damaged entry is removed, and one warning names the directory. JAX itself never overwrites an entry that exists:
    a truncated entry, left by a full disk or a killed writer, would be compiled again at every start.

    Does nothing where JAX has a directory already (`JAX_COMPILATION_CACHE_DIR`, `jax.config`): then all of its
    settings are the user's. Nor where there is no user's cache, or it cannot be written: everything works, and
    compiles each time.
    """
    cache = user_cache()
    if jax.config.values["jax_compilation_cache_dir"] or cache is None:
        return
    directory = cache / "compiled"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):  # JAX would warn at every program that it compiles
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if "JAXSPEC_CACHE" in os.environ:  # a directory that the user has named
            _warn_about(str(directory), f"cannot be written ({error.strerror}); each start compiles again")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX leaves out what compiled in less than a second, which here is most of it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _heal()


@functools.cache  # once per process
def _heal() -> None:
    """Makes JAX remove an entry that it cannot read or could not write completely."""
    try:
        # The public API does not give the key of a failing entry.
        from jax._src import compilation_cache as jax_cache

        read, write = jax_cache.get_executable_and_time, jax_cache.put_executable_and_time
    except (ImportError, AttributeError):  # another version of JAX: its entries are used, and not healed
        return

    @functools.wraps(read)
    def read_or_remove(cache_key: str, *args: Any, **more: Any) -> Any:
        try:
            return read(cache_key, *args, **more)
        except Exception:  # from zlib or XLA, depending on where the damage is
            _remove(cache_key)
            _warn_once("had damaged entries, which are removed; their programs are compiled again")
            return None, None  # JAX compiles, and writes the entry again

    @functools.wraps(write)
    def write_or_remove(cache_key: str, *args: Any, **more: Any) -> None:
        try:
            write(cache_key, *args, **more)
        except OSError as error:
            _remove(cache_key)
            _warn_once(f"cannot be written ({error.strerror}); the next start compiles again")

    jax_cache.get_executable_and_time = read_or_remove
    jax_cache.put_executable_and_time = write_or_remove


def _remove(cache_key: str) -> None:
    with contextlib.suppress(OSError):
        Path(jax.config.values["jax_compilation_cache_dir"], f"{cache_key}-cache").unlink()


@functools.cache
def _warn_about(directory: str, what: str) -> None:
    warnings.warn(f"the compile cache {directory} {what}", RuntimeWarning, stacklevel=2)


def _warn_once(what: str) -> None:
    _warn_about(jax.config.values["jax_compilation_cache_dir"], what)
