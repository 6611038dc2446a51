"""Timing in turns, and what a comparison makes of the runs; the speeds themselves are not tested here."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from jaxspec import methods
from jaxspec.measuring.bench.comparison import compare
from jaxspec.measuring.bench.speed import (
    acceptance_by_position,
    first_token_ms,
    running_ms,
    speed_ratio,
    tokens_per_second,
)
from jaxspec.measuring.bench.suite import carried
from jaxspec.measuring.bench.timing import interleaved, measure_runs
from jaxspec.requests.results import Result, Statistics
from jaxspec.requests.text import Token
from tests import refused


def test_functions_take_turns():
    calls = []
    functions = {name: lambda name=name: (calls.append(name), time.sleep(0.01)) for name in "ab"}
    taken = interleaved(functions, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert list(taken) == ["a", "b"]
    assert all(len(times) == 3 and min(times) >= 10 for times in taken.values())
    with refused("repeats is 0"):
        interleaved(functions, 0)


class Fake:
    """A language model whose methods have given speeds, in tokens a second, run by run."""

    def __init__(
        self, speeds: dict[str, list[float]], tokens: dict[str, list[int]], **defaults: float
    ) -> None:
        self.name, self.precision, self.defaults = "fake", "float32", defaults
        self.device_kind = "abacus"
        self.executables = SimpleNamespace(wait=lambda: self.calls.append("wait"), num_compilations=0)
        self.compiled_early = nullcontext
        self.calls: list = []
        self._speeds, self._tokens = {name: iter(runs) for name, runs in speeds.items()}, tokens

    def generate(self, prompt, *, method, **options):
        self.calls.append((method.name, False, options | {"method": method}))
        return self._result(method.name)

    def stream(self, prompt, *, method, **options):
        self.calls.append((method.name, True, options | {"method": method}))
        return iter(())

    def _result(self, method):
        tokens, drafts = self._tokens[method], 0 if method == "autoregressive" else 4
        decode_ms = 1e3 * (len(tokens) - 1) / next(self._speeds[method])
        rounds = len(tokens) - 1 - drafts // 2
        counts = (len(tokens), rounds, drafts, drafts, drafts // 2, (), 2 * decode_ms, decode_ms, 0.0)
        return Result("", [Token(token) for token in tokens], "length", Statistics(*counts))


@pytest.mark.parametrize(
    ("given", "default", "identical"),
    [
        (9e-6, 0.7, [True, False]),
        (None, 0.0, [True, False]),
        (1e-5, 0.0, [None] * 2),
        (None, 0.7, [None] * 2),
    ],
)
def test_texts_are_compared_if_they_are_greedy(given, default, identical):
    texts = {"autoregressive": [5, 6, 7, 8], "ngram": [5, 6, 7, 9]}
    lm = Fake({name: [1.0] * 3 for name in texts}, texts, temperature=default)
    found = compare(lm, "x", {"ngram": methods.NGram()}, repeats=1, temperature=given)["results"]
    assert [entry["identical_to_autoregressive"] for entry in found] == identical


def test_a_comparison():
    # The first two speeds of each are of the warm-up, which must not count.
    speeds = {"autoregressive": [1.0, 1.0, 100.0, 90.0, 110.0], "ngram": [1.0, 1.0, 200.0, 10.0, 210.0]}
    lm = Fake(speeds, {"autoregressive": [5, 6, 7, 8, 9], "ngram": [5, 6, 7, 8, 9]})
    told = []
    given = {"max_new_tokens": 5, "acceptor": "greedy"}
    report = compare(
        lm, "x", {"ngram": methods.NGram(num_draft_tokens=4)}, repeats=3, on_progress=told.append, **given
    )
    plain, ngram = report["results"]
    assert [report[key] for key in ("model", "device", "dtype")] == ["fake", "abacus", "float32"]
    assert plain == {
        "method": "autoregressive",
        "text": "",
        "tokens": 5,
        "first_token_ms": pytest.approx(40),  # decoding took as long, of twice that
        "tokens_per_second": pytest.approx(100),
        "speedup": 1.0,
        "mean_acceptance_length": 1.0,
        "mean_acceptance_length_drafting": None,
        "draft_acceptance_rate": None,
        "mean_draft_length": 0.0,
        "identical_to_autoregressive": True,
        "lossy": False,
    }
    assert ngram == plain | {
        "method": "ngram",
        "first_token_ms": pytest.approx(20),
        "tokens_per_second": pytest.approx(200),
        "speedup": pytest.approx(210 / 110),  # of the turns' 2, 10 / 90 and this the median
        "mean_acceptance_length": 2.0,  # 4 tokens ÷ 2 rounds
        "mean_acceptance_length_drafting": 1.5,  # 1 + 2 accepted ÷ 4 drafting rounds
        "draft_acceptance_rate": 0.5,
        "mean_draft_length": 2.0,
    }
    there = [("autoregressive", False), ("ngram", False)]
    checked, warm = [("autoregressive", True), ("ngram", True)], [*there, "wait"] * 2
    turns = [*there, "wait", *there[::-1], "wait", *there, "wait"]
    assert [call if call == "wait" else call[:2] for call in lm.calls] == [*checked, *warm, *turns]
    assert lm.calls[5][2] == given | {"method": methods.Autoregressive()}
    assert lm.calls[6][2] == given | {"method": methods.NGram(num_draft_tokens=4)}
    compiling = ["compiling autoregressive, 1 of 2", "compiling ngram, 2 of 2"]
    assert told[:7] == [*compiling, "finishing the warm-up"] * 2 + ["measuring autoregressive, turn 1 of 3"]


def texts(*turns: tuple[int, float]) -> list[Result]:
    """After one prompt, turn by turn, texts of so many tokens in so many milliseconds after the first."""
    return [Result("", [], "length", Statistics(n, 1, 0, 0, 0, (), ms, ms, 0.0), []) for n, ms in turns]


def test_a_speed_up_is_of_all_tokens_in_all_time_and_the_median_over_turns():
    mine = [texts((11, 10.0), (11, 1000.0), (11, 10.0)), texts((101, 50.0), (101, 50.0), (101, 100.0))]
    plain = [texts((11, 10.0), (11, 10.0), (11, 10.0)), texts((101, 100.0), (101, 100.0), (101, 100.0))]
    ratio, interval = speed_ratio(mine, plain)
    assert ratio == pytest.approx(statistics.median([110 / 60, 110 / 1050, 110 / 110]))
    assert interval[0] <= ratio <= interval[1]
    assert tokens_per_second(mine) == pytest.approx(1e3 * 110 / 110)
    # Compile time is apart.
    slow = Statistics(11, 1, 0, 0, 0, (), 100.0, 100.0, 95.0, decode_compile_ms=95.0)
    assert tokens_per_second([[Result("", [], "length", slow, [])]]) == pytest.approx(1e3 * 10 / 5)
    with refused(r"runs have \(2, 3\) and \(1, 3\) prompts and turns"):
        speed_ratio(mine, plain[:1])


def test_texts_generated_together_are_one():
    """In the time from the first token of any to the last of any, compilation left out."""

    def row(tokens, elapsed_ms, decode_ms, compile_ms=0.0, decode_compile_ms=0.0):
        times = (elapsed_ms, decode_ms, compile_ms)
        counts = Statistics(tokens, 1, 0, 0, 0, (), *times, decode_compile_ms=decode_compile_ms)
        return Result("", [], "length", counts)

    # First tokens after 10 and 30 ms, last ones after 50 and 60.
    batch = [row(11, 50.0, 40.0), row(21, 60.0, 30.0)]
    assert running_ms(batch) == pytest.approx(50)
    assert tokens_per_second([[batch]]) == pytest.approx(1e3 * 30 / 50)
    # The same, but 5 ms before the first token and 7 after it went into compiling.
    slow = [row(11, 62.0, 47.0, 12.0, 7.0), row(21, 72.0, 37.0, 12.0, 7.0)]
    assert running_ms(slow) == pytest.approx(50)
    assert running_ms(slow[0]) == pytest.approx(40)
    assert [first_token_ms(one) for one in slow] == [pytest.approx(10), pytest.approx(30)]


def test_prompts_of_one_group_are_drawn_together():
    mine = [texts((11, 10.0)), texts((11, 40.0))]
    plain = [texts((11, 20.0)), texts((11, 20.0))]
    ratio, apart = speed_ratio(mine, plain)
    same, together = speed_ratio(mine, plain, groups=["a", "a"])
    assert ratio == same == pytest.approx(40 / 50)
    assert apart == (pytest.approx(0.5), pytest.approx(2))
    assert together == (pytest.approx(ratio), pytest.approx(ratio))


def test_each_draw_has_as_many_prompts_of_each_kind():
    """So a run that is fast at one kind of work and slow at another, always alike, has a speed-up without a spread."""
    plain = [texts((11, 20.0))] * 4
    mine = [texts((11, 10.0)), texts((11, 40.0))] * 2
    kinds = ["sums", "stories"] * 2
    ratio, loose = speed_ratio(mine, plain)
    assert loose[0] < ratio < loose[1]
    assert speed_ratio(mine, plain, kinds=kinds) == (pytest.approx(ratio), pytest.approx((ratio, ratio)))
    # Groups are drawn among those of the same kinds.
    assert speed_ratio(mine, plain, kinds=kinds, groups=range(4)) == speed_ratio(mine, plain, kinds=kinds)
    mixed = speed_ratio(mine, plain, kinds=kinds, groups=[0, 0, 1, 1])
    assert mixed[1] == pytest.approx((ratio, ratio))
    # Prompts that are alone with their kind are drawn as if they were of one.
    assert speed_ratio(mine, plain, kinds=range(4)) == speed_ratio(mine, plain)


def test_acceptance_by_position():
    def text(*histogram):
        counts = (1, 1, sum(histogram), 9, 9)
        return Result("", [], "length", Statistics(*counts, histogram, 1.0, 1.0, 0.0))

    # Of 8 rounds with a draft 5 accepted a first token, 3 a second, 1 a third.
    taken = [[text(2, 1, 1)], [[text(1, 1, 1, 1)]]]
    assert acceptance_by_position(taken) == [5 / 8, 3 / 8, 1 / 8]
    assert acceptance_by_position([[text(0)], [text()]]) == []


def test_a_turn_in_which_something_compiled_is_taken_again():
    executables = SimpleNamespace(wait=lambda: None, num_compilations=0)
    calls = []

    def run(name, compiles_at=()):
        def generate(prompt, turn):
            calls.append((name, prompt, turn))
            executables.num_compilations += len(calls) in compiles_at
            return (name, prompt, turn, len(calls))

        return generate

    models = [SimpleNamespace(executables=executables, compiled_early=nullcontext)]
    # After a turn that compiles anyway, something compiles in one, and runs first in another.
    runs = {"a": run("a"), "b": run("b", compiles_at=(2, 6))}
    taken = list(measure_runs(models, runs, ["x", "y"], 2))
    assert [[one[:3] for one in results["b"]] for results in taken] == [
        [("b", "x", 0), ("b", "x", 1)],
        [("b", "y", 0), ("b", "y", 1)],
    ]
    first = [call for call in calls if call[1] == "x"]
    assert [call[2] for call in first] == [0] * 10 + [1] * 2
    # There and back, by turn and by prompt.
    orders = ["".join(call[0] for call in calls[at : at + 2]) for at in range(0, len(calls), 2)]
    assert orders == ["ab", "ab", "ab", "ab", "ab", "ba", "ba", "ab"]
    # What compiles in every turn is measured all the same.
    always = {"a": run("a", compiles_at=range(1000))}
    assert len(next(measure_runs(models, always, ["x"], 1))["a"]) == 1


def test_a_single_token_has_no_speed():
    lm = Fake({"autoregressive": [1.0] * 3}, {"autoregressive": [5]})
    entry = compare(lm, "x", {}, repeats=1)["results"][0]
    assert (entry["tokens"], entry["tokens_per_second"], entry["speedup"]) == (1, None, None)


def test_a_gamma_is_not_given_to_a_method_that_has_no_such_option():
    """Another package's method may have an adaptive γ of its own that nobody can set."""
    assert carried(methods.NGram(), 0.3) == methods.NGram()
