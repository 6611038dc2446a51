"""Timing in turns, and what a comparison makes of the runs; the speeds themselves are not tested here."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from jaxspec.bench.compare import compare
from jaxspec.bench.timing import interleaved, median_ratio
from jaxspec.engine.results import Piece, Result, Statistics, Token
from jaxspec.method_options import MethodOptions


def test_functions_take_turns():
    calls = []
    functions = {name: lambda name=name: (calls.append(name), time.sleep(0.01)) for name in "ab"}
    taken = interleaved(functions, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert list(taken) == ["a", "b"]
    assert all(len(times) == 3 and min(times) >= 10 for times in taken.values())
    with pytest.raises(ValueError, match="repeats is 0"):
        interleaved(functions, 0)


def test_ratios_are_taken_round_by_round():
    assert median_ratio([2, 40, 6], [1, 10, 3]) == 2


class Fake:
    """A language model whose methods have given speeds, in tokens a second, run by run."""

    def __init__(
        self, speeds: dict[str, list[float]], tokens: dict[str, list[int]], **defaults: float
    ) -> None:
        self.name, self.dtype, self.defaults = "fake", "float32", defaults
        self.device = SimpleNamespace(device_kind="abacus")
        self.executables = SimpleNamespace(wait=lambda: self.calls.append("wait"))
        self.calls: list = []
        self._speeds, self._tokens = {name: iter(runs) for name, runs in speeds.items()}, tokens

    def generate(self, prompt, *, method, **options):
        self.calls.append((method, False, options))
        return self._result(method)

    def stream(self, prompt, *, method, **options):
        self.calls.append((method, True, options))
        return self._pieces(method)

    def _pieces(self, method):
        self.calls.append(f"warm {method}")
        yield Piece(0, "", [], self._result(method).statistics)

    def _result(self, method):
        tokens, drafts = self._tokens[method], 0 if method == "autoregressive" else 4
        decode_ms = 1e3 * (len(tokens) - 1) / next(self._speeds[method])
        rounds = len(tokens) - 1 - drafts // 2
        counts = (len(tokens), rounds, drafts, drafts, drafts // 2, (), 2 * decode_ms, decode_ms, 0.0)
        return Result("", [Token(token) for token in tokens], "length", Statistics(*counts))


def test_a_comparison():
    # The first speed of each is the warm run's, which must not count.
    speeds = {"autoregressive": [1.0, 100.0, 90.0, 110.0], "ngram": [1.0, 200.0, 10.0, 210.0]}
    lm = Fake(speeds, {"autoregressive": [5, 6, 7, 8, 9], "ngram": [5, 6, 7, 8, 9]})
    told = []
    options = MethodOptions(num_draft_tokens=4, acceptor="greedy")
    report = compare(lm, "x", ["ngram"], options, repeats=3, on_progress=told.append, max_new_tokens=5)
    plain, ngram = report["results"]
    assert {key: report[key] for key in ("model", "device", "dtype")} == {
        "model": "fake",
        "device": "abacus",
        "dtype": "float32",
    }
    assert plain == {
        "method": "autoregressive",
        "text": "",
        "tokens": 5,
        "first_token_ms": pytest.approx(40),  # decoding took as long, of twice that
        "tokens_per_second": pytest.approx(100),
        "speedup": 1.0,
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": None,
        "identical_to_autoregressive": True,
    }
    assert ngram == plain | {
        "method": "ngram",
        "first_token_ms": pytest.approx(20),
        "tokens_per_second": pytest.approx(200),
        "speedup": pytest.approx(2),
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
    }
    assert [call[:2] for call in lm.calls[:2]] == [("autoregressive", True), ("ngram", True)]
    assert lm.calls[2:5] == ["warm autoregressive", "warm ngram", "wait"]
    there = [("autoregressive", False), ("ngram", False)]
    assert [call[:2] for call in lm.calls[5:]] == [*there, *there[::-1], *there]
    assert lm.calls[5][2] == {"max_new_tokens": 5, "acceptor": "greedy"}
    assert lm.calls[6][2] == {"max_new_tokens": 5, "acceptor": "greedy", "num_draft_tokens": 4}
    compiling = ["compiling autoregressive, method 1 of 2", "compiling ngram, method 2 of 2"]
    assert told[:3] == [*compiling, "timing autoregressive, run 1 of 3"]


def test_another_text_is_noticed():
    speeds = {"autoregressive": [1.0] * 2, "ngram": [1.0] * 2}
    lm = Fake(speeds, {"autoregressive": [5, 6, 7, 8], "ngram": [5, 6, 7, 9]})
    report = compare(lm, "x", ["autoregressive", "ngram", "ngram"], repeats=1)
    assert [entry["identical_to_autoregressive"] for entry in report["results"]] == [True, False]


@pytest.mark.parametrize(("given", "default"), [(0.7, 0.0), (None, 0.7)])
def test_random_texts_are_not_compared(given, default):
    lm = Fake({"autoregressive": [1.0] * 2}, {"autoregressive": [5, 6]}, temperature=default)
    report = compare(lm, "x", [], repeats=1, temperature=given)
    assert report["results"][0]["identical_to_autoregressive"] is None


def test_a_single_token_has_no_speed():
    lm = Fake({"autoregressive": [1.0] * 2}, {"autoregressive": [5]})
    entry = compare(lm, "x", [], repeats=1)["results"][0]
    assert (entry["tokens"], entry["tokens_per_second"], entry["speedup"]) == (1, None, None)


def test_wrong_comparisons():
    lm = Fake({}, {})
    with pytest.raises(ValueError, match="unknown method 'guess'"):
        compare(lm, "x", ["guess"])
    with pytest.raises(ValueError, match="repeats is 0"):
        compare(lm, "x", ["ngram"], repeats=0)
    with pytest.raises(ValueError, match=r"autoregressive, ngram has an option `draft`, `stop_rule`;"):
        compare(lm, "x", ["ngram"], MethodOptions(draft="d", stop_rule=("constant",), ngram_max=2))
    assert lm.calls == []
