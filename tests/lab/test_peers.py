"""`benchmarks.peers`: texts of equal length in turns, resumed records, and ratios; functions play the programs."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from benchmarks import peers
from jaxspec.engine.language_model import load
from jaxspec.requests.results import Result, Statistics
from jaxspec.requests.text import Token
from tests.commands import write_tiny

# Milliseconds per token of the stand-ins.
SPEEDS = {
    peers.BASELINE: 20.0,
    "jaxspec float32 auto": 10.0,
    "transformers": 40.0,
    "llama.cpp Q4_1 lookup": 5.0,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny(tmp_path_factory)


class StandIns:
    """Engines of one tiny model, for the lengths of texts, and of functions that do not compute.

    Attributes:
      called: (run, prompt) of each call.
    """

    def __init__(self, directory):
        self.called = []
        runs = {name: self._run(name, ms) for name, ms in SPEEDS.items()}
        methods = {"jaxspec float32 auto": peers.parse_run("auto")}
        self.engines = peers.Engines({"float32": load(directory)}, runs, methods, ["a line"])

    def _run(self, name, ms):
        def run(prompt, turn):
            self.called.append((name, prompt))
            count = prompt.max_new_tokens
            spent = Statistics(count, count - 1, 0, 0, 0, (), 50.0 + ms * (count - 1), ms * (count - 1), 0.0)
            return Result("a", [Token(3)] * count, "length", spent)

        return run


@pytest.fixture
def stand_ins(monkeypatch, directory):
    made = StandIns(directory)
    monkeypatch.setattr(peers, "open_engines", lambda *given: made.engines)
    return made


def called(capsys, *words):
    status = peers.main([*map(str, words), "--max-new-tokens", "4"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


def test_ratios_of_the_same_texts(capsys, directory, stand_ins):
    status, report, said = called(capsys, "--model", directory, "--limit", 8)
    assert (status, report["prompts"], report["interrupted"]) == (0, 8, False)
    kinds = ["stories", "mathematics", "code", "copy-edit", "all"]
    ratios = report["ratios"]["jaxspec float32 auto"]
    assert set(ratios) == SPEEDS.keys() - {"jaxspec float32 auto"}
    for other, by_kind in ratios.items():
        assert list(by_kind) == kinds
        for figures in by_kind.values():
            assert figures == pytest.approx([SPEEDS[other] / 10.0] * 3)
    one = report["runs"]["transformers"]["all"]
    assert one["tokens_per_second"] == pytest.approx(25.0)
    assert one["first_token_ms"] == pytest.approx(50.0)
    assert one["same_texts"] == 1
    lengths = {
        len({prompt.max_new_tokens for _, prompt in stand_ins.called if prompt.tokens == tokens})
        for tokens in (prompt.tokens for _, prompt in stand_ins.called)
    }
    assert lengths == {1}, "every run generates the same number of tokens"
    assert "jaxspec float32 auto ÷ run" in said
    assert "bootstrap over the prompts" in said
    assert "a line" in said
    assert re.findall(r"^jaxspec: (.+) tokens per second after one prompt$", said, re.MULTILINE) == [
        f"{run}: {1e3 / ms:.1f}" for run, ms in SPEEDS.items()
    ]
    assert peers.table(report).splitlines() == [
        "| tokens per second | plain | lookup | `auto` |",
        "| --- | --: | --: | --: |",
        "| jaxspec float32 | 50 |  | 100 |",
        "| transformers | 25 |  |  |",
        "| llama.cpp Q4_1 |  | 200 |  |",
    ]
    last = peers.table_of_ratios(report).splitlines()[-1]
    assert last == "| llama.cpp Q4_1 lookup | 200 | 4.00 (4.00–4.00) | 1.00 |"


def test_an_interrupted_measurement_reports_the_prompts_before(capsys, directory, stand_ins):
    runs = stand_ins.engines.runs
    whole = runs["transformers"]

    def interrupted(prompt, turn):
        if sum(name == "llama.cpp Q4_1 lookup" for name, _ in stand_ins.called) > 3:
            raise KeyboardInterrupt
        return whole(prompt, turn)

    runs["transformers"] = interrupted
    status, report, _ = called(capsys, "--model", directory, "--limit", 4)
    assert (status, report["interrupted"]) == (130, True)
    assert 0 < report["prompts"] < 4


@pytest.mark.full
def test_the_time_of_a_peers_text_begins_with_its_first_tokens():
    clock = peers._Clock()
    for size in (4, 2, 1):
        clock.put(SimpleNamespace(numel=lambda size=size: size))
    assert clock.sizes == [4, 2, 1]
    assert clock.times == sorted(clock.times)
