"""Every method compiled by the TPU's own compiler, without a TPU: no copied cache, few exchanges between chips."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re

import pytest
from rich.console import Console

from jaxspec.console.environment import compile_only
from jaxspec.measuring.aot.accelerators import mesh_axes, parse_topology
from jaxspec.methods import registry
from jaxspec.model.config import LlamaConfig

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot"),
]
# Small, but all matrices and caches have different shapes.
L, E, K = 4, 1, 5
SMALL = LlamaConfig(2048, 256, 768, L, 8, 4, 64)
# The matrices of 1.2b in fewer layers.
WIDE = LlamaConfig(128256, 2048, 8192, 2, 32, 8, 64, tie_embeddings=True)
# Equal numbers of key/value heads and query heads: for one token, attention is a product of one row too.
EVEN = LlamaConfig(2048, 256, 768, 2, 4, 4, 64, tie_embeddings=True)
# The options of a method, where it needs any on a model without files.
OPTIONS = {
    "hybrid": {"exit_layer": E},
    "draft-model": {"draft_exit": E},
    "layerskip": {"exit_layer": E},
    "adaspeed": {"exit_layer": E},
    "adaspeed-probe": {"exit_layer": E},
    "s2d": {"draft": "wide"},
}
METHODS: dict[str, dict] = {name: OPTIONS.get(name, {}) for name in registry.built_in()}
METHODS["draft-verify static"] = {"static": True}
METHODS["uno single-pass"] = {"single_pass": True}
# Sums over the chips: the embedded tokens, and in each layer after attention and after the MLP. In the head: the
# largest logit, its token, and the test for finite logits.
EMBED, LAYER, HEAD = 1, 2, 3


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Runs JAX on this machine's processor and names the test's shapes."""
    compile_only()
    from jaxspec.measuring.bench import device_profile

    with pytest.MonkeyPatch.context() as patch:
        for name, config in {"31m": SMALL, "wide": WIDE, "even": EVEN}.items():
            patch.setitem(device_profile.SHAPES, name, config)
        yield


def compiled(
    topology: str,
    method: str,
    options: dict,
    bits: int | None = None,
    shape: str = "31m",
    dtype: str = "bfloat16",
    every_option: bool = False,
    kv_cache_dtype: str = "auto",
) -> dict:
    """Returns the report of a method's rounds; `bits` is the width of quantised weights."""
    drafter = method, json.dumps(options)
    return reported(topology, drafter, bits, shape, dtype, every_option, kv_cache_dtype)


@functools.cache
def reported(topology, drafter, bits, shape, dtype, every_option, kv_cache_dtype) -> dict:
    """Returns the report for `compiled`: a program of several tests is compiled once."""
    from jaxspec.measuring.aot.programs import Place, devices, make
    from jaxspec.measuring.aot.report import build, report
    from jaxspec.measuring.aot.stand_ins import model_shape

    chips, (method, options) = parse_topology(topology), drafter
    place = Place.of(devices(chips), mesh_axes(None, chips.num_devices))
    target = dataclasses.replace(model_shape(None, shape), bits=bits)
    config = dataclasses.replace(target.config, kv_cache_dtype=kv_cache_dtype)
    target = dataclasses.replace(target, config=config)
    made = registry.make(method, json.loads(options))
    programs = make(target, made, place, capacity=256, dtype=dtype, every_option=every_option)
    return report(programs, chips.accelerator, build(programs.rounds, programs.options))


@pytest.mark.representatives("auto", "eagle3", "layerskip", "s2d", "token-recycling", "uno")
@pytest.mark.parametrize("name", METHODS)
def test_no_cache_and_no_weight_is_copied(name):
    """On one chip; the matrix unit computes all products with weights, also those of a single row."""
    # Those of generation, with the branches of all options, take longer to compile.
    whole = name in ("autoregressive", "ngram", "layerskip", "eagle3")
    found = compiled("v5e:1x1", name.split()[0], METHODS[name], shape="wide", every_option=whole)
    assert found["fits"]
    assert found["cache_copies"] == 0
    assert found["weight_copies"] == 0
    assert found["vector_products"] == 0
    assert found["collectives"] == {}


