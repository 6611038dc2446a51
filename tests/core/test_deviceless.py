"""Ahead-of-time programs for accelerators, without their compilers: reading HLO, topologies."""

from __future__ import annotations

import dataclasses
import doctest
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jaxspec.cli import main
from jaxspec.host.extras import MissingExtra
from jaxspec.io.hf import config_json
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.aot import accelerators, compiled_rounds, cuda, hlo, programs, stand_ins
from jaxspec.measuring.aot.accelerators import ACCELERATORS, mesh_axes, parse_topology
from jaxspec.measuring.aot.programs import Place
from jaxspec.measuring.aot.report import Program, build, predicted, report
from jaxspec.measuring.aot.stand_ins import ModelShape
from jaxspec.methods import registry
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.quantisation import Quantised
from jaxspec.programs import executables
from jaxspec.programs.compiler_options import compiler_options
from jaxspec.testing.models import TARGET
from tests.commands import called, one_error

# Shortened output of a TPU's compiler: one round that drafts in a loop, then verifies in one of two widths.
ROUND = """HloModule jit_run_rounds, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%in_place (p0: bf16[4,64,8], p1: bf16[4,1,8]) -> bf16[4,64,8] {
  %p0 = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[4,1,8]{2,1,0:T(8,128)(2,1)} parameter(1)
  %dus = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %p1)
  ROOT %same = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} bitcast(%dus)
}

%chosen (p0: bf16[4,64,8], p1: pred[]) -> (bf16[4,64,8], bf16[4]) {
  %p0 = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = pred[] parameter(1)
  %whole = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} select(%p1, %p0, %p0)
  %part = bf16[4]{0} slice(%p0)
  ROOT %two = (bf16[4,64,8]{2,1,0:T(8,128)(2,1)}, bf16[4]{0}) tuple(%whole, %part)
}

%more (t: (s32[], bf16[4,64,8])) -> pred[] {
  %t = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%skipped (t: bf16[4]) -> bf16[4] {
  ROOT %t = bf16[4]{0} parameter(0)
}

%sublayer (t: bf16[4]) -> bf16[4] {
  %t = bf16[4]{0} parameter(0)
  ROOT %r = bf16[4]{0} all-reduce(%t), channel_id=1, to_apply=%add
}

%draft (t: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  %t = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %row = bf16[4,1,8]{2,1,0:T(8,128)(2,1)} constant(0)
  %wrote = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} fusion(%x, %row), kind=kLoop, calls=%in_place
  %h = bf16[4]{0} constant(0)
  %maybe = bf16[4]{0} conditional(%i, %h, %h), branch_computations={%skipped, %sublayer}
  %ar = bf16[4]{0} all-reduce(%maybe), channel_id=2, to_apply=%add, metadata={op_name="jit(f)/while/body/psum"}
  ROOT %n = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) tuple(%i, %wrote)
}

%narrow (t: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  %t = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %h = bf16[4]{0} constant(0)
  %g1 = bf16[8]{0} all-gather(%h), channel_id=3, dimensions={0}
  %g2 = bf16[8]{0} all-gather(%h), channel_id=4, dimensions={0}
  ROOT %same = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) copy-done(%t)
}

%wide (t: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  %t = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %h = bf16[4]{0} constant(0)
  %s = (bf16[4]{0}, bf16[4]{0}) all-reduce-start(%h), channel_id=5, to_apply=%add
  %d = bf16[4]{0} all-reduce-done(%s)
  %ahead = (bf16[4,64,8]{2,1,0:T(8,128)(2,1)S(1)}, bf16[4,64,8]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %here = bf16[4,64,8]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%ahead)
  %moved = bf16[4,64,8]{1,2,0:T(8,128)(2,1)S(1)} copy(%here)
  %back = (bf16[4,64,8]{2,1,0:T(8,128)(2,1)}, bf16[4,64,8]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%moved)
  %there = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} copy-done(%back)
  ROOT %n = (s32[], bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) tuple(%i, %there)
}

%round (t: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  %t = (s32[], /*index=1*/bf16[4,64,8]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %k = (s32[], bf16[4,64,8]{2,1,0}) while(%t), condition=%more, body=%draft, metadata={op_name="f/trips_3/while"}
  %n = (s32[], bf16[4,64,8]{2,1,0}) while(%k), condition=%more, body=%narrow, metadata={op_name="f/verify_1/while"}
  %w = (s32[], bf16[4,64,8]{2,1,0}) while(%n), condition=%more, body=%wide, metadata={op_name="f/verify_4/while"}
  %x = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} get-tuple-element(%w), index=1
  %p = pred[] constant(true)
  %both = (bf16[4,64,8]{2,1,0:T(8,128)(2,1)}, bf16[4]{0}) fusion(%x, %p), kind=kLoop, calls=%chosen
  ROOT %next = (s32[], bf16[4,64,8]{2,1,0}) tuple(%w, %x)
}

ENTRY %main (t: (s32[], bf16[4,64,8])) -> (s32[], bf16[4,64,8]) {
  %t = (s32[], bf16[4,64,8]{2,1,0}) parameter(0)
  %first = bf16[4,64,8]{2,1,0} copy(%t)
  %short = (s32[], bf16[4,64,8]{2,1,0}) while(%t), condition=%more, body=%narrow
  ROOT %rounds = (s32[], bf16[4,64,8]{2,1,0}) while(%t), condition=%more, body=%round, metadata={op_name="f/while"}
}
"""


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    return hlo.parse(ROUND)


