"""`jaxspec inspect`: what it measures against slow arithmetic, and what it writes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.commands.inspect import _marks
from jaxspec.measuring.tuning import inspection as home
from jaxspec.measuring.tuning.agreement import exit_choices, prepare
from jaxspec.measuring.tuning.inspection import inspect_model, sublayer_ms, weights_read
from jaxspec.model import llama
from jaxspec.model.config import RopeScaling
from jaxspec.model.plan import LayerPlan
from jaxspec.programs import compilation_cache
from jaxspec.testing import reference
from tests import tiny
from tests.commands import called, one_error

# Three layers, so that a mask and an early exit have something to choose; dynamic RoPE, whose base depends on
# where the prompt ends.
DEEP = dataclasses.replace(
    tiny.TARGET, num_layers=3, max_position_embeddings=6, rope_scaling=RopeScaling("dynamic", 8.0)
)
# Of one token, and of several: texts are padded in every way.
PROMPTS = [[3], [1, 4, 2, 7, 9, 9, 5, 0, 12, 6, 2, 3, 3, 8, 11, 1, 2], "abcd e"]
BUDGET = 21


@functools.cache
def deep_params() -> llama.Params:
    return jax.tree.map(jnp.asarray, reference.random_params(DEEP, 3))


@pytest.fixture(scope="module")
def lm():
    return home.LanguageModel(DEEP, deep_params(), tiny.tokenizer(), name="deep")


@pytest.fixture(scope="module")
def report(lm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_TIMING_MS", 1.0)
        return inspect_model(lm, PROMPTS, asd=ASDNumbers(0.37, 2, 1), max_new_tokens=BUDGET, repeats=3)


def tokens_of(lm, prompt: str | list[int]) -> list[int]:
    return lm.encode(prompt) if isinstance(prompt, str) else prompt


def slow_similarities(tokens: list[int]) -> np.ndarray:
    """Mean cosines float64[L, 2] around each sublayer, one position at a time."""
    params = reference.as_float64(deep_params())
    x, found = params["embed"][tokens], []
    for p in params["layers"]:
        for kind in ("attention", "mlp"):
            normed = reference._norm(DEEP, x, p[kind]["norm"])
            if kind == "attention":
                after = x + reference._attention(DEEP, DEEP.layer_type(0), p[kind], normed, len(tokens))
            else:
                after = x + reference._mlp(DEEP, p[kind], normed)
            pairs = zip(x, after, strict=True)
            cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
            found.append(sum(cosines) / len(cosines))
            x = after
    return np.array(found).reshape(-1, 2)


def slow_exits(prompt: list[int], text: list[int]) -> list[float]:
    """For every exit, the share of new tokens that a model cut after it has as well."""
    chosen = []
    for depth in range(1, DEEP.num_layers + 1):
        cut, params = DEEP.truncated(depth), llama.truncate(deep_params(), depth)
        logits = reference.forward(cut, params, [*prompt, *text], rope_length=len(prompt))
        chosen.append(logits[len(prompt) - 1 : -1].argmax(axis=-1))
    return [float(np.mean(one == chosen[-1])) for one in chosen]


# What is measured


@pytest.mark.full
def test_similarities_are_those_of_the_slow_reference(lm, report):
    slow = np.array([slow_similarities(tokens_of(lm, prompt)) for prompt in PROMPTS])
    assert np.ptp(slow, axis=0).min() > 1e-3  # else a mixed-up row would go unnoticed
    for prompt, similarities in zip(report["prompts"], slow, strict=True):
        np.testing.assert_allclose(prompt["similarity"]["attention"], similarities[:, 0], atol=1e-5)
        np.testing.assert_allclose(prompt["similarity"]["mlp"], similarities[:, 1], atol=1e-5)
    for kind, name in enumerate(("attention", "mlp")):
        mean = slow[:, :, kind].mean(axis=0)
        summary = report["similarity"][name]
        np.testing.assert_allclose(summary["by_layer"], mean, atol=1e-5)
        expected = [mean.min(), mean.max(), mean.mean(), sorted(mean)[1]]
        np.testing.assert_allclose(
            [summary[key] for key in ("min", "max", "mean", "median")], expected, atol=1e-5
        )


def test_exits_are_models_cut_short(lm, report):
    total = np.zeros(DEEP.num_layers)
    for prompt, entry in zip(PROMPTS, report["prompts"], strict=True):
        ids = tokens_of(lm, prompt)
        text = reference.greedy(DEEP, deep_params(), ids, BUDGET)
        slow = slow_exits(ids, text)
        assert entry["exit_agreement"] == pytest.approx(slow)
        assert (entry["prompt_tokens"], entry["new_tokens"]) == (len(ids), BUDGET)
        total += BUDGET * np.array(slow)
    assert report["exit_agreement"] == pytest.approx(total / (BUDGET * len(PROMPTS)))
    assert 0 < report["exit_agreement"][0] < report["exit_agreement"][-1] == 1


def test_rows_of_a_batch_do_not_see_each_other_or_their_padding():
    config, params = dataclasses.replace(DEEP, rope_scaling=None), deep_params()
    rng = np.random.default_rng(0)
    prompts, start = rng.integers(0, 13, (2, 4)), np.array([1, 3], np.int32)
    fed, count = rng.integers(0, 13, (2, 8)), np.array([7, 3], np.int32)

    @jax.jit
    def run(prompts, start, fed, count):
        padded = jnp.pad(prompts, ((0, 0), (0, 12)))
        texts, *_ = prepare(config, params, padded, start, fed, count, chunk_size=4)
        return exit_choices(config, params, texts)

    chosen = np.asarray(run(prompts, start, fed, count))
    for row, (prompt, text) in enumerate(zip(prompts, fed, strict=True)):
        known = [*prompt[: start[row]], *text[: count[row]]]
        expected = [
            reference.forward(config, params, known, num_layers=depth).argmax(-1)[start[row] :]
            for depth in (1, 2, 3)
        ]
        np.testing.assert_array_equal(chosen[:, row, : count[row]], expected)
    spoiled = np.where(np.arange(8) < count[:, None], fed, 5)
    other = np.asarray(run(*(array[::-1] for array in (prompts, start, spoiled, count))))[:, ::-1]
    real = np.arange(7) < count[:, None]
    np.testing.assert_array_equal(other[:, real], chosen[:, real])


def test_masks_follow_from_the_similarities(lm, report):
    """α .37, m 2, n 1: layer 2 goes whole, layer 3 stays, attention of layer 1 goes where similar enough."""
    entries = [*report["prompts"], report | {"similarity": {"attention": None}}]
    expected = [entry["similarity"]["attention"] for entry in report["prompts"]]
    expected.append(report["similarity"]["attention"]["by_layer"])
    sizes = {kind: sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(layer[kind]))
             for layer in deep_params()["layers"][:1] for kind in ("attention", "mlp")}  # fmt: skip
    rest = sum(np.asarray(deep_params()[name]).nbytes for name in ("head", "norm"))
    whole = rest + 3 * (sizes["attention"] + sizes["mlp"])
    seen = set()
    for entry, similarities in zip(entries, expected, strict=True):
        mask = entry["mask"]
        attention = [0, 1] if similarities[0] >= 0.37 else [1]
        assert (mask["skip_attention"], mask["skip_mlp"]) == (attention, [1])
        skipped = len(attention) * sizes["attention"] + sizes["mlp"]
        assert mask["weights_read"] == pytest.approx(1 - skipped / whole)
        seen.add(len(attention))
    assert seen == {1, 2}
    assert weights_read(lm, LayerPlan.skipping(3)) == 1


def test_the_time_of_a_sublayer(lm, monkeypatch):
    """The median of the differences, turn by turn, over steps and layers."""
    calls = []

    def interleaved(functions, repeats, mesh=None):
        if repeats == 3:  # how many steps make one timing
            calls.append(functions[""].args[-1])
            return {"": [99.0, 99.0, 20.0 if calls[-1] >= 4 else 1.0]}
        for function in functions.values():
            function()
        return {"attention": [40.0, 100.0, 25.0], "mlp": [1.0, 80.0, 5.0], "neither": [4.0, 10.0, 7.0]}

    monkeypatch.setattr(home, "interleaved", interleaved)
    times = sublayer_ms(lm, 5, repeats=5)
    assert calls == [1, 2, 4]
    assert times == {"attention": 36 / 4 / 3, "mlp": 0.0}


def test_nothing_compiles_while_times_are_taken(lm, monkeypatch):
    events = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    def interleaved(functions, repeats, mesh=None):
        events.clear()
        for function in functions.values():
            function()
        assert not events
        return {name: [20.0] * repeats for name in functions}

    monkeypatch.setattr(home, "interleaved", interleaved)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        sublayer_ms(lm, 5)
        jax.jit(lambda x: x + math.pi)(jnp.zeros(17))
        assert events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.full
def test_one_layer(monkeypatch):
    monkeypatch.setattr(home, "sublayer_ms", lambda *_: {"attention": 1.0, "mlp": 2.0})
    small = tiny.small_model()
    report = inspect_model(small, [[1]], max_new_tokens=3)
    assert report["exit_agreement"] == [1.0]
    assert report["mask"] == {"skip_attention": [], "skip_mlp": [], "weights_read": 1.0}


def test_the_budget_is_what_the_context_leaves(lm):
    assert [home._budget(lm, DEEP.context_length - 3, asked) for asked in (None, 2)] == [3, 2]


def test_marks_of_a_mask():
    mask = {"skip_attention": [0, 2, 11], "skip_mlp": [1, 2]}
    assert _marks(mask, 12) == "▄▀·███████ █▄"
    assert _marks({"skip_attention": [], "skip_mlp": []}, 25) == f"{'█' * 10} {'█' * 10}\n█████"


# The command


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command in this process; returns status, standard output and standard error."""
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    return functools.partial(called, capsys)


