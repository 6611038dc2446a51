"""The sweeps of ASD and S2D: which settings differ, what is measured how often, and what is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cli import main
from jaxspec.drafting.asd_drafter import admg
from jaxspec.drafting.s2d_drafter import S2DDrafter
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.methods.method_files import ASD_NAME
from jaxspec.measuring.tuning import asd_sweep, race, s2d_sweep
from jaxspec.measuring.tuning.asd_sweep import tune_asd
from jaxspec.measuring.tuning.s2d_sweep import s2d_grid, sorted_draft, tune_s2d
from jaxspec.measuring.tuning.texts import prepare_texts
from jaxspec.measuring.tuning.tuning_options import ASDGrid, Sweep
from tests import refused, tiny
from tests.commands import CONFIG, write_model, write_tiny, write_tokenizer

pytestmark = pytest.mark.usefixtures("no_default_method")

DEEP = dataclasses.replace(tiny.TARGET, num_layers=6)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
# Of two prompts and six layers.
SIMILARITIES = np.float32([[0.1, 0.9, 0.99, 0.7, 0.8, 0.6], [0.2, 0.9, 0.95, 0.6, 0.7, 0.99]])


@pytest.fixture(scope="module")
def deep() -> LanguageModel:
    return LanguageModel(DEEP, tiny.params(DEEP), name="deep")


# The grid


def test_settings_of_equal_masks_are_one_group():
    settings = asd_sweep.grid((0.85, 0.92, 0.995, 1.0), (0, 2, 7), (0, 1))
    assert len(settings) == 24
    groups = asd_sweep.grouped(SIMILARITIES, settings)
    seen = {}
    for group in groups:
        for setting in group.settings:
            masks = [
                np.asarray(admg(jnp.asarray(row), setting.alpha, setting.every, setting.keep_last))
                for row in SIMILARITIES
            ]
            assert (group.plans == masks).all()
            seen[setting] = group
        assert [s.rules for s in group.settings] == sorted(s.rules for s in group.settings)
    assert len({group.plans.tobytes() for group in groups}) == len(groups) < len(seen)
    # Left out: those that skip nothing.
    idle = {s for s in settings if s.alpha >= 0.995 and s.every in (0, 7)}
    assert set(settings) - set(seen) == idle
    assert seen[ASDNumbers(0.92, 0, 0)] is seen[ASDNumbers(0.92, 7, 0)]
    assert seen[ASDNumbers(0.92, 0, 0)].settings[0] == ASDNumbers(0.92, 0, 0)
    assert seen[ASDNumbers(0.92, 0, 0)].skipped == (1.5, 0.0)
    assert seen[ASDNumbers(0.92, 0, 1)].skipped == (1.0, 0.0)
    assert seen[ASDNumbers(1.0, 2, 1)].skipped == (2.0, 2.0)


def test_a_draft_of_nothing_is_left_out():
    assert asd_sweep.grouped(SIMILARITIES, [ASDNumbers(1.0, 1, 0)]) == []
    assert len(asd_sweep.grouped(SIMILARITIES, [ASDNumbers(1.0, 1, 1)])) == 1


def test_default_alphas_are_those_of_the_model():
    alphas = asd_sweep.default_alphas(SIMILARITIES)
    assert list(alphas) == sorted(alphas)
    assert {0.985, 1.0} <= set(alphas)
    assert len(alphas) == 6
    skipped = [(alpha <= SIMILARITIES).mean() for alpha in alphas if alpha not in (0.985, 1.0)]
    assert skipped == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.1)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (((0.9,), (-1,), (0,)), "`everys` has -1"),
        (((0.9,), (2**31,), (0,)), "`everys` has 2147483648; give 0"),
        (((0.9,), (0,), (-2,)), "`keep_lasts` has -2"),
    ],
)
def test_wrong_grids(lists, message):
    with refused(message):
        asd_sweep.grid(*lists)


# The sweep


class FakeSpeed:
    """Speeds that follow from the setting and the turn."""

    def __init__(self, lm, prompts, max_new_tokens, drafter):
        self.calls: list[tuple[float, int, int]] = []
        FakeSpeed.last = self

    def __call__(self, drafter):
        setting = (round(float(drafter.alpha), 3), int(drafter.every), int(drafter.keep_last))
        self.calls.append(setting)
        alpha, every, keep_last = setting
        score = 2 - abs(alpha - 0.92) + 0.2 * (every == 2) + 0.1 * (keep_last == 1)
        # The first measurement of one setting is far too good.
        if setting == (0.6, 0, 0) and self.calls.count(setting) == 1:
            score = 9.0
        speeds = {"tokens_per_second": 100 * score, "plain_tokens_per_second": 100.0}
        return {"score": score, "draft_acceptance_rate": None} | speeds


GRID, SWEEP = ASDGrid(alphas=(0.6, 0.85, 0.92, 1.0), everys=(0, 2), keep_lasts=(0, 1)), Sweep(repeats=3)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(asd_sweep, "Speed", FakeSpeed)
    gathered = np.stack([SIMILARITIES, SIMILARITIES], axis=-1)
    monkeypatch.setattr(asd_sweep, "prepare_texts", lambda *args: (None, gathered, None))


@pytest.mark.usefixtures("fake")
def test_the_fastest_are_measured_anew(deep):
    told = []
    report = tune_asd(deep, PROMPTS, GRID, SWEEP, on_measured=lambda *progress: told.append(progress[:2]))
    calls = FakeSpeed.last.calls
    distinct = report["distinct"]
    assert report["settings"] == 16
    grid = asd_sweep.grid(GRID.alphas, GRID.everys, GRID.keep_lasts)
    assert len(set(calls[:distinct])) == distinct == len(asd_sweep.grouped(SIMILARITIES, grid))
    counts = {setting: calls[distinct:].count(setting) for setting in calls[distinct:]}
    assert set(counts.values()) == {3}
    assert len(counts) >= race.FINALISTS
    assert told[-1] == (len(calls), len(calls))
    best = report["results"][0]
    assert (best["alpha"], best["every"], best["keep_last"]) == (0.92, 2, 1)
    assert best["score"] == pytest.approx(2.3)
    assert best["turns"] == 3
    scores = [row["score"] for row in report["results"] if row["turns"] == 3]
    assert scores == sorted(scores, reverse=True)
    assert 9.0 not in scores
    assert not report["interrupted"]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("after", [1, 5, 12])
def test_an_interrupted_sweep_has_what_was_measured(deep, after):
    def stop(done, total, best):
        if done == after:
            raise KeyboardInterrupt

    report = tune_asd(deep, PROMPTS, GRID, SWEEP, on_measured=stop)
    assert report["interrupted"]
    assert sum(row["turns"] for row in report["results"]) <= after
    assert report["results"][0]["turns"] == 1


@pytest.mark.usefixtures("fake")
def test_wrong_sweeps(deep):
    with refused("no setting skips a sublayer"):
        tune_asd(deep, PROMPTS, ASDGrid(alphas=(1.0,), everys=(0,)))


@pytest.mark.slow
def test_no_setting_compiles(deep):
    tried, sweep = ASDGrid(everys=(0, 2), keep_lasts=(0, 1)), Sweep(max_new_tokens=4, repeats=1)
    compiled = []

    def told(*_) -> None:
        compiled.append(deep.executables.num_compilations)

    report = tune_asd(deep, PROMPTS, tried, sweep, on_measured=told)
    assert len(set(compiled)) == 1
    assert len(compiled) >= report["distinct"] > 3
    similarities = np.asarray(prepare_texts(deep, PROMPTS, [[0, 0]] * 2)[1])[:, :, 0]
    assert report["similarities"]["max"] == pytest.approx(similarities.max())
    assert all(row["tokens_per_second"] > 0 for row in report["results"])


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory, dataclasses.replace(CONFIG, num_layers=4))


@pytest.mark.slow
def test_the_command_writes_numbers_that_the_method_finds(model, tmp_path, capfd):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time")
    lists = ("--alpha", "0.5", "--alpha", "1", "--every", "2", "--keep-last", "1", "--repeats", "1")
    arguments = ["tune", "--method", "asd", "--model", str(model), "--prompt-file", str(prompt), *lists]
    assert main([*arguments, "--max-new-tokens", "4", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    best = report["results"][0]
    lm = load(model)
    numbers = ASDNumbers.read(model / ASD_NAME, lm.fingerprint)
    assert dataclasses.astuple(numbers) == (best["alpha"], best["every"], best["keep_last"])
    assert report["output"] == str(model / ASD_NAME)
    found_by = json.loads((model / ASD_NAME).read_text())["found_by"]
    assert {"command", "score", "tokens_per_second", "turns", "settings"} <= set(found_by)
    drafted = lm.generate("Once upon a time", method="asd", max_new_tokens=8)
    assert drafted.tokens == lm.generate("Once upon a time", method="autoregressive", max_new_tokens=8).tokens


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--alpha", "2"), "--alpha has 2.0; give a cosine similarity above 0 and at most 1 (1: rule off)"),
        (("--max-new-tokens", "1"), "--max-new-tokens is 1; give at least 2"),
        (("--output", "/no/where.json"), "cannot write /no/where.json"),
        (("--method", "ngram"), "--method is 'ngram'; give one of 'asd', 's2d'"),
        (("--repeats", "0"), "--repeats is 0; give at least 1"),
        (("--draft", "somewhere"), "tune --method asd has no option --draft; leave it out"),
        (("--threshold", "1.5"), "--threshold has (1.5,); give numbers from 0 to 1"),
        (("--threshold", "0.5"), "tune --method asd has no option --threshold; leave it out"),
    ],
)
def test_wrong_commands(model, capfd, more, message):
    assert main(["tune", "--method", "asd", "--model", str(model), *more]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    # A slow machine says what it is doing first.
    error = captured.err.splitlines()[-1]
    assert error.startswith("jaxspec: error: ")
    assert message in error


# S2D


def test_thresholds_that_draft_alike_are_tried_once():
    assert s2d_grid((0.0, 0.5, 1.0), 2) == [(1.0,), (0.5,), (0.0,)]
    three = s2d_grid((1.0, 0.0, 0.5, 0.5), 3)
    assert three == [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.5, 0.5), (0.5, 0.0), (0.0, 0.0)]
    with refused("6 thresholds at 11 exits are 4368 settings, more than 200"):
        s2d_grid(s2d_sweep.THRESHOLDS, 12)


def test_the_fastest_thresholds_win_and_a_draft_with_one_exit_has_none(deep, monkeypatch):
    def speed(method):
        (first, second), draft = method[0].thresholds.tolist(), method[1]
        score = 2 - abs(first - 0.7) - abs(second - 0.3) if draft == "parameters" else 0
        return {"score": score, "tokens_per_second": 1.0, "draft_acceptance_rate": None}

    monkeypatch.setattr(s2d_sweep, "Speed", lambda *_: speed)
    drafter = S2DDrafter(deep.config, (1, 2, 3), jnp.zeros(2))
    report = tune_s2d(deep, PROMPTS, drafter, "parameters")
    assert report["results"][0]["thresholds"] == [0.7, 0.3]
    assert len(report["results"]) == report["settings"] == 21
    with refused(r"the draft has one exit \(2 layers\)"):
        tune_s2d(deep, PROMPTS, S2DDrafter(deep.config, (2,), jnp.zeros(0)))


def test_thresholds_fit_a_draft_and_its_quantised_copy(model, tmp_path):
    draft = tmp_path / "draft"
    write_tokenizer(write_model(draft, dataclasses.replace(CONFIG, num_layers=3), seed=2))
    content = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**content, "jaxspec": {"exits": [1, 2, 3]}}))
    usual, small = (sorted_draft(load(model, weights=weights), str(draft)) for weights in (None, "int8"))
    assert usual.fingerprint == small.fingerprint


@pytest.mark.full
def test_the_command_writes_thresholds_that_the_method_finds(model, tmp_path, capfd):
    draft, prompt = tmp_path / "draft", tmp_path / "prompt.txt"
    write_tokenizer(write_model(draft, dataclasses.replace(CONFIG, num_layers=3), seed=2))
    content = json.loads((draft / "config.json").read_text())
    prompt.write_text("Once upon a time")
    arguments = ["tune", "--method", "s2d", "--model", str(model), "--draft", str(draft)]
    assert main(arguments) == 2
    assert "needs a draft with sorted exits" in capfd.readouterr().err
    (draft / "config.json").write_text(json.dumps({**content, "jaxspec": {"exits": [1, 2, 3]}}))
    arguments += ["--prompt-file", str(prompt), "--max-new-tokens", "4", "--repeats", "1"]
    assert main([*arguments, "--threshold", "0", "--threshold", "0.5", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["settings"] == 3 == len(report["results"])
    best = report["results"][0]
    lm = load(model)
    drafter, _ = lm.drafter("s2d", draft=str(draft))
    assert drafter.thresholds.tolist() == best["thresholds"]
    written = json.loads(Path(report["output"]).read_text())
    assert (written["target"], written["exits"]) == (lm.fingerprint, [1, 2, 3])
    assert {"command", "score", "tokens_per_second", "turns", "settings"} <= set(written["found_by"])
    # A file that no longer fits is written again; the report is a table too.
    Path(report["output"]).write_text(json.dumps(written | {"target": "another"}))
    assert main([*arguments, "--threshold", "0"]) == 0
    assert json.loads(Path(report["output"]).read_text())["target"] == lm.fingerprint
    assert "exits after 1, 2, 3 layers" in " ".join(capfd.readouterr().out.split())
    # Elsewhere. The draft carries them to a target without thresholds of its own, and warns of it.
    assert main([*arguments, "--threshold", "0.3", "--output", str(tmp_path / "t.json"), "--into-draft"]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["thresholds"] == [0.3, 0.3, 0.0]
    own = json.loads((draft / "config.json").read_text())["jaxspec"]
    assert own == {"exits": [1, 2, 3], "thresholds": [0.3, 0.3], "target": lm.fingerprint}
    write_tokenizer(write_model(tmp_path / "other", seed=5))
    other = load(tmp_path / "other")
    with pytest.warns(RuntimeWarning, match="was trained for another model"):
        drafter, _ = other.drafter("s2d", draft=str(draft))
    assert drafter.thresholds.tolist() == pytest.approx([0.3, 0.3])
    assert main([*arguments, "--draft", "sorted", "--into-draft"]) == 2
    assert "--into-draft writes into a draft's directory" in capfd.readouterr().err
    assert main([*arguments, "--alpha", "0.5"]) == 2
    assert "tune --method s2d has no option --alpha" in capfd.readouterr().err
