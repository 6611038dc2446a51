"""Eight simulated devices, in several meshes, decode the same tokens as one."""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxspec.console.errors import Guard
from jaxspec.io import checkpoint
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import method_files
from jaxspec.loading.loading import fit_to_mesh, place_params
from jaxspec.measuring import aot
from jaxspec.measuring.aot import model_shape
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.sharding import left_whole, spread_config, with_copies, without_copies
from tests import gguf_files, python, refused, tiny, variables, xla
from tests.commands import CONFIG, PROMPT, called, one_error, write_tiny
from tests.random_grammars import greedy_text, table

# Data × model, for two key/value heads with four query heads each.
MESHES = ("1x8", "2x4", "4x2", "8x1")
# One row per device along the data axis, and a single row.
PROMPTS = [[5], [7, 1, 7, 1, 7, 1, 7, 2], [3, 3], [2, 9, 4], [11], [1, 2, 1, 2, 1], [14, 0], [6, 5, 6]]
PRODUCT = [(name, mesh) for name in tiny.DRAFTERS for mesh in MESHES]
# A lookup, and on the blocks of families a draft with a cache of its own, one in the cache of the target, and a head.
CASES = [*zip(("granite:eagle3", "gemma:draft-model", "olmo:layerskip", "ngram"), MESHES, strict=True)]
# The arguments of a table in which some tokens are certain.
TABLE = (6, 16, 6, 14, 0.05)
DRAFTERS = """
import dataclasses, json, sys

import jax

from jaxspec import LanguageModel
from jaxspec.model import llama
from jaxspec.model.sharding import spread
from tests import tiny
from tests.core.test_mesh import TABLE
from tests.random_grammars import table

assert jax.device_count() == 8
made = {}
for name, mesh in json.loads(sys.argv[1]):
    try:
        block, _, name = name.rpartition(":")
        plain = dataclasses.replace(tiny.config_of(name), vocab_size=16, num_heads=8)
        plain = tiny.with_block(block, plain) if block else plain
        shape, auto = map(int, mesh.split("x")), jax.sharding.AxisType.Auto
        over = jax.make_mesh(tuple(shape), ("data", "model"), axis_types=(auto, auto))
        if (plain, mesh) not in made:
            config, params = spread(over, plain, tiny.params(plain))
            made[plain, mesh] = LanguageModel(config, params, mesh=over)
        lm = made[plain, mesh]
        whole = jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec())
        drafter, own = jax.device_put(tiny.drafter_of(name, config=lm.config), whole)
        prompts = json.loads(sys.argv[2])
        rows = lm.generate(prompts, max_new_tokens=10, method=(drafter, own))
        found = {"texts": [row.tokens for row in rows], "drafted": sum(r.statistics.num_draft_tokens for r in rows)}
        if name in ("ngram", "grammar"):
            rows = lm.generate(prompts[:2], max_new_tokens=10, method=(drafter, own), grammar=[table(*TABLE), None])
            found["under_a_grammar"] = [row.tokens for row in rows]
            found["drafted"] += rows[0].statistics.num_draft_tokens
    except Exception as error:
        found = {"error": repr(error)}
    print(json.dumps(found), flush=True)
"""
BYTES = """
import jax

from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import init_params
from jaxspec.model.sharding import spread

model = LlamaConfig(512, 64, 192, 2, num_heads=8, num_kv_heads=2, head_dim=8)
params = init_params(model, jax.random.key(0))
whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
for shape in ((1, 8), (2, 4), (4, 2), (8, 1)):
    config, spread_out = spread(jax.make_mesh(shape, ("data", "model")), model, params)
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(spread_out):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(leaf.sharding.mesh.axis_types) == {jax.sharding.AxisType.Auto}
    print(config.kv_copies, max(held.values()) * shape[1] / whole)
"""
BY_NAME = """
import dataclasses

import jax

from jaxspec import LanguageModel
from jaxspec.measuring.bench import steps
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.programs import buckets, compiled
from jaxspec.io.trained_for import TrainedFor
from jaxspec.loading.loading import with_adapter
from jaxspec.model import lora
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import quantise
from jaxspec.model.sharding import spread, with_copies
from jaxspec.protocol import Weights
from jaxspec.testing import reference
from tests import tiny

mesh = jax.make_mesh((2, 4), ("data", "model"))  # whose axes are Explicit
config = dataclasses.replace(tiny.TARGET, vocab_size=16, num_heads=8)
small = dataclasses.replace(tiny.SMALL, vocab_size=16, num_kv_heads=4)
models = []
for one, name, exits in ((config, "target", ()), (small, "draft", ()), (config, "sorted", (1, 2))):
    held, params = spread(mesh, one, tiny.params(one))
    models.append(LanguageModel(held, params, mesh=mesh, name=name, trained_for=TrainedFor(exits)))
    assert models[-1].fingerprint == LanguageModel(one, tiny.params(one)).fingerprint
lm, draft, sorted_draft = models
weights = lm.params["layers"][0]["attention"]["qkv"]
assert weights.sharding.spec[0] == "model" and len(weights.sharding.device_set) == 8
prompts = [[5], [7, 1, 7, 1, 7, 1, 7, 2]]
expected = [reference.greedy(config, tiny.params(config), prompt, 10) for prompt in prompts]
for options in (
    {"method": "draft-model", "num_draft_tokens": 2, "draft": draft},
    {"method": "quantised", "num_draft_tokens": 2, "draft_bits": 4},
    {"method": "s2d", "num_draft_tokens": 2, "draft": sorted_draft},
    {"method": "adaspeed", "num_draft_tokens": 2, "exit_layer": 1},
):
    rows = lm.generate(prompts, max_new_tokens=10, **options)
    assert [row.tokens for row in rows] == expected, options
    assert all((row.gamma is None) == (options["method"] != "adaspeed") for row in rows)
    print(options["method"])

# Weights in int8, and their scales, lie where the weights would.
int8 = quantise(config, tiny.params(config))
held, params = spread(mesh, config, int8)
weights = params["layers"][0]["attention"]["qkv"]
assert weights.packed.sharding.spec[0] == weights.scale.sharding.spec[0] == "model"
small_lm = LanguageModel(held, params, mesh=mesh)
for prompt in prompts:
    expected_so = reference.greedy(config, int8, prompt, 10)
    for options in ({}, {"method": "layerskip", "num_draft_tokens": 2, "exit_layer": 1}):
        assert small_lm.generate(prompt, max_new_tokens=10, **options).tokens == expected_so
print("int8")

# An adapter is whole on each device.
own = tiny.adapter(config)
alone = LanguageModel(config, lora.adapted(config, tiny.params(config), own))
held, params = spread(mesh, config, tiny.params(config))
params = with_adapter(held, params, with_copies(held, own), mesh.devices.flat[0], mesh)
both = LanguageModel(held, params, mesh=mesh)
assert held.kv_copies == 2 and both.fingerprint == alone.fingerprint != lm.fingerprint
options = {"max_new_tokens": 10, "method": "layerskip", "num_draft_tokens": 2, "exit_layer": 1}
assert [one.tokens for one in both.generate(prompts, **options)] == [
    one.tokens for one in alone.generate(prompts, max_new_tokens=10)
]
print("adapter")

# A long prompt that is fed between the rounds of its neighbour, by the target, by a draft model and by heads.
assert buckets.POLL_CHUNKS
buckets.POLL_CHUNKS, buckets.MAX_CHUNK_CPU = 1, 16
called, call = set(), lm.executables.call
lm.executables.call = lambda function, *args, **static: called.add(function) or call(function, *args, **static)
long = [3, 1, 4, 1, 5, 9, 2, 6] * 5
for options in (
    {},
    {"method": "draft-model", "num_draft_tokens": 2, "draft": draft},
    {"method": tiny.drafter_of("eagle3", config=lm.config)},
    {"method": tiny.drafter_of("dflash", config=lm.config)},
    {"method": tiny.drafter_of("uno", config=lm.config)},
):
    rows = lm.generate([*prompts, long], max_new_tokens=[1, 10, 10], max_batch=2, **options)
    assert rows[1].tokens == expected[1]
    assert rows[2].tokens == reference.greedy(config, tiny.params(config), long, 10)
assert {compiled.start_prefill, compiled.feed, compiled.end_prefill} <= called
print("fed")

# What is timed is decoding too, on the same devices, and compiles once.
timed = (
    steps.Steps(lm, Weights(lm.params), AutoregressiveDrafter()),
    steps.SubmodelSteps(lm, LayerPlan.skipping(2)),
)
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **more: events.append(name))
for loop in timed:
    loop()
    assert "/jax/core/compile/backend_compile_duration" in events
    events.clear()
    loop()
    assert "/jax/core/compile/backend_compile_duration" not in events
print("timed")
"""


