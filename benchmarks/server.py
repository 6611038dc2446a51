"""Compares the server with the scheduler in Python: `python -m benchmarks.server`.

The same greedy texts are generated in turns by `Scheduler` in this process and by `jaxspec serve` in another one, with
streaming clients here: tokens per second of all streams, and the time to the first token of a single stream.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from jaxspec.console import frame
from jaxspec.console.errors import Failed
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.engine.scheduler import Scheduler
from jaxspec.host.extras import require
from jaxspec.measuring.bench import prompts as prompt_sets
from jaxspec.methods import registry

ROOT = Path(__file__).parents[1]
# Tokens of the texts whose first token is timed, and the seconds in which a server must start.
_SHORT, _START_S = 2, 600


@dataclasses.dataclass(frozen=True)
class Options:
    """Compares the server with the scheduler in Python.

    Attributes:
      model: as for jaxspec generate.
      method: of all texts.
      streams: texts that are generated at once.
      max_new_tokens: tokens per text.
      repeats: measurements of each; the median of the ratios counts.
    """

    model: str = "smollm2"
    method: str = "ngram"
    streams: int = 8
    max_new_tokens: int = 96
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Run:
    """One measurement.

    Attributes:
      first_ms: the time to the first token of a single stream.
      tokens: of all streams.
      took_ms: their time.
    """

    first_ms: float
    tokens: int
    took_ms: float

    @property
    def tokens_per_second(self) -> float:
        """The speed of all streams together."""
        return 1e3 * self.tokens / self.took_ms


def in_python(lm: LanguageModel, prompts: list[list[int]], options: Options) -> Run:
    """Measures the scheduler."""
    scheduler = Scheduler(lm, max_batch=options.streams)

    def generated(texts: list[list[int]], budget: int) -> tuple[float, float, int]:
        began, first, tokens = time.perf_counter(), 0.0, 0
        for prompt in texts:
            method = registry.make(options.method, {})
            scheduler.add(prompt, max_new_tokens=budget, method=method, temperature=0, ignore_eos=True)
        while not scheduler.idle:
            for event in scheduler.step():
                if event.piece is None:
                    raise Failed(f"generation failed: {event.error}")
                tokens += len(event.piece.token_records)
                first = first or time.perf_counter()
        return first - began, time.perf_counter() - began, tokens

    first_s, _, _ = generated(prompts[:1], _SHORT)
    _, took_s, tokens = generated(prompts, options.max_new_tokens)
    return Run(1e3 * first_s, tokens, 1e3 * took_s)


def over_http(port: int, prompts: list[list[int]], options: Options) -> Run:
    """Measures the server, with a thread per stream."""

    def generated(prompt: list[int], budget: int) -> tuple[float, int]:
        body = {"prompt": prompt, "max_tokens": budget, "method": options.method, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(connection):
            first, tokens = 0.0, 0
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            while (line := response.readline()) and line != b"data: [DONE]\n":
                first = first or time.perf_counter()
                if line.startswith(b'data: {"error"') or response.status != 200:
                    raise Failed(f"the server answered {line.decode()}")
                if b'"choices": []' in line:
                    tokens = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return first, tokens

    began = time.perf_counter()
    first_s = generated(prompts[0], _SHORT)[0] - began
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        counts = threads.map(lambda prompt: generated(prompt, options.max_new_tokens)[1], prompts)
        tokens = sum(counts)
    return Run(1e3 * first_s, tokens, 1e3 * (time.perf_counter() - began))


class ServerProcess:
    """`jaxspec serve` in a process of its own, from its start to the end of the context.

    Args:
      *options: the options of the command.
      **environment: further variables of its environment.

    Attributes:
      url: the address of the API, up to `/v1`.
      lines: the lines on standard error so far.

    Raises:
      Failed: the server has not started.
    """

    def __init__(self, *options: object, **environment: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxspec", "serve", *map(str, options)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started = threading.Event()
        self.url = ""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if not self._started.wait(_START_S) or not self.url:
            self._process.kill()
            raise Failed(f"the server has not started: {' '.join(map(str.strip, self.lines))}")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if found := re.search(r" is at (http://\S+/v1);", line):
                self.url = found[1]
                self._started.set()
        self._started.set()

    @property
    def port(self) -> int:
        """The port of the API."""
        return int(self.url.rpartition(":")[2].partition("/")[0])

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the process, on Linux."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(text.partition("VmRSS:")[2].split()[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        """Waits for the end and the last line; returns the exit status."""
        status = self._process.wait(timeout)
        self._listener.join(timeout)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


def measured(options: Options) -> dict[str, Any]:
    """Returns the medians of all runs, and of the ratios of runs beside each other."""
    require("serve", "starlette", "uvicorn", "prometheus_client")
    lm = load(options.model)
    texts = itertools.cycle(prompt_sets.sample(2))
    prompts = [lm.encode(text) for text in itertools.islice(texts, options.streams)]
    pairs: list[tuple[Run, Run]] = []
    words = ("--model", options.model, "--method", options.method, "--max-batch", options.streams)
    with ServerProcess(*words, "--port", 0) as server:
        for repeat in range(options.repeats + 1):
            pair = in_python(lm, prompts, options), over_http(server.port, prompts, options)
            if repeat:  # the first compiles
                pairs.append(pair)

    def median(number: Any) -> float:
        return statistics.median(number(*pair) for pair in pairs)

    return {
        "streams": options.streams,
        "python_tokens_per_second": median(lambda python, _: python.tokens_per_second),
        "server_tokens_per_second": median(lambda _, server: server.tokens_per_second),
        "overhead": median(lambda python, server: server.took_ms / python.took_ms - 1),
        "python_first_token_ms": median(lambda python, _: python.first_ms),
        "server_first_token_ms": median(lambda _, server: server.first_ms),
        "first_token_later_ms": median(lambda python, server: server.first_ms - python.first_ms),
    }


def main(options: Options) -> int:
    """Prints the figures."""
    found = measured(options)
    for name, number in found.items():
        print(f"{name:<26} {number:>10.3f}" if isinstance(number, float) else f"{name:<26} {number:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(frame.run("benchmarks.server", Options, main))
