"""The suite: what runs are made of words, in which order they generate, and what their times come to."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks import suite, suite_report
from benchmarks.suite import Options, measure, parse_run
from jaxspec import methods
from jaxspec.bench import prompts
from jaxspec.cli.options import SamplingOptions
from jaxspec.engine.results import Result, Statistics, Token
from tests.test_cli import write_model, write_tokenizer

KINDS = {"stories": ("Once", "Upon"), "code": ("def f", "def g")}


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(prompts, "load", lambda split="reporting": KINDS)


def result(tokens: list[int], decode_ms: float, drafts: int = 0, accepted: int = 0) -> Result:
    counts = (len(tokens), len(tokens) - 1 - accepted, drafts, drafts, accepted, ())
    return Result("", list(map(Token, tokens)), "length", Statistics(*counts, 2 * decode_ms, decode_ms, 0.0))


class Fake:
    """A language model that takes 8 ms for a text, by ngram 4 ms, and is stopped at a given call."""

    def __init__(self, name: str = "fake", stopped_at: int | None = None) -> None:
        self.name, self.dtype, self.device = name, "float32", SimpleNamespace(device_kind="abacus")
        self.executables = SimpleNamespace(wait=lambda: self.calls.append("wait"), num_compilations=0)
        self.calls: list = []
        self.checked: list = []
        self._stopped_at = stopped_at

    def stream(self, prompt, *, method, **options):
        self.checked.append((prompt, method.name, options))
        return iter(())

    def generate(self, prompt, *, method, **options):
        method = method.name
        if len(self.calls) == self._stopped_at:
            raise KeyboardInterrupt
        self.calls.append((prompt, method, options["seed"]))
        if method == "ngram":
            return result([5, 6, 7, 8, 9], 4.0, drafts=3, accepted=2)
        return result([5, 6, 7, 8, 9], 8.0)


def take(monkeypatch, *models: Fake) -> None:
    """Has the suite load these, by name."""
    by_name = {model.name: model for model in models}
    monkeypatch.setattr(suite, "load", lambda name, dtype, device: by_name[name or "fake"])


# Words


def test_a_run_is_a_method_in_the_words_of_the_command_line():
    words = (
        "adaspeed --exit-layer 2 --gamma 0.6 --no-adaptive-gamma --stop-rule product --stop-rule confidence"
    )
    assert parse_run(words) == methods.AdaSPEED(
        exit_layer=2, gamma=0.6, adaptive_gamma=False, stop_rule=("product", "confidence")
    )
    assert parse_run("draft-model --draft 'my draft'") == methods.DraftModel(draft="my draft")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "guess --gamma 1",
            "`runs` 'guess --gamma 1': unknown method 'guess'; the methods are adaspeed,",
        ),
        ("", "`runs` '': unknown method ''"),
        ("layerskip --exit-lyer 3", r"unrecognized options: --exit-lyer.*perhaps you meant --exit-layer"),
        ("layerskip --exit-layer three", "`runs` 'layerskip --exit-layer three': "),
        ("ngram 'x", '`runs` "ngram \'x": No closing quotation'),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        measure(Options(runs=("ngram", words), num_prompts=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ()}, "give at least one of `runs`, such as 'ngram'"),
        ({"num_prompts": 0}, "^num_prompts is 0; give 1 to 2"),
        ({"num_prompts": 3}, "^num_prompts is 3; give 1 to 2"),
        ({"repeats": 0}, "^repeats is 0; give at least 1"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1; give at least 2"),
    ],
)
def test_wrong_numbers(monkeypatch, changes, message):
    take(monkeypatch)  # nothing may be loaded
    with pytest.raises(ValueError, match=message):
        measure(dataclasses.replace(Options(runs=("ngram",), num_prompts=1), **changes))


# Order


def test_turns_are_taken_prompt_by_prompt_after_one_that_compiles(monkeypatch):
    lm = Fake()
    take(monkeypatch, lm)
    sampling = SamplingOptions(temperature=0.6, top_p=0.9)
    options = Options(runs=("ngram",), num_prompts=2, repeats=2, sampling=sampling, max_new_tokens=5)
    report = measure(options)
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "max_new_tokens": 5, "max_batch": 1}
    order = ["Once", "def f", "Upon", "def g"]
    assert lm.checked == [(order, "autoregressive", given), (order, "ngram", given)]

    def turn(text, number, names):
        return [*((text, name, number) for name in names), "wait"]

    there, back = ("autoregressive", "ngram"), ("ngram", "autoregressive")
    expected = turn("Once", 0, there)
    for at, text in enumerate(order):
        ways = (there, back) if at % 2 == 0 else (back, there)
        expected += [call for number, names in enumerate(ways) for call in turn(text, number, names)]
    assert lm.calls == expected
    assert report["law"] == "temperature-0.6-top_p-0.9"
    figures = report["targets"][0]["runs"]["ngram"]["stories"]
    assert figures == {
        "prompts": 2,
        "tokens": 10,
        "tokens_per_second": pytest.approx(1000),
        "speedup": pytest.approx(2),
        "speedup_interval": (pytest.approx(2), pytest.approx(2)),
        "mean_acceptance_length": 2.0,
        "mean_acceptance_length_drafting": pytest.approx(1 + 2 / 3),
        "draft_acceptance_rate": pytest.approx(2 / 3),
        "mean_draft_length": 1.5,
        "identical_to_autoregressive": None,
    }


def test_a_run_that_a_target_cannot_do_ends_the_suite_before_it_begins(monkeypatch):
    able, unable = Fake("able"), Fake("unable")

    def refuse(*args, method, **options):
        if method.name == "ngram":
            raise ValueError("not with me")

    monkeypatch.setattr(unable, "stream", refuse)
    take(monkeypatch, able, unable)
    with pytest.raises(ValueError, match="not with me"):
        measure(Options(models=("able", "unable"), runs=("ngram",), num_prompts=1))
    assert able.calls == []


def test_an_interrupted_suite_ends_with_the_prompts_that_were_done(monkeypatch):
    # Two calls that compile and a wait; then a prompt is two that count, and a wait.
    take(monkeypatch, Fake("first", stopped_at=3 + 3 * 2 + 1), Fake("second"))
    report = measure(Options(models=("first", "second"), runs=("ngram",), num_prompts=2, repeats=1))
    assert report["interrupted"]
    (target,) = report["targets"]
    assert {kind: figures["prompts"] for kind, figures in target["runs"]["ngram"].items()} == {
        "stories": 1,
        "code": 1,
        "all kinds": 2,
    }
    take(monkeypatch, Fake("first", stopped_at=4))
    with pytest.raises(KeyboardInterrupt):
        measure(Options(models=("first",), runs=("ngram",), num_prompts=2, repeats=1))


# Figures


def record(kind: str, plain_ms: list[float], ngram_ms: list[float], text: list[int] | None = None):
    ngram = [result(text or [5, 6, 7], ms, drafts=2, accepted=1) for ms in ngram_ms]
    return kind, {"autoregressive": [result([5, 6, 7], ms) for ms in plain_ms], "ngram": ngram}


def test_speedups_are_ratios_of_total_times_and_medians_over_turns():
    records = [
        record("stories", [30.0, 60.0, 30.0], [10.0, 10.0, 900.0]),
        record("stories", [10.0, 20.0, 10.0], [10.0, 30.0, 100.0]),
        record("code", [4.0, 4.0, 4.0], [8.0, 8.0, 8.0], text=[5, 6, 8]),
    ]
    report = suite_report.target_report(Fake(), records, sampling=False)
    runs = report["runs"]
    assert {key: report[key] for key in ("model", "dtype", "device")} == {
        "model": "fake",
        "dtype": "float32",
        "device": "abacus",
    }
    # By turn 40/20, 80/40 and 40/1000; with code 44/28, 84/48 and 44/1008.
    assert runs["ngram"]["stories"]["speedup"] == pytest.approx(2)
    assert runs["ngram"]["code"]["speedup"] == pytest.approx(0.5)
    assert runs["ngram"]["all kinds"]["speedup"] == pytest.approx(44 / 28)
    assert runs["ngram"]["stories"]["tokens_per_second"] == pytest.approx(1e3 * 4 / 40)
    assert {kind: figures["speedup"] for kind, figures in runs["autoregressive"].items()} == {
        "stories": 1,
        "code": 1,
        "all kinds": 1,
    }
    assert report["best"] == {"stories": "ngram", "code": "autoregressive", "all kinds": "ngram"}
    same = {kind: figures["identical_to_autoregressive"] for kind, figures in runs["ngram"].items()}
    assert same == {"stories": True, "code": False, "all kinds": False}


def test_texts_of_one_token_have_no_speed():
    records = [("stories", {"autoregressive": [result([5], 0.0)], "ngram": [result([5], 0.0)]})]
    report = suite_report.target_report(Fake(), records, sampling=False)
    figures = report["runs"]["ngram"]["stories"]
    numbers = ("tokens_per_second", "speedup", "speedup_interval", "mean_acceptance_length")
    numbers += ("mean_acceptance_length_drafting", "draft_acceptance_rate")
    assert [figures[name] for name in numbers] == [None] * 6
    assert suite_report.average([report])["ngram"] == {"stories": None, "all kinds": None}
    suite_report.show({"law": "greedy", "targets": [report], "average_speedup": {}})


def test_averages_are_over_the_targets_that_have_a_kind():
    records = [record("stories", [30.0], [10.0]), record("code", [30.0], [20.0])]
    both = suite_report.target_report(Fake(), records, sampling=False)
    one = suite_report.target_report(Fake(), [record("stories", [30.0], [30.0])], sampling=False)
    assert suite_report.average([both, one])["ngram"] == {
        "stories": pytest.approx(2),
        "code": pytest.approx(1.5),
        "all kinds": pytest.approx((2 + 1) / 2),
    }


# The command


def command(*arguments: str) -> int:
    return suite.main(arguments)


def test_the_command_on_a_model(capsys, tmp_path):
    target = write_model(tmp_path / "target")
    write_tokenizer(target)
    arguments = ("--model", str(target), "--run", "ngram --num-draft-tokens 2", "--run", "layerskip")
    numbers = ("--prompts", "1", "--max-new-tokens", "6", "--repeats", "1")
    assert command(*arguments, *numbers, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {"machine", "options", "law", "targets", "average_speedup", "interrupted"} == set(report)
    assert report["options"]["runs"] == ["ngram --num-draft-tokens 2", "layerskip"]
    assert (report["law"], report["interrupted"]) == ("greedy", False)
    (entry,) = report["targets"]
    assert (entry["model"], entry["dtype"]) == (str(target), "float32")
    assert list(entry["runs"]) == ["autoregressive", "ngram --num-draft-tokens 2", "layerskip"]
    plain = entry["runs"]["autoregressive"]
    for kinds in entry["runs"].values():
        assert list(kinds) == ["stories", "code", "all kinds"]
        for kind, figures in kinds.items():
            assert figures["identical_to_autoregressive"] is True
            assert figures["tokens"] == plain[kind]["tokens"] > 1
            assert figures["speedup"] > 0
    assert plain["all kinds"]["mean_acceptance_length"] == 1
    assert report["average_speedup"]["layerskip"]["code"] == entry["runs"]["layerskip"]["code"]["speedup"]


def test_the_tables(monkeypatch, capsys):
    take(monkeypatch, Fake("one"), Fake("two"))
    monkeypatch.setenv("COLUMNS", "140")
    models = ("--model", "one", "--model", "two")
    assert command(*models, "--run", "ngram --match latest", "--num-prompts", "1") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines.count("ngram --match latest *2.00× (2.0|1.7) *2.00× (2.0|1.7) *2.00× (2.0|1.7)") == 2
    assert lines.count("autoregressive 500 tokens/s 500 tokens/s 500 tokens/s") == 2
    assert "ngram --match latest 2.00× 2.00× 2.00×" in lines
    assert {"one, float32, abacus", "two, float32, abacus", "mean speed-up of 2 targets"} <= set(lines)


def test_a_text_that_differs_is_told(monkeypatch, capsys):
    records = [record("stories", [1.0], [1.0], text=[5, 5, 5])]
    report = suite_report.target_report(Fake(), records, sampling=False)
    suite_report.show({"law": "greedy", "targets": [report], "average_speedup": {}})
    message = "jaxspec: warning: texts of ngram by fake are not those of autoregressive\n"
    assert capsys.readouterr().err == message


def test_the_command_says_that_it_was_interrupted(monkeypatch, capsys):
    arguments = ("--run", "ngram", "--prompts", "1", "--repeats", "1")
    for calls, printed in ((6, True), (0, False)):
        take(monkeypatch, Fake(stopped_at=calls))
        assert command(*arguments) == 130
        output = capsys.readouterr()
        assert ("2.00×" in output.out) == printed
        assert output.err.startswith("jaxspec: interrupted")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frob",), "unrecognized options: --frob; see python -m benchmarks.suite --help"),
        ((), "there is nothing to measure; give at least one of --run, such as 'ngram'"),
        (("--run", "ngram", "--repeats", "0"), "--repeats is 0; give at least 1"),
        (("--run", "ngram", "--prompts", "3"), "--num-prompts is 3; give 1 to 2"),
        (("--run", "ngram --gamma"), "--run 'ngram --gamma': "),
        (("--run", "ngram", "--model", "nowhere"), "no directory 'nowhere'"),
        (
            ("--run", "layerskip --exit-layer 99", "--model", "small"),
            "--exit-layer is 99; the model has 12 layers",
        ),
    ],
)
def test_wrong_use_is_one_line(capsys, arguments, message):
    assert command("--prompts", "1", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxspec: error: " + message)
    assert said.count("\n") == 1
