"""Programs for devices that are not attached: what is asked of their compilers, whether they compile, and fit."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib.util
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jaxspec.cli import main
from jaxspec.console.environment import compile_only
from jaxspec.host.extras import MissingExtra
from jaxspec.io.hf import config_json
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring import accelerators, aot
from jaxspec.measuring.accelerators import ACCELERATORS, mesh_axes, parse_topology
from jaxspec.measuring.aot import Built, ModelShape, Place
from jaxspec.methods import registry
from jaxspec.model import llama
from jaxspec.model.cache import KVCache
from jaxspec.model.config import LlamaConfig
from jaxspec.programs import compiled
from jaxspec.testing.models import TARGET
from tests.commands import called, one_error

MEGACORE = {"platform": "tpu", "chip_config_name": "megacore"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v5e:2x4", {"platform": "tpu", "topology_name": "v5e:2x4", "chips_per_host_bounds": (2, 2, 1)}),
        ("v6e:1x1", {"platform": "tpu", "topology_name": "v6e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
        ("v5p:2x2x2", {"topology_name": "v5:2x2x2", "chips_per_host_bounds": (2, 2, 1)} | MEGACORE),
        ("a100", {"platform": "cuda", "topology": "1x1x1", "target_config": "a100"}),
        ("h200:4", {"platform": "cuda", "topology": "1x1x4", "target_config": "h200"}),
    ],
)
def test_what_the_compiler_is_asked_for(text, expected, monkeypatch):
    def asked(**request):
        assert request == expected
        return types.SimpleNamespace(devices=["a device"])

    monkeypatch.setattr(aot, "require", lambda *_: None)
    monkeypatch.setattr(aot, "target_config", lambda gpu: gpu.name)
    monkeypatch.setattr(aot.topologies, "get_topology_desc", asked)
    assert aot.devices(parse_topology(text)) == ["a device"]


# Published figures that the description does not contain: float32 peak in 10¹² operations a second, and the largest
# memory of a block in KB.
@pytest.mark.parametrize(
    ("name", "float32", "shared", "capability"),
    [
        ("h100", 66.9, 227, "9.0"),
        ("h200", 66.9, 227, "9.0"),
        ("a100", 19.5, 163, "8.0"),
        ("l4", 30.3, 99, "8.9"),
        ("v100", 15.7, 96, "7.0"),
        ("t4", 8.1, 64, "7.5"),
    ],
)
def test_gpus_are_described_as_published(name, float32, shared, capability):
    text = aot.target_config(ACCELERATORS[name])
    found = dict(re.findall(r'^ *(\w+): "?([^"\n]+?)"?$', text, re.MULTILINE))
    peak = 2 * int(found["core_count"]) * int(found["fpus_per_core"]) * float(found["clock_rate_ghz"]) / 1e3
    assert peak == pytest.approx(float32, rel=6e-3)
    assert int(found["shared_memory_per_block_optin"]) == shared * 1024
    assert int(found["memory_bandwidth"]) == ACCELERATORS[name].bandwidth
    assert int(found["device_memory_size"]) == ACCELERATORS[name].memory_bytes
    major, minor = capability.split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert found["device_description_str"] == ACCELERATORS[name].kind


@pytest.mark.parametrize("of", [accelerators, aot])
def test_the_examples_run(of):
    outcome = doctest.testmod(of)
    assert outcome.attempted
    assert not outcome.failed


# A model without weights, compiled by this machine's own compiler.


@pytest.fixture(scope="module")
def here() -> Place:
    return Place(jax.devices("cpu")[:1], None)


# The options of a method, where it needs any on a model without files.
OPTIONS = {
    "hybrid": {"exit_layer": 1},
    "draft-model": {"draft_exit": 1},
    "layerskip": {"exit_layer": 1},
    "adaspeed": {"exit_layer": 1},
    "adaspeed-probe": {"exit_layer": 1},
}
TINY = ModelShape("tiny", TARGET, trained_for=TrainedFor((1, 2)))


def programs(place, method="autoregressive", options=None, target=TINY, **sizes):
    made = registry.make(method, OPTIONS.get(method, {}) | (options or {}))
    return aot.make(target, made, place, **{"dtype": jnp.float32, **sizes})


@pytest.mark.representatives("auto", "draft-model", "s2d", "asd", "eagle")
@pytest.mark.parametrize("method", registry.built_in())
def test_programs_of_every_method_are_made_of_shapes(here, method):
    """Nothing is allocated; the method's files are stand-ins."""
    made = programs(here, method, capacity=60)
    assert made.request.tokens.shape == (1, 64)
    arrays = jax.tree.leaves((made.weights, made.parts, made.request, made.state))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)


