"""Agreement between several processes that run one program on one mesh.

They must run the same compiled programs in the same order, or all wait forever. So a decision that depends on a clock
or a signal is taken from process 0. With one process these functions have no effect.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh

_asked_to_stop = False


def several() -> bool:
    """Whether `jax.distributed.initialize` has joined this process to others."""
    import jax

    count: int = jax.process_count()
    return count > 1


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether devices of a mesh belong to other processes."""
    return mesh is not None and bool(mesh.is_multi_process)


def is_first() -> bool:
    """Whether this is process 0, which writes files and output; True for a single process."""
    import jax

    number: int = jax.process_index()
    return number == 0


def ask_to_stop() -> None:
    """Interrupts all processes at their next call of `agreed`; for a signal handler."""
    global _asked_to_stop
    _asked_to_stop = True


def agreed(mesh: Mesh | None, *numbers: float) -> tuple[float, ...]:
    """Returns the numbers of process 0; every process must call this at the same place.

    Args:
      mesh: the processes' mesh; if it is None or within this process, the process's own numbers are returned.
      numbers: the numbers of this process.

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
    """Returns the maximum of each number over the processes; the arguments are those of `agreed`."""
    return tuple(_gathered(*numbers).max(axis=0).tolist()) if spans_processes(mesh) else numbers


def _gathered(*numbers: float) -> np.ndarray:
    """Returns the numbers of each process, float64[processes, numbers]."""
    from jax.experimental import multihost_utils

    # Sent as pairs of 32-bit words, because JAX would convert float64 to float32.
    bits = np.array(numbers, np.float64).view(np.uint32)
    return np.ascontiguousarray(multihost_utils.process_allgather(bits)).view(np.float64)


def check_same(mesh: Mesh | None, what: str, content: str) -> None:
    """Refuses an input that differs between processes: they would wait for each other forever, or mix two texts.

    Args:
      mesh: as in `agreed`.
      what: the name of the input, for the message.
      content: the input of this process.

    Raises:
      ValueError: the input is not the same in all processes; all of them raise it.
    """
    if not spans_processes(mesh):
        return
    digest = int.from_bytes(hashlib.sha256(content.encode()).digest()[:6])
    found = _gathered(digest)[:, 0]
    if other := [str(number) for number, one in enumerate(found) if one != found[0]]:
        raise ValueError(
            f"{what} in process {', '.join(other)} differ from those in process 0; give the same to each process"
        )


def of_first(content: str) -> str:
    """Returns the text of process 0, such as a file's; every process must call this at the same place."""
    if not several():
        return content
    from jax.experimental import multihost_utils

    data = np.frombuffer(content.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    data = np.resize(data, size) if is_first() else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).decode() if size else ""


def any_of(wrong: bool) -> bool:
    """Whether `wrong` is true in any process; every process must call this at the same place."""
    return bool(_gathered(wrong).any()) if several() else wrong


def wait_for_all(where: str) -> None:
    """Waits until every process has reached this place, such as after process 0 has written a file that all read."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)
