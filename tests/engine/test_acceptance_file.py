"""The file of `jaxspec tune --method auto`, and the prior of `auto`."""

from __future__ import annotations

import json

import pytest

from jaxspec.cli import main
from jaxspec.costs.expectations import Expectation
from jaxspec.costs.rounds import DraftCost
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.acceptance_file import NAME, read_acceptance, write_acceptance
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.tuning.acceptance_counts import fitted, measure_acceptance
from jaxspec.methods import Auto, LayerSkip, NGram, Resources
from jaxspec.methods.base import Candidate
from tests import tiny
from tests.commands import write_tiny

GOOD = {"accept": [0.9, 0.8], "strength": 9.0, "draft": [1.0, 0.5]}


def tiny_candidate(name):
    drafter, params = tiny.drafter_of(name, "constant", tiny.engine_config())
    return Candidate(name, drafter, params, DraftCost(layers=1, absorb_layers=1))


@pytest.mark.full
def test_what_is_measured_is_what_rounds_had():
    lm = tiny.language_model()
    candidates = [tiny_candidate(name) for name in ("ngram", "draft-model")]
    prompts = [[7, 1, 7, 1], [5], [3, 4, 3]]
    expected, rows = measure_acceptance(lm, candidates, prompts, max_new_tokens=24)
    for candidate, row in zip(candidates, rows, strict=True):
        texts = [
            lm.generate(prompt, method=(candidate.drafter, candidate.params), max_new_tokens=24)
            for prompt in prompts
        ]
        for name in ("num_draft_tokens", "rounds"):
            counted = {"rounds": "num_rounds"}.get(name, name)
            assert row[name] == sum(getattr(text.statistics, counted) for text in texts)
        assert len(expected[candidate.name].accept) == tiny.K
    # The tiny draft model differs from the target; the texts repeat themselves.
    assert expected["ngram"].accept[1] > expected["draft-model"].accept[1]


def test_a_text_that_ends_within_a_draft_is_no_fault_of_it():
    """The end of a text, or of its budget, within a draft does not count as a rejection."""
    for last in ((2, 2), (0, 0)):
        expected = fitted({"head": [[(4, 4), (4, 4), last]] * 9})["head"]
        assert min(expected.accept) == 0.95, expected
    # A shorter draft elsewhere has a wrong next token.
    expected = fitted({"lookup": [[(4, 4), (2, 2), (0, 0), (4, 4)]] * 9})["lookup"]
    assert expected.accept[0] < expected.accept[1] > expected.accept[2] < expected.accept[3]


def test_what_never_drafts_is_not_expected_to_be_right():
    assert fitted({"lookup": [[(0, 0)] * 30] * 8})["lookup"].accept[0] < 0.1
    assert fitted({"lookup": [[]]}) == fitted({"lookup": [[(0, 0)]] * 8}) == {}


