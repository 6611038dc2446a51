"""The loss of int8 weights and activations, `benchmarks.int8_loss`."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import int8_loss
from jaxspec.engine.language_model import load
from jaxspec.loading.int8 import with_activations
from jaxspec.model import cache as kv
from jaxspec.model import llama
from jaxspec.model.quantisation import NUM_OUTLIERS, quantise
from tests.commands import write_model, write_tokenizer

TEXT = "Once upon a time there was a boat made of paper. " * 20


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("fidelity") / "model")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def lm(stored):
    return load(stored, device="cpu", compilation_cache=False)


def test_against_a_forward_pass_with_a_cache(lm, monkeypatch):
    """Each window is read for itself; float32 agrees with itself."""
    monkeypatch.setattr(int8_loss, "WINDOW", 24)
    monkeypatch.setattr(int8_loss, "OUTLIERS", (NUM_OUTLIERS,))
    ids = np.asarray(lm.encode(TEXT))
    found = int8_loss.of_weights(lm, TEXT, 50)
    assert found["tokens"] == 72
    small = quantise(lm.config, lm.params)
    forms = {"weights": small, "weights and activations": with_activations(lm.config, small, lm.tokenizer)}
    assert found["forms"].keys() == forms.keys()

    def read(params):
        parts = []
        for first in (0, 24, 48):
            cache = kv.create(lm.config, 1, 24, jnp.float32, True)
            tokens = jnp.asarray(ids[first : first + 24], jnp.int32)[None]
            parts.append(llama.forward(lm.config, params, tokens, jnp.zeros(1, jnp.int32), cache)[0][0])
        logits = np.concatenate(parts)
        log_p = np.asarray(jax.nn.log_softmax(logits))
        return -log_p[np.arange(72), ids[1:73]], log_p.argmax(axis=-1)

    expected, best = read(lm.params)
    assert found["loss"] == pytest.approx(expected.mean(), rel=1e-5)
    for name, params in forms.items():
        losses, chosen = read(params)
        form = found["forms"][name]
        assert form["loss"] == pytest.approx(losses.mean(), rel=1e-4)
        assert form["increase"] == pytest.approx((losses - expected).mean(), abs=1e-4)
        assert form["interval"] == pytest.approx(1.96 * (losses - expected).std() / 72**0.5, abs=1e-4)
        assert form["agreement"] == pytest.approx((chosen == best).mean(), abs=0.03)


def test_the_benchmark_varies_the_channels_apart(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(int8_loss, "OUTLIERS", (1, 64))
    (tmp_path / "text.txt").write_text(TEXT)
    report = int8_loss.measure(int8_loss.Options(tmp_path / "text.txt", str(stored), tokens=100))
    assert [*report["forms"]] == [
        "weights", "weights and activations, 1 channels apart", "weights and activations"
    ]  # fmt: skip
    json.dumps(report)


def test_one_line_for_what_cannot_be(lm):
    with pytest.raises(ValueError, match="has 1 tokens; give at least 2"):
        int8_loss.of_weights(lm, "", 100)
