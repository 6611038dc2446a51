"""Stop rules tuned by replay: cases are what `generate` runs, and prices are those of the rounds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers import prices, rules
from jaxspec.drafting.layerskip_drafter import LayerSkip
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods import method_files
from jaxspec.testing.models import DEEP, engine_config, params, tokenizer

NEW = 24
PROMPTS = ([2, 3, 4], [5, 6, 2, 4, 3], [7])


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    made = LanguageModel(engine_config(DEEP), params(DEEP), tokenizer(), directory=directory)
    probe = method_files.ProbeFile(np.linspace(-1, 1.5, DEEP.hidden_size, dtype=np.float32), 0.3, 1, "greedy")
    path = method_files.probe_path(directory, 1, "greedy")
    path.parent.mkdir()
    method_files.write_probe(path, made.fingerprint, probe)
    return made


@pytest.fixture(scope="module")
def cases(lm):
    records = rules.record(lm, PROMPTS, rules.texts(lm, PROMPTS, NEW), 1)
    return rules.replayed(lm, 1, records[:1], records)


@pytest.mark.full
def test_every_rule_is_tried_and_a_settled_threshold_beside(cases):
    assert {case.rule for case in cases} == {"constant", "oracle", *rules.THRESHOLDS}
    assert {case.rule for case in cases if case.settled} == set(rules.THRESHOLDS)
    assert all(0 <= case.number <= 1 for case in cases if case.settled)


@pytest.mark.full
def test_texts_are_greedy_whatever_the_model_usually_does(lm):
    usual = {"do_sample": True, "temperature": 5.0}
    drawn = LanguageModel(lm.config, lm.params, lm.tokenizer, directory=lm.directory, defaults=usual)
    usually, greedy = (
        model.generate(PROMPTS[0], method="autoregressive", max_new_tokens=NEW) for model in (drawn, lm)
    )
    assert usually.tokens != greedy.tokens
    mine, its = (rules.record(model, PROMPTS, rules.texts(model, PROMPTS, NEW), 1) for model in (drawn, lm))
    assert [one.right.tolist() for one in mine] == [one.right.tolist() for one in its]


@pytest.mark.full
@pytest.mark.representatives("product")
@pytest.mark.parametrize("rule", ["constant", *rules.THRESHOLDS])
def test_a_case_counts_what_its_method_does(lm, cases, rule):
    number = 3 if rule == "constant" else 0.3
    case = rules.Case(rule, 1, number)
    _, rounds = cases[case]
    ran = [lm.generate(prompt, method=case.method(), max_new_tokens=NEW).statistics for prompt in PROMPTS]
    assert rounds.tokens.tolist() == [one.num_tokens - 1 for one in ran]
    assert rounds.by_length.sum(axis=1).tolist() == [one.num_rounds for one in ran]
    assert rounds.drafted == sum(one.num_draft_tokens for one in ran)
    assert rounds.accepted == sum(one.num_accepted_tokens for one in ran)


@pytest.mark.full
def test_the_oracle_has_no_method(cases):
    with pytest.raises(ValueError, match="differs for each text"):
        rules.Case("oracle", 1).method()


def test_a_settled_threshold_is_where_the_rule_stays(lm):
    # Nothing this draft says is accepted often enough, so γ rises: by .001 a round, from the paper's γ0.
    records = rules.record(lm, PROMPTS, rules.texts(lm, PROMPTS, NEW), 1)
    settled = next(
        case for case in rules.replayed(lm, 1, records, records) if case.rule == "confidence" and case.settled
    )
    assert settled.number > rules.PAPER_GAMMA


@pytest.mark.full
@pytest.mark.representatives("3")
@pytest.mark.parametrize("length", [1, 3, 5])
def test_rounds_of_a_fixed_length_draft_that_many(lm, length):
    drafter = LayerSkip(lm.config, 1, prices.fixed_length(length), 8)
    result = lm.generate(PROMPTS[0], method=drafter, max_new_tokens=40, ignore_eos=True)
    # But for the end of the text, where there is no room for more.
    assert set(result.draft_lengths[:-length]) == {length}


@pytest.mark.full
def test_prices_are_rounds_over_plain_steps(lm, monkeypatch):
    # A clock of our own: a round of K drafts takes K + 1, a step of plain decoding takes 1.
    def speed_ratio(mine, plain):
        texts = [text for turns in mine for text in turns]
        tokens = sum(text.statistics.num_tokens - 1 for text in texts)
        took = sum(sum(1 + drafted for drafted in text.draft_lengths) for text in texts)
        return tokens / took, None

    monkeypatch.setattr(prices, "speed_ratio", speed_ratio)
    drafters = {length: LayerSkip(lm.config, 1, prices.fixed_length(length), 8) for length in (1, 4)}
    found = prices.round_prices(lm, drafters, PROMPTS[:1], max_new_tokens=100, repeats=1)
    assert found[1] == pytest.approx(2, rel=0.05)
    assert found[4] == pytest.approx(5, rel=0.05)


def test_prices_between_measured_lengths_lie_on_a_line():
    rounds = np.array([[2, 0, 0, 0, 0], [0, 1, 1, 0, 1]])
    np.testing.assert_allclose(prices.price_of(rounds, {1: 1.5, 3: 2.5}), [2.0, 1.5 + 2.0 + 2.5])


@pytest.mark.full
def test_a_ratio_of_sums_has_an_interval_over_texts():
    above = np.array([1.0, 3.0, 2.0, 6.0])
    ratio, (low, high) = rules.ratio(above, np.ones(4))
    assert ratio == 3.0
    assert 1.0 <= low < 3.0 < high <= 6.0
    # A text that ended with its first token: draws of it alone have no ratio.
    ratio, interval = rules.ratio(np.array([0.0, 4.0]), np.array([0.0, 2.0]))
    assert (ratio, interval) == (2.0, (2.0, 2.0))
    assert rules.ratio(np.array([4.0]), np.array([2.0])) == (2.0, None)
