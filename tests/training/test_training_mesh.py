"""Training over eight simulated devices, of one process and of two, takes the steps of one device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxspec import load
from tests.core.test_mesh import on_eight_devices
from tests.engine.test_processes import begun, ended, free_address
from tests.training.test_training_run import losses_of
from training import soft
from training.heads import train as heads
from training.loop import state_sharding
from training.reports import metrics

SHAPE = (
    "--vocab-size 304 --hidden-size 32 --intermediate-size 48 --layers 2 --heads 8 --kv-heads 4 --head-dim 4 "
    "--context 64 --exits 1 2 --samples 1 --compute float32"
)
STEPS = "--window 32 --batch 4 --held-out 6 --steps 6 --every 3"
MESH = "data=2,model=4"
TRAIN = """
import json, sys

import jax

from training import soft
from training.heads import train as heads
from training.loop import state_sharding

made = state_sharding.make_sharded
def checked(*given, **how):
    found = made(*given, **how)
    if hasattr(found, "opt_state"):
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
        own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(found))
        print(own / whole)
    return found
state_sharding.make_sharded = checked
first, second = json.loads(sys.argv[1])
assert soft.main(first) == 0
assert heads.main(second) == 0
"""


@pytest.fixture(scope="module")
def folder(folder):
    """A text, and what one device makes of it: a sorted draft, and a head for it."""
    assert soft.main([*of_draft(folder, "one"), "--output", str(folder / "one")]) == 0
    assert heads.main(of_head(folder, "one-head")) == 0
    return folder


def of_draft(folder: Path, name: str) -> list[str]:
    return f"--data {folder}/text.txt --run {folder}/run-{name} {SHAPE} {STEPS}".split()


def of_head(folder: Path, name: str) -> list[str]:
    shape = "--kind eagle3 --aux-layers 1 2 2 --test-steps 2 --intermediate-size 24 --card-prompts 0 --compute float32"
    target = f"--target {folder}/one --data {folder}/text.txt"
    return f"{target} --run {folder}/run-{name} --output {folder}/{name} {shape} {STEPS}".split()


def check_same(folder: Path, one: str, other: str) -> None:
    found = [losses_of(metrics.read_metrics(folder / f"run-{name}")) for name in (one, other)]
    assert [len(records) for records in found] == [6, 6]
    for which in range(4):  # step, loss, norm of the gradient, held-out loss
        columns = [[record[which] or 0.0 for record in records] for records in found]
        np.testing.assert_allclose(*columns, rtol=3e-4)


@pytest.mark.full
def test_a_draft_and_a_head_on_a_mesh(folder):
    given = [of_draft(folder, "mesh"), of_head(folder, "mesh-head")]
    shares = on_eight_devices(TRAIN, json.dumps([[*one, "--mesh", MESH] for one in given]))
    assert len(shares) == 2
    assert max(map(float, shares)) < 0.14, shares
    check_same(folder, "one", "mesh")
    check_same(folder, "one-head", "mesh-head")


@pytest.mark.full
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one(folder, resumes):
    """They read and write the same checkpoints; process 0 writes all else, and goes on alone with what is exported."""
    output = folder / "two"
    for again in range(1 + resumes):
        if again:
            shutil.rmtree(folder / "run-two" / "checkpoints" / "6")
        shared = [*of_draft(folder, "two"), "--output", str(output), "--mesh", MESH]
        shared += ["--coordinator-address", free_address(), "--num-processes", "2"]
        pair = [begun("-m", "training.soft", *shared, "--process-id", str(one)) for one in range(2)]
        (first, _, err), (second, *said) = ended(pair)
        assert (first, second) == (0, 0), (err, said)
        assert said == ["", ""]
        assert ("resumed from step 3" in err) == again
    check_same(folder, "one", "two")
    assert (output / "README.md").is_file()
    one, two = (load(folder / name, dtype="float32").params for name in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), one, two)


def test_how_a_leaf_is_divided():
    """As the decoder does along model, and once more along data; what has no rule, over all places."""
    mesh = AbstractMesh((2, 4), state_sharding.AXES)
    found = {
        ("qkv", (4, 12, 32)): P("model", None, "data"),
        ("qkv", (2, 12, 32)): P(None, None, state_sharding.AXES),
        ("embed", (304, 32)): P("model", "data"),
        ("embed", (301, 32)): P(None, state_sharding.AXES),
        ("norm", (32,)): P(None),
        ("fc", (96, 32)): P(state_sharding.AXES, None),
        ("step", ()): P(),
        ("norm", (3,)): P(None),
    }
    assert {key: state_sharding.leaf_sharding(mesh, *key).spec for key in found} == found
    row = AbstractMesh((8, 1), state_sharding.AXES)
    assert state_sharding.leaf_sharding(row, "embed", (304, 32)).spec == P("data", None)
