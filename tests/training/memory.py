"""Measures the memory of devices and host while the trainer loads, begins, resumes and exports.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.training.memory

prints a line of JSON per phase: the peak of the bytes of live arrays on any device, with the temporaries of the
compiled initialisation, as a multiple of the device's share of the final state; and the peak of the host's own arrays
while parameters are read, as a multiple of one device's shards of them.
"""

from __future__ import annotations

import collections
import functools
import gc
import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.io.hf import huggingface
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.programs import buckets
from tests import gguf_files
from tests.training.test_training_run import STORIES as TEXT
from training import export as exporting
from training import soft, start
from training.data import bpe_tokenizer
from training.loop import state_sharding
from training.loop.checkpoints import Checkpoints

# The largest matrix is less than an eighth of all parameters, as in real models.
CONFIG = LlamaConfig(
    vocab_size=304,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=64,
    bos_token_id=bpe_tokenizer.BOS_ID,
    eos_token_ids=(bpe_tokenizer.EOS_ID,),
)
STEPS = "--window 32 --batch 8 --held-out 6 --every 1 --compute float32"


class Meter:
    """The peaks of memory by phase, in bytes."""

    def __init__(self) -> None:
        self.phase = ""
        self.device: dict[str, int] = collections.defaultdict(int)
        self.host: dict[str, int] = {}

    def look(self, more: int = 0) -> None:
        """Counts the live arrays of each device, and `more` bytes."""
        held: dict[Any, int] = collections.defaultdict(int)
        seen = set()
        for array in jax.live_arrays():
            for shard in array.addressable_shards:
                key = shard.device, shard.data.unsafe_buffer_pointer()
                if shard.data.nbytes and key not in seen:
                    seen.add(key)
                    held[shard.device] += shard.data.nbytes
        self.device[self.phase] = max(self.device[self.phase], more + max(held.values(), default=0))

    @contextmanager
    def during(self, phase: str, host: bool = False) -> Iterator[None]:
        """Looks at the begin and the end of a phase, and at each transfer to a device in between."""
        outer, self.phase = self.phase, phase
        self.look()
        if host:
            tracemalloc.start()
        try:
            yield
        finally:
            if host:
                self.host[phase] = max(self.host.get(phase, 0), tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            self.look()
            self.phase = outer

    def wrap(self, module: Any, name: str, phase: str) -> None:
        """Makes a function of a module a phase."""
        function: Callable[..., Any] = getattr(module, name)

        @functools.wraps(function)
        def wrapped(*given: Any, **how: Any) -> Any:
            with self.during(phase):
                return function(*given, **how)

        setattr(module, name, wrapped)


METER = Meter()


def _misaligned(array: Any) -> Any:
    """Returns a host array that a CPU device copies, as other devices do, where it would use an aligned one itself."""
    if not isinstance(array, np.ndarray):
        return array
    memory = np.empty(array.nbytes + 64, np.uint8)
    begin = (array.itemsize - memory.ctypes.data) % 64
    moved = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def watch() -> None:
    """Measures the functions of the trainer from now on."""
    put = jax.device_put

    def watched_put(array: Any, *given: Any, **how: Any) -> Any:
        if tracemalloc.is_tracing():  # counting arrays takes memory of the host
            return put(_misaligned(array), *given, **how)
        found = put(array, *given, **how)
        METER.look()
        return found

    made = state_sharding.make_sharded

    def watched_made(mesh: Any, make: Any, *given: Any, donate: bool = False) -> Any:
        program = state_sharding.maker(mesh, make, *given, donate=donate).lower(*given)
        memory = program.compile().memory_analysis()
        with METER.during("first state"):
            METER.look(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
            return made(mesh, make, *given, donate=donate)

    # A cache of the usual 512 slots is larger than a device's share of this model.
    buckets.START_CAPACITY = 64
    jax.device_put = watched_put
    state_sharding.make_sharded = watched_made
    METER.wrap(start, "start_model", "parameters")
    METER.wrap(soft, "load_target", "target")
    METER.wrap(Checkpoints, "resume", "resume")
    METER.wrap(exporting, "export", "export")


def report(job: str, final_bytes: float, params: int) -> None:
    """Prints the phases of a job: device peaks as multiples of the final state, host peaks of one device's shards."""
    share, shards = final_bytes / jax.device_count(), 4 * params / jax.device_count()
    for phase, peak in METER.device.items():
        host = METER.host.get(phase)
        row = {"job": job, "phase": phase, "device": round(peak / share, 3)}
        print(json.dumps(row | ({} if host is None else {"host": round(host / shards, 3)})), flush=True)
    METER.device.clear()
    METER.host.clear()
    gc.collect()


def main() -> None:
    """Runs the jobs in a temporary directory.

    Python's collector is off, so that a reference cycle that keeps arrays always shows.
    """
    gc.disable()
    with tempfile.TemporaryDirectory() as place:
        _run(Path(place))


def _run(folder: Path) -> None:
    model, params = folder / "model", llama.init_params(CONFIG, jax.random.key(0))
    huggingface.save(model, CONFIG, params, jnp.bfloat16)
    bpe_tokenizer.save(bpe_tokenizer.train(TEXT, CONFIG.vocab_size), model, 64)
    gguf_files.write(
        folder / "model.gguf", CONFIG, params, kind=lambda name: "F32" if "norm" in name else "Q8_0"
    )
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(TEXT))
    size = llama.num_params(CONFIG)
    del params
    watch()

    mesh = state_sharding.make_mesh()
    for name in ("model", "model.gguf"):
        for host in (False, True):
            with METER.during(name, host):
                state_sharding.load_params(mesh, folder / name, CONFIG)
    report("load", 4 * size, size)

    given = (
        f"--data {folder}/text.txt --run {folder}/run --start {model} --target {model} --exits 2 4 {STEPS}"
    )
    for steps in (1, 2):
        more = f"--steps {steps} --samples 1 --output {folder}/draft"
        assert soft.main([*given.split(), *more.split()]) == 0
        report("soft" if steps == 1 else "soft, resumed", (12 + 4) * size, size)


if __name__ == "__main__":
    main()
