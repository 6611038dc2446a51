"""Keeps compiled functions on disk, so that the next process does not compile them again."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.host.user_cache import drop_unused, mark_used, user_cache

# `bypassed.now`: whether this thread compiles without JAX's cache.
_bypass = threading.local()


def enable() -> None:
    """Switches JAX's persistent compilation cache on, in the user's cache directory (see `host.user_cache`).

    A damaged entry is removed, and one warning names the directory. JAX itself never overwrites an existing entry, so
    a program with a truncated one (full disk, killed writer) would be compiled again at every start.

    Does nothing if the user has set JAX's cache directory (`JAX_COMPILATION_CACHE_DIR`, `jax.config`), if there is no
    user's cache, or if it cannot be written. Programs are then compiled at each start.
    """
    cache = user_cache()
    if jax.config.values["jax_compilation_cache_dir"] or cache is None:
        return
    directory = cache / "compiled"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):  # JAX would warn once per compiled program
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if "JAXSPEC_CACHE" in os.environ:  # a directory that the user has named
            _warn_about(str(directory), f"cannot be written ({error.strerror}); each start compiles again")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # By default JAX skips programs that compile in less than a second, which most programs here do.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _heal()


def bypasses() -> bool:
    """Whether `enable` has switched the cache on, and `bypassed` has an effect."""
    cache = user_cache()
    found = jax.config.values["jax_compilation_cache_dir"]
    return cache is not None and found == str(cache / "compiled") and _heal()


@contextlib.contextmanager
def bypassed() -> Iterator[None]:
    """Within this context, this thread neither reads nor writes JAX's cache.

    An executable that XLA has read from a file cannot be serialised again, so programs that are kept in another way
    (`stored_programs`) are compiled without it.
    """
    _bypass.now = True
    try:
        yield
    finally:
        _bypass.now = False


@functools.cache  # once per process
def _heal() -> bool:
    """Makes JAX remove an entry that it cannot read or could not write completely; returns whether it could."""
    try:
        # The public API does not give the key of a failing entry.
        from jax._src import compilation_cache as jax_cache

        read, write = jax_cache.get_executable_and_time, jax_cache.put_executable_and_time
    except (ImportError, AttributeError):  # another version of JAX: damaged entries stay
        return False

    @functools.wraps(read)
    def read_or_remove(cache_key: str, *args: Any, **more: Any) -> Any:
        if getattr(_bypass, "now", False):
            return None, None
        try:
            if bypasses():  # else the directory is the user's own
                mark_used(_entry(cache_key))
            return read(cache_key, *args, **more)
        except Exception:  # from zlib or XLA, depending on the damage
            _remove(cache_key)
            _warn_once("had damaged entries, which are removed; their programs are compiled again")
            return None, None  # a miss: JAX compiles, and writes the entry again

    @functools.wraps(write)
    def write_or_remove(cache_key: str, *args: Any, **more: Any) -> None:
        if getattr(_bypass, "now", False):
            return
        try:
            write(cache_key, *args, **more)
            if bypasses():
                drop_unused(_entry(cache_key).parent)
        except OSError as error:
            _remove(cache_key)
            _warn_once(f"cannot be written ({error.strerror}); the next start compiles again")

    jax_cache.get_executable_and_time = read_or_remove
    jax_cache.put_executable_and_time = write_or_remove
    return True


def _entry(cache_key: str) -> Path:
    return Path(jax.config.values["jax_compilation_cache_dir"], f"{cache_key}-cache")


def _remove(cache_key: str) -> None:
    with contextlib.suppress(OSError):
        _entry(cache_key).unlink()


@functools.cache
def _warn_about(directory: str, what: str) -> None:
    warnings.warn(f"the compile cache {directory} {what}", RuntimeWarning, stacklevel=2)


def _warn_once(what: str) -> None:
    _warn_about(jax.config.values["jax_compilation_cache_dir"], what)
