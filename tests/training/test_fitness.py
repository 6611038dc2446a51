"""The fitness test: its figures against slow and independent ones, and a gate that an idle model fails."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.language_model import LanguageModel
from jaxspec.testing import reference
from tests import tiny
from training.reports import card, fitness
from training.reports import fitness_report as bench
from training.reports.fitness import Check, Exits, Gate, Texts

CONFIG = tiny.engine_config(tiny.DEEP)


def texts():
    rng = np.random.default_rng(0)
    return Texts.rows(
        [(rng.integers(0, CONFIG.vocab_size, size).tolist(), read) for size, read in ((9, 4), (6, 2), (7, 3))]
    )


@pytest.fixture(scope="module")
def params():
    return tiny.params(CONFIG)


@pytest.mark.full
def test_every_exit_says_what_the_cut_model_says(params):
    some = texts()
    exits = fitness.by_exit(CONFIG, params, some.tokens, some.segments, some.positions)
    for layers in range(1, CONFIG.num_layers + 1):
        for row, count in enumerate((9, 6, 7)):
            tokens = some.tokens[row, :count]
            logits = reference.forward(CONFIG, params, tokens, num_layers=layers)
            distributions = np.exp(logits - logits.max(-1, keepdims=True))
            distributions /= distributions.sum(-1, keepdims=True)
            np.testing.assert_array_equal(exits.chosen[layers - 1, row, :count], distributions.argmax(-1))
            np.testing.assert_allclose(
                exits.confidence[layers - 1, row, :count], distributions.max(-1), rtol=1e-4
            )
            said = -np.log(distributions[np.arange(count - 1), tokens[1:]])
            np.testing.assert_allclose(exits.loss[layers - 1, row, : count - 1], said, rtol=1e-3, atol=1e-4)


def test_only_answers_are_judged_and_packed_texts_apart():
    some = Texts(
        tokens=np.array([[5, 6, 7, 5, 8, 9, 0]]),
        segments=np.array([[1, 1, 1, 2, 2, 2, 0]]),
        positions=np.array([[0, 1, 2, 0, 1, 2, 0]]),
        learn=np.array([[False, False, True, False, True, True, False]]),
    )
    assert some.judged.tolist() == [[False, True, False, True, True, False, False]]
    assert some.has_answers
    right = np.array([[0, 7, 0, 8, 9, 0, 0]])
    wrong = np.array([[0, 7, 0, 1, 9, 0, 0]])
    loss = np.stack([np.full((1, 7), 2.0), np.full((1, 7), 1.0)])
    confidence = np.array([[[0, 0.9, 0, 0.2, 0.8, 0, 0]], [[0, 1, 0, 1, 1, 0, 0]]])
    got = fitness.summary(some, Exits(loss, np.stack([wrong, right]), confidence))
    assert got["tokens"] == 3
    assert got["loss"] == [2.0, 1.0]
    assert got["agreement"] == pytest.approx([2 / 3, 1])
    assert got["confidence"] == pytest.approx([1.9 / 3, 1])
    assert got["auroc"] == [1.0, None]
    assert got["calibration_error"][0] == pytest.approx((0.1 + 0.2 + 0.2) / 3)
    assert (got["accuracy"], got["answers"]) == ([0.5, 1.0], 2)
    assert some.openings(9) == [[5, 6], [5]]
    open_text = dataclasses.replace(some, learn=np.array([[True] * 6 + [False]]))
    assert not open_text.has_answers
    assert fitness.summary(open_text, Exits(loss, np.stack([wrong, right]), confidence))["accuracy"] is None
    assert open_text.openings(1, opening=2) == [[5, 6]]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=20))
def test_auroc_is_the_share_of_pairs_in_order(pairs):
    score, label = (np.array(column) for column in zip(*pairs, strict=True))
    higher = [(a > b) + 0.5 * (a == b) for a in score[label] for b in score[~label]]
    got = fitness.auroc(score.astype(float), label)
    assert got is None if not higher else got == pytest.approx(np.mean(higher))


def test_auroc_weighs_soft_labels():
    score, label = np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.2, 0.0, 0.7, 1.0])
    weights = label[:, None] * (1 - label[None])
    order = (score[:, None] > score[None]) + 0.5 * (score[:, None] == score[None])
    assert fitness.auroc(score, label) == pytest.approx((weights * order).sum() / weights.sum())
    assert fitness.auroc(score, np.ones(4)) is None


def test_repetition_counts_what_was_written_before():
    assert fitness.repeated([1, 2, 3, 4], length=2) == 0
    assert fitness.repeated([1, 2] * 10, length=2) == pytest.approx(17 / 19)
    assert fitness.repeated([1, 2], length=8) == 0


def made_report(depth=12, **changes):
    """A report that passes, changed where asked."""
    falling = np.linspace(1.0, 0.2, depth).tolist()

    def kind(accuracy):
        return {
            "tokens": 100, "loss": falling, "agreement": [0.8] * depth, "confidence": [0.9] * depth,
            "auroc": [0.9] * depth, "calibration_error": [0.05] * depth, "accuracy": accuracy,
        }  # fmt: skip

    report = {
        "kinds": {"sums": kind([0.95] * depth), "edits": kind([0.95] * depth), "stories": kind(None)},
        "write_rms": {"attention": [0.05] * depth, "mlp": [0.05] * depth},
        "repeated": 0.02,
    }
    for path, value in changes.items():
        *inside, name = path.split("__")
        place = report
        for part in inside:
            place = place[part]
        place[name] = value
    return report


def test_a_model_that_needs_its_depth_passes():
    assert [check for check in fitness.checks(made_report()) if not check.passed] == []


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"kinds__stories__loss": [1.0] * 3 + [0.2] * 9}, ["loss on open text falls from 9 to 12 layers"]),
        (
            {"kinds__sums__loss": [0.2] * 12, "kinds__edits__loss": [0.2] * 12},
            ["loss on answers falls from 3 to 12 layers", "loss on answers falls from 9 to 12 layers"],
        ),
        (
            {"write_rms__mlp": [0.09] * 4 + [0.004] * 8, "write_rms__attention": [0.07] * 4 + [0.004] * 8},
            ["write RMS, first and last third"],
        ),
        ({"repeated": 0.6}, ["repeated 8-grams"]),
        ({"kinds__sums__accuracy": [0.9] * 11 + [0.5]}, ["accuracy on sums"]),
        ({"kinds__sums__agreement": [0.99] * 12, "kinds__edits__agreement": [0.99] * 12}, ["agreement of exit 3"]),
        ({"kinds__stories__auroc": [None] * 12}, []),
    ],
)  # fmt: skip
def test_each_condition_can_fail(change, failed):
    assert [check.name for check in fitness.checks(made_report(**change)) if not check.passed] == failed


@pytest.mark.full
def test_idle_layers_are_found_in_a_whole_model(params):
    """Layers that write nothing: the last exits have one loss, and the write RMS falls."""
    idle = jax.tree.map(lambda leaf: leaf, params)
    for layer in idle["layers"][1:]:
        layer["attention"]["out"] = jnp.zeros_like(layer["attention"]["out"])
        layer["mlp"]["down"] = jnp.zeros_like(layer["mlp"]["down"])
    lm = LanguageModel(CONFIG, idle, tiny.tokenizer(), name="idle")
    report = bench.measure(lm, {"text": texts()}, greedy_texts=2)
    assert report["kinds"]["text"]["loss"][0] == pytest.approx(report["kinds"]["text"]["loss"][-1])
    assert not report["passed"]
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    assert "write RMS, first and last third" in failed
    shown = "\n".join(card.fitness_lines(report, with_gate=True))
    assert "**failed**" in shown
    assert "| text |" in shown


@pytest.mark.full
def test_texts_too_short_to_be_continued_are_no_error_but_do_not_pass(params):
    """As after a training on short lines, or with windows that are longer than the context."""
    lm = LanguageModel(CONFIG, params, tiny.tokenizer(), name="tiny")
    long = CONFIG.context_length + 8
    short = Texts.rows([([5, 6, 7], 0)])
    for some in (short, Texts.rows([([5] * long, long - 2)])):
        report = bench.measure(lm, {"text": some})
        assert report["repeated"] is None
        (check,) = [one for one in report["checks"] if one["name"] == "repeated 8-grams"]
        assert not check["passed"]
        assert "| repeated 8-grams | - |" in "\n".join(card.fitness_lines(report, with_gate=True))


@dataclasses.dataclass
class Written:
    tokens: list[int]


def test_a_long_text_that_loops_is_not_hidden_by_short_ones(params, monkeypatch):
    lm = LanguageModel(CONFIG, params, tiny.tokenizer(), name="tiny")
    written = [Written([1, 2] * 18), Written(list(range(9))), Written([1])]
    monkeypatch.setattr(lm, "generate", lambda *_, **__: written)
    assert bench.measure(lm, {"text": texts()})["repeated"] == pytest.approx(27 / 31)


@pytest.mark.parametrize("kind", ["sums", "code", "edits", "facts"])
def test_each_family_of_tasks_has_an_accuracy_to_reach(kind):
    report = made_report(**{f"kinds__{kind}": {**made_report()["kinds"]["sums"], "accuracy": [0.7] * 12}})
    assert [check.name for check in fitness.checks(report) if not check.passed] == [f"accuracy on {kind}"]


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="no text is given"):
        bench.measure(None, {})


@pytest.mark.full
def test_the_gate_is_data():
    (check,) = [
        one for one in fitness.checks(made_report(), Gate(repeated=0.01)) if one.name == "repeated 8-grams"
    ]
    assert check == Check("repeated 8-grams", 0.02, "at most 0.01", False)
