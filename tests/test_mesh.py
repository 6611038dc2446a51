"""Eight simulated devices, 2 × 4, decode the same tokens as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec import LanguageModel
from jaxspec.engine import buckets, compiled
from jaxspec.model.sharding import param_shardings
from jaxspec.testing import reference
from tests import tiny

assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
config = dataclasses.replace(tiny.TARGET, vocab_size=16, num_kv_heads=4)
small = dataclasses.replace(tiny.SMALL, vocab_size=16, num_kv_heads=4)
spread = [
    LanguageModel(
        one, jax.device_put(tiny.params(one), param_shardings(mesh, one)), mesh=mesh, name=name, exits=exits
    )
    for one, name, exits in ((config, "target", ()), (small, "draft", ()), (config, "sorted", (1, 2)))
]
weights = spread[0].params["layers"][0]["attention"]["qkv"]
assert weights.sharding.spec[0] == "model" and len(weights.sharding.device_set) == 8
prompts = [[5], [7, 1, 7, 1, 7, 1, 7, 2]]
expected = [reference.greedy(config, tiny.params(config), prompt, 10) for prompt in prompts]
for options in (
    {"method": "autoregressive"},
    {"method": "ngram", "num_draft_tokens": 2},
    {"method": "draft-model", "num_draft_tokens": 2, "draft": spread[1]},
    {"method": "asd", "num_draft_tokens": 2, "alpha": 0.8, "every": 0, "keep_last": 0},
    {"method": "s2d", "num_draft_tokens": 2, "draft": spread[2]},
    {"method": "adaspeed", "num_draft_tokens": 2, "exit_layer": 1},
    {"method": "token-recycling", "tree": "5x3"},
):
    rows = spread[0].generate(prompts, max_new_tokens=10, **options)
    assert [row.tokens for row in rows] == expected, options
    assert all((row.gamma is None) == (options["method"] not in ("asd", "adaspeed")) for row in rows)
    print(options["method"])

# A long prompt that is fed between the rounds of its neighbour, by the target, by a draft model and by heads.
assert buckets.POLL_CHUNKS
buckets.POLL_CHUNKS, buckets.MAX_CHUNK_CPU = 1, 16
called, call = set(), spread[0].executables.call
spread[0].executables.call = lambda function, *args, **static: (
    called.add(function) or call(function, *args, **static)
)
long = [3, 1, 4, 1, 5, 9, 2, 6] * 5
for options in (
    {},
    {"method": "draft-model", "num_draft_tokens": 2, "draft": spread[1]},
    {"method": tiny.drafter_of("eagle3", config=config)},
    {"method": tiny.drafter_of("dflash", config=config)},
):
    rows = spread[0].generate([*prompts, long], max_new_tokens=[1, 10, 10], max_batch=2, **options)
    assert rows[1].tokens == expected[1]
    assert rows[2].tokens == reference.greedy(config, tiny.params(config), long, 10)
assert {compiled.start_prefill, compiled.feed, compiled.end_prefill} <= called
print("fed")
"""


def test_a_mesh_decodes_as_one_device():
    root = Path(__file__).parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "autoregressive",
        "ngram",
        "draft-model",
        "asd",
        "s2d",
        "adaspeed",
        "token-recycling",
        "fed",
    ]
