"""Tests of the reader of a TPU compiler's estimated cycles, on a short program written by hand."""

from __future__ import annotations

import pytest

from jaxspec.measuring.aot import hlo
from jaxspec.measuring.aot.accelerators import ACCELERATORS
from jaxspec.measuring.aot.compiled_rounds import main_loop
from jaxspec.measuring.aot.cycles import (
    ATTENTION,
    CACHE,
    EXCHANGES,
    HEAD,
    NORMS,
    PRODUCTS,
    REST,
    WAITING,
    estimate,
)
from jaxspec.measuring.aot.reads import bytes_read
from jaxspec.measuring.commands import compile as command
from jaxspec.measuring.output import show

V5E = ACCELERATORS["v5e"]


def costs(scope: str, cycles: int) -> str:
    """Returns the scope and the cycles of an instruction in the compiler's notation."""
    return (
        f'metadata={{op_name="jit(run_rounds)/while/body/{scope}" stack_frame_id=1}}, '
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}","iteration_bounds":["1"]}}}}'
    )


def scope(text: str) -> str:
    return f'metadata={{op_name="jit(run_rounds)/while/body/{text}"}}'


STEP = "draft/trips_3/while/body"
STATE = "(s32[], bf16[1024,2048]{1,0}, bf16[2048,2048]{1,0}, bf16[512,1024]{1,0})"
# A round has three draft steps and a verification. Each draft step reads %a (4 MB) and takes 100 cycles. The
# verification reads a half of %a ahead of time, %a and %b (8 MB) in place, updates a cache (1 MB) and reads all of it.
ROUND = f"""HloModule jit_run_rounds, is_scheduled=true

%product (p0: bf16[1024,2048], p1: bf16[8,2048]) -> bf16[8,1024] {{
  %p1 = bf16[8,2048]{{1,0}} parameter(1)
  %p0 = bf16[1024,2048]{{1,0}} parameter(0)
  %inner = bf16[1024,2048]{{1,0}} fusion(%p0), kind=kLoop, calls=%only_bits
  %dot = bf16[8,1024]{{1,0}} convolution(%p1, %inner), dim_labels=bf_oi->bf, {scope("verify/layer_0/dot_general")}
  ROOT %sum = bf16[8,1024]{{1,0}} add(%dot, %dot), {scope("verify/layer_0/add")}
}}

%only_bits (q0: bf16[1024,2048]) -> bf16[1024,2048] {{
  %q0 = bf16[1024,2048]{{1,0}} parameter(0)
  ROOT %bits = bf16[1024,2048]{{1,0}} bitcast(%q0)
}}

%row (r0: bf16[2048,2048], r1: s32[]) -> bf16[1,2048] {{
  %r0 = bf16[2048,2048]{{1,0}} parameter(0)
  %r1 = s32[] parameter(1)
  ROOT %one = bf16[1,2048]{{1,0}} dynamic-slice(%r0, %r1, %r1), dynamic_slice_sizes={{1,2048}}
}}

%put (w0: bf16[512,1024], w1: bf16[1,1024], w2: s32[]) -> bf16[512,1024] {{
  %w0 = bf16[512,1024]{{1,0}} parameter(0)
  %w1 = bf16[1,1024]{{1,0}} parameter(1)
  %w2 = s32[] parameter(2)
  ROOT %written = bf16[512,1024]{{1,0}} dynamic-update-slice(%w0, %w1, %w2, %w2)
}}

%step (s: (s32[], bf16[1024,2048])) -> (s32[], bf16[1024,2048]) {{
  %s = (s32[], bf16[1024,2048]{{1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %sa = bf16[1024,2048]{{1,0}} get-tuple-element(%s), index=1
  %normed = bf16[8,2048]{{1,0:S(1)}} fusion(%n), kind=kLoop, calls=%row, {costs(STEP + "/layer_0/norm/mul", 10)}
  %drafted = bf16[8,1024]{{1,0:S(1)}} dot(%normed, %sa), {costs(STEP + "/head/dot_general", 90)}
  ROOT %snext = (s32[], bf16[1024,2048]{{1,0}}) tuple(%n, %sa)
}}

%more (m: (s32[], bf16[1024,2048])) -> pred[] {{
  ROOT %yes = pred[] constant(true)
}}

%less (l: bf16[512,1024]) -> bf16[8,1024] {{
  %l = bf16[512,1024]{{1,0}} parameter(0)
  ROOT %cheap = bf16[8,1024]{{1,0:S(1)}} slice(%l), {costs("verify/sampling/select", 2)}
}}

%dear (d: bf16[1024,2048]) -> bf16[8,1024] {{
  %d = bf16[1024,2048]{{1,0}} parameter(0)
  ROOT %filtered = bf16[8,1024]{{1,0:S(1)}} slice(%d), {costs("verify/vmap(sampling)/select", 7)}
}}

%body (t: (s32[], bf16[1024,2048], bf16[2048,2048], bf16[512,1024])) -> (s32[], bf16[1024,2048]) {{
  %t = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %a = bf16[1024,2048]{{1,0}} get-tuple-element(%t), index=1
  %b = bf16[2048,2048]{{1,0}} get-tuple-element(%t), index=2
  %kv = bf16[512,1024]{{1,0}} get-tuple-element(%t), index=3
  %first = ((bf16[1024,2048]{{1,0}}), bf16[512,2048]{{1,0:S(1)}}, s32[]) slice-start(%a), slice={{[0:512], [0:2048]}}
  %into = (s32[], bf16[1024,2048]{{1,0}}) tuple(%i, %a)
  %drafting = (s32[], bf16[1024,2048]{{1,0}}) while(%into), condition=%more, body=%step, {scope("draft/trips_3/while")}
  %came = bf16[1024,2048]{{1,0}} get-tuple-element(%drafting), index=1
  %embedded = bf16[1,2048]{{1,0:S(1)}} fusion(%b, %i), kind=kLoop, calls=%row, {costs("verify/gather", 3)}
  %half = bf16[512,2048]{{1,0:S(1)}} slice-done(%first)
  %q = bf16[8,512]{{1,0:S(1)}} dot(%embedded, %half), {costs("verify/layer_0/dot_general", 20)}
  %gate = bf16[8,1024]{{1,0:S(1)}} fusion(%came, %embedded), calls=%product, {costs("verify/layer_0/add", 30)}
  %kept = bf16[512,1024]{{1,0}} fusion(%kv, %q, %i), kind=kLoop, calls=%put, {costs("verify/layer_0/cache/dus", 4)}
  %scores = bf16[8,512]{{1,0:S(1)}} dot(%q, %kept), {costs("verify/layer_0/attend/dot_general", 40)}
  %everywhere = bf16[8,512]{{1,0:S(1)}} all-reduce(%scores), to_apply=%add, {scope("verify/layer_0/dot_general")}
  %logits = bf16[8,2048]{{1,0:S(1)}} dot(%everywhere, %b), {costs("verify/head/dot_general", 50)}
  %chosen = bf16[8,1024]{{1,0}} conditional(%i, %kept, %came), branch_computations={{%less, %dear}}
  %copied = bf16[8,1024]{{1,0}} copy(%chosen), {costs("scatter", 5)}
  ROOT %next = {STATE} tuple(%i, %came, %b, %kept)
}}

ENTRY %main (g: (s32[], bf16[1024,2048], bf16[2048,2048], bf16[512,1024])) -> (s32[], bf16[1024,2048]) {{
  %g = {STATE} parameter(0)
  ROOT %loop = {STATE} while(%g), condition=%more, body=%body
}}
"""
A, B, KV = 2 * 1024 * 2048, 2 * 2048 * 2048, 2 * 512 * 1024


