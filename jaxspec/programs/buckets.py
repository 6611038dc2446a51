"""Numbers of rows, cache capacities and chunks: few of each, so that few programs serve all requests."""

from __future__ import annotations

# The slots per row with which every batch starts; it grows during decoding. A step with a text of 50 tokens takes as
# long as with 64 slots, up to 1 %.
START_CAPACITY = 512
MIN_CAPACITY = 32
# A capacity is a multiple of it: the lanes of a TPU.
_TILE = 128
# Positions per prefill call, which bound its memory. On a CPU smaller chunks pad less, and take longer for each token.
MAX_CHUNK, MAX_CHUNK_CPU, MIN_CHUNK = 256, 64, 16
# Prompt chunks fed per host poll while other rows are decoding.
POLL_CHUNKS = 4


def bucket(size: int, smallest: int = MIN_CAPACITY) -> int:
    """Returns the smallest power of two that is at least `size` and `smallest`."""
    return max(smallest, 1 << (size - 1).bit_length())


def prefill_chunk_size(longest: int, platform: str) -> int:
    """Returns the positions per prefill call for a longest prompt of this many tokens."""
    return min(bucket(longest, MIN_CHUNK), MAX_CHUNK_CPU if platform == "cpu" else MAX_CHUNK)


def is_long(size: int, platform: str) -> bool:
    """Whether a prompt of `size` tokens is fed over several host polls if it joins a running batch."""
    return size > POLL_CHUNKS * prefill_chunk_size(size, platform)


def rows_for(count: int, most: int, smallest: int = 1) -> int:
    """Returns the number of rows of a batch for `count` texts: a power of four, or `most`.

    Args:
      count: at least 1.
      most: the largest number of rows, unless `count` is larger.
      smallest: the smallest number, such as the devices over which rows are spread.

    Examples:
      >>> [rows_for(count, most=8) for count in (1, 2, 4, 5, 8)]
      [1, 4, 4, 8, 8]
    """
    rows = smallest
    while rows < count:
        rows *= 4
    return max(min(rows, most), count)


def rows_below(rows: int) -> int:
    """Returns the next smaller number of rows, a power of four; 1 for 1.

    Examples:
      >>> rows_below(8), rows_below(4), rows_below(1)
      (4, 1, 1)
    """
    below = 1
    while 4 * below < rows:
        below *= 4
    return below


def capacity_for(size: int, most: int, platform: str) -> int:
    """Returns the capacity for rows of `size` tokens: `START_CAPACITY`, four times that, and so on.

    On an accelerator each later one is twice the one before, because attention reads most of the capacity there. On a
    CPU attention follows the length of the text, so four times as many slots cost memory alone. The last capacity is
    that of the longest text. One that is nearly as large is left out.

    Args:
      size: the slots that are needed.
      most: the slots that the longest text needs.
      platform: cpu, gpu or tpu.

    Examples:
      >>> [capacity_for(size, most=9000, platform="cpu") for size in (20, 512, 513, 3000)]
      [512, 512, 2048, 9088]
      >>> [capacity_for(size, most=9000, platform="gpu") for size in (20, 512, 513, 3000)]
      [512, 512, 2048, 4096]
    """
    power = START_CAPACITY
    while power < size:
        power = _after(power, platform)
    last = _whole_tiles(max(size, most))
    return power if 4 * power < 3 * last else last


def before(capacity: int, platform: str) -> int:
    """Returns the capacity from which a cache grows to this one; 0 if no cache grows to it.

    Examples:
      >>> [before(capacity, "cpu") for capacity in (512, 640, 2048, 5120, 8192)]
      [0, 0, 512, 2048, 2048]
      >>> before(8192, "tpu")
      4096
    """
    found, power = 0, START_CAPACITY
    while 4 * power < 3 * capacity:
        found, power = power, _after(power, platform)
    return found


def _after(power: int, platform: str) -> int:
    return power * (4 if platform == "cpu" or power == START_CAPACITY else 2)


def must_grow(length: int, reach: int, capacity: int) -> bool:
    """Whether the next round may exceed the capacity if the longest row has `length` tokens."""
    return length + reach > capacity


def may_grow(length: int, longest: int, reach: int, capacity: int) -> bool:
    """Whether to compile for the next capacity: a text may reach `longest` tokens, and this one is half full (most
    texts end earlier)."""
    return 2 * length > capacity and must_grow(longest, reach, capacity)


def _whole_tiles(size: int) -> int:
    return -(-size // _TILE) * _TILE
