"""Loads a server with requests, many of them faulty, and checks each answer: `python -m tests.server.load`.

Clients cancel, disconnect, read slowly, and send bad bodies and prompts that are too long; in the middle the server is
killed and started again. In the end each request has its own text or its own error, no row is in use, and the memory
of the process has not grown.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.server.process import ServerProcess

# The share of each kind of request, in percent.
KINDS = {
    "whole": 36, "stream": 20, "cancel": 12, "disconnect": 12, "bad body": 8, "long prompt": 5, "slow reader": 7,
}  # fmt: skip
METHODS = ("autoregressive", "ngram", {"name": "ngram", "num_draft_tokens": 3})
BAD = (b"{", b"[]", b'{"prompt": "a", "beams": 2}', b'{"prompt": "a", "max_tokens": 0}', b'{"prompt": [[]]}')
NUM_PROMPTS = 12
# The seconds in which each request must be answered: somewhat more than the server's own time limit.
PATIENCE_S = 660
# In the last tenth of a long run. Before, programs for further numbers of rows are still being compiled.
MAX_GROWTH_BYTES, LONG = 16 * 2**20, 1000


@dataclasses.dataclass(frozen=True)
class Options:
    """Loads a server with requests, many of them faulty.

    Attributes:
      model: a directory with a model. Default: a tiny one with random weights.
      requests: the number of requests.
      clients: the number of clients at a time.
      kills: how often the server is killed and started again.
      max_tokens: the longest text; those whose clients go are four times as long.
      max_batch: of the server. Each number of rows has programs of its own.
      seed: of the choices.
    """

    model: str | None = None
    requests: int = 2000
    clients: int = 64
    kills: int = 1
    max_tokens: int = 40
    max_batch: int = 8
    seed: int = 0


@dataclasses.dataclass
class Report:
    """The outcomes of a run.

    Attributes:
      answered: requests with the outcome that they must have.
      problems: the others, and rows or memory that were not freed; one line each.
      retries: how often requests were sent again: after status 429, or because the server was killed.
      memory_bytes: of the process at half of the requests, then after each tenth of them.
    """

    answered: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)
    retries: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    memory_bytes: list[int] = dataclasses.field(default_factory=list)


class Again(Exception):
    """A request has to be sent again."""


class Load:
    """One run; see `Options`."""

    def __init__(self, options: Options, start) -> None:
        self._options, self._start = options, start
        self._random = random.Random(options.seed)
        self._server = start(0)
        self._up = asyncio.Event()
        self._up.set()
        self.report = Report()

    async def run(self) -> Report:
        prompts = [f"Once upon a time {number}" for number in range(NUM_PROMPTS)]
        longest = self._options.max_tokens
        bodies = [
            {"prompt": prompt, "max_tokens": self._random.randint(4, longest), "temperature": 0}
            for prompt in prompts
        ]
        # One by one, so that nothing is mixed in these.
        self._expected = [(body, await self._whole(body)) for body in bodies]
        if wrong := [text for _, text in self._expected if text.startswith("status")]:
            raise RuntimeError(wrong[0])
        kinds = self._random.choices(list(KINDS), list(KINDS.values()), k=self._options.requests)
        self._todo = collections.deque(kinds)
        self._kill_at = {
            len(kinds) * (one + 1) // (2 * (self._options.kills + 1)) for one in range(self._options.kills)
        }
        try:
            await asyncio.gather(*(self._client(number) for number in range(self._options.clients)))
            await self._check_free()
            self.report.memory_bytes.append(self._server.memory_bytes)
        finally:
            self._server.__exit__()
        *_, before, after = self.report.memory_bytes
        if self._options.requests >= LONG and after > before + MAX_GROWTH_BYTES:
            self.report.problems.append(f"the memory has grown from {before} to {after} bytes")
        return self.report

    async def _client(self, number: int) -> None:
        choose = random.Random(self._options.seed + 1 + number)
        while self._todo:
            kind = self._todo.popleft()
            done = self._options.requests - len(self._todo)
            if done in self._kill_at:
                await self._restart()
            tenths, rest = divmod(10 * done, self._options.requests)
            if tenths >= 5 and rest < 10:
                self.report.memory_bytes.append(self._server.memory_bytes)
            await self._answered(kind, choose)

    async def _restart(self) -> None:
        self._up.clear()
        port = self._server.port
        self._server.__exit__()
        self._server = await asyncio.to_thread(self._start, port)
        self._up.set()

    async def _answered(self, kind: str, choose: random.Random) -> None:
        while True:
            await self._up.wait()
            try:
                problem = await asyncio.wait_for(self._one(kind, choose), PATIENCE_S)
            except TimeoutError:  # an OSError too
                problem = f"no answer in {PATIENCE_S} seconds"
            except Again as error:
                self.report.retries[str(error)] += 1
                await asyncio.sleep(choose.random() / 2)
                continue
            except (OSError, EOFError) as error:
                self.report.retries[type(error).__name__] += 1
                await asyncio.sleep(0.05)
                continue
            break
        if problem is None:
            self.report.answered += 1
        else:
            self.report.problems.append(f"{kind}: {problem}")

    async def _one(self, kind: str, choose: random.Random) -> str | None:
        """Sends one request; returns what is wrong with the answer, or None."""
        body, text = choose.choice(self._expected)
        body = body | {"method": choose.choice(METHODS)}
        long = body | {"max_tokens": 4 * self._options.max_tokens, "ignore_eos": True}
        match kind:
            case "whole":
                return _difference(await self._whole(body), text)
            case "stream":
                return _difference(await self._stream(body), text)
            case "slow reader":
                return _difference(await self._stream(body, pause_s=0.01), text)
            case "cancel":
                await self._stream(long, most=choose.randint(1, 4))
                return None
            case "disconnect":
                async with self._sent(long):
                    await asyncio.sleep(choose.random() / 20)
                return None
            case "bad body":
                return await self._refused(choose.choice(BAD))
            case "long prompt":
                return await self._refused(json.dumps({"prompt": "word " * 3000}).encode())
        raise AssertionError(kind)

    @contextlib.asynccontextmanager
    async def _sent(self, body: object):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port, limit=2**20)
        try:
            head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
            yield reader
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, body: object) -> tuple[int, dict]:
        async with self._sent(body) as reader:
            status, data = await _status(reader), await reader.read()
        if not data:
            raise EOFError
        return status, json.loads(data)

    async def _whole(self, body: dict) -> str:
        status, found = await self._answer(body)
        return found["choices"][0]["text"] if status == 200 else f"status {status}: {found}"

    async def _refused(self, body: bytes) -> str | None:
        status, found = await self._answer(body)
        return None if status == 400 and found["error"]["message"] else f"status {status}: {found}"

    async def _stream(self, body: dict, pause_s: float = 0.0, most: int | None = None) -> str:
        """Returns the text of a stream, or of its first chunks."""
        text, reason, count = "", None, 0
        async with self._sent(body | {"stream": True}) as reader:
            assert await _status(reader) == 200
            async for line in reader:
                event = line.removeprefix(b"data: ").decode().strip()
                if event == "[DONE]" or count == most:
                    return text if reason or count == most else "no finish reason"
                found = json.loads(event or "{}")
                if "error" in found:
                    return f"error: {found}"
                for choice in found.get("choices", ()):
                    text, reason, count = text + choice["text"], choice["finish_reason"], count + 1
                await asyncio.sleep(pause_s)
        raise EOFError

    async def _check_free(self) -> None:
        """Waits until no text runs or waits: rows of clients that have gone become free at once."""
        for _ in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            lines = (await reader.read()).decode().splitlines()
            writer.close()
            counts = [line for line in lines if line.startswith("vllm:num_requests")]
            if not any(float(line.split()[-1]) for line in counts):
                return
            await asyncio.sleep(0.05)
        self.report.problems.append(f"rows are in use in the end: {counts}")


async def _status(reader) -> int:
    """Returns the status of an answer, after its head."""
    if not (line := await reader.readline()):
        raise EOFError
    while await reader.readline() not in (b"\r\n", b""):
        pass
    if b" 429 " in line:
        raise Again("status 429")
    return int(line.split()[1])


def _difference(found: str, expected: str) -> str | None:
    return None if found == expected else f"{found!r} instead of {expected!r}"


def run(options: Options) -> Report:
    """Runs a load."""
    with tempfile.TemporaryDirectory() as folder:
        given = options.model
        if given is None:
            from tests.commands import write_model, write_tokenizer

            directory = write_model(Path(folder) / "tiny")
            write_tokenizer(directory)
            given = str(directory)

        def start(port: int) -> ServerProcess:
            limits = ("--max-batch", options.max_batch, "--max-queue", 32)
            environment = {"JAX_PLATFORMS": "cpu", "JAXSPEC_CACHE": f"{folder}/cache"}
            return ServerProcess("--model", given, "--port", port, *limits, **environment)

        async def inside() -> Report:
            return await Load(options, start).run()

        return asyncio.run(inside())


def work(options: Options) -> int:
    """Prints the report; returns the exit status."""
    began = time.perf_counter()
    report = run(options)
    print(f"{report.answered} of {options.requests} requests answered in {time.perf_counter() - began:.0f} s")
    print("sent again: " + ("  ".join(f"{why} {count}" for why, count in report.retries.items()) or "none"))
    print("memory, MiB: " + " ".join(f"{one / 2**20:.0f}" for one in report.memory_bytes))
    print("\n".join(report.problems[:20]) or "no problems")
    return bool(report.problems)


if __name__ == "__main__":
    from jaxspec.console import frame

    sys.exit(frame.run_command("tests.server.load", Options, work))
