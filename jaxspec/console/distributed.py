"""Several processes that run one command together: how they connect, which of them writes, and how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import sys
import time
from typing import Any

from jaxspec.host import processes
from jaxspec.host.messages import fitted

# Process 0 waits before it ends with an error, so that others that fail too can write their own errors.
_GRACE_S = 2.0


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Several processes that run this command together, each with its own devices: give the same command to each.

    Attributes:
      distributed: join the other processes of this job on one mesh of their devices. SLURM, Open MPI and TPU pods
        name them; elsewhere give the next three options.
      coordinator_address: the address of process 0, HOST:PORT with a free port.
      num_processes: the number of processes.
      process_id: the number of this process; 0 writes all output.
      join_timeout_seconds: the longest wait for other processes.
      heartbeat_timeout_seconds: the longest time without a heartbeat.
    """

    distributed: bool = False
    coordinator_address: str | None = dataclasses.field(default=None, metadata={"metavar": "HOST:PORT"})
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout_seconds: int = 300
    heartbeat_timeout_seconds: int = 100

    def __post_init__(self) -> None:
        given = self.coordinator_address, self.num_processes, self.process_id
        if None in given and given != (None, None, None):
            raise ValueError(
                "`coordinator_address`, `num_processes` and `process_id` go together; give all three, or "
                "`distributed` alone if SLURM, Open MPI or a TPU pod provides them"
            )
        if self.num_processes is not None and self.process_id is not None:
            if self.num_processes < 1:
                raise ValueError(f"num_processes is {self.num_processes}; give at least 1")
            if not 0 <= self.process_id < self.num_processes:
                raise ValueError(
                    f"process_id is {self.process_id}; give a number from 0 to {self.num_processes - 1}"
                )
        if self.coordinator_address is not None and not _is_address(self.coordinator_address):
            raise ValueError(
                f"coordinator_address is {self.coordinator_address!r}; give HOST:PORT, such as 10.0.0.1:8476"
            )
        for name in ("join_timeout_seconds", "heartbeat_timeout_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")

    @property
    def asked(self) -> bool:
        """Whether the options ask to join other processes."""
        return self.distributed or self.coordinator_address is not None


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def options_in(command: Any) -> tuple[ProcessOptions, Any]:
    """Returns the `ProcessOptions` of a command, by default the default ones, and its mesh, by default None."""
    found, mesh = ProcessOptions(), getattr(command, "mesh", None)
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, ProcessOptions):
            found = value
        elif dataclasses.is_dataclass(value):
            inner, inner_mesh = options_in(value)
            found = inner if inner.asked else found
            mesh = inner_mesh if mesh is None else mesh
    return found, mesh


def complain(line: str) -> None:
    """Writes an error of any process to standard error as one line of at most 300 characters, with the process's number
    if there are several."""
    stream = sys.stderr
    if _joined():
        import jax

        program, _, rest = line.partition(": ")
        line = f"{program}: process {jax.process_index()}: {rest}"
        stream = sys.__stderr__ or stream
    print(fitted(line), file=stream, flush=True)


def lost(error: BaseException) -> str:
    """Returns the beginning of the message if another process's end caused the error of a collective; else ""."""
    words = r"Gloo|NCCL|connection|peer|heartbeat|unavailable|deadline"
    if type(error).__name__ != "JaxRuntimeError" or not re.search(words, str(error), re.I) or not _joined():
        return ""
    return "another process is lost; see its error, and start all again: "


def _joined() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and processes.several()


def join(options: ProcessOptions, mesh: str | None, command: Any = None) -> None:
    """Joins the other processes, if the options ask for it. JAX must not have looked for devices before.

    Afterwards only process 0 writes output; the others write only errors. The first Ctrl-C in any process interrupts
    all of them at their next agreement.

    Args:
      options: the options of the processes.
      mesh: the mesh over which they run.
      command: the dataclass of all options, which must be the same in each process; None to skip this check.

    Raises:
      ValueError: process 0 cannot listen at its address, there is no mesh, or a process was given another command. If
        the processes do not find each other, JAX ends this one.
    """
    if not options.asked:
        return
    if mesh is None:
        raise ValueError("several processes run on one mesh; give its axes, such as mesh=data=2,model=4")
    if options.process_id == 0 and options.coordinator_address is not None:
        _check_port(options.coordinator_address)
    # The CPU's collectives write a greeting to standard output.
    sys.stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import jax

    try:
        jax.distributed.initialize(
            options.coordinator_address,
            options.num_processes,
            options.process_id,
            initialization_timeout=options.join_timeout_seconds,
            heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
        )
    except ValueError as error:
        raise ValueError(
            f"`distributed`: neither SLURM nor Open MPI nor a TPU pod names the processes ({error}); give "
            "`coordinator_address`, `num_processes` and `process_id`"
        ) from None
    if not processes.is_first():
        from jaxspec.host import files

        files.leave_to_another()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    signal.signal(signal.SIGINT, _interrupt)
    if command is not None:
        _check_same(command)


def _check_port(address: str) -> None:
    """Refuses an address at which process 0 cannot listen: JAX may end with a segmentation fault there."""
    try:
        with socket.create_server(("", int(address.rpartition(":")[2]))):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"process 0 cannot listen at {address} ({reason}); give another `coordinator_address`"
        ) from None


def _check_same(command: Any) -> None:
    """Refuses, in all processes, commands that differ from process 0's: they would wait for each other forever."""
    mine = {"command": type(command).__name__} | _options(command)
    first = json.loads(processes.of_first(json.dumps(mine)))
    others = [name for name in dict.fromkeys([*first, *mine]) if first.get(name) != mine.get(name)]
    wrong = processes.any_of(bool(others))
    if others:
        here, there = (options.get(others[0], "missing") for options in (mine, first))
        raise ValueError(
            f"`{others[0]}` is {here} here and {there} in process 0; give each process the same command"
        )
    if wrong:
        raise ValueError(
            "another process was given another command, see its error; give each process the same"
        )


def _options(command: Any) -> dict[str, str]:
    """Returns the options except those of `ProcessOptions`, by name."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, ProcessOptions):
            continue
        if dataclasses.is_dataclass(value):
            found |= _options(value)
        else:
            found[field.name] = repr(value)
    return found


def _interrupt(number: int, frame: Any) -> None:
    processes.ask_to_stop()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(status: int) -> None:
    """Ends this process with a status if it has joined others; after success, together with them."""
    if not _joined():
        return
    import jax

    if status == 0:
        processes.wait_for_all("the end of the command")  # process 0 may still write files
        jax.distributed.shutdown()
    elif processes.is_first():
        time.sleep(_GRACE_S)  # the others end when process 0 does
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for the others, which may wait for this process.
    os._exit(status)
