"""Eight simulated devices, 2 × 4, decode the same tokens as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.commands import PROMPT, called, one_error, write_tiny

SCRIPT = """
import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec import LanguageModel
from jaxspec.bench import steps
from jaxspec.drafting.autoregressive import Autoregressive
from jaxspec.engine import buckets, compiled
from jaxspec.model.plan import LayerPlan
from jaxspec.model.sharding import param_shardings
from jaxspec.protocol import Weights
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

# A long prompt that is fed between the rounds of its neighbour, by the target, by a draft model and by a head.
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
):
    rows = spread[0].generate([*prompts, long], max_new_tokens=[1, 10, 10], max_batch=2, **options)
    assert rows[1].tokens == expected[1]
    assert rows[2].tokens == reference.greedy(config, tiny.params(config), long, 10)
assert {compiled.start_prefill, compiled.feed, compiled.end_prefill} <= called
print("fed")

# What is timed is decoding too, on the same devices, and compiles once.
timed = (
    steps.Steps(spread[0], Weights(spread[0].params), Autoregressive()),
    steps.DraftSteps(spread[0]),
    steps.SubmodelSteps(spread[0], LayerPlan.skipping(2)),
)
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **more: events.append(name))
for loop, given in zip(timed, [(), (LayerPlan.skipping(2).traced(),), ()]):
    loop(*given)
    assert "/jax/core/compile/backend_compile_duration" in events
    events.clear()
    loop(*given)
    assert "/jax/core/compile/backend_compile_duration" not in events
print("timed")
"""


COMMANDS = """
import json, sys

from jaxspec.cli import main

for command in json.loads(sys.argv[1]):
    assert main(command) == 0
"""


def on_eight_devices(script, *arguments):
    """The lines that a script prints in a process of its own that sees eight devices."""
    root = Path(__file__).parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_commands_on_a_mesh(capsys, tmp_path_factory):
    """The text of a command, and what one finds of a model, are those of one device; the report names the mesh."""
    common = ["--model", str(write_tiny(tmp_path_factory)), "--json", "--max-new-tokens", "12"]
    commands = (
        ["generate", PROMPT, "--method", "layerskip", "--exit-layer", "1", *common],
        ["inspect", PROMPT, *common],
    )
    spread = [[*command, "--mesh", "data=2,model=4"] for command in commands]
    found = [json.loads(line) for line in on_eight_devices(COMMANDS, json.dumps(spread))]
    alone = [json.loads(called(capsys, *command)[1]) for command in commands]
    assert len(found[0]["tokens"]) == 12
    assert found[0]["tokens"] == alone[0]["tokens"]
    assert found[0]["text"] == alone[0]["text"]
    assert found[1]["prompts"][0]["exit_agreement"] == alone[1]["prompts"][0]["exit_agreement"]
    assert found[1]["device"] == f"{alone[1]['device']} × 8 (data 2, model 4)"


def test_wrong_meshes(capsys, tmp_path_factory):
    """One line each; a mesh of one place is one device."""

    def run(*arguments):
        return called(capsys, "generate", PROMPT, "--model", model, "--max-new-tokens", "2", *arguments)

    model = write_tiny(tmp_path_factory)
    assert "--mesh is 'data=1,model=2', which has 2 places, and JAX sees 1 cpu device; give" in one_error(
        run, "--mesh", "data=1,model=2"
    )
    for mesh in ("rows=4", "4", "", "model=0", "model=2,model=2"):
        assert "give its axes data (rows) and model (heads), such as data=1,model=4" in one_error(
            run, "--mesh", mesh
        )
    assert run("--mesh", "data=1,model=1")[0] == 0


def test_a_mesh_decodes_as_one_device():
    assert [line.split()[0] for line in on_eight_devices(SCRIPT)] == [
        "autoregressive",
        "ngram",
        "draft-model",
        "asd",
        "s2d",
        "adaspeed",
        "token-recycling",
        "fed",
        "timed",
    ]
