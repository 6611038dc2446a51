"""Processes that do not find each other end with one line that has the address, within the given time."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxspec.console import rendezvous
from jaxspec.console.rendezvous import meet


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return f"127.0.0.1:{port}"


def met(address, *processes, timeout=20):
    """Returns each process's error message, for processes (count, number); None for one that met the others."""

    def one(process):
        try:
            meet(address, *process, timeout)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


APART = "the processes do not find each other, give each the address of process 0 and the same number of processes: "


def test_all_come(address):
    """They meet twice at one address, which is free again at once."""
    for _ in range(2):
        assert met(address, (3, 0), (3, 1), (3, 2)) == [None] * 3
    assert met(address, (1, 0)) == [None]


def test_nobody_comes(address):
    assert met(address, (3, 0), timeout=0.3) == [
        f"{APART}process 1, 2 did not come to {address} within 0.3 seconds"
    ]
    (said,) = met(address, (3, 1), timeout=0.3)
    assert said.startswith(f"{APART}process 0 did not answer at {address} within 0.3 seconds (")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ((4, 2), "process 0 was given num_processes=3"),
        ((3, 1), "another process has this process_id"),
    ],
)
def test_one_that_is_not_expected(address, other, why):
    """It reports the error at once; the expected processes wait for the missing one."""
    said = met(address, (3, 0), (3, 1), other, timeout=0.6)
    assert said[0] == f"{APART}process 2 did not come to {address} within 0.6 seconds"
    assert f"{APART}{why}, at {address}" in said[1:]


def test_port_in_use():
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (said,) = met(address, (2, 0))
        assert said.startswith(f"process 0 cannot listen at {address} (")
        assert said.endswith("; give another coordinator_address")
        # `taken` listens there but does not answer.
        (said,) = met(address, (2, 1), timeout=0.3)
        assert said.startswith(f"{APART}process 0 did not answer at {address} within 0.3 seconds")


def test_no_such_host():
    (said,) = met("no.such.host.invalid:8476", (2, 1), timeout=0.3)
    assert said.startswith(f"{APART}process 0 did not answer at no.such.host.invalid:8476")


def test_a_host_name_that_is_none():
    (said,) = met(f"{'a' * 300}:1234", (2, 1), timeout=0.2)
    assert said.startswith(f"{APART}process 0 did not answer at ")


@pytest.mark.full
def test_strangers(address, monkeypatch):
    """Other programs that connect are not processes of the run; a silent one delays the others only briefly."""
    monkeypatch.setattr(rendezvous, "_GREETING_S", 0.2)
    host, _, port = address.partition(":")

    def turned_away(said):
        """Returns the answer to another program, which attempts it until process 0 listens."""
        for _ in range(200):
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection((host, int(port)), timeout=10) as connection,
            ):
                connection.sendall(said)
                return connection.recv(100)
            time.sleep(0.05)
        return None

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, address, 2, 0, 20)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b""):
            assert turned_away(said) == b"no: process 0 was given num_processes=2\n"
        assert met(address, (2, 1)) == [None]
        assert waiting.result() is None