def test_what_is_read_of_an_instruction(module):
    one = {one.name: one for one in module.computations["wide"]}["ahead"]
    assert (one.opcode, one.operands, one.root) == ("copy-start", ("x",), False)
    assert one.results[:2] == (hlo.Buffer("bf16", (4, 64, 8), 1), hlo.Buffer("bf16", (4, 64, 8)))
    loop = compiled_rounds.main_loop(module)
    assert (loop.name, loop.scope) == ("rounds", "f/while")
    assert loop.called == {"condition": ("more",), "body": ("round",)}


def test_copies_in_a_round(module):
    """Two copies: a change of layout in fast memory, and a choice between two whole arrays.

    Copies outside the loop, writes in place and transfers between memories do not count. One transfer is a write-back.
    """
    loop = compiled_rounds.main_loop(module)
    assert compiled_rounds.copies(module, loop, [(1, 4, 64, 8)]) == 2
    assert compiled_rounds.write_backs(module, loop, [(1, 4, 64, 8)]) == 1
    assert (
        compiled_rounds.copies(module, loop, [(4, 64, 9)])
        == compiled_rounds.write_backs(module, loop, [(4, 64, 9)])
        == 0
    )


def test_collectives_are_counted_as_a_round_runs(module):
    """Each draft step has two, one in a branch. Only the wider verification counts; its start and done are one."""
    loop = compiled_rounds.main_loop(module)
    assert compiled_rounds.collectives(module, loop) == {"all-reduce": 3 * 2 + 1}
    narrow = hlo.parse(ROUND.replace("verify_4", "verify_0").replace("trips_3", "unknown"))
    assert compiled_rounds.collectives(narrow, compiled_rounds.main_loop(narrow)) == {
        "all-reduce": 2,
        "all-gather": 2,
    }


def test_kernels_are_counted_as_a_round_runs(module):
    """Each of three draft steps has a fusion and two exchanges, one of them in a branch.

    The wider verification has an exchange, a copy and two transfers, and after it there is a fusion. Ends of transfers
    and names of memory do not count.
    """
    assert compiled_rounds.kernels(module, compiled_rounds.main_loop(module)) == 3 * 3 + 4 + 1


