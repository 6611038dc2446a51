"""Several processes that run one command together: how they connect, which of them writes, and how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any, TextIO

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


class _Streams:
    """The original standard error, if this process is not the first and its streams are closed, and the filter program
    for the output of libraries."""

    errors: TextIO | None = None
    filter: subprocess.Popen[bytes] | None = None


def complain(line: str) -> None:
    """Writes an error of any process to standard error as one line of at most 300 characters, with the process's number
    if there are several."""
    if _joined():
        import jax

        program, _, rest = line.partition(": ")
        line = f"{program}: process {jax.process_index()}: {rest}"
    print(fitted(line), file=_Streams.errors or sys.stderr, flush=True)


def lost(error: BaseException) -> str:
    """Returns the beginning of the message if another process's end caused the error of a collective; else ""."""
    words = r"Gloo|NCCL|connection|peer|heartbeat|unavailable|deadline"
    if type(error).__name__ != "JaxRuntimeError" or not re.search(words, str(error), re.I) or not _joined():
        return ""
    return "another process is lost; see its error, and start all again: "


def _joined() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and processes.several()


def join(options: ProcessOptions, mesh: str | None, program: str, command: Any = None) -> None:
    """Joins the other processes, if the options ask for it. JAX must not have looked for devices before.

    Afterwards only process 0 writes output; the others write only errors. The first Ctrl-C in any process interrupts
    all of them at their next agreement.

    Args:
      options: the options of the processes.
      mesh: the mesh over which they run.
      program: the beginning of error lines.
      command: the dataclass of all options, which must be the same in each process; None to skip this check.

    Raises:
      ValueError: process 0 cannot listen at its address, there is no mesh, or a process was given another command. If
        the processes do not find each other, JAX ends this one after a line of `_FILTER`.
    """
    if not options.asked:
        return
    if mesh is None:
        raise ValueError("several processes run on one mesh; give its axes, such as mesh=data=2,model=4")
    if options.process_id == 0 and options.coordinator_address is not None:
        _check_port(options.coordinator_address)
    if not os.environ.get("JAXSPEC_DEBUG"):
        _filter_libraries(program, options)
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
    if _Streams.filter is not None:
        os.write(2, f"{_CONNECTED}\n".encode())
    if not processes.is_first():
        from jaxspec.host import files

        files.leave_to_another()
        _Streams.errors = sys.stderr
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


def _filter_libraries(program: str, options: ProcessOptions) -> None:
    """Filters the output of C++ libraries, which Python cannot catch, through another program: JAX ends this process
    with a page of text if another is lost or does not come, and the CPU's collectives write a greeting to standard
    output."""
    streams = [os.fdopen(os.dup(stream.fileno()), "w", 1) for stream in (sys.stdout, sys.stderr)]
    reader, writer = os.pipe()
    # The filter outlives this process, which does not wait for it.
    here = f"{options.coordinator_address} and {options.num_processes}, within {options.join_timeout_seconds} seconds"
    given = [program, str(options.heartbeat_timeout_seconds), _CONNECTED, here]
    command = [sys.executable, "-I", "-S", "-c", _FILTER, *given]
    _Streams.filter = subprocess.Popen(command, stdin=reader, stdout=streams[1], stderr=streams[1])
    os.close(reader)
    os.dup2(writer, 2)
    os.close(writer)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout, sys.stderr = streams


# Tells the program below that all processes have connected, so that a later failure is a lost process.
_CONNECTED = "jaxspec: all processes are here"
_FILTER = r"""
import re, signal, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
program, timeout, mark, here = sys.argv[1:]
ended, lost, skips, found = False, [], False, False
for line in sys.stdin.buffer:
    text = line.decode(errors="replace")
    if text.strip() == mark:
        found = True
    elif "Terminating process because the JAX distributed service detected fatal errors" in text:
        ended, first = True, "Failed to send RPC to coordination service" in text
    elif ended:
        if re.fullmatch(r"\s*(\S*task:)?\d+\s*", text):
            lost.append(text.strip().rpartition(":")[2])
    elif re.match(r"[IWEF]\d{4} .*", text):
        skips = re.search(r" (coordination_service\w*|preemption_sync_manager)\.cc:", text) is not None
        if not skips:
            sys.stderr.write(text)
    elif not skips:
        sys.stderr.write(text)
    sys.stderr.flush()
if ended:
    which = f"process {', '.join(lost)} has" if len(lost) == 1 else f"processes {', '.join(lost)} have"
    said = f"{which} not responded for {timeout} seconds" if lost else "another process is lost"
    if first:
        said = "process 0 has ended, or cannot be reached"
    advice = "so this one ends too; see the error of that one, and start all again"
    if not found:
        said = "the processes do not find each other"
        advice = "give each the address of process 0 and the same number of processes, and start all at about one time"
        advice += f" (here {here})"
    print(f"{program}: error: {said}, {advice}", file=sys.stderr)
"""
