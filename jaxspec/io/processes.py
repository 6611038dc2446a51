"""Several processes that run one program on one mesh: what they agree on, and who writes.

All of them run the same compiled programs in the same order, or all wait for ever. So what the host decides by a clock
or a signal, it decides by what process 0 saw. With one process nothing here does anything.
"""

from __future__ import annotations

import numpy as np

_asked_to_stop = False


def several() -> bool:
    """Whether this process is one of several that `jax.distributed.initialize` joined."""
    import jax

    count: int = jax.process_count()
    return count > 1


def is_first() -> bool:
    """Whether this is process 0, the one that writes and speaks; so is the only one."""
    import jax

    number: int = jax.process_index()
    return number == 0


def ask_to_stop() -> None:
    """Has all processes interrupted where they next agree on something; for a signal's handler."""
    global _asked_to_stop
    _asked_to_stop = True


def agreed(*numbers: float) -> tuple[float, ...]:
    """The numbers that process 0 gives; every process must call this, at the same place.

    Raises:
      KeyboardInterrupt: one of the processes was asked to stop; all of them raise it.
    """
    if not several():
        return numbers
    global _asked_to_stop
    from jax.experimental import multihost_utils

    # As bits: JAX would make 32 of the 64.
    bits = np.array([_asked_to_stop, *numbers], np.float64).view(np.uint32)
    given = np.ascontiguousarray(multihost_utils.process_allgather(bits)).view(np.float64)
    if given[:, 0].any():
        _asked_to_stop = False
        raise KeyboardInterrupt
    return tuple(given[0, 1:].tolist())


def wait_for_all(where: str) -> None:
    """Returns once every process is here, as where process 0 has written a file that all read."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)