def test_kernels_of_a_layer():
    """The verification has one kernel of layer 0, two of layer 1, and an unnamed one that these use.

    Kernels of layer 0 in a draft step, and kernels of no layer, do not count.
    """
    scopes = {
        "calls=%in_place": "layer_0",
        "channel_id=5, to_apply=%add": "layer_0",
        "calls=%chosen": "layers",
        "S(2)}) copy-start(%moved)": "layer_1",
        "copy-start(%x)": "layer_1",
    }
    text = ROUND
    for after, scope in scopes.items():
        assert text.count(after) == 1
        text = text.replace(after, f'{after}, metadata={{op_name="f/while/body/{scope}/op"}}')
    module = hlo.parse(text)
    assert compiled_rounds.kernels_per_layer(module, compiled_rounds.main_loop(module)) == (1 + 3) / 2
    module = hlo.parse(ROUND)
    assert compiled_rounds.kernels_per_layer(module, compiled_rounds.main_loop(module)) is None


def test_a_write_into_what_a_fusion_made_is_a_copy():
    """The write covers a part, but the fusion has written the rest just before."""
    made = "%dus = bf16[4,64,8]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0"
    assert made in ROUND
    text = ROUND.replace(made, "%new = bf16[4,64,8]{2,1,0} negate(%p0)\n  " + made.replace("%p0", "%new"))
    module = hlo.parse(text)
    assert compiled_rounds.copies(module, compiled_rounds.main_loop(module), [(4, 64, 8)]) == 2 + 1


def test_a_fusion_may_make_several_arrays_by_one_of_its_parts():
    """One part makes the maximum and its index, beside another array; the choice between whole caches still counts."""
    after = "bf16[4]{0}) tuple(%whole, %part)"
    assert ROUND.count(after) == 1
    text = ROUND.replace("  ROOT %two", "  %pair = (bf16[4]{0}, s32[4]{0}) reduce(%part, %part)\n  ROOT %two")
    text = text.replace(after, "(bf16[4]{0}, s32[4]{0})) tuple(%whole, %pair)")
    text = text.replace("bf16[4]{0}) fusion(%x, %p)", "(bf16[4]{0}, s32[4]{0})) fusion(%x, %p)")
    module = hlo.parse(text)
    assert compiled_rounds.copies(module, compiled_rounds.main_loop(module), [(4, 64, 8)]) == 2


SCORES = """HloModule scores

%softer (p0: f32[4,64,8], p1: f32[4,64]) -> f32[4,64,8] {
  %p0 = f32[4,64,8]{2,1,0} parameter(0)
  %p1 = f32[4,64]{1,0} parameter(1)
  %wide = f32[4,64,8]{2,1,0} broadcast(%p1)
  ROOT %less = f32[4,64,8]{2,1,0} subtract(%p0, %wide)
}

%turned (p0: f32[4,64,8], p1: f32[4,64]) -> f32[4,8,64] {
  %p1 = f32[4,64]{1,0} parameter(1)
  %p0 = f32[4,64,8]{2,1,0} parameter(0)
  %wide = f32[4,64,8]{2,1,0} broadcast(%p1)
  %sum = f32[4,64,8]{2,1,0} add(%wide, %p0)
  ROOT %turn = f32[4,8,64]{2,1,0} transpose(%sum)
}

%body (t: (f32[4,64,8], f32[4,64])) -> (f32[4,64,8], f32[4,64]) {
  %t = (f32[4,64,8]{2,1,0}, f32[4,64]{1,0}) parameter(0)
  %x = f32[4,64,8]{2,1,0} get-tuple-element(%t), index=0
  %m = f32[4,64]{1,0} get-tuple-element(%t), index=1
  %scores = f32[4,64,8]{2,1,0} dot(%x, %x)
  %soft = f32[4,64,8]{2,1,0} fusion(%scores, %m), kind=kLoop, calls=%softer
  %kept = f32[4,64,8]{2,1,0} copy(%soft)
  %next = f32[4,64]{1,0} reduce(%kept, %m), to_apply=%softer
  %other = f32[4,8,64]{2,1,0} fusion(FROM, %next), kind=kLoop, calls=%turned
  ROOT %out = (f32[4,64,8]{2,1,0}, f32[4,64]{1,0}) tuple(%x, %next)
}

%more (t: (f32[4,64,8], f32[4,64])) -> pred[] {
  ROOT %go = pred[] constant(true)
}

ENTRY %main (s: (f32[4,64,8], f32[4,64])) -> (f32[4,64,8], f32[4,64]) {
  %s = (f32[4,64,8]{2,1,0}, f32[4,64]{1,0}) parameter(0)
  ROOT %w = (f32[4,64,8]{2,1,0}, f32[4,64]{1,0}) while(%s), condition=%more, body=%body
}
"""


