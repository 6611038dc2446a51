"""Predictions from bytes and exchanges: their algebra, and that the bytes are the model's."""

from __future__ import annotations

import json

import pytest

from benchmarks import scaling
from benchmarks.scaling import Options, measure, of_model
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.model.llama import num_params


def test_a_pass_reads_the_weights_of_the_model():
    """All but norms and the embedding, of which a token reads one row."""
    config = SHAPES["8b"]
    rest = config.vocab_size * config.hidden_size + (2 * config.num_layers + 1) * config.hidden_size
    assert of_model(config).weights + rest == num_params(config)


def test_where_drafts_cost_nothing_a_round_costs_a_step():
    """So many rows are free; exchanges slow both alike, but not on one chip."""
    found = measure(Options("v5e:2x2", "8b", agreement=1.0, num_draft_tokens=4, exchange_us=0.0))
    assert found["methods"]["ngram"]["speedup"] == pytest.approx(5)
    assert found["exchange_share"] == pytest.approx(0)
    slower = measure(Options("v5e:2x2", "8b", agreement=1.0, num_draft_tokens=4, exchange_us=10.0))
    assert slower["plain_ms"] == pytest.approx(found["plain_ms"] + 68 * 10e-3)
    assert slower["methods"]["ngram"]["speedup"] == pytest.approx(5)
    assert measure(Options("v6e:1x1", "8b"))["exchange_share"] == pytest.approx(0)


def test_the_best_length_rises_with_the_agreement():
    found = [measure(Options(draft="1.2b", agreement=rate))["methods"] for rate in (0.3, 0.6, 0.9)]
    for name in ("draft-model", "eagle3", "layerskip"):
        lengths = [one[name]["num_draft_tokens"] for one in found]
        assert lengths == sorted(lengths)
        assert lengths[0] < lengths[-1], name
    assert found[1]["layerskip"]["speedup"] < found[1]["eagle3"]["speedup"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shape huge", "unknown shape 'huge'; give one of 31m,"),
        ("--topology v5e", "--topology is 'v5e'; give the chips"),
        ("--agreement 2", "--agreement is 2.0; give 0 to 1"),
    ],
)
def test_wrong_use_is_one_line(capsys, words, message):
    assert scaling.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.scaling: error: {message}")


def test_the_report_says_that_it_is_a_prediction(capsys):
    assert scaling.main(["--topology", "v5p:2x2x4", "--shape", "405b", "--draft", "8b"]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] is True
