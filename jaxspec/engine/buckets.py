"""How much room rows get: capacities are powers of two, so that few programs serve every length."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.engine.requests import RowRequest

# Below this many tokens in all a batch starts in the bucket it ends in; above, it grows as it goes.
START_CAPACITY = 512
MIN_CAPACITY = 32
# Positions fed at once by a prefill: bounds its memory. A CPU is as fast with few (see `numerics`), and pads less.
MAX_CHUNK, MAX_CHUNK_CPU, MIN_CHUNK = 256, 32, 16
# Pieces of prompts that a host poll feeds while other rows have texts to go on with.
POLL_CHUNKS = 4


def bucket(size: int, smallest: int = MIN_CAPACITY) -> int:
    """The power of two at or above `size`, at least `smallest`."""
    return max(smallest, 1 << (size - 1).bit_length())


def prefill_chunk_size(longest: int, platform: str) -> int:
    """How many positions a prefill feeds at once where the longest prompt has this many tokens."""
    return min(bucket(longest, MIN_CHUNK), MAX_CHUNK_CPU if platform == "cpu" else MAX_CHUNK)


def is_long(request: RowRequest, platform: str) -> bool:
    """Whether a prompt is fed over several host polls where it comes after another text."""
    size = len(request.prompt)
    return size > POLL_CHUNKS * prefill_chunk_size(size, platform)


def start_capacity(requests: Sequence[RowRequest], reach: int) -> int:
    """Tokens per row that a batch starts with: room for all of a short one, else for its prompts and a round.

    `reach`: of the drafter, slots that a round may write past the committed tokens.
    """
    total = max(len(r.prompt) + r.max_new_tokens for r in requests) + reach
    prompt = max(len(r.prompt) for r in requests) + 1 + reach
    return bucket(total) if total <= START_CAPACITY else max(START_CAPACITY, bucket(prompt))


def must_grow(length: int, reach: int, capacity: int) -> bool:
    """Whether the next round might not fit, where the longest row has `length` tokens."""
    return length + reach > capacity


def may_grow(length: int, requests: Sequence[RowRequest], reach: int, capacity: int) -> bool:
    """Whether it is time to compile for the next bucket: from half of this one on, as most texts end before, and only
    if one of the requests may need it."""
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    return 2 * length > capacity and must_grow(longest, reach, capacity)