@pytest.mark.parametrize(("source", "count"), [("%kept", 0), ("%x", 1)])
def test_scores_with_the_shape_of_a_cache_are_no_copies(source, count):
    """Compares a fusion of a product with the same fusion of the cache."""
    module = hlo.parse(SCORES.replace("FROM", source))
    assert compiled_rounds.copies(module, compiled_rounds.main_loop(module), [(4, 64, 8)]) == count


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no HLO module"):
        hlo.parse("a text")
    straight = "ENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}"
    with pytest.raises(ValueError, match="has no loop"):
        compiled_rounds.main_loop(hlo.parse(straight))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v5e:2x4", {"platform": "tpu", "topology_name": "v5e:2x4", "chips_per_host_bounds": (2, 2, 1)}),
        ("v6e:1x1", {"platform": "tpu", "topology_name": "v6e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
        (
            "v5p:2x2x2",
            {
                "platform": "tpu",
                "topology_name": "v5:2x2x2",
                "chips_per_host_bounds": (2, 2, 1),
                "chip_config_name": "megacore",
            },
        ),
    ],
)
def test_what_the_compiler_is_asked_for(text, expected):
    assert parse_topology(text).request == expected


@pytest.mark.parametrize(("text", "topology"), [("a100", "1x1x1"), ("l4:1", "1x1x1"), ("h200:4", "1x1x4")])
def test_what_the_compiler_is_asked_for_a_gpu(text, topology):
    request = parse_topology(text).request
    assert (request["platform"], request["topology"]) == ("cuda", topology)
    assert request["target_config"].count("gpu_device_info {") == 1


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
    text = parse_topology(name).request["target_config"]
    found = dict(re.findall(r'^ *(\w+): "?([^"\n]+?)"?$', text, re.MULTILINE))
    peak = 2 * int(found["core_count"]) * int(found["fpus_per_core"]) * float(found["clock_rate_ghz"]) / 1e3
    assert peak == pytest.approx(float32, rel=6e-3)
    assert int(found["shared_memory_per_block_optin"]) == shared * 1024
    assert int(found["memory_bandwidth"]) == ACCELERATORS[name].bandwidth
    assert int(found["device_memory_size"]) == ACCELERATORS[name].memory_bytes
    major, minor = capability.split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert found["device_description_str"] == ACCELERATORS[name].kinds[0]


@pytest.mark.parametrize("of", [hlo, compiled_rounds, accelerators, cuda, stand_ins])
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


@pytest.mark.representatives("auto", "draft-model", "s2d", "asd", "eagle")
@pytest.mark.parametrize("method", registry.built_in())
def test_programs_of_every_method_are_made_of_shapes(here, method):
    """Nothing is allocated; the method's files are stand-ins."""
    made = programs.make(
        TINY, registry.make(method, OPTIONS.get(method, {})), here, capacity=60, dtype=jnp.float32
    )
    assert made.request.tokens.shape == (1, 64)
    arrays = jax.tree.leaves((made.weights, made.parts, made.request, made.state))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)
    assert "while" in made.rounds().as_text()
    assert all(64 in shape for shape in made.cache_shapes())


def test_room_that_this_machine_does_not_have(here):
    made = programs.make(TINY, registry.make("autoregressive", {}), here, batch=2**10, capacity=2**30)
    assert made.request.tokens.shape == (2**10, 2**30)