def found(text: str = ROUND, bandwidth: float = 1e18) -> dict:
    """Returns the estimate for a chip with this bandwidth; by default no instruction waits for memory."""
    module, chip = hlo.parse(text), V5E
    estimated = estimate(module, main_loop(module), type(chip)(**{**vars(chip), "bandwidth": bandwidth}))
    assert estimated is not None
    return estimated


def nonzero(part: dict) -> dict:
    return {name: cycles for name, cycles in part["split"].items() if cycles}


def test_a_round_is_split_by_stage_and_by_kind_of_work():
    """A product counts within a fusion that has a later operation's name; a condition counts its expensive branch."""
    one = found()
    assert nonzero(one["draft_step"]) == {NORMS: 10, HEAD: 90}
    assert one["draft_step"]["trips"] == 3
    assert nonzero(one["stages"]["draft"]) == {NORMS: 30, HEAD: 270}
    assert nonzero(one["stages"]["verify"]) == {PRODUCTS: 50, HEAD: 57, ATTENTION: 40, CACHE: 4, REST: 3}
    assert nonzero(one["stages"]["beside"]) == {REST: 5}
    assert one["round"]["cycles"] == 300 + 154 + 5
    assert one["loops"] == {"jit(run_rounds)/while/body/draft/trips_3/while": {"trips": 3, "cycles": 100}}


