"""The acceptance that the training of a head records, and the prior of `auto`."""

from __future__ import annotations

import json

import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.acceptance_file import NAME, Acceptances, Accepted
from jaxspec.io.trained_for import TrainedFor
from jaxspec.methods import Auto, LayerSkip, NGram
from tests import refused, tiny
from training.heads.accepted import accepted_shares

GOOD = {"accept": [0.9, 0.8]}
WRITTEN = Acceptances({"eagle": Accepted((0.5, 0.25))})


def test_a_text_that_ends_within_a_draft_is_no_fault_of_it():
    """The end of a text, or of its budget, within a draft does not count as a rejection."""
    for last in ((2, 2), (0, 0)):
        shares = accepted_shares([[(4, 4), (4, 4), last]] * 9)
        assert min(shares) == 0.95, shares
    # A shorter draft elsewhere has a wrong next token.
    shares = accepted_shares([[(4, 4), (2, 2), (0, 0), (4, 4)]] * 9)
    assert shares[0] < shares[1] > shares[2] < shares[3]


def test_what_never_drafts_is_not_expected_to_be_right():
    assert accepted_shares([[(0, 0)] * 30] * 8)[0] < 0.1
    assert accepted_shares([[]]) == accepted_shares([[(0, 0)]] * 8) == ()


def test_what_is_written_is_read(tmp_path):
    WRITTEN.write(tmp_path / NAME, "abc", {})
    assert Acceptances.read(tmp_path / NAME, "abc") == WRITTEN
    content = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    content["candidates"]["eagle"] |= {"strength": 2.0, "draft": [1.0]}  # as in published heads
    (tmp_path / NAME).write_text(json.dumps(content), encoding="utf-8")
    assert Acceptances.read(tmp_path / NAME, "abc") == WRITTEN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "jaxspec.plan/1"}, "expected jaxspec.acceptance/2; make one with `python -m"),
        ({"model": "other"}, "belongs to another model .*; make one with `python -m training.heads`"),
        ({"candidates": [GOOD]}, r"has .* in `candidates`, expected an object"),
        *(
            (
                {"candidates": {"ngram": GOOD | bad}},
                "ngram.*`accept`.*; expected numbers from 0 to 1|ngram has .* in `accept`, expected a list",
            )
            for bad in (
                {"accept": []},
                {"accept": [1.5]},
                {"accept": [float("nan")]},
                {"accept": 0.5},
                {"accept": [True]},
                {"accept": [10**400]},
            )
        ),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, changes, message):
    path = tmp_path / NAME
    WRITTEN.write(path, "abc", {})
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content), encoding="utf-8")
    with refused(message):
        Acceptances.read(path, "abc")


@pytest.mark.parametrize(
    ("method", "acceptance"),
    [
        (LayerSkip(exit_layer=1), 0.9),
        # Lookups have expectations of their own.
        (NGram(), 0.25),
    ],
)
def test_what_is_recorded_is_expected_of_models(monkeypatch, method, acceptance):
    lm = tiny.language_model()
    lm = LanguageModel(lm.config, lm.params, trained_for=TrainedFor((1, 2)))
    monkeypatch.setattr(type(method), "expectation", lambda *given: (0.9,))
    result = lm.generate([5], method=Auto(among=(method,), explain=True), max_new_tokens=3, ignore_eos=True)
    (expected,) = (one.acceptance for one in result.expected)
    assert expected == pytest.approx(acceptance, abs=0.02)