@pytest.mark.full
def test_the_loops_of_a_round_have_names(here):
    """`rounds.collectives` distinguishes the loops by these names."""
    cases: list[tuple[str, dict, set]] = [
        ("autoregressive", {"temperature": 1.0, "top_k": 3}, {"trips_31"}),  # a filter searches bit by bit
        ("layerskip", {}, {"trips_5"}),
        ("adaspeed", {}, {"trips_12", "verify_1", "verify_5", "verify_13"}),
    ]
    for method, distribution, names in cases:
        made = programs.make(
            TINY,
            registry.make(method, OPTIONS.get(method, {})),
            here,
            dtype=jnp.float32,
            distribution=distribution,
        )
        text = made.rounds().as_text(debug_info=True)
        assert set(re.findall(r"/((?:trips|verify)_\d+)/while", text)) == names


def test_a_shared_draft_is_counted_once(here):
    """The draft model is the target's own first layer: it is passed twice and is in memory once."""
    method = registry.make("draft-model", {"draft_exit": 1})
    made = programs.make(TINY, method, here, capacity=32, dtype=jnp.float32)
    first = llama.truncate(made.weights.target, 1)
    assert made.shared_bytes == programs.part_bytes(first) == programs.part_bytes(made.weights.drafter)


def test_static_masks_and_part_of_the_vocabulary(here):
    method = registry.make("draft-verify", {"static": True, "draft_vocab": 5})
    made = programs.make(TINY, method, here, dtype=jnp.float32)
    assert made.parts.drafter.plan.num_layers == TARGET.num_layers
    assert made.weights.drafter["vocabulary"].head.shape == (5, TARGET.hidden_size)


def test_the_report_of_a_program(here):
    """The bound equals a manual calculation, memory is the compiler's, and the plain loop has no copies."""
    made = programs.make(TINY, registry.make("autoregressive", {}), here, capacity=32, dtype=jnp.float32)
    chip = ACCELERATORS["v5e"]
    found = report(made, chip, build(made.rounds))
    assert found["fits"] is True
    assert found["collectives"] == {}
    assert found["cache_copies"] == found["weight_copies"] == 0
    assert found["prefill"] is None
    assert found["cycles"] is None  # a CPU's compiler estimates no cycles
    assert found["argument_bytes_per_device"] >= programs.part_bytes((made.weights, made.state))
    read = llama.num_params(TARGET)
    read -= 0 if TARGET.tie_embeddings else TARGET.vocab_size * TARGET.hidden_size
    cache = 2 * TARGET.num_layers * TARGET.num_kv_heads * 32 * TARGET.head_dim
    assert found["predicted_tokens_per_second"] == pytest.approx(chip.bandwidth / (4 * (read + cache)))
    many = programs.make(
        TINY, registry.make("autoregressive", {}), here, batch=4, capacity=32, dtype=jnp.float32
    )
    assert predicted(many, chip) == pytest.approx(4 * chip.bandwidth / (4 * (read + 4 * cache)))


@pytest.mark.full
def test_the_report_of_a_gpu(here):
    """The report counts kernels, and its bound includes the time to start them."""
    kinds = (("autoregressive", 0), ("layerskip", 5))
    for method, drafted in kinds:
        made = programs.make(
            TINY, registry.make(method, OPTIONS.get(method, {})), here, capacity=32, dtype=jnp.float32
        )
        found = report(made, ACCELERATORS["h100"], build(made.rounds))
        counted, tpus = found["kernels_per_round"], report(made, ACCELERATORS["v5e"], build(made.rounds))
        assert tpus["kernels_per_round"] is tpus["kernels_per_layer"] is None
        assert 0 < found["kernels_per_layer"] < counted
        usual = accelerators.LAYER_OPERATIONS * TARGET.num_layers + accelerators.OTHER_OPERATIONS
        started = 2.5e-6 * (usual if drafted else counted)
        without = dataclasses.replace(ACCELERATORS["h100"], launch_us=0.0)
        seconds = 1 / predicted(made, without) + started
        assert found["predicted_tokens_per_second"] == pytest.approx(1 / seconds)


