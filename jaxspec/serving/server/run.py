"""Serves a model on a socket until a signal."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxspec.console import interrupts
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.scheduler import Scheduler
from jaxspec.methods import Method
from jaxspec.programs import executables
from jaxspec.serving.server.answers import scores_of
from jaxspec.serving.server.app import Api, Settings
from jaxspec.serving.server.connections import Connection
from jaxspec.serving.server.engine_thread import EngineThread
from jaxspec.serving.server.metrics import Metrics

# Connections that wait in the kernel.
_BACKLOG = 2048
# The bytes that the kernel keeps for a slow reader: with few, the server sees how much such a reader reads.
_UNREAD_BYTES = 2**17
# How much longer than the engine's limit the server waits at the end, for responses to be written.
_LAST_WRITES_S = 2


class _Listener(socket.socket):
    def listen(self, backlog: int = 1) -> None:
        """Lets connections wait in the kernel: more than asyncio accepts at once."""
        super().listen(_BACKLOG)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address, and does not listen yet.

    Raises:
      ValueError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = _Listener(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # connections inherit it
        made.bind(address)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"the server cannot use port {port} of {host} ({reason}); give --host and --port"
        ) from None
    return made


def serve(
    lm: LanguageModel,
    bound: socket.socket,
    settings: Settings,
    *,
    max_batch: int,
    max_queue: int,
    shutdown_timeout_s: float,
    address: str,
    report: Callable[[str], None],
) -> int | None:
    """Serves a model until SIGINT or SIGTERM, then finishes the requests that run.

    Args:
      lm: the model, with a tokenizer.
      bound: from `bind`.
      settings: see `app.Settings`.
      max_batch: texts that are decoded at once, for each method.
      max_queue: further texts that may wait.
      shutdown_timeout_s: the maximum number of seconds for the requests that run at the end. Then they get an error.
      address: the address of the API, for `report`.
      report: called with a line when connections are accepted, when all programs are compiled, after that for each
        program that a request compiles, and at the signal.

    Returns:
      The number of the signal.
    """
    metrics = Metrics((settings.names or (lm.name,))[0])
    began, make = time.monotonic(), functools.partial(warm_scheduler, lm, max_batch, settings.method)
    engine = EngineThread(
        make,
        max_batch + max_queue,
        metrics,
        functools.partial(scores_of, lm),
        lambda: report(
            f"ready at {address} after {time.monotonic() - began:.0f} s ({lm.executables.num_compilations} programs "
            "compiled); Ctrl-C ends the server"
        ),
    )
    app = Api(lm, engine, metrics, settings).app()
    begins = f"{lm.name} is at {address}; requests wait while the programs are compiled"
    config = configuration(app, shutdown_timeout_s)
    server = Server(config, engine, shutdown_timeout_s, begins, report)
    with _compilations_reported(engine, report):
        server.run(sockets=[bound])
    return server.signal


@contextlib.contextmanager
def _compilations_reported(engine: EngineThread, report: Callable[[str], None]) -> Iterator[None]:
    """Reports each program that a request compiles within this context, with its time."""

    class Reported(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if engine.is_ready:
                report(record.getMessage())

    log, handler = logging.getLogger(executables.__name__), Reported(logging.INFO)
    before, passes = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        log.propagate = passes


def configuration(app: ASGIApp, shutdown_timeout_s: float) -> uvicorn.Config:
    """Returns the settings of uvicorn for an application."""
    # With another loop than asyncio's, a second Ctrl-C would not end the process.
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        # asyncio accepts so many connections before a protocol learns of any, and writes as many tracebacks where there
        # are no descriptors.
        backlog=1,
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(shutdown_timeout_s) + _LAST_WRITES_S,
    )


def warm_scheduler(lm: LanguageModel, max_batch: int, method: Method) -> Scheduler:
    """Returns a scheduler whose programs for a method are compiled."""
    scheduler = Scheduler(lm, max_batch=max_batch)
    scheduler.warm_up(method=method)
    return scheduler


class Server(uvicorn.Server):
    """uvicorn's server, which lets the engine finish its requests at the end.

    Args:
      config: from `configuration`.
      engine: the engine.
      timeout_s: how long requests may run after the signal.
      begins: the line for `report` when connections are accepted.
      report: called with a line.

    Attributes:
      signal: the number of the signal; None before.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: EngineThread,
        timeout_s: float,
        begins: str,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._engine, self._timeout_s, self._begins, self._report = engine, timeout_s, begins, report
        self.signal: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        self._report(self._begins)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets the requests end, and closes the connections."""
        interrupts.is_first_line()  # this line replaces the one that a busy process writes
        requests = "1 request" if (count := self._engine.num_jobs) == 1 else f"{count} requests"
        again = f"a second {interrupts.signal_name(self.signal or signal.SIGINT)} ends the server at once"
        self._report(f"finishing {requests} within {self._timeout_s:g} seconds; {again}")
        self._engine.drain(self._timeout_s)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes the signals; the base class raises them again at the end, which would hide the exit status."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        self.signal, self.should_exit = number, True