def test_programs_of_a_choice_among_drafts_that_skip_layers_are_made_of_shapes(here):
    """Their prices follow from options, not from numbers of the program."""
    deep = ModelShape("deep", dataclasses.replace(TARGET, num_layers=3))
    made = programs(here, "auto", {"among": ("clasp", "knapspec"), "refresh": 8}, deep, capacity=60)
    assert len(made.parts.drafter.candidates) == 2


def test_room_that_this_machine_does_not_have(here):
    assert programs(here, batch=2**10, capacity=2**30).request.tokens.shape == (2**10, 2**30)


def test_a_shared_draft_is_counted_once(here):
    """The draft model is the target's own first layer: it is passed twice and is in memory once."""
    made = programs(here, "draft-model", capacity=32)
    first = llama.truncate(made.weights.target, 1)
    assert made.shared_bytes == aot.part_bytes(first) == aot.part_bytes(made.weights.drafter)


def test_static_masks_and_part_of_the_vocabulary(here):
    made = programs(here, "draft-verify", {"static": True, "draft_vocab": 5})
    assert made.parts.drafter.plan.num_layers == TARGET.num_layers
    assert made.weights.drafter["vocabulary"].head.shape == (5, TARGET.hidden_size)


@pytest.fixture
def refused(monkeypatch):
    """Replaces the compiler of the rounds by one that has no space."""

    def told(where):
        def compile(**_):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED:\n Ran out of memory in {where}\nlists")

        lowered = types.SimpleNamespace(compile=compile)
        monkeypatch.setattr(
            compiled, "run_rounds", types.SimpleNamespace(lower=lambda *_, **options: lowered)
        )

    return told


def test_a_program_that_does_not_fit(here, refused):
    made = programs(here, capacity=32)
    refused("memory space hbm")
    found = made.rounds().report(ACCELERATORS["v5e"])
    assert found["fits"] is False
    assert found["refusal"] == "Ran out of memory in memory space hbm"
    assert found["temporary_bytes_per_device"] is None
    assert found["argument_bytes_per_device"] > aot.part_bytes((made.weights, made.state))
    refused("memory space vmem")
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        made.rounds()


def test_what_a_chip_holds():
    """Arguments, temporaries, results and the program itself; a v5e has 2³⁴ bytes."""
    for more, fits in ((0, True), (1, False)):
        assert Built(1.0, 2**33, 2**32, 2**32 + more).report(ACCELERATORS["v5e"])["fits"] is fits


def test_a_device_holds_its_part():
    """On an abstract mesh of four, a device holds a quarter of the heads, of the MLP and of the vocabulary."""
    devices = [jax.devices("cpu")[0]] * 4
    assert Place.from_devices(devices[:1], {"data": 1, "model": 1}).mesh is None
    config = LlamaConfig(64, 16, 32, 1, 8, 4, 8)
    place = Place(devices, AbstractMesh((1, 4), ("data", "model")))
    placed = place.put_params(ModelShape("one", config).params(jnp.bfloat16), config)
    shapes = {part(leaf) for leaf in jax.tree.leaves(placed) if leaf.ndim > 1}
    assert shapes == {(16, 16), (1, 32, 16), (16, 16), (2, 8, 16), (16, 8)}


def part(leaf):
    return leaf.sharding.shard_shape(leaf.shape)


def test_a_draft_is_spread_as_its_own_shape(tmp_path):
    """Also beside another method, where the drafter's config is the target's."""
    target = LlamaConfig(64, 16, 32, 4, num_heads=8, num_kv_heads=2, head_dim=8)
    draft = dataclasses.replace(target, hidden_size=8, num_layers=3, num_kv_heads=8, intermediate_size=24)
    (tmp_path / "config.json").write_text(json.dumps(config_json.config_json(draft, "bfloat16")))
    place = Place([jax.devices("cpu")[0]] * 4, AbstractMesh((1, 4), ("data", "model")))
    shapes = []
    for name, options in {"draft-model": {}, "hybrid": {"second": "draft-model"}}.items():
        method = registry.make(name, {**options, "draft": tmp_path, "draft_exit": 2})
        made = aot.make(ModelShape("one", target), method, place, dtype=jnp.bfloat16)
        shapes.append(jax.tree.map(part, made.weights.drafter))
    assert (None, shapes[0]) == shapes[1]
    assert shapes[0]["layers"][0]["attention"]["qkv"] == (2, 24, 8)


