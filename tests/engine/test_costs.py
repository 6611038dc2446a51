"""What a round costs: the table of steps, how it is measured and kept, and what follows for a device on paper."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import types

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cli.options import ModelOptions
from jaxspec.console.distributed import ProcessOptions
from jaxspec.costs.rounds import (
    DraftCost,
    StepCosts,
    guessed,
    kinds,
    predicted_speedup,
    speedup_table,
    tokens_per_round,
)
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods import cost_files
from jaxspec.measuring.accelerators import ACCELERATORS
from jaxspec.measuring.bench import device_profile
from jaxspec.measuring.bench import step_costs as measuring
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.commands.profile import Profile
from jaxspec.measuring.roofline import EXCHANGE_US, needed_gb, report, roofline, usual, weights
from jaxspec.methods import Eagle3, LoadedModel
from jaxspec.model import llama
from jaxspec.model.quantisation import quantise
from tests import caching, refused, tiny
from tests.commands import called, one_error

# A layer is 8 % of a step of one row; texts cost 1 ms each, rows 2.
COSTS = StepCosts(
    *("a device", "a model", "float32", 10, 100),
    full_ms=((1, 1, 10.0), (5, 1, 18.0), (1, 4, 13.0), (5, 4, 30.0)),
    cut_layers=2,
    cut_ms=3.6,
    live_token_ms=0.01,
    loop_ms=0.5,
    lookup_ms=0.25,
    absorb_ms=0.4,
)


def test_known_steps_come_back():
    assert [COSTS.step_ms(rows, batch=batch) for rows, batch, _ in COSTS.full_ms] == pytest.approx(
        [ms for _, _, ms in COSTS.full_ms]
    )
    assert COSTS.step_ms(layers=2) == pytest.approx(3.6)
    assert COSTS.step_ms(layers=0) == pytest.approx(2.0)
    assert guessed(10, row=0.1).step_ms(rows=6) == pytest.approx(1.5)
    assert guessed(10, row=0.1).step_ms(layers=5) == pytest.approx(0.55)
    known = guessed(10, row=0.1, steps=((2, 1.4), (8, 1.5)))
    assert [known.step_ms(rows) for rows in (1, 2, 5, 8)] == pytest.approx([1.0, 1.4, 1.45, 1.5])
    # Products of a batch have the rows of all texts, and with `row_reads` so has attention.
    known = guessed(10, row=0.1, steps=((2, 1.4), (8, 1.5), (64, 7.1)), live_token=0.01, row_reads=1.0)
    assert [known.step_ms(rows, batch=8) for rows in (1, 2, 8)] == pytest.approx([1.5, 2.3, 7.1])
    assert known.step_ms(2, live=100, batch=8) == pytest.approx(2.3 + 8 * 2 * 100 * 0.01)


def test_between_and_behind_the_known_ones_are_straight_lines():
    assert COSTS.step_ms(3) == pytest.approx(14)
    assert COSTS.step_ms(9) == pytest.approx(26)
    assert COSTS.step_ms(batch=2) == pytest.approx(11)
    assert COSTS.step_ms(5, batch=2) == pytest.approx(22)
    assert COSTS.step_ms(batch=7) == pytest.approx(16)
    # Each of 4 texts attends to 100 tokens more, in half of the layers.
    assert COSTS.step_ms(layers=5, live=200, batch=4) - COSTS.step_ms(layers=5, batch=4) == pytest.approx(2)


def test_noise_makes_no_part_negative():
    noisy = dataclasses.replace(COSTS, cut_ms=12.0)
    assert noisy.step_ms(layers=1) == noisy.step_ms(layers=9) == 10
    noisy = dataclasses.replace(COSTS, cut_ms=0.1)
    assert noisy.step_ms(layers=0) == pytest.approx(0)


def test_rounds_are_made_of_steps():
    plain = DraftCost().round_ms(COSTS, 0)
    assert plain == 10.5
    assert DraftCost(lookup=True).round_ms(COSTS, 0) == 10.75
    assert DraftCost(lookup=True).round_ms(COSTS, 4) == 18.75
    # Four draft tokens through 5 layers and the head: 6 ms each.
    assert DraftCost(layers=5).round_ms(COSTS, 4) == pytest.approx(4 * 6 + 18.5)
    assert DraftCost(layers=5, once=True).round_ms(COSTS, 4) == pytest.approx(6 + 18.5)
    # Verification spares half of the layers; the last draft token runs through them without the head.
    spared = 18 * 0.08 * 5
    assert DraftCost(layers=5, shared=5).round_ms(COSTS, 4) == pytest.approx(4 * 6 + 18.5 - spared + 4)
    assert DraftCost(layers=1, absorb_layers=5).absorb_ms(COSTS) == pytest.approx(0.2)


def test_the_best_length_is_found():
    plain = DraftCost().round_ms(COSTS, 0)
    one = predicted_speedup(0.8, plain, lambda k: DraftCost(lookup=True).round_ms(COSTS, k), longest=6)
    by_length = {k: tokens_per_round(0.8, k) * 10.5 / (8.25 + 2 * (k + 1) + 0.5) for k in range(1, 7)}
    assert one.speedup == pytest.approx(max(by_length.values()))
    assert by_length[one.num_draft_tokens] == max(by_length.values())
    assert predicted_speedup(0.1, plain, lambda k: DraftCost(layers=9).round_ms(COSTS, k)).speedup < 1


# Measuring


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(tiny.SMALL, tiny.params(tiny.SMALL), name="tiny")


@pytest.fixture(scope="module")
def measured(lm):
    told = []
    patch = pytest.MonkeyPatch()
    patch.setattr(measuring, "POINTS", ((1, 1), (3, 1), (1, 2)))
    patch.setattr(measuring, "LONG", (120, 128))
    patch.setattr(measuring, "_TURNS", (1, 1))
    found = measuring.step_costs(lm, on_progress=told.append)
    patch.undo()
    return found, told


@pytest.mark.full
def test_a_table_is_measured(lm, measured):
    found, told = measured
    assert (found.device, found.model, found.dtype) == (lm.device_kind, "tiny", "float32")
    assert [point[:2] for point in found.full_ms] == [(1, 1), (3, 1), (1, 2)]
    assert all(ms > 0 for *_, ms in found.full_ms)
    assert 0 <= found.cut_layers < found.num_layers == tiny.SMALL.num_layers
    assert found.absorb_ms == pytest.approx(found.full_ms[1][2] / 3)
    assert min(found.cut_ms, found.lookup_ms) > 0
    assert min(found.live_token_ms, found.loop_ms) >= 0
    assert told[:2] == ["compiling steps, 0 of 7", "compiling steps, 1 of 7"]
    assert told[-1] == "timing steps, turn 1 of 1"


def test_on_a_mesh_one_program_runs_at_a_time(lm):
    """Programs with exchanges that are started by several threads may wait for each other for ever."""
    running, most = [], []

    def run():
        running.append(1)
        time.sleep(0.01)
        most.append(len(running))
        running.pop()

    spread = types.SimpleNamespace(mesh="a mesh", device=lm.device)
    measuring._compile(spread, [run] * 8, lambda what: None)
    assert max(most) == 1
    assert len(most) == 8


def test_costs_are_measured_once(lm, measured, tmp_path, monkeypatch):
    found, _ = measured
    calls = []
    monkeypatch.setattr(measuring, "step_costs", lambda lm, on_progress: calls.append(lm) or found)
    with caching.user_cache(tmp_path):
        assert measuring.remembered_step_costs(lm) == (found, True)
        assert measuring.remembered_step_costs(lm) == (found, False)
        assert measuring.remembered_step_costs(lm, fresh=True) == (found, True)
        assert len(calls) == 2
        assert len(list((tmp_path / "costs").iterdir())) == 1  # nothing half-written is left
        other = LanguageModel(tiny.TARGET, tiny.params(tiny.TARGET), name="tiny")
        assert measuring.remembered_step_costs(other)[1]
        twin = LanguageModel(tiny.SMALL, tiny.params(tiny.SMALL), name="twin")
        kept, new = measuring.remembered_step_costs(twin)
        assert (kept.model, new) == ("twin", False)  # weights change no cost
    with caching.user_cache("off"):
        assert measuring.remembered_step_costs(lm) == (found, True)


@pytest.mark.full
def test_what_weights_are_held_in_and_what_is_computed_in_both_have_files_of_their_own(
    lm, measured, tmp_path, monkeypatch
):
    found, _ = measured
    monkeypatch.setattr(measuring, "step_costs", lambda lm, on_progress: found)
    with caching.user_cache(tmp_path):
        for number, dtype in enumerate(("float32", "bfloat16"), 1):
            params = quantise(
                tiny.SMALL, llama.init_params(tiny.SMALL, jax.random.key(0), jnp.dtype(dtype)), 8
            )
            held = LanguageModel(tiny.SMALL, params, name="tiny")
            assert (held.weights, held.dtype) == ("int8", dtype)
            assert measuring.remembered_step_costs(held)[1]
            assert len(list((tmp_path / "costs").iterdir())) == number
        assert measuring.remembered_step_costs(lm)[1]


def test_another_processor_has_a_file_of_its_own(lm, monkeypatch):
    here = cost_files.key(lm.device_kind, "cpu", lm.config, lm.dtype)
    monkeypatch.setattr(cost_files, "processor", lambda: ("another", 2, ""))
    assert cost_files.key(lm.device_kind, "cpu", lm.config, lm.dtype) != here


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content | {"key": None},
        lambda content: content | {"value": {}},
        lambda content: content | {"value": None},
        lambda content: [content],
        lambda content: None,
    ],
)
def test_a_file_that_cannot_be_used_is_measured_again(lm, measured, tmp_path, monkeypatch, damage):
    found, _ = measured
    monkeypatch.setattr(measuring, "step_costs", lambda lm, on_progress: found)
    with caching.user_cache(tmp_path):
        measuring.remembered_step_costs(lm)
        (path,) = (tmp_path / "costs").iterdir()
        path.write_text(json.dumps(damage(json.loads(path.read_text()))))
        assert measuring.remembered_step_costs(lm) == (found, True)
        assert measuring.remembered_step_costs(lm) == (found, False)


def test_a_cache_that_cannot_be_written_is_left_out(lm, measured, tmp_path, monkeypatch):
    found, _ = measured
    monkeypatch.setattr(measuring, "step_costs", lambda lm, on_progress: found)
    (tmp_path / "costs").touch()
    with caching.user_cache(tmp_path):
        assert measuring.remembered_step_costs(lm) == (found, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cut_ms": "3"}, "has '3' in `cut_ms`, expected a number"),
        ({"cut_ms": float("nan")}, "has nan in `cut_ms`"),
        ({"cut_ms": 10**400}, "in `cut_ms`, expected a number"),
        ({"num_layers": 10**400}, "in `num_layers`, expected a whole number"),
        ({"cut_layers": -(10**400)}, "in `cut_layers`, expected a whole number"),
        ({"full_ms": [[1, 1, 3.0], [10**400, 1, 4.0]]}, "in `full_ms`, expected a list"),
        ({"loop_ms": -1}, "has -1 in `loop_ms`"),
        ({"full_ms": [[1, 1]]}, "in `full_ms`, expected a list, each entry [a whole number"),
        ({"full_ms": [[2, 1, 3.0]]}, "no time above 0 of a step of one row"),
        ({"full_ms": [[1, 1, 3.0], [1, 1, 4.0]]}, "two times of one step"),
        (
            {"full_ms": [[1, 1.5, 3.0]]},
            "expected a list, each entry [a whole number, a whole number, a number]",
        ),
        ({"cut_layers": 10}, "has 10 in `cut_layers`"),
    ],
)
def test_wrong_costs_are_one_line(changes, message):
    good = json.loads(json.dumps(dataclasses.asdict(COSTS)))
    assert cost_files.parse(good, "here") == COSTS
    with refused(re.escape(message)):
        cost_files.parse(good | changes, "here")


# On paper


def test_a_described_device_reads_each_weight_once():
    device = ACCELERATORS["h100"]
    layer, head = weights(SHAPES["8b"])
    costs = roofline(device, SHAPES["8b"], "8b", launch_us=0.0)
    read = 2 * (32 * layer + head) / device.bandwidth
    assert 32 * layer + head == pytest.approx(7.5e9, rel=0.01)  # of 8.03 billion, the rest the embedding
    assert costs.step_ms(live=0) == pytest.approx(1e3 * read)
    # A few rows are free, and so many that the products take longer than the reading are not.
    assert costs.step_ms(9, live=0) == pytest.approx(1e3 * read)
    assert costs.step_ms(65, batch=128, live=0) == pytest.approx(
        2e3 * 65 * 128 * (32 * layer + head) / device.flops
    )
    kept = 2 * 32 * 8 * 128 * 2
    assert costs.live_token_ms == pytest.approx(1e3 * kept / device.bandwidth)
    # A launch costs wherever a layer runs: drafting by layers gains less.
    slow = roofline(device, SHAPES["8b"], "8b", launch_us=20.0)
    assert slow.step_ms() - costs.step_ms() == pytest.approx(0.02 * (32 * 18 + 6))


def test_several_devices_divide_what_is_read_and_int8_halves_it():
    device, config = ACCELERATORS["v5e"], SHAPES["8b"]
    one, half, four = (
        roofline(device, config, "8b", launch_us=0.0, chips=chips, bits=bits)
        for chips, bits in ((1, None), (1, 8), (4, None))
    )
    assert one.step_ms(live=0) == pytest.approx(2 * half.step_ms(live=0))
    # As docs/scaling.md computes it: 68 exchanges of 5 µs.
    exchanged = 1e-3 * (2 * 32 + 4) * EXCHANGE_US
    assert four.step_ms(live=0) == pytest.approx(one.step_ms(live=0) / 4 + exchanged)
    assert four.live_token_ms == pytest.approx(one.live_token_ms / 4)
    assert half.step_ms(65, batch=128, live=0) == pytest.approx(one.step_ms(65, batch=128, live=0))


def test_a_model_that_does_not_fit_is_told_what_would():
    found = [
        report(device, "70b", bits=bits)["remedies"]
        for device, bits in (("l4", None), ("l4:4", 8), ("l4", 8))
    ]
    assert found == [["--mesh model=8", "--weights int8 --mesh model=4"], [""], ["--mesh model=4"]]
    assert needed_gb(SHAPES["8b"], 2) == pytest.approx(needed_gb(SHAPES["8b"]) / 2)


def test_predictions_rise_with_acceptance_and_fall_with_the_batch():
    found = report("h100", "8b")
    assert found["prediction"] is True
    assert set(found["speedups"]) == {*kinds(32), "draft model"}
    for by_rate in found["speedups"].values():
        speedups = [one["speedup"] for one in by_rate.values()]
        assert speedups == sorted(speedups)
        assert list(by_rate) == ["0.5", "0.6", "0.7", "0.8", "0.9", "0.95"]
    crowded = report("h100", "8b", batch=128)
    for name, by_rate in crowded["speedups"].items():
        assert by_rate["0.9"]["speedup"] <= found["speedups"][name]["0.9"]["speedup"], name
    assert report("h100", "70b")["remedies"] == ["--weights int8", "--mesh model=2"]
    assert speedup_table(COSTS, {"x": DraftCost(lookup=True)})["x"]["0.5"].speedup > 1


def test_a_draft_model_costs_a_step_of_its_own():
    device = ACCELERATORS["h100"]
    costs, drafts = usual(device, "8b")
    draft = roofline(device, SHAPES["1.2b"], "1.2b")
    rounds = drafts["draft model"].round_ms(costs, 3) - costs.step_ms(4)
    assert rounds == pytest.approx(3 * draft.step_ms())
    assert drafts["draft model"].absorb_ms(costs) == pytest.approx(draft.absorb_ms)
    assert "draft model" not in usual(device, "31m")[1]


def test_an_embedding_of_a_head_is_not_read_whole():
    target, params = LoadedModel(tiny.TARGET, tiny.params(), "tiny"), tiny.params()
    own = {"fc": params["layers"][0]["mlp"]["down"]}
    with_embedding = own | {"embed": params["embed"]}
    assert Eagle3().cost(target, None, own) == Eagle3().cost(target, None, with_embedding)


# The command


def test_the_command_shows_both(capsys, measured, monkeypatch):
    found, _ = measured
    status, out, err = called(capsys, "profile", "--device-model", "v5e", "--shape", "8b", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(report("v5e", "8b")))
    status, out, _ = called(capsys, "profile", "--device-model", "h100", "--shape", "70b", "--batch", "4")
    assert status == 0
    assert "prediction, not a measurement" in " ".join(out.split())
    assert "they do not fit its memory" in out
    assert "give --weights int8 or --mesh model=2" in " ".join(re.sub("[│ ]+", " ", out).split())
    status, out, _ = called(
        capsys, *["profile", "--device-model", "v5e:2x4", "--shape", "70b", "--weights", "int8", "--json"]
    )
    assert status == 0
    assert json.loads(out) == json.loads(json.dumps(report("v5e:2x4", "70b", bits=8)))
    assert json.loads(out)["remedies"] == [""]

    def remembered(lm, *, fresh, on_progress):
        return found, True

    monkeypatch.setattr(measuring, "remembered_step_costs", remembered)
    monkeypatch.setattr(device_profile, "language_model", lambda *_: None)
    monkeypatch.setattr(device_profile, "floor_ms", lambda _: 0.5)
    status, out, err = called(capsys, "profile", "--json")
    assert status == 0
    assert json.loads(out)["floor_ms"] == 0.5
    assert err == ""
    assert cost_files.parse(json.loads(out)["costs"], "it") == found
    status, out, _ = called(capsys, "profile", "--batch", "2")
    assert status == 0
    assert "step of 1 row of each of 2 texts" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device-model b200 --shape 8b", "unknown --device-model 'b200'; give one of v5e, v5p, v6e,"),
        ("--device-model h100", "--device-model needs a shape; give --shape"),
        ("--device-model h100 --shape 9b", "unknown shape '9b'; give one of"),
        ("--device-model h100 --shape 8b --fresh", "--device-model predicts for a named shape"),
        ("--device-model h100 --shape 8b --batch 0", "--batch is 0; give at least 1"),
        ("--device-model h100 --shape 8b --launch-us -1", "--launch-us is -1.0; give a number from 0 on"),
        ("--launch-us 2", "--launch-us is given without --device-model"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert message in one_error(lambda *arguments: called(capsys, *arguments), "profile", *words.split())


@pytest.mark.full
def test_several_processes_do_not_measure_a_shape():
    """One would put weights on the other's devices, and the other would wait for it for ever."""
    joined = ModelOptions(mesh="model=2", processes=ProcessOptions(distributed=True))
    with refused("`shape` is measured by one process; give `model`, or leave out"):
        Profile(shape="31m", model=joined).run()
