"""The benchmark of an accelerator, on this machine's processor: its budget, and that every part measures something."""

from __future__ import annotations

import json
import threading

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accelerator, dialed, stages
from benchmarks.cases import dial_cases
from benchmarks.dialed import Dial
from benchmarks.parts import LeftOutError, Part, Parts
from benchmarks.synthetic_acceptance import dial_model
from jaxspec.model.config import LlamaConfig

TINY = LlamaConfig(64, 16, 32, 2, 2, 1, 8)


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setitem(accelerator.SHAPES, "tiny", TINY)
    monkeypatch.setattr(accelerator, "RATES", (0.8,))
    monkeypatch.setattr(dialed, "SETTINGS", (0.01, 0.8))
    monkeypatch.setattr(dialed, "CORRECTIONS", 1)
    # Each width of a verification is a program.
    monkeypatch.setattr(stages, "LONGEST", 2)


class Clock:
    """A clock that parts move on."""

    now = 0.0

    def takes(self, seconds, name="part", shape="s", kind=""):
        def run(on_progress):
            on_progress("working")
            self.now += seconds
            return {"took": seconds}

        return Part(name, shape, run, kind)


def ran(parts, budget_s, clock):
    records, told = [], []
    Parts(budget_s, records.append, began=0.0, clock=lambda: clock.now).run(parts, told.append)
    return records, told


def test_a_part_is_begun_only_where_it_would_end_in_time():
    """By the slowest of its kind; a part of another kind still is."""
    clock = Clock()
    rows = [clock.takes(seconds, f"rows {seconds}", kind="rows") for seconds in (2, 40, 3)]
    records, told = ran([*rows, clock.takes(1, "floor")], 81.0, clock)
    assert [one["part"] for one in records[:-1]] == ["rows 2", "rows 40", "floor"]
    (left,) = records[-1]["left_out"]
    assert left == {"part": "rows 3", "shape": "s", "reason": "39 s of the budget were left"}
    assert records[-1]["seconds"] == 43
    assert told[0] == "s rows 2: working"


def test_what_fails_or_does_not_fit_stops_no_other_part():
    clock = Clock()

    def fails(on_progress):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    def does_not_fit(on_progress):
        raise LeftOutError("too large")

    parts = [
        Part("method", "s", fails),
        Part("floor", "large", does_not_fit),
        clock.takes(1, "rows 2", "large"),
        clock.takes(1),
    ]
    records, _ = ran(parts, 100.0, clock)
    assert records[0]["error"] == "RESOURCE_EXHAUSTED: out of memory"
    assert [one["part"] for one in records[1:-1]] == ["part"]
    assert [(one["part"], one["reason"]) for one in records[-1]["left_out"]] == [
        ("floor", "too large"),
        ("rows 2", "too large"),
    ]


def test_what_still_runs_when_the_time_is_up_is_cut_off():
    """The last record is out by then, and nothing comes after it."""
    records, ended = [], threading.Event()

    def hangs(on_progress):
        assert ended.wait(10)
        return {}

    parts = [Part("quick", "s", lambda on_progress: {}), Part("hangs", "s", hangs), Part("next", "s", hangs)]
    clock = Clock()
    Parts(0.2, records.append, began=0.0, clock=lambda: clock.now, end=ended.set).run(parts[:2], print)
    assert [one.get("part") for one in records] == ["quick", None]
    (left,) = records[-1]["left_out"]
    assert left == {"part": "hangs", "shape": "s", "reason": "it was running when the time was up"}


def test_the_process_ends_in_time_although_nobody_reads_what_it_says():
    ended = threading.Event()

    def gone(record):
        raise BrokenPipeError

    def hangs(on_progress):
        ended.wait(3)
        return {}

    Parts(0.1, gone, began=0.0, clock=lambda: 0.0, end=ended.set).run([Part("hangs", "s", hangs)], print)
    assert ended.is_set()


@pytest.mark.full
def test_every_part_measures(tiny_shape, capsys, tmp_path):
    """On a shape of this size in seconds; a shape that no machine holds is left out."""
    methods = "draft-verify,ngram,eagle tree 15x4"
    given = ["--shapes", "405b,tiny", "--methods", methods, "--rows", "2", "--max-new-tokens", "8"]
    output = tmp_path / "found.json"
    assert accelerator.main([*given, "--repeats", "1", "--output", str(output)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert json.loads(output.read_text()) == records
    *found, last = records
    assert {one["shape"] for one in last["left_out"]} == {"405b"}
    assert all("the model does not fit: weights 15" in one["reason"] for one in last["left_out"])
    by_name = {one["part"]: one for one in found}
    assert list(by_name) == ["device", "floor", "prefill", "rows 2", "masks", *methods.split(",")]
    assert not [one for one in found if "error" in one], found
    assert by_name["device"]["measured_bandwidth"] > 0
    assert by_name["floor"]["floor_from"] == "measured"
    assert by_name["floor"]["over_estimated"] is None  # a CPU's compiler estimates nothing
    # Two layers of norms, (2 + 2) · 8 rows of queries, keys and values, 2 · 8 columns out, an MLP; last norm, head.
    assert by_name["floor"]["floor_bytes"] == 4 * (2 * (16 * (2 + 32 + 16) + 3 * 16 * 32) + 16 + 64 * 16)
    assert by_name["masks"]["traced_over_static"] > 0
    for name in ("draft-verify", "eagle tree 15x4"):
        (row,) = by_name[name]["results"]
        assert row["rate"] == 0.8
        assert row["identical_to_autoregressive"], name
        assert row["obtained_over_predicted"] == pytest.approx(row["speedup"] / row["predicted"])
    (copied,) = by_name["ngram"]["results"]
    assert copied["draft_acceptance_rate"] == 1


def test_the_baseline_is_plain_decoding(tiny_shape):
    """Not the default method: it reads weights that the dial has changed in place."""
    lm = Dial("tiny", TINY, jnp.float32, jax.devices()[0], 8).lm
    named, generate = [], lm.generate
    lm.generate = lambda prompt, **options: named.append(options["method"]) or generate(prompt, **options)
    case = dial_cases(lm, 1, 1, 4)["layerskip"]
    case.plain_run(case.prompt, 0)
    assert named == ["autoregressive"]


def test_the_dial_turns_in_place():
    """To the very model that is made so; what is not turned stays valid, as a draft of the first layers needs it."""
    dial = Dial("tiny", TINY, jnp.float32, jax.devices()[0], 8)
    first = dial.lm.params["layers"][0]
    dial.turn(1, 0.5)
    dial.turn(1, 0.25)
    _, made = dial_model(TINY, 0.25, 1, jax.random.key(0))
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, dial.lm.params, made)))
    assert dial.lm.params["layers"][0] is first
    dial.turn(0, 1e-3)
    assert dial.agreement(0) == 1
    assert dial.lm.params["layers"][0] is not first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "huge"], "unknown shape 'huge'; give some of 31m,"),
        (["--methods", "ngram,guess"], "unknown method 'guess'; give some of draft-model,"),
        (["--max-new-tokens", "1"], "--max-new-tokens is 1; give at least 2"),
        (["--budget", "0"], "--budget is 0.0; give seconds above 0"),
        (["--rows", "0"], "--rows is 0; give at least 1"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert accelerator.main(words) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.accelerator: error: {message}")