def test_exchanges_have_bytes_and_no_cycles():
    assert found()["exchanged_bytes"] == 2 * 8 * 512
    assert EXCHANGES not in nonzero(found()["round"])


@pytest.mark.parametrize(
    ("exchange", "size"),
    [
        ("(bf16[8,512]{1,0:S(1)}, f32[8]{0}) all-reduce(%scores, %rows)", 2 * 8 * 512 + 4 * 8),
        ("(bf16[8,512]{1,0}, bf16[16,512]{1,0}) all-gather-start(%scores)", 2 * 16 * 512),
        ("(bf16[8,512]{1,0}, bf16[8,512]{1,0}, u32[], u32[]) collective-permute-start(%scores)", 2 * 8 * 512),
    ],
)
def test_an_exchange_of_several_arrays_and_one_that_is_started(exchange, size):
    """Every result counts; of a start, neither its operands nor what it waits by."""
    text = ROUND.replace("bf16[8,512]{1,0:S(1)} all-reduce(%scores)", exchange)
    text = text.replace("dot(%everywhere, %b)", "dot(%q, %b)")
    text = text.replace("  %everywhere", "  %rows = f32[8]{0:S(1)} convert(%i)\n  %everywhere")
    assert found(text)["exchanged_bytes"] == size


def test_loops_of_one_name_are_told_apart():
    name = "jit(run_rounds)/while/body/draft/trips_3/while"
    again = "  %again = (s32[], bf16[1024,2048]{1,0}) while(%into), condition=%more, body=%step, "
    text = ROUND.replace("  %came =", f"{again}{scope('draft/trips_3/while')}\n  %came =")
    assert found(text)["loops"].keys() == {f"{name} (drafting)", f"{name} (again)"}


def test_stages_are_in_the_order_of_a_round():
    assert list(found()["stages"]) == ["draft", "verify", "beside"]


