"""Compares penalties and bans with transformers' logits processors, and texts with its `generate`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

import jaxspec  # noqa: E402
from jaxspec.io.hf.generation_json import Rules  # noqa: E402
from jaxspec.requests.reading import RowRequest  # noqa: E402
from jaxspec.requests.row_settings import Shapes  # noqa: E402
from tests.data import MODELS  # noqa: E402

pytestmark = pytest.mark.peers

EOS, BEGIN, SIZE = 6, 5, 9
SETTINGS = {
    "repetition_penalty": 1.7,
    "suppress_tokens": [2],
    "begin_suppress_tokens": [4, 7],
    "bad_words_ids": [[1], [3, 5], [0, 8, 1], [EOS]],
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 3,
}


def processors(name: str):
    value = SETTINGS[name]
    made = {
        "repetition_penalty": lambda: transformers.RepetitionPenaltyLogitsProcessor(value),
        "suppress_tokens": lambda: transformers.SuppressTokensLogitsProcessor(value),
        "begin_suppress_tokens": lambda: transformers.SuppressTokensAtBeginLogitsProcessor(value, BEGIN),
        "bad_words_ids": lambda: transformers.NoBadWordsLogitsProcessor(value, torch.tensor([EOS])),
        "no_repeat_ngram_size": lambda: transformers.NoRepeatNGramLogitsProcessor(value),
        "min_new_tokens": lambda: transformers.MinNewTokensLengthLogitsProcessor(BEGIN, value, EOS),
    }
    return made[name]()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [BEGIN, BEGIN + 1, BEGIN + 8])
def test_each_setting_is_theirs(name, length):
    rng = np.random.default_rng(length)
    text, logits = rng.integers(0, SIZE, (40, length)), rng.standard_normal((40, SIZE)).astype(np.float32)
    wanted = processors(name)(torch.tensor(text), torch.tensor(logits)).numpy()
    given = {} if name != "repetition_penalty" else {name: SETTINGS[name]}
    rules = Rules.from_values({} if given else {name: SETTINGS[name]})
    requests = [RowRequest(tuple(row[:BEGIN].tolist()), 9, (EOS,), **given, rules=rules) for row in text]
    penalties = Shapes.from_requests(requests).penalties(requests)
    tokens = jnp.asarray(np.pad(text, ((0, 0), (0, 3))))
    found = penalties.apply(jnp.asarray(logits)[:, None], tokens, jnp.full(40, length))[:, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("method", [{}, {"method": "ngram"}, {"method": "draft-model", "draft_exit": 2}])
def test_greedy_text_with_all_of_them_is_theirs(method):
    if not (MODELS / "stories260K").is_dir():
        pytest.skip("the shared data is not here")
    lm = jaxspec.load(MODELS / "stories260K", dtype="float32", device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / "stories260K", dtype=torch.float32)
    prompt = lm.encode("Once upon a time, there was a little girl named Lily.")
    first = lm.generate(prompt, max_new_tokens=20).tokens
    settings = {
        "repetition_penalty": 1.2,
        "suppress_tokens": [first[0]],
        "bad_words_ids": [[first[1]], first[4:6]],
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 60,
    }
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80, **settings
    )
    lm.defaults |= settings
    assert lm.generate(prompt, max_new_tokens=80, **method).tokens == theirs[0, len(prompt) :].tolist()