# The command


def test_a_mesh_that_says_less():
    assert mesh_axes(None, 4) == {"data": 1, "model": 4}
    assert mesh_axes("data=4", 4) == {"data": 4, "model": 1}


@contextlib.contextmanager
def restored():
    """Restores the environment variables and the settings of JAX that the command changes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
            patch.setenv(name, "cpu")
        for name in ("TPU_WORKER_ID", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
            patch.setenv(name, "1")
        before = {name: jax.config.values[name] for name in ("jax_platforms", "jax_enable_compilation_cache")}
        yield
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture
def environment():
    with restored():
        yield


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("topology", "package", "extra"),
    [("v5e:1x1", "libtpu", "aot"), ("h100", "jax_cuda13_plugin", "aot-cuda")],
)
def test_a_compiler_is_an_extra(topology, package, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["compile", "--topology", topology, "--shape", "31m"]) == 1
    remedy = f"pip install '.[{extra}]' in jaxspec's repository"
    said = f"jaxspec: error: this needs {package}, of the extra `{extra}`: {remedy}\n"
    assert capsys.readouterr().err == said
    with pytest.raises(MissingExtra):
        aot.devices(parse_topology(topology))


@pytest.mark.usefixtures("environment")
def test_a_process_that_runs_on_an_accelerator(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    said = one_error(
        lambda *given: called(capsys, *given), "compile", "--shape", "31m", "--topology", "v5e:1x1"
    )
    assert "JAX runs on a tpu in this process already" in said


@pytest.fixture
def compiler(monkeypatch, environment, here):
    """Replaces the TPU's compiler by this machine's."""
    from jaxspec.measuring.bench import device_profile

    monkeypatch.setattr(aot, "devices", lambda topology: here.devices * topology.num_devices)
    monkeypatch.setitem(device_profile.SHAPES, "31m", TARGET)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_the_report_of_the_command(capsys):
    """As a table and as JSON; memory is the compiler's."""
    given = ("compile", "--topology", "v5e:1x1", "--shape", "31m", "--capacity", "40")
    status, out, _ = called(capsys, *given)
    assert status == 0
    assert re.search(r"fits the memory of a chip\W+yes, of 17.18 GB", out)
    assert "https://cloud.google.com/tpu/docs/v5e" in out
    record = json.loads(called(capsys, *given, "--method", "layerskip", "--json")[1])
    assert (record["fits"], record["method"], record["capacity"]) == (True, "layerskip", 64)
    for name in ("rounds", "prefill"):
        assert record[name]["fits"] is True
        assert record[name]["refusal"] is None
        assert record[name]["argument_bytes_per_device"] >= 4 * llama.num_params(TARGET)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("h300", "topology is 'h300'; give KIND:CHIPS with one of the kinds v5e, v5p, v6e, h100"),
        ("h100:2x4", "give the number of GPUs of one host, 1 to 8, such as h100:2"),
        ("h100:", "give the number of GPUs of one host, 1 to 8, such as h100:2"),
        ("l4:9", "give the number of GPUs of one host, 1 to 8, such as l4:2"),
        ("v5e:2", "each of the 2 axes of v5e, such as v5e:2x2"),
        ("v5p:2x2", "each of the 3 axes of v5p, such as v5p:2x2x1"),
        ("v5e:0x2", "such as v5e:2x2"),
        ("v5e:2x2 --mesh data=1,model=3", "--mesh is 'data=1,model=3', which has 3 places"),
        ("v5e:2x2 --mesh rows=4", "and model (heads), such as data=1,model=4\n"),
        ("v5e:2x2 --mesh model=2,model=2", "its axes data (rows) and model (heads)"),
        ("v5e:2x2 --method none", "unknown method 'none'"),
        ("v5e:2x2 --method ngram --exit-layer 2", "has no option --exit-layer"),
        ("v5e:1x1 --shape 9b", "unknown shape '9b'; give one of 31m"),
        ("v5e:1x1 --model small", "got both --model small and --shape 31m"),
        ("v5e:1x1 --batch 0", "--batch is 0; give at least 1"),
        ("v5e:1x1 --capacity 0", "--capacity is 0; give at least 1"),
        ("v5e:1x1 --method draft-model --draft 134m", "vocabulary of 32000 tokens"),
        ("v5e:1x1 --method ngram --num-draft-tokens 99 --capacity 64", "100 slots"),
    ],
)
def test_what_cannot_be_compiled(capsys, words, says):
    given = ("compile", "--shape", "31m", "--topology", *words.split())
    assert says in one_error(lambda *given: called(capsys, *given), *given)


