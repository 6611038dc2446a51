"""Probes: their training examples against a reference without a cache, the fit, its figures, and the command."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.io.hf import huggingface
from jaxspec.io.methods import method_files
from jaxspec.model import llama
from jaxspec.model.numerics import rms_norm
from tests import refused, tiny
from training import probe, prompt_options
from training.data import bpe_tokenizer, formats, reading, sources
from training.losses import base
from training.probes import estimates, fit, gather

CONFIG = dataclasses.replace(tiny.TARGET, eos_token_ids=())
DISTRIBUTION = {"temperature": 0.7, "top_p": 0.8}
STORIES = [f"Once {name} had a {thing} and {name} was glad." for name in "abcdefgh" for thing in "uvwxyz"]


@jax.jit
def _states(params, row):
    batch = {"tokens": row, "segments": jnp.ones_like(row), "positions": jnp.arange(row.shape[1])[None]}
    return [out[0] for out in base.layer_outputs(CONFIG, params, batch)]


def whole_pass(tokens: list[int]) -> list[jax.Array]:
    """Returns the residual stream after every layer at a text's last token, [L][D], computed without a cache."""
    row = jnp.asarray([tokens + [0] * (24 - len(tokens))])  # later tokens are masked
    return [states[len(tokens) - 1] for states in _states(tiny.params(CONFIG), row)]


def greedy_examples():
    """Returns the greedy drafts after each prefix, token by token, by whole forward passes."""
    params, found = tiny.params(CONFIG), []
    text = [1, 5, 2, 9]

    def best(hidden):
        return int(jnp.argmax(llama.logits(CONFIG, params, hidden)))

    text.append(best(whole_pass(text)[-1]))
    new, limit = 1, 12
    while new < limit:
        draft: list[int] = []
        # The last token of the budget is never drafted.
        for _ in range(min(tiny.K, limit - new - 1)):
            states = whole_pass(text + draft)
            token, wanted = best(states[0]), best(states[-1])
            found.append((rms_norm(states[0], params["norm"], CONFIG.rms_norm_eps), float(token == wanted)))
            if token != wanted:
                break
            draft.append(token)
        text += [*draft, best(whole_pass(text + draft)[-1])]
        new += len(draft) + 1
    return found


@pytest.mark.full
def test_gathered_states_and_labels_are_those_of_whole_passes():
    got = gather.gather(
        CONFIG,
        tiny.params(CONFIG),
        [[1, 5, 2, 9]],
        1,
        {},
        num_draft_tokens=tiny.K,
        new_tokens=12,
        batch=1,
        seed=0,
    )
    hidden, label = zip(*greedy_examples(), strict=True)
    assert got.label.tolist() == list(label)
    assert 0 < np.mean(label) < 1
    np.testing.assert_allclose(got.hidden, np.stack(hidden), atol=1e-4)


@pytest.mark.full
def test_sampled_labels_are_acceptance_probabilities():
    """The labels are probabilities; their mean is the share of first draft tokens that rejection sampling accepts."""
    prompts = [[1, 5, 2, 9], [3, 3], [7, 1, 4]] * 8
    got = gather.gather(
        CONFIG,
        tiny.params(CONFIG),
        prompts,
        1,
        DISTRIBUTION,
        num_draft_tokens=1,
        new_tokens=20,
        batch=8,
        seed=3,
    )
    assert ((got.label >= 0) & (got.label <= 1)).all()
    assert ((got.label > 0.01) & (got.label < 0.99)).any()
    model = jaxspec.LanguageModel(CONFIG, tiny.params(CONFIG))
    results = model.generate(
        prompts,
        method="layerskip",
        exit_layer=1,
        num_draft_tokens=1,
        max_new_tokens=20,
        acceptor="rejection",
        **DISTRIBUTION,
    )
    drafted = sum(result.statistics.num_draft_tokens for result in results)
    accepted = sum(result.statistics.num_accepted_tokens for result in results)
    error = np.sqrt(0.25 / drafted + 0.25 / len(got.label))
    assert got.label.mean() == pytest.approx(accepted / drafted, abs=4 * error)


def made_examples(count: int, seed: int):
    """Returns examples with labels drawn from a known probe."""
    rng = np.random.default_rng(seed)
    v, b = rng.normal(size=6), -0.4
    hidden = rng.normal(size=(count, 6)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(hidden @ v + b)))
    return gather.Examples(hidden, (rng.random(count) < chance).astype(np.float32), chance), v, b


