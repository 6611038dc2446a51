"""Connects processes by plain sockets before JAX joins them, because JAX aborts a process that cannot connect."""

from __future__ import annotations

import contextlib
import socket
import time

# Seconds between two attempts to reach process 0, and seconds that a caller has to identify itself.
_RETRY_S, _GREETING_S = 0.2, 2.0
_HERE, _GO, _NO = "jaxspec process", b"go\n", "no: "


def meet(address: str, count: int, number: int, timeout: float) -> None:
    """Waits until all processes are connected.

    Args:
      address: HOST:PORT at which process 0 listens. The port is free again when this returns.
      count: the number of processes.
      number: the number of this process, from 0.
      timeout: the longest time to wait for the others, seconds.

    Raises:
      ValueError: a process is missing after the timeout, the address cannot be used, or processes were given different
        counts or equal numbers; one line with the address.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if number == 0:
        _gather(address, int(port), count, timeout, deadline)
    else:
        _report((host.strip("[]"), int(port)), f"{_HERE} {number} of {count}", address, timeout, deadline)


def _not_connected(what: str) -> ValueError:
    return ValueError(
        "the processes do not find each other, give each the address of process 0 and the same number of processes: "
        + what
    )


def _listening(address: str, port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"process 0 cannot listen at {address} ({reason}); give another coordinator_address"
        ) from None


def _gather(address: str, port: int, count: int, timeout: float, deadline: float) -> None:
    """Runs in process 0: answers each of the others after all have connected."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listening(address, port))
        others: dict[str, socket.socket] = {}
        expected = {f"{_HERE} {number} of {count}": number for number in range(1, count)}
        while len(others) < len(expected):
            remaining = deadline - time.monotonic()
            missing = [str(number) for greeting, number in expected.items() if greeting not in others]
            late = _not_connected(
                f"process {', '.join(missing[:8])} did not come to {address} within {timeout:g} seconds"
            )
            if remaining <= 0:
                raise late
            server.settimeout(remaining)
            try:
                caller = server.accept()[0]
            except TimeoutError:
                raise late from None
            stack.enter_context(caller)
            greeting = _line(caller, _GREETING_S)
            if greeting in expected and greeting not in others:
                others[greeting] = caller
            else:
                why = "another process has this process_id"
                if greeting not in others:
                    why = f"process 0 was given num_processes={count}"
                with contextlib.suppress(OSError):
                    caller.sendall(f"{_NO}{why}\n".encode())
        for caller in others.values():
            with contextlib.suppress(OSError):
                caller.sendall(_GO)
        for caller in others.values():  # the other side closes first, so that the port is free at once
            _line(caller, _GREETING_S)


def _report(place: tuple[str, int], greeting: str, address: str, timeout: float, deadline: float) -> None:
    """Runs in the other processes: sends its number until process 0 answers."""
    reason = ""
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=remaining) as connection:
                connection.sendall(greeting.encode() + b"\n")
                answer = _line(connection, max(deadline - time.monotonic(), 0.01))
        except (OSError, UnicodeError) as error:  # an invalid host name raises UnicodeError
            answer, reason = "", f" ({(error.strerror if isinstance(error, OSError) else None) or error})"
        if answer == _GO.decode().strip():
            return
        if answer.startswith(_NO):
            raise _not_connected(f"{answer.removeprefix(_NO)}, at {address}")
        time.sleep(min(_RETRY_S, max(remaining, 0)))
    raise _not_connected(f"process 0 did not answer at {address} within {timeout:g} seconds{reason}")


def _line(connection: socket.socket, timeout: float) -> str:
    """Returns the next line of text, or the part of it that arrived before the other side stopped or closed."""
    deadline, found = time.monotonic() + timeout, b""
    with contextlib.suppress(OSError):
        while b"\n" not in found and len(found) < 200 and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            more = connection.recv(200)
            if not more:
                break
            found += more
    return found.partition(b"\n")[0].decode(errors="replace")