@pytest.mark.parametrize(
    ("kind", "quantised", "told"),
    [
        ("TPU v5 lite", True, {"xla_tpu_scoped_vmem_limit_kib": "65536"}),
        ("TPU v5 lite", False, None),  # the compiler estimates more cycles for bfloat16 with it
        ("TPU v6 lite", True, None),  # the compiler estimates more cycles for int8 with it
        ("cpu", True, None),  # its compiler has no such option
    ],
)
def test_what_a_compiler_is_told(kind, quantised, told):
    sharding = types.SimpleNamespace(
        device_set=[types.SimpleNamespace(device_kind=kind, platform=kind[:3].lower())]
    )
    leaf = types.SimpleNamespace(sharding=sharding)
    weights = {"norm": leaf, "out": Quantised(leaf, leaf) if quantised else leaf}
    assert compiler_options((weights, 0)) == told


def test_a_gpu_starts_loops_and_branches_without_the_host():
    """The compiler of this machine parses the option too, and refuses a part that it does not know."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA H100", platform="gpu")
    leaf = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=[gpu]))
    (option,) = (told := compiler_options(leaf) or {})
    assert {"WHILE", "CONDITIONAL"} < set(told[option].split(","))
    lowered = jax.jit(jnp.sin).lower(1.0)
    lowered.compile(compiler_options=told)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not a valid enum value"):
        lowered.compile(compiler_options={option: f"{told[option]},NO_SUCH_PART"})


def test_a_compiler_is_told_by_generation_and_by_the_command(here, monkeypatch):
    made = programs.make(TINY, registry.make("autoregressive", {}), here, capacity=32, dtype=jnp.float32)
    assert made.options is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        build(made.rounds, {"no_such_option": "1"})
    monkeypatch.setattr(executables, "compiler_options", lambda args: {"no_such_option": str(len(args))})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        executables.Executables().call(jax.jit(jnp.add), jnp.ones(1), jnp.ones(1))


@pytest.mark.parametrize(("platform", "temporaries"), [("tpu", 60), ("gpu", 100)])
def test_temporaries_that_are_alive_at_once(platform, temporaries):
    """The TPU's compiler adds up those of loops, so that its peak counts: 75 less the arguments and results."""
    memory = types.SimpleNamespace(
        argument_size_in_bytes=10,
        output_size_in_bytes=7,
        alias_size_in_bytes=2,
        temp_size_in_bytes=100,
        generated_code_size_in_bytes=3,
        peak_memory_in_bytes=75,
    )
    device = types.SimpleNamespace(platform=platform)
    compiled = types.SimpleNamespace(
        memory_analysis=lambda: memory,
        cost_analysis=lambda: None,
        as_text=lambda: "",
        input_shardings=((types.SimpleNamespace(device_set=[device]),), {}),
        output_shardings=(),
    )
    lowered = types.SimpleNamespace(compile=lambda compiler_options: compiled)
    made = build(lambda: lowered)
    assert (made.argument_bytes, made.temporary_bytes, made.other_bytes) == (10, temporaries, 8)


def test_a_program_that_does_not_fit(here):
    made = programs.make(TINY, registry.make("autoregressive", {}), here, capacity=32, dtype=jnp.float32)

    def lower():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED:\n Ran out of memory in memory space hbm\nlists")

    found = report(made, ACCELERATORS["v5e"], build(lower))
    assert found["fits"] is False
    assert found["refusal"] == "Ran out of memory in memory space hbm"
    assert found["predicted_tokens_per_second"] is None
    assert found["cache_copies"] is found["collectives"] is found["temporary_bytes_per_device"] is None
    assert found["argument_bytes_per_device"] > 0

    def other():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem")

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        build(other)
    large = Program(1.0, "", 2**40, 0)
    assert report(made, ACCELERATORS["v5e"], large)["fits"] is False