@pytest.mark.full
def test_the_fit_finds_the_probe_that_made_the_labels():
    examples, v, b = made_examples(8000, 0)
    found_v, found_b = fit.fit(examples)
    np.testing.assert_allclose(found_v, v, atol=0.15)
    assert found_b == pytest.approx(b, abs=0.15)
    figures = estimates.quality(fit.predict(found_v, found_b, examples.hidden), examples.label)
    assert figures["calibration_error"] < 0.02
    assert figures["cross_entropy"] == pytest.approx(
        estimates.quality(examples.confidence, examples.label)["cross_entropy"], abs=0.01
    )


def test_labels_that_are_all_the_same_are_refused():
    examples = gather.Examples(np.ones((5, 2)), np.ones(5), np.ones(5))
    with refused("all 5 gathered draft tokens have the same label"):
        fit.fit(examples)


def test_quality_is_what_it_says():
    label = np.array([1.0, 0.0, 1.0, 0.25])
    got = estimates.quality(np.array([0.9, 0.8, 0.2, 0.85]), label)
    assert got["accuracy"] == pytest.approx((1 + 0 + 0 + 0.25) / 4)
    # Bins of a tenth: [.8, .9) contains .8 and .85 (labels 0, .25); .9 and .2 are alone in theirs.
    assert got["calibration_error"] == pytest.approx((1.4 + 0.1 + 0.8) / 4)
    assert got["cross_entropy"] == pytest.approx(
        -np.mean([np.log(0.9), np.log(0.2), np.log(0.2), 0.25 * np.log(0.85) + 0.75 * np.log(0.15)])
    )


def test_information_is_measured_from_the_base_rate():
    """Cases with known results: the labels' mean, certainty, and two groups with known rates."""
    label = np.array([1.0, 1, 1, 0] * 25)
    constant = estimates.quality(np.full(100, 0.75), label)
    base = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert constant["cross_entropy"] == pytest.approx(base)
    assert constant["information"] == pytest.approx(0, abs=1e-12)
    assert constant["auroc"] == 0.5
    assert estimates.quality(np.full(100, 0.5), label)["information"] == pytest.approx(1 - np.log(2) / base)
    certain = estimates.quality(label, label)
    assert certain["information"] == pytest.approx(1, abs=1e-4)
    assert certain["auroc"] == 1
    assert estimates.quality(1 - label, label)["auroc"] == 0
    same = estimates.quality(np.full(3, 0.9), np.ones(3))
    assert same["information"] is None
    assert same["auroc"] is None


def test_auroc_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    estimate = rng.integers(0, 6, 40) / 6  # many ties
    for label in (rng.integers(0, 2, 40).astype(float), rng.random(40)):
        weight = label[:, None] * (1 - label)[None]
        order = np.sign(estimate[:, None] - estimate[None]) / 2 + 0.5
        expected = (weight * order).sum() / weight.sum()
        assert estimates.quality(estimate, label)["auroc"] == pytest.approx(expected)


@pytest.mark.full
def test_platt_scaling_finds_the_two_numbers_that_made_the_labels():
    rng = np.random.default_rng(1)
    confidence = np.exp(-rng.exponential(0.05, 20_000)).astype(np.float32)  # an over-confident draft's
    chance = 1 / (1 + np.exp(-(30 * np.log(confidence) + 2.5)))
    label = (rng.random(len(chance)) < chance).astype(np.float32)
    found = fit.fit_scaling(gather.Examples(np.zeros((len(label), 2), np.float32), label, confidence))
    assert found.slope == pytest.approx(30, rel=0.06)
    assert found.intercept == pytest.approx(2.5, rel=0.06)
    np.testing.assert_allclose(found.predict(confidence), chance, atol=0.02)


