"""The benchmark of an accelerator, on this machine's processor: its budget, and that every part measures something."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import threading
from pathlib import Path
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accelerator, auto_guarantee, dialed, real_texts, stages
from benchmarks.cases import dial_cases
from benchmarks.dialed import Dial
from benchmarks.parts import LeftOutError, Part, Parts, UnfinishedError
from benchmarks.synthetic_acceptance import dial_model
from jaxspec.io import checkpoint
from jaxspec.methods import Auto
from jaxspec.model.config import LlamaConfig
from tests.commands import CONFIG, write_tiny

TINY = LlamaConfig(64, 16, 32, 2, 2, 1, 8)


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setitem(accelerator.SHAPES, "tiny", TINY)
    monkeypatch.setattr(dialed, "SETTINGS", (0.01, 0.8))
    monkeypatch.setattr(dialed, "CORRECTIONS", 1)
    # Each width of a verification is a program.
    monkeypatch.setattr(stages, "LONGEST", 2)


class Clock:
    """A clock that parts move on."""

    now = 0.0

    def takes(self, seconds, name="part", model="s", **more):
        def run(on_progress):
            on_progress("working")
            self.now += seconds
            return {"took": seconds, "model": "of the report"}

        return Part(name, model, run, **more)


def ran(parts, budget_s, clock, earlier=()):
    records, told = [], []
    began = clock.now
    Parts(budget_s, records.append, began=began, earlier=earlier, clock=lambda: clock.now).run(
        parts, told.append
    )
    return records, told


def names(records):
    return [one["part"] for one in records if "part" in one]


def test_a_part_is_begun_only_where_it_would_end_in_time():
    """By the slowest of its kind; a part of another kind still is."""
    clock = Clock()
    rows = [clock.takes(seconds, f"rows {seconds}", kind="rows") for seconds in (2, 40, 3)]
    records, told = ran([*rows, clock.takes(1, "floor")], 81.0, clock)
    assert names(records) == ["rows 2", "rows 40", "floor"]
    (left,) = records[-1]["left_out"]
    assert left == {"part": "rows 3", "model": "s", "reason": "it takes about 40 s, and 39 s were left"}
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
        clock.takes(1, "after", needs="method"),
        clock.takes(1),
    ]
    records, _ = ran(parts, 100.0, clock)
    assert records[0]["error"] == "RESOURCE_EXHAUSTED: out of memory"
    assert names(records[1:]) == ["part"]
    assert [(one["part"], one["reason"]) for one in records[-1]["left_out"]] == [
        ("floor", "too large"),
        ("after", "it needs the part method, which is not done"),
    ]


def test_a_measurement_continues_after_its_finished_parts():
    """Parts that failed or were cut off run again after all others, and before those that need them."""
    clock, tried = Clock(), []

    def state(name, *errors):
        def run(on_progress):
            tried.append(name)
            if len(errors) >= tried.count(name):
                raise errors[tried.count(name) - 1]
            return {}

        return run

    parts = [
        clock.takes(30, "first", kind="long"),
        Part("texts", "s", state("texts", UnfinishedError("step 3 of 9")), resumable=True),
        clock.takes(30, "training", needs="texts"),
        Part("failing", "s", state("failing", ValueError("no"))),
        clock.takes(30, "last", kind="long"),
    ]
    begun, _ = ran(parts, 50.0, clock)
    assert names(begun) == ["first", "texts", "failing"]
    assert begun[1]["unfinished"] == "step 3 of 9"
    earlier = [one for one in begun if "part" in one]
    records, _ = ran(parts, 95.0, clock, earlier)
    assert names(records) == ["last", "texts", "training", "failing"]
    assert records[-1]["left_out"] == []
    assert names(ran(parts, 95.0, clock, [*earlier, *records[:-1]])[0]) == []


def test_what_was_cut_off_waits_for_more_time_unless_it_continues():
    clock = Clock()
    earlier = [{"part": name, "model": "s", "seconds": 50, "unfinished": "…"} for name in ("whole", "pieces")]
    parts = [clock.takes(1, "whole"), clock.takes(1, "pieces", resumable=True)]
    records, _ = ran(parts, 40.0, clock, earlier)
    assert names(records) == ["pieces"]
    assert records[-1]["left_out"][0]["part"] == "whole"
    assert names(ran(parts, 60.0, clock, earlier)[0]) == ["whole", "pieces"]


def test_what_still_runs_when_the_time_is_up_is_cut_off():
    """The last record is out by then, and nothing comes after it."""
    records, ended = [], threading.Event()

    def hangs(on_progress):
        assert ended.wait(10)
        return {}

    parts = [Part("quick", "s", lambda on_progress: {}), Part("hangs", "s", hangs)]
    clock = Clock()
    Parts(0.2, records.append, began=0.0, clock=lambda: clock.now, end=ended.set).run(parts, print)
    assert [one.get("part") for one in records] == ["quick", "hangs", None]
    assert records[1]["unfinished"] == "it was running when the time was up"


def test_the_process_ends_in_time_although_nobody_reads_what_it_says():
    ended = threading.Event()

    def gone(record):
        raise BrokenPipeError

    def hangs(on_progress):
        ended.wait(3)
        return {}

    Parts(0.1, gone, began=0.0, clock=lambda: 0.0, end=ended.set).run([Part("hangs", "s", hangs)], print)
    assert ended.is_set()


@pytest.fixture
def few(monkeypatch, tiny_shape):
    """A plan of few programs."""
    monkeypatch.setattr(accelerator, "usual_methods", lambda num_layers: ["autoregressive", "ngram"])
    monkeypatch.setattr(accelerator, "BESIDE", ())
    monkeypatch.setattr(accelerator, "FEW", ("ngram",))
    # Each candidate is a program.
    monkeypatch.setattr(auto_guarantee, "Auto", functools.partial(Auto, among=("ngram",)))
    monkeypatch.setattr(accelerator, "CASES", ("ngram",))
    monkeypatch.setattr(accelerator, "FORMS", ("eagle tree 15x4",))
    monkeypatch.setattr(accelerator, "SHARED", ())
    monkeypatch.setattr(real_texts, "TASKS", ("sums:200",))
    monkeypatch.setattr(accelerator, "LENGTHS", (64, 256))
    monkeypatch.setattr(accelerator, "AUTO", ("--temperatures", "0", "--batches", "1", "--methods", "ngram"))
    monkeypatch.setattr(accelerator, "TRAINING", ("--batch", "2", "--window", "64"))
    monkeypatch.setattr(stages, "LIVE", 64)
    monkeypatch.setattr(stages, "TOKENS", 8)
    monkeypatch.setattr(stages, "ROWS", (2,))
    monkeypatch.setattr(real_texts.Papers, "run", of_the_draft)


def of_the_draft(papers):
    """Stands for the paper, which `test_paper_s2d.py` measures."""
    exits = checkpoint.read_trained_for(papers.draft, checkpoint.read_config(papers.draft)).exits
    Path(papers.output).mkdir()
    (Path(papers.output) / "report.json").write_text(json.dumps({"claims": exits}))
    return 0


# Parts that run the commands of others with another dtype, other weights or another cache.
ALIKE = {"texts bfloat16", "texts float16", "steps bfloat16", "texts int8"}
ALIKE |= {"steps int8 cache", "texts int8 cache"}


@pytest.mark.full
@pytest.mark.parametrize(
    "without", [ALIKE, pytest.param(set(), marks=pytest.mark.slow)], ids=["one of a kind", "all"]
)
def test_every_part_measures(few, without, monkeypatch, capsys, tmp_path, tmp_path_factory):
    """On tiny models in seconds; a shape that no machine holds is left out, and finished parts are not repeated."""
    whole = accelerator.plan
    monkeypatch.setattr(
        accelerator, "plan", lambda *given: [part for part in whole(*given) if part.name not in without]
    )
    model = write_tiny(tmp_path_factory, dataclasses.replace(CONFIG, num_layers=4))
    given = ["--model", str(model), "--shapes", "tiny,405b", "--output", str(tmp_path), "--limit", "1"]
    given += [
        "--max-new-tokens",
        "8",
        "--repeats",
        "1",
        "--own-texts",
        "8",
        "--train-steps",
        "1",
        "--budget",
        "36000",
    ]
    assert accelerator.main(given) == 0
    *found, last = map(json.loads, capsys.readouterr().out.splitlines())
    by_name = {one["part"]: one for one in found}
    left = [one for one in last["left_out"] if one["model"] == "405b"]
    assert last["left_out"] == left
    assert all("the model does not fit: weights" in one["reason"] for one in left)
    assert {name: one["error"] for name, one in by_name.items() if "error" in one} == {"heads": ANY}, found
    assert "needs a head" in by_name["heads"]["error"]
    every = (
        *("device", "texts float32", "texts bfloat16", "texts float16", "steps float32", "steps bfloat16"),
        *("prompts", "eagle tree 15x4", "auto", "heads", "steps int8", "texts int8"),
        *("steps int8 cache", "texts int8 cache", "own texts", "training", "s2d", "ngram"),
    )
    assert list(by_name) == [name for name in every if name not in without]
    assert by_name["device"]["measured_bandwidth"] > 0
    for setting in ("float32",) if without else ("float32", "bfloat16", "float16"):
        texts = by_name[f"texts {setting}"]
        assert (texts["dtype"], texts["runs"]["ngram"]["texts"]) == (setting, 1)
    assert by_name["texts float32"]["runs"]["ngram"]["num_different"] == 0
    assert by_name["auto"]["over_plain"][0] > 0
    floor = by_name["steps float32"]
    assert floor["floor_from"] == "measured"
    assert floor["over_estimated"] is None  # a CPU's compiler estimates nothing
    # Two layers of norms, (2 + 2) · 8 rows of queries, keys and values, 2 · 8 columns out, an MLP; last norm, head.
    assert floor["floor_bytes"] == 4 * (2 * (16 * (2 + 32 + 16) + 3 * 16 * 32) + 16 + 64 * 16)
    assert by_name["steps int8"]["floor_bytes"] < floor["floor_bytes"]
    assert without or by_name["texts int8 cache"]["dtype"] == "float32, int8 cache"
    assert list(by_name["prompts"]["prompts"]) == ["64", "256"]
    assert by_name["prompts"]["live_in_longest"] > 0
    (row,) = by_name["eagle tree 15x4"]["results"]
    assert row["identical_to_autoregressive"]
    assert row["obtained_over_predicted"] == pytest.approx(row["speedup"] / row["predicted"])
    (copied,) = by_name["ngram"]["results"]
    assert copied["draft_acceptance_rate"] == 1
    assert by_name["training"]["step"] == 1
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    assert by_name["s2d"]["claims"] == [1, 2, 3]
    # The parts that are done are read back; those that failed run again.
    assert accelerator.main(given) == 0
    assert names(map(json.loads, capsys.readouterr().out.splitlines())) == ["heads"]
    assert accelerator.main([*given, "--train-steps", "2"]) == 2


def test_other_options_are_refused(few, capsys, tmp_path, monkeypatch):
    given = ["--model", "small", "--shapes", "tiny", "--output", str(tmp_path), "--budget"]
    monkeypatch.setattr(accelerator, "plan", lambda options, ends: [Part("one", "tiny", lambda tell: {})])
    assert accelerator.main([*given, "60"]) == 0
    assert accelerator.main([*given, "90"]) == 0
    assert names(map(json.loads, capsys.readouterr().out.splitlines())) == ["one"]
    assert accelerator.main([*given, "90", "--limit", "5"]) == 2
    assert re.fullmatch(
        r"benchmarks.accelerator: error: \S+records.jsonl belongs to another measurement: its limit is 8, now 5; "
        r"give the same, add --no-resume to begin again, or give another --output\n",
        capsys.readouterr().err,
    )
    assert accelerator.main([*given, "90", "--limit", "5", "--no-resume"]) == 0
    assert names(map(json.loads, capsys.readouterr().out.splitlines())) == ["one"]


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
        (["--max-new-tokens", "1"], "--max-new-tokens is 1; give at least 2"),
        (["--budget", "0"], "--budget is 0.0; give seconds above 0"),
        (["--train-steps", "0"], "--train-steps is 0; give at least 1"),
        (["--data", "missing"], "--data is missing, which is no directory; give that of the shared files"),
        (["--model", "missing"], "no directory 'missing'; give a model's directory"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert accelerator.main(words) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.accelerator: error: {message}")