@pytest.mark.slow
def test_the_command_writes_what_auto_begins_with(tmp_path_factory, tmp_path, capfd):
    model = write_tiny(tmp_path_factory)
    command = ["tune", "--method", "auto", "--model", str(model), "--max-new-tokens", "8", "--json"]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("ab ab ab", encoding="utf-8")
    assert main([*command, "--prompt-file", str(prompt)]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["output"] == str(model / NAME)
    assert [row["candidate"] for row in report["results"]] == ["ngram", "suffix"]
    generate = ["generate", "--method", "auto", "--explain", "--json", "--model", str(model), "ab"]
    content = json.loads((model / NAME).read_text(encoding="utf-8"))
    content["candidates"] |= {"ngram": GOOD}
    (model / NAME).write_text(json.dumps(content), encoding="utf-8")
    assert main([*generate, "--max-new-tokens", "4"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert {one["name"] for one in report["expected"]} == {"ngram", "suffix"}
    assert report["prices"]["candidates"] == ["ngram", "suffix"]
    content["candidates"]["ngram"] = {}
    (model / NAME).write_text(json.dumps(content), encoding="utf-8")
    assert main([*generate, "--max-new-tokens", "4"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["tokens"]
    (line,) = (line for line in captured.err.splitlines() if "no measured acceptances" in line)
    assert "ngram has {}; expected `accept`" in line
    assert main([*command, "--prompt-file", str(prompt)]) == 0  # and replaces it by a valid file


def test_what_is_written_is_read(tmp_path):
    expected = {"ngram": Expectation((0.5, 0.25), 2.0, (0.75, 0.5))}
    write_acceptance(tmp_path / NAME, "abc", expected, {})
    assert read_acceptance(tmp_path / NAME, "abc") == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "jaxspec.plan/1"}, "expected jaxspec.acceptance/2: not a file of acceptances"),
        ({"model": "other"}, "belongs to another model .*; make one with `jaxspec tune --method auto`"),
        ({"candidates": [GOOD]}, "has no candidates"),
        *(
            (
                {"candidates": {"ngram": GOOD | bad}},
                "ngram has .*; expected `accept` and `draft`, numbers from 0 to 1",
            )
            for bad in (
                {"accept": []},
                {"accept": [1.5]},
                {"accept": [float("nan")]},
                {"accept": 0.5},
                {"strength": 0},
                {"strength": 10**400},
                {"strength": True},
                {"draft": []},
                {"draft": [1, -1]},
                {"draft": [20.0, 0.1]},
                {"draft": None},
            )
        ),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, changes, message):
    path = tmp_path / NAME
    write_acceptance(path, "abc", {}, {})
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_acceptance(path, "abc")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "acceptance"),
    [
        (LayerSkip(exit_layer=1), 0.9),
        (LayerSkip(exit_layer=1, num_draft_tokens=4), 0.9),
        # The name does not tell its exit by another option from one that was measured.
        (LayerSkip(exit_layer=1, stop_rule="confidence"), 0.5),
        # Lookups have expectations of their own.
        (NGram(), 0.5),
    ],
)
def test_what_was_measured_is_expected_of_models(monkeypatch, method, acceptance):
    lm = tiny.language_model()
    lm = LanguageModel(lm.config, lm.params, trained_for=TrainedFor((1, 2)))
    known = dict.fromkeys(("ngram", "layerskip 1"), Expectation((0.9,), 20.0))
    monkeypatch.setattr(Auto, "expected", staticmethod(lambda *given: known))
    result = lm.generate([5], method=Auto(among=(method,), explain=True), max_new_tokens=3, ignore_eos=True)
    (expected,) = (one.acceptance for one in result.expected)
    assert expected == pytest.approx(acceptance, abs=0.02)


def test_heads_that_come_along_bring_what_is_known(tmp_path, monkeypatch):
    """The file of the model itself has precedence."""
    loaded = tiny.language_model().loaded
    model, *heads = (tmp_path / name for name in ("model", "eagle", "medusa"))
    for directory in (model, *heads):
        directory.mkdir()
    resources = Resources(load_draft=lambda model: model.loaded, encode=list, directory=model)
    monkeypatch.setattr(
        "jaxspec.heads.files.embedded_head",
        lambda kind, target, config: next(
            (one for one in heads if one.name == kind and target == loaded.fingerprint), None
        ),
    )
    assert Auto.expected(loaded, resources) == {}
    brought, own = Expectation((0.5,), 2.0, (1.0,)), Expectation((0.75,), 4.0, (0.5,))
    write_acceptance(heads[0] / NAME, loaded.fingerprint, {"eagle": brought, "hybrid": brought}, {})
    assert Auto.expected(loaded, resources) == {"eagle": brought, "hybrid": brought}
    write_acceptance(model / NAME, loaded.fingerprint, {"hybrid": own}, {})
    assert Auto.expected(loaded, resources) == {"eagle": brought, "hybrid": own}
    # The measurements of a distributed head do not apply to the user's own head of the same kind.
    (model / "heads" / "eagle").mkdir(parents=True)
    (model / "heads" / "eagle" / "config.json").write_text("{}")
    assert Auto.expected(loaded, resources) == {"hybrid": own}
    write_acceptance(heads[1] / NAME, "other", {"ngram": own}, {})
    with pytest.raises(ValueError, match=r"medusa.*belongs to another model"):
        Auto.expected(loaded, resources)


@pytest.mark.parametrize("more", [["--alpha", "0.9"], ["--threshold", "0.5"], ["--draft", "x"]])
def test_options_of_other_methods_are_refused(capfd, more):
    assert main(["tune", "--method", "auto", *more]) == 2
    assert f"tune --method auto has no option {more[0]}; leave it out" in capfd.readouterr().err
