"""Compiled functions outlive the process: the second run of a command does not compile."""

from __future__ import annotations

import os

from jaxspec.io.user_cache import user_cache


def enable() -> None:
    """Switches JAX's persistent compilation cache on; call it before anything is compiled.

    It lies in the user's cache directory (`JAXSPEC_CACHE` for another place), unless JAX was told of one by
    `JAX_COMPILATION_CACHE_DIR`. Where it cannot be written everything works, and compiles each time.
    """
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        directory = user_cache() / "compiled"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX leaves out what compiled in less than a second, which here is most of it.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
