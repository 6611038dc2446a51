"""Times streams of a server of OpenAI's protocol: `python -m benchmarks.streams URL PROMPTS.jsonl --streams 8`.

A line of the file has `messages`. Each of the streams sends the next request when its text has ended. Prints the tokens
a second of all streams, the time to the first token, and the time between pieces of a text.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any


def main() -> None:
    """Reads the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="model", help="the name that requests give")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    waiting = iter([json.loads(line) for line in given.prompts.read_text("utf-8").splitlines()])
    firsts: list[float] = []
    gaps: list[float] = []
    counts: list[int] = []
    problems: list[Exception] = []

    def stream() -> None:
        try:
            for row in waiting:
                # Some servers close it after each text.
                connection = http.client.HTTPConnection(urllib.parse.urlsplit(given.url).netloc, timeout=600)
                body = {"model": given.model, "messages": row["messages"], "temperature": 0}
                began = time.perf_counter()
                times, count = timed(connection, body | {"max_tokens": given.max_tokens})
                firsts.append(times[0] - began)
                gaps.extend(later - earlier for earlier, later in itertools.pairwise(times))
                counts.append(count)
        except Exception as error:  # raised below, by the main thread
            problems.append(error)

    threads = [threading.Thread(target=stream) for _ in range(given.streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if problems:
        raise problems[0]
    print(
        "| streams | texts | tokens | tokens/s | first token, s: median, worst "
        "| between pieces, ms: median, 99 %, worst |"
    )
    between = [1e3 * statistics.median(gaps), 1e3 * statistics.quantiles(gaps, n=100)[-1], 1e3 * max(gaps)]
    print(
        f"| {given.streams} | {len(counts)} | {sum(counts)} | {sum(counts) / seconds:.1f} "
        f"| {statistics.median(firsts):.2f}, {max(firsts):.2f} | {', '.join(f'{gap:.0f}' for gap in between)} |"
    )


def timed(connection: http.client.HTTPConnection, body: dict[str, Any]) -> tuple[list[float], int]:
    """Streams a text; returns the times at which its pieces arrived, and the number of its tokens.

    Raises:
      ValueError: the server refuses the request, or sends no text.
    """
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"the server answers {response.status}: {response.read(300)!r}")
    times: list[float] = []
    count = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if "choices" not in event:
            raise ValueError(f"the server sent {event}")
        if any(choice["delta"].get("content") for choice in event["choices"]):
            times.append(time.perf_counter())
        count = (event.get("usage") or {}).get("completion_tokens", count)
    if not times or not count:
        raise ValueError(f"the server sent no text, or no usage, for {json.dumps(body['messages'])[:80]}")
    return times, count


if __name__ == "__main__":
    main()