def test_a_device_holds_its_part():
    """On an abstract mesh of four, a device holds a quarter of the heads, of the MLP and of the vocabulary."""
    devices = [jax.devices("cpu")[0]] * 4
    assert Place.of(devices[:1], {"data": 1, "model": 1}).mesh is None
    config = LlamaConfig(64, 16, 32, 1, 8, 4, 8)
    place = Place(devices, AbstractMesh((1, 4), ("data", "model")))
    placed = place.put_params(ModelShape("one", config).params(jnp.bfloat16), config)
    shapes = {programs.part(leaf) for leaf in jax.tree.leaves(placed) if leaf.ndim > 1}
    assert shapes == {(16, 16), (1, 32, 16), (16, 16), (2, 8, 16), (16, 8)}


def test_a_draft_is_spread_as_its_own_shape(tmp_path):
    """Also in a hybrid, whose config is the target's."""
    target = LlamaConfig(64, 16, 32, 4, num_heads=8, num_kv_heads=2, head_dim=8)
    draft = dataclasses.replace(target, hidden_size=8, num_layers=3, num_kv_heads=8, intermediate_size=24)
    (tmp_path / "config.json").write_text(json.dumps(config_json.config_json(draft, "bfloat16")))
    place = Place([jax.devices("cpu")[0]] * 4, AbstractMesh((1, 4), ("data", "model")))
    shapes = []
    for name, options in {"draft-model": {}, "hybrid": {"second": "draft-model"}}.items():
        method = registry.make(name, {**options, "draft": tmp_path, "draft_exit": 2})
        made = programs.make(ModelShape("one", target), method, place, dtype=jnp.bfloat16)
        shapes.append(jax.tree.map(programs.part, made.weights.drafter))
    assert (None, shapes[0]) == shapes[1]
    assert shapes[0]["layers"][0]["attention"]["qkv"] == (2, 24, 8)


# The command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--topology", "h300"),
            "topology is 'h300'; give KIND:CHIPS with one of the kinds v5e, v5p, v6e, h100",
        ),
        (("--topology", "h100:2x4"), "give the number of GPUs of one host, 1 to 8, such as h100:2"),
        (("--topology", "h100:"), "give the number of GPUs of one host, 1 to 8, such as h100:2"),
        (("--topology", "l4:9"), "give the number of GPUs of one host, 1 to 8, such as l4:2"),
        (("--topology", "v5e:2"), "each of the 2 axes of v5e, such as v5e:2x2"),
        (("--topology", "v5p:2x2"), "each of the 3 axes of v5p, such as v5p:2x2x1"),
        (("--topology", "v5e:0x2"), "such as v5e:2x2"),
        (
            ("--topology", "v5e:2x2", "--mesh", "data=1,model=3"),
            "--mesh is 'data=1,model=3', which has 3 places",
        ),
        (("--topology", "v5e:2x2", "--mesh", "rows=4"), "and model (heads), such as data=1,model=4\n"),
        (("--topology", "v5e:2x2", "--mesh", "model=2,model=2"), "its axes data (rows) and model (heads)"),
        (("--topology", "v5e:2x2", "--method", "none"), "unknown method 'none'"),
        (("--topology", "v5e:2x2", "--method", "ngram", "--exit-layer", "2"), "has no option --exit-layer"),
    ],
)
def test_wrong_topologies_and_meshes(capsys, arguments, says):
    assert says in one_error(lambda *given: called(capsys, *given), "compile", "--shape", "31m", *arguments)


def test_a_mesh_that_says_less():
    assert mesh_axes(None, 4) == {"data": 1, "model": 4}
    assert mesh_axes("data=4", 4) == {"data": 4, "model": 1}


