"""Suffix decoding against a slow reference in plain Python."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import methods
from jaxspec.drafting.lookup import BREAK, joined
from jaxspec.drafting.suffix_drafter import SuffixDrafter
from jaxspec.protocol import View
from tests import refused, tiny

V, ROWS, SIZE = 3, 4, 24
TEXTS = ((0, 1, 2, 0, 1, 1), (2, 2, 1, 0), (1, 2))
PAST = joined(TEXTS, 20)
DRAFTERS = {
    "usual": SuffixDrafter(),
    "short": SuffixDrafter(num_draft_tokens=4, suffix_max=5),
    "short-suffix": SuffixDrafter(num_draft_tokens=6, suffix_max=2, factor=2.5),
    "sure": SuffixDrafter(min_prob=0.5, num_draft_tokens=5),
    "any": SuffixDrafter(min_prob=0.0, num_draft_tokens=5),
    "few-places": SuffixDrafter(num_places=3, num_draft_tokens=5),
    "reference": SuffixDrafter(PAST, num_draft_tokens=6),
    "reference-few-places": SuffixDrafter(PAST, num_places=5, suffix_max=4, num_draft_tokens=3),
}


def matching(searched: list[int], end: int, text: list[int]) -> int:
    """Returns the number of tokens of `searched` before `end` that equal the last ones of `text`."""
    length = 0
    while length < min(end, len(text)) and searched[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


def follow(drafter: SuffixDrafter, rests: list[list[int]], most: int) -> tuple[list[int], np.float32]:
    """Returns the most frequent continuation over all occurrences, and the sum of its probabilities."""
    tokens: list[int] = []
    prob, score = np.float32(1), np.float32(0)
    while len(tokens) < most:
        rests = [rest for rest in rests if rest and rest[0] != BREAK]
        heads = [rest[0] for rest in rests]
        if not heads:
            break
        # `max` takes the first of several: the occurrences are in order of preference.
        token = max(heads, key=heads.count)
        prob = np.float32(prob * (np.float32(heads.count(token)) / np.float32(len(heads))))
        if prob < np.float32(drafter.min_prob):
            break
        tokens.append(token)
        score = np.float32(score + prob)
        rests = [rest[1:] for rest in rests if rest[0] == token]
    return tokens, score


def slow(drafter: SuffixDrafter, text: list[int]) -> tuple[list[int], np.float32]:
    """Returns the draft after a text and its score, by trying every occurrence of every suffix."""
    past = [] if drafter.reference is None else [*np.asarray(drafter.reference).tolist(), BREAK]
    searched = past + text
    places = [(matching(searched, end, text), end) for end in range(1, len(searched))]
    places = [(min(length, drafter.suffix_max), end) for length, end in places if length]
    places = [(length, end) for length, end in places if searched[end] != BREAK]
    places = sorted(places, reverse=True)[: drafter.num_places]
    best: tuple[list[int], np.float32] = ([], np.float32(0))
    for m in range(1, drafter.suffix_max + 1):
        rests = [searched[end:] for length, end in places if length >= m]
        found = follow(drafter, rests, min(int(m * drafter.factor), drafter.num_draft_tokens))
        best = found if found[1] >= best[1] else best
    return best


@functools.partial(jax.jit, static_argnames="name")
def look_up(name: str, tokens: jax.Array, length: jax.Array):
    view = View(tokens, length, None, budget=jnp.full_like(length, 99))
    return DRAFTERS[name].look_up(jax.random.split(jax.random.key(0), ROWS), view)


def shown(texts: list[list[int]], beyond: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the lengths of a view."""
    tokens = np.full((ROWS, SIZE), beyond, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens, np.array([len(text) for text in texts], np.int32)


@pytest.mark.representatives("usual", "reference-few-places")
@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=120)
@given(
    texts=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=SIZE), min_size=ROWS, max_size=ROWS),
    beyond=st.integers(0, V - 1),
)
def test_suffix_finds_what_the_slow_twin_finds(name, texts, beyond):
    """The tokens after a row's length are not searched."""
    proposal, score = look_up(name, *shown(texts, beyond))
    assert proposal.log_probs is None
    assert proposal.tokens.min() >= 0
    for row, text in enumerate(texts):
        tokens, expected = slow(DRAFTERS[name], text)
        assert np.asarray(proposal.tokens[row, : proposal.count[row]]).tolist() == tokens
        np.testing.assert_allclose(score[row], expected, rtol=1e-6)


def test_the_places_are_found_without_a_sort():
    """In long texts a sort would cost more than everything else."""
    tokens, length = shown([[0, 1]] * ROWS)
    assert " sort(" not in look_up.lower("few-places", tokens, length).compile().as_text()


@pytest.mark.full
def test_past_outputs_are_a_reference_of_one_size():
    """They compile nothing new, and earlier outputs are then drafted."""
    lm = tiny.language_model()
    prompt, numbers = [3, 4, 5], {"max_new_tokens": 12, "ignore_eos": True}
    drafter, _ = lm.drafter("suffix", num_draft_tokens=3)
    first = lm.generate(prompt, method=drafter.remembering([], 32), **numbers)
    compiled = lm.executables.num_compilations
    again = lm.generate(prompt, method=drafter.remembering([[*prompt, *first.tokens]], 32), **numbers)
    assert again.tokens == first.tokens == lm.generate(prompt, **numbers).tokens
    assert again.statistics.num_rounds < first.statistics.num_rounds
    assert lm.executables.num_compilations == compiled + 2  # plain decoding's two


def test_references_are_searched_beside_the_text(tmp_path):
    """The same files as for n-gram search, which searches only them."""
    path = tmp_path / "past.txt"
    path.write_text("ab cd")
    lm = tiny.language_model()
    drafter, _ = lm.drafter(methods.Suffix(reference=path))
    assert drafter.reference.tolist() == [*lm.encode("ab cd"), BREAK]
    assert lm.drafter("suffix")[0].reference is None


@pytest.mark.parametrize(
    ("texts", "size", "line"),
    [
        (["abc"], 6, "the token 'a'; give token ids"),
        ([[1.5]], 6, "the token 1.5; give token ids"),
        ([[1]], 0, "size is 0; give a whole number"),
    ],
)
def test_past_outputs_are_token_ids(texts, size, line):
    with refused(line):
        SuffixDrafter().remembering(texts, size)
