"""JAX's persistent compilation cache, for some tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache


@contextlib.contextmanager
def user_cache(directory: Path | str) -> Iterator[None]:
    """Makes `directory` the user's cache and disables JAX's own cache; restores both afterwards."""
    names = [name for name in jax.config.values if "compilation_cache" in name or "persistent_cache" in name]
    before = {name: jax.config.values[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSPEC_CACHE", str(directory))
        jax.config.update("jax_compilation_cache_dir", None)
        jax_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()