@pytest.mark.full
def test_the_estimates_are_compared_on_the_same_held_out_tokens():
    """The labels depend only on the draft's probability: Platt scaling fits them, a probe of noise does not."""
    rng = np.random.default_rng(2)

    def made(count: int) -> gather.Examples:
        confidence = rng.uniform(0.2, 1, count).astype(np.float32)
        chance = 1 / (1 + np.exp(-(5 * np.log(confidence) + 1.5)))
        label = (rng.random(count) < chance).astype(np.float32)
        return gather.Examples(rng.normal(size=(count, 4)).astype(np.float32), label, confidence)

    training, held_out = made(8000), made(4000)
    noise = fit.predict(*fit.fit(training), held_out.hidden)
    report = fit.compared(training, held_out, noise)
    assert tuple(report) == fit.ESTIMATES
    assert report["base_rate"]["rate"] == pytest.approx(training.label.mean())
    assert report["base_rate"]["auroc"] == 0.5
    assert abs(report["base_rate"]["information"]) < 0.005
    assert abs(report["probe"]["information"]) < 0.01
    assert report["platt"]["information"] > 0.15
    # Platt scaling changes the confidence of the draft's probability, not the ranking.
    assert report["platt"]["auroc"] == pytest.approx(report["draft_probability"]["auroc"])
    assert (
        report["platt"]["calibration_error"] < 0.03 < 0.1 < report["draft_probability"]["calibration_error"]
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with a tiny model, a tokenizer and data."""
    folder = tmp_path_factory.mktemp("probe")
    words = bpe_tokenizer.train(STORIES, 300)
    config = dataclasses.replace(
        CONFIG,
        vocab_size=words.get_vocab_size(),
        bos_token_id=0,
        eos_token_ids=(1,),
        max_position_embeddings=64,
    )
    huggingface.save(folder, config, llama.init_params(config, jax.random.key(0), scale=3.0), np.float32)
    bpe_tokenizer.save(words, folder, 64)
    (folder / "text.txt").write_text(f"\n{reading.SEPARATOR}\n".join(STORIES))
    return folder


def test_the_prompt_of_an_answer_is_its_whole_question(directory):
    """The continuation of half a question would be text that the model was not trained on."""
    lm = jaxspec.load(directory)
    given = probe.Options(
        model=directory, exit_layers=(1,), data=(sources.Source("x", "x"),), prompt_tokens=3, new_tokens=8
    )
    question = "Who had a u? Answer:"
    spans = (formats.Span(question, learn=False), formats.Span(" a had a u, and was glad."))
    for document, expected in (
        (formats.Document(spans, ""), lm.encode(question)),
        (formats.Document((formats.Span(STORIES[0]),), ""), lm.encode(STORIES[0])[:3]),
        (formats.Document((formats.Span(question * 9, learn=False), spans[1]), ""), lm.encode(question)[:3]),
    ):
        assert prompt_options.beginning(document, given, lm) == expected


def arguments(directory, *more: str) -> list[str]:
    sizes = "--prompts 8 --held-out-prompts 2 --held-out 5 --new-tokens 8 --num-draft-tokens 2 --batch 2"
    return ["--model", str(directory), "--data", str(directory / "text.txt"), *sizes.split(), *more]


@pytest.mark.full
def test_the_command_writes_a_probe_that_decoding_takes(directory, capsys):
    assert (
        probe.main(arguments(directory, "--exit-layers", "1", "--temperature", "0.6", "--top-p", "0.9")) == 0
    )
    distribution = "temperature-0.6-top_p-0.9"
    path = method_files.probe_path(directory, 1, distribution)
    lm = jaxspec.load(directory)
    assert (
        method_files.read_probe(path, lm.fingerprint, lm.config.hidden_size, 1, distribution).distribution
        == distribution
    )
    report = json.loads(path.with_suffix(".json").read_text())
    assert report["options"]["held_out_prompts"] == 2
    assert report["decoding"]["adaspeed-probe"]["mean_acceptance_length"] >= 1
    figures = {"accuracy", "cross_entropy", "information", "auroc", "calibration_error"}
    assert set(report["probe"]) == set(report["draft_probability"]) == figures
    assert set(report["base_rate"]) == figures | {"rate"}
    assert set(report["platt"]) == figures | {"slope", "intercept"}
    said = capsys.readouterr().err
    for words in ("base rate", "draft", "platt", "probe", "AUROC", "information", "calibration"):
        assert words in said
    # The output shows the progress, also in a pipe, and no warnings of transformers on PyTorch or long contexts.
    assert "exit 1, gathering training tokens: prompt 0/8  compiling" in said
    assert "exit 1, decoding by adaspeed-probe: prompt 0/2  compiling" in said
    assert "PyTorch" not in said
    assert "Token indices" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--exit-layers", "2"], "give layers from 1 to 1"),
        (["--exit-layers", "1", "--model", "nowhere"], "nowhere"),
        (
            ["--exit-layers", "1", "--prompts", "0"],
            "training.probe: error: --prompts is 0; give a whole number",
        ),
    ],
)
def test_what_does_not_fit_gets_one_clear_line(directory, more, said, capsys):
    assert probe.main(arguments(directory, *more)) == 2
    assert said in capsys.readouterr().err