# The compilers of other devices

# Small, but all matrices and caches have different shapes.
SMALL = ModelShape("small", LlamaConfig(2048, 256, 768, 4, 8, 4, 64))
# The operations that may produce an array of a cache's shape. A TPU moves small caches to fast memory and back.
IN_PLACE = {"parameter", "get-tuple-element", "dynamic-update-slice", "fusion", "bitcast", "copy-done"}


def rounds_on(topology: str, method: str, bits: int | None = None) -> tuple[aot.Programs, str]:
    """The programs of a method, of which the rounds compile and fit, and the optimised HLO of these."""
    compile_only()
    chips = parse_topology(topology)
    place = Place.from_devices(aot.devices(chips), mesh_axes(None, chips.num_devices))
    target = dataclasses.replace(SMALL, bits=bits)
    made = programs(place, method, target=target, capacity=256, dtype=jnp.bfloat16)
    rounds = made.rounds()
    assert rounds.report(chips.accelerator)["fits"] is True
    return made, rounds.text


def shapes_of(leaves) -> set[tuple[int, ...]]:
    """The shapes of one device's part, without axes of length 1."""
    return {tuple(size for size in part(leaf) if size > 1) for leaf in leaves}


def written(text: str) -> list[tuple[str, tuple[int, ...], str]]:
    """The dtype, shape and operation of each array that a program writes: outside of fusions, and of whole copies."""
    fused = set(re.findall(r" fusion\(.*calls=%?([\w.-]+)", text))
    found = []
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        if computation.removeprefix("ENTRY ").split()[0].lstrip("%") in fused:
            continue
        found += re.findall(r"= (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", computation)
        for dtype, dims, here, there in re.findall(
            r"= \((\w+)\[([\d,]+)\](\S*), \w+\[[\d,]*\](\S*), .* copy-start\(", computation
        ):
            if ("S(" in here) == ("S(" in there):
                found.append((dtype, dims, "copy"))
    return [
        (dtype, tuple(int(size) for size in dims.split(",") if size != "1"), name)
        for dtype, dims, name in found
    ]


def on_caches(made: aot.Programs, text: str) -> set[str]:
    """The operations that write an array of a cache's shape."""
    nodes = [node for node in jax.tree.leaves(made.state, is_leaf=is_cache) if is_cache(node)]
    caches = shapes_of(leaf for node in nodes for leaf in jax.tree.leaves(node.layers))
    return {name for _, shape, name in written(text) if shape in caches}


def is_cache(node: object) -> bool:
    return isinstance(node, KVCache)


@pytest.fixture(scope="module")
def compilers():
    with restored():
        yield


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot")
@pytest.mark.usefixtures("compilers")
@pytest.mark.representatives("layerskip")
@pytest.mark.parametrize("method", ["autoregressive", "layerskip", "eagle3", "token-recycling"])
def test_a_tpu_copies_no_cache(method):
    """Caches are updated in place."""
    used = on_caches(*rounds_on("v5e:1x1", method))
    assert "dynamic-update-slice" in used or "fusion" in used
    assert used <= IN_PLACE


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot")
@pytest.mark.usefixtures("compilers")
def test_a_tpu_reads_int8_weights_as_they_are():
    """No weight is written as floats, in the loop or before it."""
    made, text = rounds_on("v5e:1x1", "autoregressive", bits=8)
    held = shapes_of(leaf for leaf in jax.tree.leaves(made.weights) if leaf.dtype == jnp.int8)
    assert held
    floats = [one for one in written(text) if one[0] in ("bf16", "f32") and one[1] in held]
    # The embedding has the head's shape.
    assert {name for *_, name in floats} <= {"parameter", "get-tuple-element", "bitcast"}


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot")
def test_a_topology_that_the_compiler_does_not_know(compilers, capsys):
    assert main(["compile", "--topology", "v5e:3x3", "--shape", "31m"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxspec: error: libtpu cannot compile for v5e:3x3: ")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra aot-cuda")
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize("method", ["autoregressive", "layerskip"])
def test_an_h100_copies_no_cache(method):
    assert on_caches(*rounds_on("h100", method)) <= IN_PLACE