@pytest.fixture
def environment(monkeypatch):
    """Restores the environment variables and the settings of JAX that the command changes."""
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "cpu")
    for name in ("TPU_WORKER_ID", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setenv(name, "1")
    before = {name: jax.config.values[name] for name in ("jax_platforms", "jax_enable_compilation_cache")}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("environment")
def test_the_compiler_is_an_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert main(["compile", "--topology", "v5e:1x1", "--shape", "31m"]) == 1
    err = capsys.readouterr().err
    remedy = "pip install '.[aot]' in jaxspec's repository"
    assert err == f"jaxspec: error: this needs libtpu, of the extra `aot`: {remedy}\n"
    with pytest.raises(MissingExtra):
        programs.devices(parse_topology("v6e:2x2"))


@pytest.mark.usefixtures("environment")
def test_the_compiler_of_gpus_is_another_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax_cuda13_plugin", None)
    assert main(["compile", "--topology", "h100", "--shape", "31m"]) == 1
    err = capsys.readouterr().err
    remedy = "pip install '.[aot-cuda]' in jaxspec's repository"
    assert err == f"jaxspec: error: this needs jax_cuda13_plugin, of the extra `aot-cuda`: {remedy}\n"


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

    monkeypatch.setattr(programs, "devices", lambda topology: here.devices * topology.num_devices)
    monkeypatch.setitem(device_profile.SHAPES, "31m", TARGET)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_the_command_prints_a_table(capsys, tmp_path):
    file = tmp_path / "rounds.txt"
    given = ("--topology", "v5e:1x1", "--shape", "31m", "--capacity", "40", "--hlo", file)
    status, out, _ = called(capsys, "compile", *given)
    assert status == 0
    assert "copies of a cache in a round" in out
    assert "https://cloud.google.com/tpu/docs/v5e" in out
    assert compiled_rounds.main_loop(hlo.parse(file.read_text()))


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_the_command_prints_json(capsys):
    given = ("--topology", "v5e:1x1", "--shape", "31m", "--capacity", "40", "--no-prefill", "--json")
    status, out, _ = called(capsys, "compile", *given, "--method", "layerskip", "--temperature", "1")
    record = json.loads(out)
    assert status == 0
    assert record["method"] == "layerskip"
    assert record["capacity"] == 64
    assert record["prefill"] is None
    wanted = {
        "fits",
        "refusal",
        "argument_bytes_per_device",
        "temporary_bytes_per_device",
        "cache_copies",
        "weight_copies",
        "collectives",
        "cycles",
        "compile_seconds",
        "predicted_tokens_per_second",
    }
    assert wanted <= record.keys()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shape", "9b"), "unknown shape '9b'; give one of 31m"),
        (("--shape", "31m", "--model", "small"), "got both --model small and --shape 31m"),
        (
            ("--shape", "31m", "--hlo", "no/such/file"),
            "cannot write no/such/file (No such file or directory); give another --hlo FILE",
        ),
        (("--shape", "31m", "--hlo", "."), ". is a directory; give --hlo FILE"),
        (("--shape", "31m", "--batch", "0"), "--batch is 0; give at least 1"),
        (("--shape", "31m", "--capacity", "0"), "--capacity is 0; give at least 1"),
        (("--shape", "31m", "--method", "draft-model", "--draft", "134m"), "vocabulary of 32000 tokens"),
        (
            ("--shape", "31m", "--method", "ngram", "--num-draft-tokens", "99", "--capacity", "64"),
            "100 slots",
        ),
    ],
)
def test_what_cannot_be_compiled(capsys, arguments, says):
    assert says in one_error(
        lambda *given: called(capsys, *given), "compile", "--topology", "v5e:1x1", *arguments
    )


@pytest.mark.usefixtures("compiler")
def test_a_file_is_left_alone_until_there_is_a_program(capsys, monkeypatch, tmp_path):
    from jaxspec.measuring.aot import report as of

    file = tmp_path / "rounds.txt"
    given = ("compile", "--topology", "v5e:1x1", "--no-prefill", "--json", "--hlo", file)
    one_error(lambda *given: called(capsys, *given), *given, "--shape", "9b")
    assert not file.exists()
    monkeypatch.setattr(of, "build", lambda *_: Program(1.0))
    assert called(capsys, *given, "--shape", "31m")[0] == 0
    assert file.read_text() == "the rounds do not fit the memory of a chip\n"
