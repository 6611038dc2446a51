"""Cache capacities per row: powers of two, so that few programs serve all lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxspec.engine.requests import RowRequest

# A batch whose rows need at most this many tokens starts with its final capacity; a longer one grows during decoding.
START_CAPACITY = 512
MIN_CAPACITY = 32
# Positions per prefill call, which bound its memory. On a CPU small chunks are as fast (see `numerics`) and pad less.
MAX_CHUNK, MAX_CHUNK_CPU, MIN_CHUNK = 256, 32, 16
# Prompt chunks fed per host poll while other rows are decoding.
POLL_CHUNKS = 4


def bucket(size: int, smallest: int = MIN_CAPACITY) -> int:
    """Returns the smallest power of two that is at least `size` and `smallest`."""
    return max(smallest, 1 << (size - 1).bit_length())


def prefill_chunk_size(longest: int, platform: str) -> int:
    """Returns the positions per prefill call for a longest prompt of this many tokens."""
    return min(bucket(longest, MIN_CHUNK), MAX_CHUNK_CPU if platform == "cpu" else MAX_CHUNK)


def is_long(request: RowRequest, platform: str) -> bool:
    """Whether the prompt is fed over several host polls if it joins a running batch."""
    size = request.num_fed
    return size > POLL_CHUNKS * prefill_chunk_size(size, platform)


def start_capacity(requests: Sequence[RowRequest], reach: int) -> int:
    """Returns the initial tokens per row: the final capacity of a short batch, else that for its prompts and a round.

    `reach`: the slots that a round of the drafter may write past the committed tokens.
    """
    total = max(len(r.prompt) + r.max_new_tokens for r in requests) + reach
    prompt = max(len(r.prompt) for r in requests) + 1 + reach
    return bucket(total) if total <= START_CAPACITY else max(START_CAPACITY, bucket(prompt))


def capacities_from(capacity: int) -> list[int]:
    """Returns this initial capacity, and the larger ones up to `START_CAPACITY`."""
    larger = itertools.takewhile(
        lambda size: size <= START_CAPACITY, (capacity << n for n in itertools.count(1))
    )
    return [capacity, *larger]


def chunk_sizes_from(chunk_size: int, platform: str) -> list[int]:
    """Returns this chunk size, and the larger ones of a platform."""
    most = MAX_CHUNK_CPU if platform == "cpu" else MAX_CHUNK
    return [
        chunk_size,
        *itertools.takewhile(lambda size: size <= most, (chunk_size << n for n in itertools.count(1))),
    ]


def must_grow(length: int, reach: int, capacity: int) -> bool:
    """Whether the next round may exceed the capacity if the longest row has `length` tokens."""
    return length + reach > capacity


def may_grow(length: int, requests: Sequence[RowRequest], reach: int, capacity: int) -> bool:
    """Whether to compile for the next bucket: a request may need it, and this one is half full (most texts end
    earlier)."""
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    return 2 * length > capacity and must_grow(longest, reach, capacity)
