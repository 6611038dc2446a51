"""Compiled functions outlive the process: the second run of a program does not compile again."""

from __future__ import annotations

import os

import jax

from jaxspec.io.user_cache import user_cache


def enable() -> None:
    """Switches JAX's persistent compilation cache on, in the user's cache directory (see `io.user_cache`).

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
    except OSError:
        return
    if not os.access(directory, os.W_OK | os.X_OK):  # JAX would warn at every program that it compiles
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX leaves out what compiled in less than a second, which here is most of it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