@pytest.mark.representatives("bfloat16-None", "bfloat16-8")
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", None), ("float32", None), ("bfloat16", 8)])
def test_a_single_query_a_key_head_takes_the_matrix_unit(dtype, bits):
    """An embedding that is also the head is not copied."""
    found = compiled("v5e:1x1", "autoregressive", {}, bits, "even", dtype)
    assert found["vector_products"] == found["weight_copies"] == found["cache_copies"] == 0


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:2x4"])
def test_plain_decoding_on_several_chips(topology):
    """One chip per key/value head, and two per head with copies of the heads; the copies add no exchanges."""
    found = compiled(topology, "autoregressive", {})
    assert found["cache_copies"] == found["weight_copies"] == 0
    assert found["collectives"] == {"all-reduce": EMBED + L * LAYER + HEAD}
    # Single rows, without the rows of zeros that fill a register; and a few numbers of each chip.
    rows, chips = (EMBED + L * LAYER) * 2 * 256, parse_topology(topology).num_devices
    assert rows < found["cycles"]["exchanged_bytes"] <= rows + HEAD * 4 * chips


def test_a_tree_takes_little_more_than_a_step():
    """65 rows, in two layers; the estimate was 1.37 × that of a step when this was written."""
    tree = compiled("v5e:1x1", "token-recycling", {"tree": "64x8"}, shape="wide")
    plain = compiled("v5e:1x1", "autoregressive", {}, shape="wide")
    assert tree["cache_copies"] == tree["cache_write_backs"] == 0
    assert tree["cycles"]["round"]["cycles"] < 1.4 * plain["cycles"]["round"]["cycles"]


@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:2x2"])
def test_int8_weights_are_read_as_they_are(topology):
    """No weight is converted whole to bfloat16, in the loop or before it; arguments shrink by half of the matrices."""
    plain, small = (compiled(topology, "autoregressive", {}, bits) for bits in (None, 8))
    assert small["dequantised_weights"] == small["weight_copies"] == small["cache_copies"] == 0
    assert small["vector_products"] == plain["vector_products"] == 0
    assert small["collectives"] == plain["collectives"]
    chips = 1 if topology == "v5e:1x1" else 4
    matrices = SMALL.vocab_size * 256 + L * 256 * (16 * 64 + 512 + 3 * 768)
    saved = plain["argument_bytes_per_device"] - small["argument_bytes_per_device"]
    assert 0.97 * matrices / chips < saved < matrices / chips  # minus the scales and padding


@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:2x2"])
def test_an_int8_cache_is_read_as_it_is(topology):
    """No keys and values are converted whole to bfloat16; their bytes are those of the numbers and of the scales."""
    plain, small = (
        compiled(topology, "autoregressive", {}, kv_cache_dtype=name) for name in ("auto", "int8")
    )
    assert small["cache_copies"] == small["vector_products"] == 0
    assert small["collectives"] == plain["collectives"]
    chips = 1 if topology == "v5e:1x1" else 4
    saved = plain["argument_bytes_per_device"] - small["argument_bytes_per_device"]
    expected = 2 * L * 4 * 256 * (2 * 64 - 64 - 2) // chips
    assert 0.96 * expected < saved <= expected  # the scales of one head are padded


@pytest.mark.representatives("4")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_draft_is_read_as_it_is(bits):
    found = compiled("v5e:1x1", "quantised", {"draft_bits": bits})
    assert found["dequantised_weights"] == found["vector_products"] == 0


def test_layerskip_on_four_chips():
    """K draft steps of E layers, the last token through these layers, and verification by the other layers.

    The comparison of the verified rows needs two exchanges of another kind.
    """
    found = compiled("v5e:2x2", "layerskip", {"exit_layer": E, "num_draft_tokens": K})
    assert found["cache_copies"] == found["weight_copies"] == 0
    step, last, verification = EMBED + E * LAYER + HEAD, EMBED + E * LAYER, (L - E) * LAYER + HEAD - 2
    assert found["collectives"] == {"all-reduce": K * step + last + verification, "all-gather": 2}


