"""HTTP connections that do not hold the server: an idle one is closed, and makes room when there are too many."""

from __future__ import annotations

import asyncio
import functools
import math
import os

from uvicorn.protocols.http.h11_impl import H11Protocol

# How long a connection may take for the whole head of a request, from its begin or from the end of a response.
HEAD_S = 10.0


@functools.cache
def most_connections() -> float:
    """Returns the maximum number of connections: half of the descriptors that the process has left.

    The rest is for files, and for connections that are accepted or closed at the moment.
    """
    try:
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # another system
        return math.inf
    return math.inf if most == resource.RLIM_INFINITY else max(1, (most - used) // 2)


class Connection(H11Protocol):
    """A connection that is closed if no complete head of a request comes for some seconds.

    A client has the same time to read some of the end of a response. If there are more than `most_connections`, the one
    that has waited longest for a head is closed, or the new one if none waits.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection."""
        super().connection_made(transport)
        self._wait()
        open_ones = [one for one in self.connections if not one.transport.is_closing()]
        if len(open_ones) > most_connections():
            waiting = [one for one in open_ones if isinstance(one, Connection) and one._waits]
            min(waiting, key=lambda one: one._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Takes the end of the connection."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Takes the end of a response; the next request may have begun."""
        super().on_response_complete()
        if self._waits:
            self._timer.cancel()
            self._wait()

    @property
    def _waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, self._look, self.cycle, math.inf)

    def _look(self, before: object, unread: float) -> None:
        """Ends the connection unless a request has begun, or the client reads the last response, slowly."""
        left = self.transport.get_write_buffer_size()
        if self.cycle is not before:
            return
        if 0 < left < unread:
            self._timer = self.loop.call_later(HEAD_S, self._look, before, left)
        else:
            self.transport.abort()