def on_eight_devices(script, *arguments):
    """Returns the output lines of a script in a separate process with eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = variables(XLA_FLAGS=flags) | xla.shared_programs()
    done = python("-c", script, *arguments, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.full
def test_wrong_meshes(capsys, tmp_path_factory):
    """Each is an error of one line; a mesh of one device is one device."""

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


@functools.cache
def decoded(cases):
    """The results of each drafter on its mesh, all from one process."""
    lines = on_eight_devices(DRAFTERS, json.dumps(cases), json.dumps(PROMPTS))
    return dict(zip(cases, map(json.loads, lines), strict=True))


def check_decoded(name, found):
    block, _, name = name.rpartition(":")
    config = dataclasses.replace(tiny.config_of(name), vocab_size=16, num_heads=8)
    config = tiny.with_block(block, config) if block else config
    assert found.get("texts") == [tiny.greedy(prompt, 10, config=config) for prompt in PROMPTS], found
    assert (found["drafted"] > 0) == (not name.startswith("autoregressive"))
    if name in ("ngram", "grammar"):
        rows = zip((table(*TABLE), None), PROMPTS, strict=False)
        assert found["under_a_grammar"] == [greedy_text(*row, config, 10, ()) for row in rows]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_mesh_decodes_as_one_device(name, mesh):
    """With more, as many and fewer devices along `model` than key/value heads, and with rows that divide or do not."""
    check_decoded(name, decoded(tuple(CASES))[name, mesh])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), PRODUCT)
def test_every_drafter_on_every_mesh(name, mesh):
    """Each has a process of its own, so that one of them can be run alone."""
    check_decoded(name, decoded(((name, mesh),))[name, mesh])


@pytest.mark.full
def test_bytes_of_a_device():
    """A device holds its share of the weights and a little more for copies of key/value heads."""
    found = [line.split() for line in on_eight_devices(BYTES)]
    assert [int(copies) for copies, _ in found] == [4, 2, 1, 1]
    assert all(1 <= float(share) <= 1.1 for _, share in found), found


@pytest.mark.parametrize(("shape", "places"), [("8b", 8), ("8b", 16), ("70b", 16), ("70b", 32)])
def test_bytes_of_a_device_at_real_sizes(shape, places):
    """For models with eight key/value heads."""
    mesh = AbstractMesh((1, places), ("data", "model"))
    one = model_shape(None, shape)
    place = aot.Place([jax.devices("cpu")[0]] * places, mesh)
    whole = 2 * llama.num_params(one.config)
    held = one.over(mesh)
    part = aot.part_bytes(place.put_params(held.params(jnp.bfloat16), held.config))
    assert 1 <= part * places / whole <= 1.1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "places", "copies", "whole"),
    [(8, 2, 8, 4, False), (9, 3, 9, 3, False), (12, 4, 6, 3, False), (8, 2, 16, 1, True), (6, 2, 4, 1, True)],
)
def test_how_often_a_head_is_held(heads, kv_heads, places, copies, whole):
    """If the mesh does not divide the query heads, each device has the whole attention, with a warning."""
    mesh = AbstractMesh((1, places), ("data", "model"))
    config = spread_config(mesh, LlamaConfig(9 * 16, 32, 9 * 16, 1, heads, kv_heads, 4))
    assert config.kv_copies == copies
    assert next(iter(left_whole(mesh, config).values())) == whole


def test_copies_of_heads_are_no_part_of_the_model(tmp_path):
    """Its name, its files, their contents and the result of the copies are the same."""
    plain = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=2, qkv_bias=True, model_type="qwen2")
    params = tiny.params(plain)
    config = spread_config(AbstractMesh((1, 8), ("data", "model")), plain)
    copied = with_copies(config, params)
    assert config.kv_copies == 4
    assert copied["layers"][0]["attention"]["qkv"].shape[0] == 8
    assert method_files.fingerprint(config, copied) == method_files.fingerprint(plain, params)
    for name, saved in {"plain": (plain, params), "copied": (config, copied)}.items():
        huggingface.save(tmp_path / name, *saved)
    for file in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "plain" / file, tmp_path / "copied" / file, shallow=False)
    jax.tree.map(
        np.testing.assert_array_equal,
        (copied, params),
        (huggingface.load_params(tmp_path / "plain", config, np.float32), without_copies(config, copied)),
    )
    quantised = place_params(
        tmp_path / "plain", config, jnp.float32, None, jax.make_mesh((1, 1), ("data", "model")), 8, None
    )
    assert method_files.fingerprint(config, *quantised) == method_files.fingerprint(plain, params)
    with refused("kv_copies 3 does not divide the 4 query heads of each key/value head"):
        dataclasses.replace(plain, kv_copies=3)


def test_a_gguf_file_is_loaded_with_copies_of_its_heads(tmp_path):
    """A GGUF file has its rows of queries and keys in another order."""
    plain = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=2)
    params = tiny.params(plain)
    config = spread_config(AbstractMesh((1, 8), ("data", "model")), plain)
    path = gguf_files.write(tmp_path / "m.gguf", plain, params)
    jax.tree.map(
        np.testing.assert_array_equal,
        with_copies(config, params),
        checkpoint.load_params(path, config, np.float32),
    )


def test_a_warning_of_a_command_is_one_line(capsys):
    def run():
        warnings.warn("mesh has\n5 places", RuntimeWarning, stacklevel=1)
        return 0

    assert Guard("jaxspec", lambda: {"mesh": "--mesh"})(run) == 0
    assert capsys.readouterr().err == "jaxspec: warning: mesh has 5 places\n"


def test_what_does_not_divide_is_said():
    mesh = AbstractMesh((1, 5), ("data", "model"))
    config = LlamaConfig(16, 32, 50, 1, 8, 2, 4)
    says = "mesh has 5 places along model, which do not divide the 8 query heads of 2 key/value heads and the"
    with pytest.warns(
        RuntimeWarning, match=f"^{says} vocabulary of 16 of mine; each device holds these whole$"
    ):
        assert fit_to_mesh(mesh, config, "mine") == config
    config = dataclasses.replace(config, intermediate_size=48)
    with refused("no part of mine can be spread over them: they divide neither the 8 query"):
        fit_to_mesh(mesh, config, "mine")
    with pytest.warns(RuntimeWarning, match="and the MLP's width 48 and"):
        fit_to_mesh(mesh, config, "draft mine", target=False)


@pytest.mark.slow
def test_methods_by_name_on_a_mesh():
    assert [line.split()[0] for line in on_eight_devices(BY_NAME)] == [
        "draft-model",
        "quantised",
        "s2d",
        "adaspeed",
        "int8",
        "adapter",
        "fed",
        "timed",
    ]
