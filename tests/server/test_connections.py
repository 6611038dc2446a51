"""Connections that hold the server: heads and bodies that never come, idle ones, too many, readers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket

import pytest
from starlette.responses import Response
from starlette.routing import Route

from jaxspec.serving.server import app as app_module
from jaxspec.serving.server import run
from tests.server import FakeScheduler, application, with_fixtures

connections = pytest.importorskip("jaxspec.serving.server.connections")
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    monkeypatch.setattr(app_module, "BODY_S", 0.2)


def served(answers=None, **options):
    """Makes a test of a coroutine that takes a function that opens a connection, the scheduler, and fixtures."""

    def decorated(test):
        def run_test(**fixtures):
            scheduler = FakeScheduler()
            app, engine = application(lambda: scheduler, **options)
            app.routes.extend([] if answers is None else [Route("/answers", answers)])

            async def inside():
                bound = run.bind("127.0.0.1", 0)
                port = bound.getsockname()[1]
                server = run.Server(run.configuration(app, 1), engine, 1, "", lambda line: None)
                task = asyncio.create_task(server.serve([bound]))
                while not (server.started and engine.is_ready):
                    await asyncio.sleep(0.01)
                try:
                    with contextlib.closing(Clients(port, server.server_state.connections)) as clients:
                        await asyncio.wait_for(test(clients, scheduler, **fixtures), 60)
                finally:
                    server.should_exit = True
                    await task

            asyncio.run(inside())

        return with_fixtures(run_test, test, 2)

    return decorated


class Clients:
    """Opens connections, and closes them at the end; `connections` are those of the server."""

    def __init__(self, port, connections):
        self.port, self.connections, self._writers = port, connections, []

    async def __call__(self, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**30)
        self._writers.append(writer)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def answers(self):
        """Returns whether another client is answered."""
        reader, _ = await self(HEAD + b"Connection: close\r\n\r\n")
        return (await reader.read()).startswith(b"HTTP/1.1 200 ")

    def close(self):
        for writer in self._writers:
            writer.transport.abort()


async def end(reader):
    """Returns what comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(2**16):
            data += part
    return data


@pytest.mark.parametrize("begin", [b"", b"GET", HEAD, HEAD + b"X-A: " + b"a" * 999])
@served()
async def test_a_head_that_never_comes_is_given_up(clients, scheduler, begin):
    reader, _ = await clients(begin)
    assert await end(reader) == b""
    assert await clients.answers()


@pytest.mark.parametrize("drips", [False, True], ids=["none", "a byte at a time"])
@served()
async def test_a_head_after_a_response_is_given_up_too(clients, scheduler, drips):
    reader, writer = await clients(HEAD + b"\r\n")
    assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")

    async def drip():
        for byte in (HEAD * 99) if drips else b"":
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert await end(reader) == b""
    dripping.cancel()
    assert await clients.answers()


@served()
async def test_a_slow_text_is_no_idle_connection(clients, scheduler):
    scheduler.gate.clear()
    body = json.dumps({"prompt": "ab", "max_tokens": 3, "stream": True}).encode()
    reader, _ = await clients(REQUEST % len(body) + body)
    await reader.readuntil(b"200")
    idle, _ = await clients()
    await end(idle)
    await asyncio.sleep(0.3)
    scheduler.gate.set()
    await reader.readuntil(b"[DONE]")


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("part", [b"", b'{"prompt": '])
def test_a_body_that_never_comes_is_given_up(part, key):
    @served(key=key)
    async def test(clients, scheduler):
        reader, _ = await clients(REQUEST % 100 + part)
        found = await end(reader)
        assert found.startswith(b"HTTP/1.1 401 " if key else b"HTTP/1.1 408 ")
        error = json.loads(found.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == ("invalid_api_key" if key else "timeout")
        assert await clients.answers()

    test()


@pytest.mark.parametrize("length", [5 * 2**20, 10**19])
@served()
async def test_a_body_that_is_too_long_is_refused_before_it_comes(clients, scheduler, length, monkeypatch):
    monkeypatch.setattr(app_module, "BODY_S", 3600.0)
    reader, _ = await clients(REQUEST % length)
    assert (await end(reader)).startswith(b"HTTP/1.1 413 ")


async def running(clients, scheduler):
    """Returns the reader of a request whose text is held back until the scheduler's gate opens."""
    scheduler.gate.clear()
    body = json.dumps({"prompt": "ab", "max_tokens": 3}).encode()
    reader, _ = await clients(REQUEST % len(body) + body)
    while not scheduler.rows:
        await asyncio.sleep(0.01)
    return reader


@served()
async def test_new_connections_take_the_place_of_those_that_wait_longest(clients, scheduler, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 3600.0)
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    runs = await running(clients, scheduler)
    held = [await clients(HEAD) for _ in range(20)]
    for reader, _ in held[:-2]:
        await end(reader)
    assert await clients.answers()  # in place of one of the last two
    scheduler.gate.set()
    assert (await runs.readuntil(b"aaa")).startswith(b"HTTP/1.1 200 ")


@served()
async def test_a_connection_is_refused_where_all_others_are_served(clients, scheduler, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 1)
    runs = await running(clients, scheduler)
    refused, _ = await clients(HEAD + b"\r\n")
    assert await end(refused) == b""
    scheduler.gate.set()
    assert (await runs.readuntil(b"aaa")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("reads", [False, True])
def test_a_reader_of_a_long_response_has_time_as_long_as_it_reads(reads, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    size = 2**22

    async def test(clients, scheduler):
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            slow.setblocking(False)
            await loop.sock_connect(slow, ("127.0.0.1", clients.port))
            await loop.sock_sendall(slow, HEAD.replace(b"health", b"answers") + b"Connection: close\r\n\r\n")
            found = await loop.sock_recv(slow, 1)
            while not reads and clients.connections:
                await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(slow, 2**19):
                    found += part
                    await asyncio.sleep(0.05 if reads else 0)
        assert (len(found.partition(b"\r\n\r\n")[2]) == size) == reads

    async def answers(request):
        return Response(b"a" * size)

    served(answers)(test)()


def test_a_lack_of_descriptors_is_one_line_in_each_turn(monkeypatch, caplog):
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)
    accept, failed = socket.socket.accept, []

    def fails(listener):
        asyncio.get_running_loop().call_soon(monkeypatch.setattr, socket.socket, "accept", accept)
        failed.append(listener)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    @served()
    async def test(clients, scheduler):
        monkeypatch.setattr(socket.socket, "accept", fails)
        assert await clients.answers()

    test()

    assert len(failed) == 1
    assert [record.name for record in caplog.records if "system resource" in record.message] == ["asyncio"]