def test_each_stage_reads_each_array_once():
    """%a counts once for a half read ahead and a whole in place; %b counts once for one row and a whole."""
    module = hlo.parse(ROUND)
    names = {"draft": "/draft/", "verify": "/verify/"}

    def stage(one: hlo.Instruction) -> str:
        return next((name for name, part in names.items() if part in one.scope), "ahead")

    read = bytes_read(module, main_loop(module), stage)
    assert read == {"draft": 3 * (A + 4), "verify": A + B + KV + 4, "ahead": A // 2}
    assert found()["stages"]["verify"]["bytes"] == A + B + KV + 4


def test_an_estimate_below_the_floor_is_raised_to_it():
    one = found(bandwidth=V5E.bandwidth)
    floor = round((A + B + KV + 4) / V5E.bandwidth * V5E.clock)
    verify = one["stages"]["verify"]
    assert verify["cycles"] == verify["floor"] == floor > 154
    assert verify["split"][WAITING] == floor - 154
    assert verify["of_floor"] == 1
    assert sum(one["round"]["split"].values()) == one["round"]["cycles"]


def test_a_compiler_that_gives_no_estimates():
    module = hlo.parse(ROUND.replace("estimated_cycles", "something"))
    assert estimate(module, main_loop(module), V5E) is None


@pytest.mark.parametrize(("name", "clock"), [("v5e", 1.5e9), ("v5p", 1.75e9), ("v6e", 1.75e9)])
def test_the_clock_follows_from_the_published_peak(name, clock):
    assert ACCELERATORS[name].clock == pytest.approx(clock, rel=3e-3)


def test_the_table(capsys):
    show(found(), False, lambda cycles: command._cycles(cycles, cycles))
    out = capsys.readouterr().out
    assert "the compiler's estimate, not a time" in out
    for part in (PRODUCTS, WAITING, "floor ÷ all", "draft step", "prompt chunk"):
        assert part in out
    assert "trips_3/while: 3 × 100 cycles" in out
    assert "its cycles are not estimated" in out


@pytest.mark.parametrize(("cycles", "shown"), [(None, False), (found(), True)])
def test_products_of_the_vector_unit_are_shown_of_a_tpu(cycles, shown):
    """A GPU has no such unit."""
    record = dict.fromkeys(("cache_copies", "cache_write_backs", "weight_copies", "vector_products"), 7)
    record |= dict.fromkeys(("weights", "refusal", "prefill", "collectives", "kernels_per_round"))
    record |= {"predicted_tokens_per_second": None, "dequantised_weights": 0, "mesh": {}, "fits": True}
    record |= {
        "model": "m",
        "dtype": "bfloat16",
        "topology": "t",
        "method": "ngram",
        "batch": 1,
        "capacity": 8,
        "kv_cache_dtype": "auto",
    }
    record |= {"argument_bytes_per_device": 1, "temporary_bytes_per_device": 1, "compile_seconds": 1.0}
    _, table, *_ = command._parts("a page", record | {"cycles": cycles})
    assert ("multiplied by the vector unit" in str(table)) == shown


def test_a_slice_of_an_array_in_another_layout_is_a_part():
    """A TPU changes the layout of an int8 cache within a fusion, and reads only the slice."""
    module = hlo.parse("""HloModule f
%relayout (p: s8[8,64]) -> s8[8,64] {
  %p = s8[8,64]{1,0} parameter(0)
  ROOT %c = s8[8,64]{1,0} copy(%p)
}
%part (p: s8[8,64], i: s32[]) -> s8[8,4] {
  %p = s8[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %q = s8[8,64]{1,0} fusion(%p), kind=kLoop, calls=%relayout
  ROOT %s = s8[8,4]{1,0} dynamic-slice(%q, %i, %i), dynamic_slice_sizes={8,4}
}
%body (t: (s32[], s8[8,64])) -> (s32[], s8[8,64]) {
  %t = (s32[], s8[8,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = s8[8,64]{1,0} get-tuple-element(%t), index=1
  %y = s8[8,4]{1,0} fusion(%x, %i), kind=kLoop, calls=%part
  ROOT %next = (s32[], s8[8,64]{1,0}) tuple(%i, %x)
}
%more (t: (s32[], s8[8,64])) -> pred[] {
  ROOT %c = pred[] constant(false)
}
ENTRY %main (s: (s32[], s8[8,64])) -> (s32[], s8[8,64]) {
  %s = (s32[], s8[8,64]{1,0}) parameter(0)
  ROOT %w = (s32[], s8[8,64]{1,0}) while(%s), condition=%more, body=%body
}""")
    assert bytes_read(module, main_loop(module), lambda one: "all")["all"] == 8 * 4 + 4
