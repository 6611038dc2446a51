"""Writes the response to one request while the engine thread generates: at once, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from jaxspec.host.messages import fitted
from jaxspec.serving.openai import ApiRequest, Part, Responses, joined
from jaxspec.serving.server.answers import Answer
from jaxspec.serving.server.engine_thread import Job, Pieces
from jaxspec.serving.server.metrics import metrics_of
from jaxspec.serving.server.refusals import EXPECTED, Refused, refused

_LOG = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the chunks
]
_DONE = b"data: [DONE]\n\n"
# How long the error of a stream may wait for a slow reader.
_LAST_WRITE_S = 1.0


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One request and its response.

    Attributes:
      request: the request.
      job: its job.
      answer: turns the pieces of the job into parts of the response.
      responses: builds the bodies.
      deadline: the time limit, by the clock of the event loop.
    """

    request: ApiRequest
    job: Job
    answer: Answer
    responses: Responses
    deadline: float

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the response; ends early if the client has gone.

        Raises:
          Refused: the request has failed before anything was written.
        """
        await _while_connected(
            receive, self._stream(send) if self.request.stream else self._whole(scope, send)
        )

    async def _whole(self, scope: Scope, send: Send) -> None:
        choices: list[list[Part]] = [[] for _ in range(self.answer.num_choices)]
        try:
            async with asyncio.timeout_at(self.deadline):
                async for pieces in self.job.pieces():
                    for part in await self._parts(pieces):
                        choices[part.index].append(part)
            with _failures():
                parts = [joined(own) for own in choices]
                body = self.responses.whole(parts, self.answer.usage(), metrics_of(self.job))
                response = JSONResponse(body)
        except EXPECTED as error:
            raise refused(error, self.request) from None
        await response(scope, _never, send)

    async def _parts(self, pieces: Pieces) -> list[Part]:
        """Returns the parts of new pieces; texts of single tokens are decoded beside the event loop."""
        with _failures():
            if self.request.logprobs:
                return await asyncio.to_thread(self.answer.parts, pieces)
            return self.answer.parts(pieces)

    async def _stream(self, send: Send) -> None:
        stream = _Stream(send)
        try:
            async with asyncio.timeout_at(self.deadline):
                async for pieces in self.job.pieces():
                    if not stream.began:  # the scheduler has accepted the job
                        await stream.begin()
                        await stream.write(self.responses.first_chunks())
                    parts = await self._parts(pieces)
                    await stream.write(chunk for part in parts for chunk in self.responses.chunks(part))
                await stream.write(self.responses.last_chunks(self.answer.usage(), metrics_of(self.job)))
                await stream.end()
        except EXPECTED as error:
            found = refused(error, self.request)
            if not stream.began:
                raise found from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WRITE_S):
                    await stream.write([found.body])
                    await stream.end()


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Makes an error of this program, which what a model has written may show, one of this response with status 500."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused):
            raise
        _LOG.error("the response failed", exc_info=error)
        said = fitted(f"{type(error).__name__}: {error}")
        raise Refused(500, said, code="response_failed") from None


class _Stream:
    """A response of server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send, self.began = send, False

    async def begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self.began = True

    async def write(self, chunks: Iterable[Mapping[str, Any]]) -> None:
        with _failures():
            lines = (json.dumps(chunk, ensure_ascii=False, allow_nan=False) for chunk in chunks)
            data = "".join(f"data: {line}\n\n" for line in lines).encode()
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": _DONE})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until its end, or until the client has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()  # no effect on one that has ended
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()  # raises its error


async def _never() -> Any:
    await asyncio.Event().wait()
