"""The comparison of stop rules, what it counts by, and the oracle."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import stop_rules
from benchmarks.stop_rules import Options, measure
from jaxspec.bench import prompts, speed
from jaxspec.bench.oracle import oracle
from jaxspec.cli.options import ModelOptions, SamplingOptions
from jaxspec.console import terminal
from jaxspec.drafting.layerskip import LayerSkip
from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.results import Result, Statistics, Token
from jaxspec.tuning import objectives
from jaxspec.tuning.texts import read_prompts
from tests import tiny

SPLITS = {
    "tuning": {"stories": ("ab", "cd"), "code": ("e ", "ba")},
    "reporting": {"stories": ("abc", "cde"), "code": ("ae ", "bad")},
}


def deep() -> LanguageModel:
    config = tiny.engine_config(tiny.DEEP)
    return LanguageModel(config, tiny.params(tiny.DEEP), tiny.tokenizer(), name="deep")


def result(num_tokens: int, ms: float) -> Result:
    """A text of so many tokens in so many milliseconds after the first."""
    statistics = Statistics(num_tokens, 1, 0, 0, 0, (), ms, ms, 0.0)
    return Result(None, [Token(1)] * num_tokens, "length", statistics)


# What tuning counts by


class Clock:
    """A model whose texts take known times: by prompt, (tokens, plain ms, ms of the method)."""

    def __init__(self, texts):
        self.texts, self.calls, self.executables, self.num_compilations = texts, [], self, 0

    def wait(self):
        pass

    def generate(self, prompt, method=None, **given):
        self.calls.append((prompt, method, given))
        tokens, plain_ms, ms = self.texts[prompt]
        return result(tokens, plain_ms if method is None else ms)


def test_a_score_is_all_tokens_in_all_time():
    """Not a median over prompts, of which the short ones would count as much as the long ones."""
    lm = Clock({"long": (101, 1000.0, 500.0), "short": (11, 100.0, 200.0), "shorter": (6, 50.0, 100.0)})
    speed = objectives.Speed(lm, ["long", "short", "shorter"], 101, "fast")
    row = speed("fast")
    assert row["score"] == pytest.approx(1150 / 800)
    assert row["tokens_per_second"] == pytest.approx(1e3 * 115 / 800)
    assert row["plain_tokens_per_second"] == pytest.approx(1e3 * 115 / 1150)
    # As the suite generates: texts end where the model ends them.
    assert all(given == {"max_new_tokens": 101, "temperature": 0.0} for _, _, given in lm.calls)
    # Each prompt by both, there and back.
    order = [(prompt, method is not None) for prompt, method, _ in lm.calls[6:]]
    assert [prompt for prompt, _ in order] == ["long", "long", "short", "short", "shorter", "shorter"]
    assert order[0][1] != order[1][1]
    assert order[0][1] != order[2][1]


def test_texts_of_one_token_have_no_score():
    with pytest.raises(ValueError, match="every text ends with its first token; give other prompts"):
        objectives.Speed(Clock({"x": (1, 0.0, 0.0)}), ["x"], 8, "fast")("fast")


def test_numbers_are_tuned_on_other_prompts_than_those_that_are_reported():
    lm = deep()
    lm.encode = lambda text, chat=False: [hash(text)]
    lm.config = dataclasses.replace(lm.config, max_position_embeddings=1000)
    tuned = {ids[0] for ids in read_prompts(lm, (), 8)}
    assert len(tuned) == 8
    assert not tuned & {hash(text) for texts in prompts.load().values() for text in texts}


# Intervals


def test_an_interval_is_that_of_other_prompts():
    """Of ten prompts at 2 × and ten at 1 ×, as often as not the one or the other."""
    plain = [[result(11, 100.0)] for _ in range(20)]
    mine = [[result(11, 100.0 if at % 2 else 50.0)] for at in range(20)]
    ratio, (low, high) = speed.speed_ratio(mine, plain)
    assert ratio == pytest.approx(2000 / 1500)
    assert 1.1 < low < ratio < high < 1.7
    ratio, interval = speed.speed_ratio(plain, plain)
    assert (ratio, interval) == (1.0, (1.0, 1.0))
    assert speed.speed_ratio([[result(1, 0.0)]], [[result(1, 0.0)]]) == (None, None)


# The comparison


@pytest.fixture
def model(monkeypatch):
    lm = deep()
    monkeypatch.setattr(ModelOptions, "load", lambda self: lm)
    monkeypatch.setattr(prompts, "load", lambda split="reporting": SPLITS[split])
    return lm


FEW = Options(
    exit_layers=(1, 2),
    constants=(1, 3),
    gammas=(0.2, 0.5),
    num_draft_tokens=4,
    kinds=("stories", "code"),
    num_tuning_prompts=1,
    num_reporting_prompts=2,
    max_new_tokens=12,
    repeats=2,
)


def test_every_rule_is_tuned_and_reported_on_other_prompts(model, monkeypatch):
    asked = []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda p, **given: asked.append((tuple(p), given)) or generate(p, **given)
    )
    report = measure(FEW)
    tried = [(row["rule"], row["exit_layer"], row["number"]) for row in report["tuning"]]
    constants = [("constant", exit_layer, k) for exit_layer in (1, 2) for k in (1, 3)]
    others = [(rule, e, gamma) for rule in ("confidence", "product") for e in (1, 2) for gamma in (0.2, 0.5)]
    assert tried == constants + others
    assert list(report["rules"]) == ["constant", "confidence", "product", "oracle"]
    for rule, row in report["rules"].items():
        assert rule == "oracle" or (rule, row["exit_layer"], row["number"]) in tried
        assert row["speedup_interval"][0] <= row["speedup_interval"][1]
    assert report["rules"]["constant"]["over_constant"] == 1.0
    speeds = {case: row["speedup"] for case, row in zip(tried, report["tuning"], strict=True)}
    for rule in ("constant", "confidence", "product"):
        row = report["rules"][rule]
        assert speeds[rule, row["exit_layer"], row["number"]] == max(
            speedup for case, speedup in speeds.items() if case[0] == rule
        )
    # Of what is reported nothing was seen while numbers were chosen.
    seen = [prompt for prompt, _ in asked]
    tuning = {tuple(model.encode(text)) for texts in SPLITS["tuning"].values() for text in texts[:1]}
    reporting = {tuple(model.encode(text)) for texts in SPLITS["reporting"].values() for text in texts}
    last = max(at for at, prompt in enumerate(seen) if prompt in tuning)
    assert set(seen[: last + 1]) == tuning
    assert set(seen[last + 1 :]) == reporting
    assert not any("ignore_eos" in given for _, given in asked)


def name_of(given: dict) -> str:
    """The method of a call; "" for an object that has no name."""
    return getattr(given.get("method"), "name", "")


def test_a_carried_gamma_is_burnt_in_first(model, monkeypatch):
    """And each text of a case starts from the γ that the one before it ended with."""
    asked = []
    generate = model.generate

    def counted(prompt, **given):
        one = generate(prompt, **given)
        asked.append((given, one.statistics.num_rounds, one.gamma))
        return one

    monkeypatch.setattr(model, "generate", counted)
    few = dataclasses.replace(FEW, carry=True, burn_in=25, exit_layers=(1,), gammas=(0.9,), repeats=1)
    assert measure(few)["carry"]
    for method in ("layerskip", "adaspeed"):
        texts = [one for one in asked if name_of(one[0]) == method and one[0]["method"].gamma is not None]
        assert len(texts) > 4
        first = [0.9] + [ended for _, _, ended in texts[:-1]]
        assert [given["method"].gamma for given, _, _ in texts] == first
        assert len(set(first)) > 1
    plain = next(at for at, (given, _, _) in enumerate(asked) if name_of(given) == "autoregressive")
    assert sum(rounds for given, rounds, _ in asked[:plain] if name_of(given) == "adaspeed") >= 25
    constant = [given for given, _, _ in asked if name_of(given) == "layerskip"]
    assert any(given["method"].gamma is None for given in constant)
    asked.clear()
    measure(dataclasses.replace(few, carry=False))
    with_gamma = [given["method"] for given, _, _ in asked if getattr(given.get("method"), "gamma", None)]
    assert {method.gamma for method in with_gamma} == {0.9}


def test_the_oracle_drafts_what_is_accepted_and_no_more(model):
    """At least one token, which may be wrong; never a wrong one after a right one."""
    for text in SPLITS["reporting"]["stories"]:
        prompt = model.encode(text)
        plain = model.generate(prompt, max_new_tokens=24, ignore_eos=True)
        for exit_layer in (1, 2):
            rule = oracle(model, prompt, plain.tokens, exit_layer, 24)
            drafter = LayerSkip(model.config, exit_layer, rule, 5)
            mine = model.generate(prompt, method=drafter, max_new_tokens=24, ignore_eos=True)
            assert mine.tokens == plain.tokens
            counts = mine.statistics
            wrong = counts.num_draft_tokens - counts.num_accepted_tokens
            assert wrong <= counts.acceptance_histogram[0]
            whole = LayerSkip(model.config, exit_layer, num_draft_tokens=5)
            other = model.generate(prompt, method=whole, max_new_tokens=24, ignore_eos=True).statistics
            assert counts.num_rounds == other.num_rounds
            assert counts.num_draft_tokens < other.num_draft_tokens


def test_sampled_texts_have_no_oracle(model):
    few = dataclasses.replace(
        FEW,
        sampling=SamplingOptions(temperature=0.8, top_p=0.9),
        acceptor="rejection",
        exit_layers=(1,),
        constants=(2,),
        gammas=(0.4,),
        repeats=1,
    )
    report = measure(few)
    assert list(report["rules"]) == ["constant", "confidence", "product"]
    assert report["law"] == "temperature-0.8-top_p-0.9"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ("poems",)}, "unknown kind of prompt 'poems'; give some of stories, code"),
        ({"num_tuning_prompts": 3}, "^num_tuning_prompts is 3; give 1 to 2"),
        ({"num_reporting_prompts": 0}, "^num_reporting_prompts is 0; give 1 to 2"),
        ({"max_new_tokens": 1}, "^max_new_tokens is 1; give at least 2"),
    ],
)
def test_wrong_comparisons(model, changes, message):
    with pytest.raises(ValueError, match=message):
        measure(dataclasses.replace(FEW, **changes))


def test_the_command_prints_a_table_or_json(model, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.0)
    words = "--exit-layer 1 --constant 2 --gamma 0.4 --kind stories --num-tuning-prompts 1 --num-reporting-prompts 1"
    words += " --max-new-tokens 6 --repeats 1 --num-draft-tokens 4"
    assert stop_rules.main([*words.split(), "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert rules.keys() == {"constant", "confidence", "product", "oracle"}
    assert {"mean_acceptance_length", "mean_acceptance_length_drafting"} <= rules["product"].keys()
    assert stop_rules.main(words.split()) == 0
    captured = capsys.readouterr()
    assert "oracle" in captured.out
    assert "…" not in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    assert "measuring" in captured.err
    for wrong, message in (
        (("--max-new-tokens", "1"), "--max-new-tokens is 1; give at least 2"),
        (("--num-tuning-prompts", "9"), "--num-tuning-prompts is 9; give 1 to 2"),
        (("--repeats", "0"), "--repeats is 0; give at least 1"),
        (("--gamma",), "missing value for argument '--gamma'"),
    ):
        assert stop_rules.main([*words.split(), *wrong]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("jaxspec: error: ")
        assert message in said
