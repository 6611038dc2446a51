"""The search for a mask: which masks there are, what is proposed, what one is worth, and going on after a stop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cli import main
from jaxspec.costs.rounds import LONGEST, Prediction, StepCosts, predicted_speedup, tokens_per_round
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.io.methods.method_files import PLAN_NAME, read_plan
from jaxspec.measuring.tuning import kinds, objectives, round_costs
from jaxspec.measuring.tuning import mask_search as bench
from jaxspec.measuring.tuning.mask_search import search
from jaxspec.measuring.tuning.masks import MaskSpace
from jaxspec.measuring.tuning.proposals import FIRST, propose_bayesian, propose_random
from jaxspec.measuring.tuning.round_costs import Costs, measure_costs
from jaxspec.measuring.tuning.texts import continuations, prepare_texts
from jaxspec.measuring.tuning.tuning_options import SearchOptions
from jaxspec.model import llama
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import Weights
from tests import refused, tiny
from tests.commands import CONFIG, write_tiny

pytestmark = pytest.mark.usefixtures("no_default_method")

DEEP = dataclasses.replace(tiny.TARGET, num_layers=4)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
COSTS = Costs(1.0, 1.5, 0.5, ((1, 11.0), (4, 12.0), (8, 13.0), (13, 15.0)))


@pytest.fixture(scope="module")
def deep() -> LanguageModel:
    """Four layers, of which two may be skipped while the first and the last are kept."""
    return LanguageModel(DEEP, tiny.params(DEEP), name="deep")


@pytest.fixture
def known_costs(monkeypatch):
    monkeypatch.setattr(bench, "measure_costs", lambda *args, **options: COSTS)


# Masks


@pytest.mark.parametrize(
    ("space", "size"),
    [(MaskSpace(4), 15), (MaskSpace(3, keep_first_last=False), 62), (MaskSpace(1, keep_first_last=False), 2)],
    ids=str,
)
def test_masks_are_those_that_were_asked_for(space, size):
    masks = list(space)
    assert len(set(masks)) == len(masks) == space.size == size
    layers = range(space.num_layers)
    for mask in masks:
        skipped = len(mask.skip_attention) + len(mask.skip_mlp)
        assert 0 < skipped < 2 * space.num_layers
        if space.keep_first_last:
            assert mask[layers[0]] == mask[layers[-1]] == (True, True)
        assert space.nearest(space.corner(mask)) == mask
    rng = np.random.default_rng(0)
    points = rng.random((400, len(space.free)))
    assert {space.nearest(point) for point in points} == set(masks)
    assert {space.neighbour(masks[0], moves, rng) for moves in (1, 2, 3) for _ in range(9)} <= set(masks)


def test_a_point_above_one_half_skips():
    plan = MaskSpace(4).nearest(np.array([0.4, 0.6, 0.9, 0.5]))
    assert (plan.skip_attention, plan.skip_mlp) == ((2,), (1,))
    none = MaskSpace(4).nearest(np.array([0.1, 0.3, 0.2, 0.0]))
    assert (none.skip_attention, none.skip_mlp) == ((), (1,))


def test_no_layer_is_left_to_skip():
    with refused(r"2 layers.*keep_first_last=False"):
        MaskSpace(2)


# Proposals


@pytest.mark.parametrize("propose", [propose_random, propose_bayesian])
def test_no_mask_is_proposed_twice_until_there_is_none_left(propose):
    space, tried = MaskSpace(4), []
    for _ in range(space.size):
        tried.append((propose(space, tried, 3), 1.0))
    assert {plan for plan, _ in tried} == set(space)
    with refused("all 15 masks were tried"):
        propose(space, tried, 3)


@pytest.mark.full
def test_proposals_learn():
    space = MaskSpace(9)
    worth = np.random.default_rng(4).standard_normal(len(space.free))
    best = {}
    for propose in (propose_random, propose_bayesian):
        tried = []
        for _ in range(FIRST + 14):
            plan = propose(space, tried, 0)
            tried.append((plan, float(space.corner(plan) @ worth)))
        best[propose] = max(score for _, score in tried)
        assert propose(space, tried, 0) == propose(space, list(tried), 0)
        assert propose(space, [], 0) != propose(space, [], 1)
    ideal = worth[worth > 0].sum()
    assert best[propose_bayesian] > best[propose_random]
    assert best[propose_bayesian] > 0.85 * ideal


# What a mask is worth


def calibrated(lm, tokens=7):
    texts = continuations(lm, PROMPTS, tokens)
    texts[1] = texts[1][:3]  # as if it had ended
    return prepare_texts(lm, PROMPTS, texts)[0], texts


PLANS = [
    LayerPlan.skipping(4, [1]),
    LayerPlan.skipping(4, [], [2]),
    LayerPlan.skipping(4, [0, 3], [1, 2]),
    LayerPlan.skipping(4, range(4), [0, 1, 2]),
]


@pytest.mark.full
def test_agreement_is_that_of_drafts_token_by_token_and_no_mask_compiles(deep):
    texts, written = calibrated(deep)
    score = bench.Agreement(deep, texts, COSTS)
    compiled = objectives._agreement._cache_size()
    step = jax.jit(llama.forward, static_argnums=0)
    parts = tiny.Parts(AutoregressiveDrafter(), tiny.ACCEPTORS["greedy"](), tiny.Greedy())
    plain = tiny.Loop(parts, Weights(deep.params), DEEP)
    rates = []
    for plan in PLANS:
        agreed = total = 0
        for prompt, text in zip(PROMPTS, written, strict=True):
            cache = plain.begin([prompt])[0].cache
            for at, (token, following) in enumerate(itertools.pairwise(text)):
                fed, start = jnp.array([[token]]), jnp.array([len(prompt) + at])
                logits, _, cache = step(DEEP, deep.params, fed, start, cache, plan=plan.traced())
                agreed += int(jnp.argmax(logits)) == following
                total += 1
        assert total == 6 + 2 + 6
        rates.append(agreed / total)
        assert score(plan)["agreement"] == pytest.approx(rates[-1])
        assert score(plan)["score"] == pytest.approx(predicted(rates[-1], plan).speedup)
    assert len(set(rates)) > 2
    assert score(LayerPlan.skipping(4))["agreement"] == 1
    assert objectives._agreement._cache_size() == compiled > 0


def predicted(rate: float, plan: LayerPlan, longest: int = LONGEST) -> Prediction:
    return predicted_speedup(rate, COSTS.verify_ms[0][1], functools.partial(COSTS.round_ms, plan), longest)


def test_the_predicted_speed_up():
    assert tokens_per_round(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))
    assert tokens_per_round(1.0, 5) == 6
    plan = LayerPlan.skipping(4, [1, 2], [2])
    assert COSTS.draft_step_ms(plan) == pytest.approx(0.5 + 2 * 1.0 + 3 * 1.5)
    # Drafts of 1 to 3 tokens are verified in 4 rows.
    by_hand = {
        k: (1 - 0.6 ** (k + 1)) / 0.4 * 11 / (7 * k + rows)
        for k, rows in ((1, 12), (2, 12), (3, 12), (4, 13))
    }
    prediction = predicted(0.6, plan, longest=4)
    assert prediction == Prediction(pytest.approx(max(by_hand.values())), max(by_hand, key=by_hand.get))
    assert predicted(1.0, LayerPlan.skipping(4, range(4), range(3))).num_draft_tokens == 12
    assert predicted(0.0, plan).num_draft_tokens == 1


def test_costs_are_those_of_steps_and_sublayers(monkeypatch):
    """A layer of 3 ms is divided as its sublayers are; a round of 5 rows takes a step and the loop."""
    lm = LanguageModel(tiny.SMALL, tiny.params(tiny.SMALL))
    full = ((1, 1, 4.0), (5, 1, 6.0), (13, 1, 10.0))
    steps = StepCosts("d", "m", "float32", 1, 33, full, 0, 1.0, 0.0, loop_ms=0.5)
    monkeypatch.setattr(round_costs, "remembered_step_costs", lambda lm, on_progress: (steps, True))
    monkeypatch.setattr(round_costs, "sublayer_ms", lambda lm, live: {"attention": 0.2, "mlp": 0.4})
    costs = measure_costs(lm, on_progress=lambda what: None)
    assert costs == Costs(pytest.approx(1.0), pytest.approx(2.0), 1.0, ((1, 4.5), (5, 6.5), (13, 10.5)))
    assert costs.draft_step_ms(LayerPlan.skipping(1)) == pytest.approx(4.0)


def test_texts_are_counted_as_they_come(deep):
    told = []
    texts = continuations(deep, PROMPTS, 6, told.append)
    written = deep.generate(PROMPTS, method="autoregressive", max_new_tokens=6, temperature=0.0)
    assert texts == [row.tokens for row in written]
    total = len(PROMPTS)
    assert told == [f"generating the model's own text: {n} of {total} texts" for n in range(1, total + 1)]


# The search


def run(lm, log, watch=lambda *told: None, **options):
    return search(lm, PROMPTS, SearchOptions(max_new_tokens=6, **options), log, on_trial=watch)


def stop_after(number):
    def watch(kind, done, budget, best):
        watch.seen += 1
        if watch.seen == number:
            os.kill(os.getpid(), signal.SIGINT)

    watch.seen = 0
    return watch


@pytest.mark.full
@pytest.mark.usefixtures("known_costs")
def test_a_search_goes_on_where_it_was(tmp_path, monkeypatch):
    lm = LanguageModel(
        dataclasses.replace(DEEP, num_layers=6), tiny.params(dataclasses.replace(DEEP, num_layers=6))
    )
    evaluated: list[LayerPlan] = []
    call = bench.Agreement.__call__
    monkeypatch.setattr(
        bench.Agreement, "__call__", lambda self, plan: evaluated.append(plan) or call(self, plan)
    )
    trials = FIRST + 4
    whole = run(lm, tmp_path / "whole.jsonl", trials=trials)
    assert [len(whole.trials[kind]) for kind in ("bayesian", "random")] == [trials, trials]
    del evaluated[0]  # compiles
    assert len(set(evaluated)) == len(evaluated)
    # What the searches have in common was evaluated once.
    assert set(evaluated) == {trial.plan for found in whole.trials.values() for trial in found}
    assert len(evaluated) < 2 * trials
    assert whole.best.score == max(t.score for found in whole.trials.values() for t in found)

    log = tmp_path / "parts.jsonl"
    for stop, done in ((3, 3), (FIRST, FIRST + 3), (6, trials + 5)):
        part = run(lm, log, stop_after(stop), trials=trials)
        assert part.interrupted
        assert sum(map(len, part.trials.values())) == done
    # Killed in the middle of a line.
    torn = log.read_text()
    log.write_text(torn + '{"search": "ran')
    evaluated.clear()
    again = run(lm, log, trials=trials)
    assert not again.interrupted
    assert again.trials == whole.trials
    assert again.costs == whole.costs == COSTS
    assert len(evaluated) - 1 <= trials - 5
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 2 + 2 * trials

    more = run(lm, log, trials=trials + 2)
    assert [len(found) for found in more.trials.values()] == [trials + 2] * 2
    assert more.trials["bayesian"][:trials] == whole.trials["bayesian"]


@pytest.mark.full
@pytest.mark.usefixtures("known_costs")
def test_few_masks_are_all_tried(deep, tmp_path):
    found = run(deep, tmp_path / "log", trials=100)
    assert list(found.trials) == ["exhaustive"]
    assert {trial.plan for trial in found.trials["exhaustive"]} == set(MaskSpace(4))
    texts, *_ = prepare_texts(deep, PROMPTS, continuations(deep, PROMPTS, 6))
    score = bench.Agreement(deep, texts, COSTS)
    best = max(predicted(score(plan)["agreement"], plan).speedup for plan in MaskSpace(4))
    assert found.best.score == pytest.approx(best)


@pytest.mark.usefixtures("known_costs")
def test_a_log_of_another_search_is_refused(deep, tmp_path):
    log = tmp_path / "log"
    run(deep, log, trials=2, random=True)
    with refused(r"log belongs to another search: its keep first last is True, now False;.*"):
        run(deep, log, trials=2, keep_first_last=False)
    with refused(r"its prompts is '\w+', now"):
        search(deep, PROMPTS[:1], SearchOptions(max_new_tokens=6), log)
    other = LanguageModel(DEEP, tiny.params(DEEP, seed=6))
    with refused(r"its model is '\w+', now"):
        run(other, log, trials=2)
    for text in ("no log\n", "[" * 200_000 + "\n"):
        log.write_text(text)
        with refused("log is not a log of a search"):
            run(deep, log, trials=2)
    anew = search(deep, PROMPTS, SearchOptions(max_new_tokens=6, trials=1, random=True), log, resume=False)
    assert len(anew.trials["random"]) == 1
    with pytest.raises(OSError, match="nowhere"):
        run(deep, tmp_path / "nowhere" / "log", trials=1)


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory, dataclasses.replace(CONFIG, num_layers=4))


def command(model, tmp_path, *more):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time\n")
    short = ("--prompt-file", str(prompt), "--max-new-tokens", "4", "--trials", "3")
    return main(["search", "--model", str(model), *short, *more])


@pytest.mark.full
@pytest.mark.usefixtures("known_costs")
def test_the_command_writes_a_plan_that_the_method_finds(model, tmp_path, capfd):
    assert command(model, tmp_path, "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert [entry["search"] for entry in report["searches"]] == ["bayesian", "random"]
    assert report["best"]["score"] == max(entry["score"] for entry in report["searches"])
    assert report["output"] == str(model / PLAN_NAME)
    lm = load(model)
    plan = read_plan(model / PLAN_NAME, lm.fingerprint, 4)
    assert list(plan.skip_attention) == report["best"]["skip_attention"]
    assert list(plan.skip_mlp) == report["best"]["skip_mlp"]
    found_by = json.loads((model / PLAN_NAME).read_text())["found_by"]
    assert {"command", "options", "search", "trials", "seconds", "score", "agreement"} <= set(found_by)
    assert found_by["options"]["seed"] == 0
    assert command(model, tmp_path) == 0
    shown, complaint = capfd.readouterr()
    replaced, *warnings = complaint.splitlines()
    assert replaced == f"jaxspec: will replace {model / PLAN_NAME}; give --output FILE to keep it"
    slow = "jaxspec: warning: with every mask tried, drafts are slower than plain decoding"
    assert [line.startswith(slow) for line in warnings] == [True] * (report["best"]["predicted_speedup"] < 1)
    assert "bayesian" in shown
    assert "written to" in shown
    drafted = lm.generate("Once upon a time", method="draft-verify", max_new_tokens=8)
    assert drafted.tokens == lm.generate("Once upon a time", method="autoregressive", max_new_tokens=8).tokens


def prompt_set(tmp_path, categories):
    path = tmp_path / "set.jsonl"
    texts = ("Once upon a time", "1 + 1 = 2 and", "The dog ran")
    entries = ({"turns": [text], "category": one} for one, text in zip(categories, texts, strict=True))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


@pytest.mark.full
@pytest.mark.usefixtures("known_costs")
def test_the_command_writes_a_mask_for_each_kind_of_prompts(model, tmp_path, capfd, monkeypatch):
    places = ("--output", str(tmp_path / "bank.json"), "--prompt-file", prompt_set(tmp_path, ("a", "b", "a")))
    short = ("--max-new-tokens", "4", "--trials", "3", "--random", "--by-kind")
    words = ["search", "--model", str(model), *places, *short]
    assert main([*words, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [one["kind"] for one in report["kinds"]] == ["a", "b"]
    content = json.loads((tmp_path / "bank.json").read_text())
    assert [(one["kind"], len(one["centres"])) for one in content["kinds"]] == [("a", 2), ("b", 1)]
    for kind, entry in zip(content["kinds"], report["kinds"], strict=True):
        assert (kind["skip_attention"], kind["skip_mlp"]) == (entry["skip_attention"], entry["skip_mlp"])
    # Each kind was scored on its own prompts alone.
    lm = load(model)
    ids = [lm.encode(text) for text in ("Once upon a time", "The dog ran")]
    texts, *_ = prepare_texts(lm, ids, continuations(lm, ids, 4))
    plan = LayerPlan.skipping(4, content["kinds"][0]["skip_attention"], content["kinds"][0]["skip_mlp"])
    assert bench.Agreement(lm, texts, COSTS)(plan)["agreement"] == pytest.approx(
        report["kinds"][0]["agreement"]
    )
    options = {"max_new_tokens": 8, "ignore_eos": True}
    prompts = ["Once upon a time", "1 + 1 = 2 and"]
    drafted = lm.generate(prompts, method="draft-verify", plan=tmp_path / "bank.json", **options)
    plain = lm.generate(prompts, method="autoregressive", **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]

    # The table has a row for each kind. An interruption leaves the one mask, and no bank.
    assert main(words) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()[5:8]] == ["random", "a", "b"]
    monkeypatch.setattr(bench, "search_kinds", lambda *args, **options: [])
    assert main([*words, "--json"]) == 130
    assert json.loads((tmp_path / "bank.json").read_text())["kinds"] == []


def test_prompts_without_kinds_are_grouped_by_their_vectors():
    rng = np.random.default_rng(1)
    where = np.repeat(np.arange(4), 3)
    vectors = np.float32(10 * np.eye(6)[where] + 0.1 * rng.standard_normal((12, 6)))
    order = rng.permutation(12)
    found = kinds.groups(["text"] * 12, vectors[order])
    assert sorted(found) == [f"group {n}" for n in range(1, 5)]
    assert {tuple(sorted(order[members])) for members in found.values()} == {
        (0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)
    }  # fmt: skip
    assert {kind: of.tolist() for kind, of in kinds.groups(["b", "a", "b"], vectors[:3]).items()} == {
        "b": [0, 2], "a": [1]
    }  # fmt: skip
    # Equal vectors share a centre.
    centres, labels = kinds.k_means(np.float32([[1, 2], [1, 2], [5, 6]]), 10)
    assert (len(centres), labels[0], labels[0] == labels[2]) == (2, labels[1], False)


@pytest.mark.full
@pytest.mark.usefixtures("known_costs")
def test_an_interrupted_command_leaves_the_best_so_far(model, tmp_path, capfd, monkeypatch):
    output = tmp_path / "plan.json"
    call = bench.Agreement.__call__
    calls = []

    def stopping(self, plan):
        calls.append(plan)
        if len(calls) == 3:  # the first compiles
            raise KeyboardInterrupt
        return call(self, plan)

    with monkeypatch.context() as patched:
        patched.setattr(bench.Agreement, "__call__", stopping)
        assert command(model, tmp_path, "--output", str(output), "--json") == 130
    captured = capfd.readouterr()
    report = json.loads(captured.out)
    assert report["interrupted"]
    assert report["best"]["trials"] == 1
    assert captured.err.endswith(
        f"jaxspec: interrupted; the best so far is in {output}; the same command continues\n"
    )
    assert json.loads(output.read_text())["skip_mlp"] == report["best"]["skip_mlp"]
    assert command(model, tmp_path, "--output", str(output), "--json") == 0
    assert json.loads(capfd.readouterr().out)["best"]["trials"] == 3
    patience = ("--output", str(tmp_path / "other.json"))
    with monkeypatch.context() as patched:
        calls[:] = [None] * 2
        patched.setattr(bench.Agreement, "__call__", stopping)
        assert command(model, tmp_path, *patience) == 130
    assert capfd.readouterr().err == "jaxspec: interrupted\n"
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--trials", "0"), "--trials is 0"),
        (("--max-new-tokens", "1"), "--max-new-tokens is 1; give at least 2"),
        (("--max-new-tokens", "600"), r"prompt.txt \(\d+ tokens\) and --max-new-tokens \(600\) exceed"),
        (("--prompt-file", "/no/where.txt"), "/no/where.txt does not exist; "),
        (("--output", "/no/where/plan.json"), "cannot write /no/where/plan.json .*--output FILE"),
        (("--output", "/tmp"), "/tmp is a directory; give --output FILE"),
    ],
)
def test_wrong_commands(model, tmp_path, capfd, more, message):
    (model / "jaxspec.plan.json").unlink(missing_ok=True)  # of another test
    assert command(model, tmp_path, *more) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxspec: error: ")
    assert re.search(message, captured.err)
