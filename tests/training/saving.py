"""Measures how long a checkpoint takes to write, after which a run that gets SIGTERM may be killed.

    python -m tests.training.saving 135

prints a line of JSON for a model of 135 million parameters with the moments of AdamW, all float32: `bytes`, `busy_s`
(seconds until the training continues), `written_s` (until the checkpoint is complete) and `checksums_s` (the part of it
in which checksums are computed), and `one_thread_s`, the same with one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from training.loop import checkpoints
from training.loop.step import TrainState

# A matrix of a layer: 2**22 parameters.
WIDTH = 2048


def main(millions: int) -> None:
    """Writes a checkpoint of a model of this size into a temporary directory, and prints the times."""
    rng = jax.random.key(0)

    def drawn(number: int) -> dict[str, jax.Array]:
        count = max(1, round(1e6 * millions / WIDTH**2))
        return {
            f"w{i}": jax.random.normal(jax.random.fold_in(rng, 1000 * number + i), (WIDTH, WIDTH))
            for i in range(count)
        }

    state = jax.block_until_ready(TrainState(jnp.int32(1), drawn(0), {"mu": drawn(1), "nu": drawn(2)}))
    spent: list[float] = []
    write_checksums = checkpoints.Checkpoints._write_checksums

    def timed(kept: checkpoints.Checkpoints) -> None:
        begin = time.monotonic()
        write_checksums(kept)
        spent.append(time.monotonic() - begin)

    checkpoints.Checkpoints._write_checksums = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place, checkpoints.Checkpoints(Path(place)) as kept:
        begin = time.monotonic()
        kept.save(1, state, {}, None)
        busy_s = time.monotonic() - begin
        kept.wait()
        written_s = time.monotonic() - begin
        begin = time.monotonic()
        assert checkpoints.damage(Path(place) / "1") is None
        one_thread_s = time.monotonic() - begin
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    times = {"busy_s": busy_s, "written_s": written_s, "checksums_s": spent[0], "one_thread_s": one_thread_s}
    print(json.dumps({"bytes": size} | {name: round(value, 2) for name, value in times.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