def test_cycles_of_a_round():
    """Every part of the work has its scope, the parts add up to the round, and a floor equals the bytes read."""
    found = compiled("v5e:1x1", "layerskip", {"exit_layer": E, "num_draft_tokens": K})
    cycles = found["cycles"]
    whole, stages, step = cycles["round"], cycles["stages"], cycles["draft_step"]
    assert sum(whole["split"].values()) == whole["cycles"] >= whole["floor"] > 0
    assert whole["cycles"] == sum(stage["cycles"] for stage in stages.values())
    for part in ("products", "head and sampling", "attention", "norms and rotation", "cache writes"):
        assert whole["split"][part] > 0, part
    assert whole["split"]["the rest"] < 0.5 * whole["cycles"]
    assert step["trips"] == K
    assert K * step["cycles"] < stages["draft"]["cycles"]  # the draft also runs its last token
    layer, head = 2 * 256 * (16 * 64 + 512 + 3 * 768), 2 * SMALL.vocab_size * 256
    cache = 2 * 4 * 64 * 2 * 256  # bytes a layer
    # The step also reads norms and rows of the embedding; a small cache may stay in fast memory.
    read = E * (layer + cache) + head
    assert read - 2 * E * cache <= step["bytes"] < 1.02 * read
    assert found["predicted_tokens_per_second"] is None
    plain = compiled("v5e:1x1", "autoregressive", {})
    clock = parse_topology("v5e:1x1").accelerator.clock
    whole = plain["cycles"]["round"]
    assert clock / whole["cycles"] <= plain["predicted_tokens_per_second"] <= clock / whole["floor"]


def test_a_model_that_is_too_large(capsys, monkeypatch):
    """The compiler refuses it; the report has the remaining figures."""
    from jaxspec.cli import main
    from jaxspec.measuring.bench import device_profile

    monkeypatch.setitem(device_profile.SHAPES, "13b", LlamaConfig(800_000, 8192, 768, 1, 8, 4, 64))
    given = ["--topology", "v5e:1x1", "--shape", "13b", "--no-prefill", "--json"]
    assert main(["compile", *given]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] is False
    assert record["cache_copies"] is None
    assert record["argument_bytes_per_device"] > 25e9


def test_a_topology_that_the_compiler_does_not_know(capsys):
    from jaxspec.cli import main

    assert main(["compile", "--topology", "v5e:3x3", "--shape", "31m"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxspec: error: libtpu cannot compile for v5e:3x3: ")
    assert err.count("\n") == 1


def test_a_training_step_on_sixteen_chips(capsys):
    """The state is divided over all chips: float32 weights and AdamW's two moments, a sixteenth each."""
    from jaxspec.model.llama import num_params
    from training import compile as training_compile

    given = "--topology v5e:4x4 --shape 31m --exits 1 2 --window 64 --batch 16 --remat --json"
    assert training_compile.main(given.split()) == 0
    record = json.loads(capsys.readouterr().out)
    draft = SMALL.truncated(2)
    assert record["mesh"] == {"data": 16, "model": 1}
    assert record["fits"] is True
    assert record["parameters"] == num_params(draft)
    share = 12 * record["parameters"] / 16
    assert share <= record["state_bytes_per_device"] < 1.02 * share  # norms and biases are whole
    assert record["state_bytes_per_device"] < record["argument_bytes_per_device"]
    phases = record["phases"]
    assert list(phases) == ["loading", "init", "step", "evaluation", "export"]
    assert phases["loading"] == pytest.approx(share / 3, rel=0.02)
    # The initial state takes the memory of the parameters; nothing of it is elsewhere meanwhile.
    assert share <= phases["init"] < 1.15 * share
    assert record["most"] == max(phases, key=phases.get)
    assert phases["step"] > record["argument_bytes_per_device"]
    # Each layer's four matrices are gathered where they are used, at least once.
    assert record["collectives"]["all-gather"] >= 4 * draft.num_layers
    training_compile.show(record, Console(width=100))
    shown = capsys.readouterr().out
    assert re.search(rf"{record['most']}, a chip, the most\W+{phases[record['most']] / 1e9:.2f} GB", shown)
    assert re.search(r"fits the memory of a chip\W+yes", shown)
    assert re.search(rf"all-gather in a step\W+{record['collectives']['all-gather']}\b", shown)