@pytest.mark.full
def test_json(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(home, "sublayer_ms", lambda *_: {"attention": 1.5, "mlp": 2.0})
    (tmp_path / "text").write_text("time\nupon\n")
    files = ("--prompt-file", tmp_path / "text")
    numbers = ("--alpha", 1, "--every", 1, "--keep-last", 1, "--max-new-tokens", 5)
    status, out, err = run("inspect", "Once", "a time", "--model", model, *files, *numbers, "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    keys = "model device dtype num_layers alpha every keep_last similarity time_ms live_tokens mask exit_agreement"
    assert list(report) == [*keys.split(), "prompts"]
    assert (report["model"], report["device"], report["dtype"]) == (str(model), "cpu", "float32")
    assert (report["num_layers"], report["alpha"], report["every"], report["keep_last"]) == (2, 1, 1, 1)
    for summary in report["similarity"].values():
        assert list(summary) == ["by_layer", "min", "max", "mean", "median"]
        assert len(summary["by_layer"]) == 2
    assert report["mask"].keys() == {"skip_attention", "skip_mlp", "weights_read"}
    assert (report["mask"]["skip_attention"], report["mask"]["skip_mlp"]) == ([0], [0])
    assert [entry["prompt"] for entry in report["prompts"]] == ["Once", "a time", "time\nupon"]
    for entry in report["prompts"]:
        assert " ".join(entry) == "prompt prompt_tokens new_tokens similarity mask exit_agreement"
        assert 1 <= entry["new_tokens"] <= 5
        assert len(entry["exit_agreement"]) == len(entry["similarity"]["mlp"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("''", "a prompt is empty"),
        ("Once ''", "a prompt is empty"),
        ("--prompt-file EMPTY", "a prompt is empty"),
        ("--prompt-file nowhere.txt", "nowhere.txt does not exist; --prompt-file must be a text file"),
        ("--prompt-file BINARY", "is not text in UTF-8"),
        ("--alpha 0", "--alpha is 0"),
        ("--keep-last -1", "--keep-last is -1"),
        ("--max-new-tokens 0", "--max-new-tokens is 0"),
        ("--max-new-tokens 512", "exceed the model's context of 512"),
        ("--prompt-file LONG", "a prompt has 6.. tokens, the model's context 512; shorten it"),
    ],
)
def test_bad_input(run, model, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "LONG").write_text("x" * 650)
    before = sorted(tmp_path.iterdir())
    assert re.search(message, one_error(run, "inspect", *shlex.split(words), "--model", model))
    assert sorted(tmp_path.iterdir()) == before
