"""Several processes that run one program on one mesh: what they agree on, and who writes.

All of them run the same compiled programs in the same order, or all wait for ever. So what the host decides by a clock
or a signal, it decides by what process 0 saw. With one process nothing here does anything.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh

_asked_to_stop = False


def several() -> bool:
    """Whether this process is one of several that `jax.distributed.initialize` joined."""
    import jax

    count: int = jax.process_count()
    return count > 1


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether devices of a mesh belong to other processes."""
    return mesh is not None and bool(mesh.is_multi_process)


def is_first() -> bool:
    """Whether this is process 0, the one that writes and speaks; so is the only one."""
    import jax

    number: int = jax.process_index()
    return number == 0


def ask_to_stop() -> None:
    """Has all processes interrupted where they next agree on something; for a signal's handler."""
    global _asked_to_stop
    _asked_to_stop = True


def agreed(mesh: Mesh | None, *numbers: float) -> tuple[float, ...]:
    """The numbers that process 0 gives; every process must call this, at the same place.

    Args:
      mesh: on which they work together; where it is None, or all in this process, it has only itself to agree with.
      numbers: of this process.

    Raises:
      KeyboardInterrupt: one of the processes was asked to stop; all of them raise it.
    """
    if not spans_processes(mesh):
        return numbers
    global _asked_to_stop
    given = _gathered(_asked_to_stop, *numbers)
    if given[:, 0].any():
        _asked_to_stop = False
        raise KeyboardInterrupt
    return tuple(given[0, 1:].tolist())


def largest(mesh: Mesh | None, *numbers: float) -> tuple[float, ...]:
    """The largest that any process gives of each; otherwise as `agreed`."""
    return tuple(_gathered(*numbers).max(axis=0).tolist()) if spans_processes(mesh) else numbers


def _gathered(*numbers: float) -> np.ndarray:
    """The numbers of each process, float64[processes, numbers]."""
    from jax.experimental import multihost_utils

    # As bits: JAX would make 32 of the 64.
    bits = np.array(numbers, np.float64).view(np.uint32)
    return np.ascontiguousarray(multihost_utils.process_allgather(bits)).view(np.float64)


def check_same(mesh: Mesh | None, what: str, content: str) -> None:
    """Refuses what is another thing in one process: they would wait for each other for ever, or mix two texts.

    Args:
      mesh: as `agreed`.
      what: it is, for the message.
      content: of it, in this process.

    Raises:
      ValueError: in all processes, where it is not the same in all of them.
    """
    if not spans_processes(mesh):
        return
    digest = int.from_bytes(hashlib.sha256(content.encode()).digest()[:6])
    found = _gathered(digest)[:, 0]
    if other := [str(number) for number, one in enumerate(found) if one != found[0]]:
        raise ValueError(
            f"{what} are others in process {', '.join(other)} than in process 0; give the same to each process"
        )


def of_first(content: str) -> str:
    """The text that process 0 gives, such as what it has read; every process must call this, at the same place."""
    if not several():
        return content
    from jax.experimental import multihost_utils

    data = np.frombuffer(content.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    data = np.resize(data, size) if is_first() else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).decode() if size else ""


def any_of(wrong: bool) -> bool:
    """Whether any process says so; every process must call this, at the same place."""
    return bool(_gathered(wrong).any()) if several() else wrong


def wait_for_all(where: str) -> None:
    """Returns once every process is here, as where process 0 has written a file that all read."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)
