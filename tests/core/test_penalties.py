"""With penalties and bans, every drafter gives the text of plain decoding under the same settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.model.tree import Shape, Tree
from jaxspec.penalties import Penalties
from jaxspec.sampling import Sampling
from jaxspec.testing import distributions, reference
from jaxspec.testing.contracts import FOUR
from tests import tiny

PROMPTS = ((1, 2, 3), (5,), (7, 7, 2, 7))
# Each setting alone, and all of them at once; the rows have different numbers.
SETTINGS: dict[str, dict] = {
    "repetition": {"repetition": (1.5, 1.0, 3.0)},
    "presence": {"presence": (0.5, 2.0, -1.0)},
    "frequency": {"frequency": (0.7, 0.0, 2.0)},
    "biased": {
        "biased": ((3, -1), (4, 9), (2, 7)),
        "bias": ((-np.inf, 0), (-np.inf, 2.5), (-3.0, -np.inf)),
        "until": ((99, 0), (3, 99), (5, 99)),
    },
    "words": {"words": (((-1, 12, 0), (2, 3, 9)), ((4, 3, 10), (-1, -1, -1)), ((7, 2, 7), (-1, 9, 0)))},
    "ngram": {"ngram": (2, 0, 3), "longest_ngram": 3},
}
SETTINGS["all"] = {name: value for setting in tuple(SETTINGS.values()) for name, value in setting.items()}


NAMES = tuple(SETTINGS)
# Settings for a vocabulary of four tokens and a text of four tokens.
SETTINGS["small"] = {
    "repetition": (1.6,),
    "presence": (0.4,),
    "frequency": (0.3,),
    "biased": ((0, 2),),
    "bias": ((-np.inf, 0.8),),
    "until": ((4, 99),),
    "words": (((1, 0, 3), (-1, 3, 3)),),
    "ngram": (3,),
    "longest_ngram": 3,
}


def penalties(
    setting: str, prompts: Sequence[Sequence[int]] = PROMPTS, rows: Sequence[int] = (0, 1, 2)
) -> Penalties:
    kinds = dict.fromkeys(("repetition", "presence", "frequency", "bias"), jnp.float32)
    arrays = {
        name: value
        if name == "longest_ngram"
        else jnp.asarray([value[row] for row in rows], kinds.get(name, jnp.int32))
        for name, value in SETTINGS[setting].items()
    }
    return Penalties(begin=jnp.array([len(prompt) for prompt in prompts]), **arrays)


def changed(setting: str, row: int, logits: np.ndarray, text: Sequence[int], begin: int) -> np.ndarray:
    """Returns the logits [V] after a text, with one rule after another applied token by token."""
    own = {
        name: value if name == "longest_ngram" else value[row] for name, value in SETTINGS[setting].items()
    }
    new = np.array(logits, np.float64)
    for token in range(len(new)):
        if token in text and "repetition" in own:
            new[token] *= own["repetition"] if new[token] < 0 else 1 / own["repetition"]
        times = list(text[begin:]).count(token)
        new[token] -= own.get("frequency", 0) * times + own.get("presence", 0) * (times > 0)
    for token, bias, until in zip(*(own.get(name, ()) for name in ("biased", "bias", "until")), strict=True):
        if token >= 0 and len(text) < until:
            new[token] += bias
    for word in own.get("words", ()):
        sequence = [token for token in word if token >= 0]
        before = sequence[:-1]
        if sequence and list(text[len(text) - len(before) :]) == before:
            new[sequence[-1]] = -np.inf
    size = own.get("ngram", 0)
    if size and len(text) >= size - 1:
        last = list(text[len(text) - size + 1 :])
        for at in range(len(text) - size + 1):
            if list(text[at : at + size - 1]) == last:
                new[text[at + size - 1]] = -np.inf
    return new


def greedy_text(setting: str, row: int, config: tiny.LlamaConfig, budget: int) -> list[int]:
    prompt = PROMPTS[row]
    text = list(prompt)
    while len(text) < len(prompt) + budget:
        logits = reference.forward(config, tiny.params(config), text, rope_length=len(prompt))[-1]
        text.append(int(np.argmax(changed(setting, row, logits, text, len(prompt)))))
    return text[len(prompt) :]


@pytest.mark.full
def test_rows_of_a_chain_see_the_drafts_before_them():
    text, drafts = [1, 2, 3, 1], [2, 1, 2]
    tokens = jnp.array([[*text, 9, 9, 9, 9]])
    logits = np.random.default_rng(0).standard_normal((1, 4, 13)).astype(np.float32)
    for name in NAMES:
        found = penalties(name, ((1, 2),), (0,)).apply(
            jnp.asarray(logits), tokens, jnp.array([4]), jnp.array([drafts])
        )
        for row in range(4):
            wanted = changed(name, 0, logits[0, row], text + drafts[:row], 2)
            np.testing.assert_allclose(found[0, row], wanted, rtol=1e-5, err_msg=f"{name}, row {row}")


@pytest.mark.full
def test_rows_of_a_tree_see_the_drafts_on_their_path():
    text, drafts = [7, 7, 2, 7], [2, 1, 7, 2, -1, 7]
    shape = Shape((-1, -1, 0, 2, 2, 1))
    paths = [[], [2], [1], [2, 7], [2, 7, 2], [2, 7], [1, 7]]
    tokens, logits = (
        jnp.array([text]),
        np.random.default_rng(1).standard_normal((1, 7, 13)).astype(np.float32),
    )
    for name in NAMES:
        found = penalties(name, ((7,),), (2,)).apply(
            *(jnp.asarray(logits), tokens, jnp.array([4]), jnp.array([drafts]), Tree.from_parents(shape, 3))
        )
        for row, path in enumerate(paths):
            if row != 5:  # row 5 has no node
                wanted = changed(name, 2, logits[0, row], text + path, 1)
                np.testing.assert_allclose(found[0, row], wanted, rtol=1e-5, err_msg=f"{name}, row {row}")


def with_penalties(loop: tiny.Loop, setting: str, *args) -> tiny.Loop:
    return dataclasses.replace(
        loop, parts=dataclasses.replace(loop.parts, penalties=penalties(setting, *args))
    )


DRAFTERS = [
    tiny.Combination("autoregressive", "-", "greedy"),
    tiny.Combination("draft-model-vocab", "confidence", "greedy"),
    tiny.Combination("token-recycling", "-", "greedy"),
    tiny.Combination("medusa-tree", "-", "greedy"),
]


@pytest.mark.representatives("draft-model-vocab-confidence-greedy", "medusa-tree-greedy")
@pytest.mark.parametrize("combination", DRAFTERS, ids=str)
def test_greedy_text_is_the_slow_decoders(combination):
    loop = tiny.loop(combination)
    texts = with_penalties(loop, "all").texts(PROMPTS, 10)
    assert texts == [greedy_text("all", row, loop.config, 10) for row in range(3)]


def test_the_settings_change_these_texts():
    plain = [tiny.greedy(prompt, 10) for prompt in PROMPTS]
    for setting in set(NAMES) - {"ngram"}:  # no two tokens occur twice in such a short text
        assert [greedy_text(setting, row, tiny.TARGET, 10) for row in range(3)] != plain, setting


SAMPLED = [
    tiny.Combination("draft-model", "any_of", "block"),
    tiny.Combination("eagle-tree-drawn", "-", "rejection"),
]


@pytest.mark.full
@pytest.mark.representatives("draft-model-any_of-block")
@pytest.mark.parametrize("combination", SAMPLED, ids=str)
def test_sampled_text_follows_the_enumerated_distribution(combination):
    prompt, budget, eos, rows = (1, 3, 1), 4, (2,), 6000
    distribution = Sampling(jnp.full(rows, 1.5), top_p=jnp.full(rows, 0.95))
    loop = tiny.loop(combination, distribution, FOUR)
    settings = penalties("small", [prompt] * rows, [0] * rows)
    loop = dataclasses.replace(loop, parts=dataclasses.replace(loop.parts, penalties=settings))

    def next_probs(prefix: tuple[int, ...]) -> np.ndarray:
        text = [*prompt, *prefix]
        logits = reference.forward(FOUR, tiny.params(FOUR), text)[-1]
        return distributions.warp(changed("small", 0, logits, text, len(prompt)), temperature=1.5, top_p=0.95)

    expected = distributions.text_distribution(next_probs, budget, eos)
    assert len(expected) > 10, "too few texts are possible for a test"
    found = [tuple(text) for text in loop.texts([prompt] * rows, budget, eos=eos, capacity=16)]
    assert distributions.chi_square(found, expected) > 1e-3
