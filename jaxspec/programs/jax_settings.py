"""Applies the JAX settings that this library's programs depend on, whatever the settings of the process are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

# The setting, its context manager, and the value. They fix dtype and rank promotion, the random bits of a threefry key,
# and that programs are compiled. The key implementation is not here, because `sampling.seed_key` names it.
_NEEDED: tuple[tuple[str, Callable[[Any], contextlib.AbstractContextManager[Any]], Any], ...] = (
    ("jax_enable_x64", jax.enable_x64, False),
    ("jax_numpy_rank_promotion", jax.numpy_rank_promotion, "allow"),
    ("jax_numpy_dtype_promotion", jax.numpy_dtype_promotion, "standard"),
    ("jax_threefry_partitionable", jax.threefry_partitionable, True),
    ("jax_disable_jit", jax.disable_jit, False),
)


@contextlib.contextmanager
def needed() -> Iterator[None]:
    """Traces programs of this thread with the settings that they need; restores the caller's settings at the end.

    Examples:
      >>> import jax.numpy as jnp
      >>> with jax.enable_x64(True), needed():
      ...     print(jnp.arange(2).dtype)
      int32
    """
    with contextlib.ExitStack() as stack:
        for _, context, value in _NEEDED:
            stack.enter_context(context(value))
        yield


def keep_needed() -> None:
    """Applies the settings to the whole process and all its threads: for commands, which own their process."""
    for name, _, value in _NEEDED:
        jax.config.update(name, value)
