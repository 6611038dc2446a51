"""Speed-up against what the costs of its parts predict: which parts are measured; the speeds are not tested here."""

from __future__ import annotations

import json

import pytest

from benchmarks import prediction
from jaxspec.model.config import LlamaConfig

TINY = LlamaConfig(64, 16, 32, 4, 2, 1, 8)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setitem(prediction.SHAPES, "tiny", TINY)


@pytest.mark.slow
def test_every_method_is_held_against_its_parts(capsys):
    words = "--shape tiny --methods ngram,layerskip --num-draft-tokens 2 --max-new-tokens 8 --repeats 1"
    assert prediction.main(words.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["shape"], report["device"], list(report["results"])) == (
        "tiny",
        "cpu",
        ["ngram", "layerskip"],
    )
    for name, row in report["results"].items():
        assert row["identical_to_autoregressive"], name
        assert row["speedup"] > 0
        assert row["obtained_over_predicted"] == pytest.approx(row["speedup"] / row["predicted"])
        assert {"mean_acceptance_length", "mean_acceptance_length_drafting"} <= row.keys()
    assert report["results"]["ngram"]["draft_step_ms"] is None
    assert report["results"]["layerskip"]["draft_step_ms"] > 0
    assert report["results"]["layerskip"]["mean_draft_length"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shape huge", "unknown shape 'huge'; give one of 31m,"),
        ("--shape tiny --max-new-tokens 1", "--max-new-tokens is 1; give at least 2"),
        ("--shape tiny --methods ngram,guess", "unknown method 'guess'; give some of ngram,"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert prediction.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.prediction: error: {message}")
