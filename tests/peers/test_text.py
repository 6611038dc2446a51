"""Greedy text against transformers' `generate`, token for token, and the distributions against its filters."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

import jaxspec  # noqa: E402
from jaxspec.sampling import Sampling  # noqa: E402
from tests.data import MODELS  # noqa: E402

pytestmark = pytest.mark.peers

TARGET, DRAFT = MODELS / "stories260K", MODELS / "llama2xs"
OPENINGS = [
    "Once upon a time, there was a little girl named Lily.",
    "One day, a dog found a big red ball in the park.",
    "Tom and Ben were best friends.",
]
BUDGET = 200


@functools.cache
def target() -> jaxspec.LanguageModel:
    if not DRAFT.is_dir():
        pytest.skip("the shared data is not here")
    return jaxspec.load(TARGET, dtype="float32", device="cpu")


@functools.cache
def theirs() -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    texts = []
    for opening in OPENINGS:
        prompt = torch.tensor([target().encode(opening)])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=BUDGET,
            max_new_tokens=BUDGET,
        )
        texts.append(out[0, prompt.shape[1] :].tolist())
    return texts


@pytest.mark.parametrize(
    "options",
    [
        {"method": "autoregressive"},
        {"method": "ngram"},
        {"method": "draft-model", "draft": str(DRAFT)},
        {"method": "draft-model", "draft_exit": 2, "stop_rule": "confidence"},
    ],
    ids=["autoregressive", "ngram", "draft-model", "draft-exit"],
)
def test_greedy_text_is_theirs(options):
    rows = target().generate(OPENINGS, max_new_tokens=BUDGET, temperature=0.0, ignore_eos=True, **options)
    assert [row.tokens for row in rows] == theirs()


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_filters_are_theirs(top_k, top_p, min_p):
    """In the same order: temperature, top-k, top-p, min-p."""
    rows, vocabulary, temperature = 50, 30, 0.8
    logits = 2 * np.random.default_rng(0).standard_normal((rows, vocabulary)).astype(np.float32)
    warpers = [transformers.TemperatureLogitsWarper(temperature), transformers.TopPLogitsWarper(top_p)]
    if top_k:
        warpers.insert(1, transformers.TopKLogitsWarper(top_k))
    warpers.append(transformers.MinPLogitsWarper(min_p))
    scores = torch.tensor(logits)
    for warper in warpers:
        scores = warper(None, scores)
    expected = torch.softmax(scores, dim=-1).numpy()

    def each(value, dtype):
        return jnp.full(rows, value, dtype)

    distribution = Sampling(
        each(temperature, jnp.float32),
        each(top_k, jnp.int32),
        each(top_p, jnp.float32),
        each(min_p, jnp.float32),
    )
    np.testing.assert_allclose(np.exp(distribution.log_probs(jnp.asarray(logits))), expected, atol=1e-5)
