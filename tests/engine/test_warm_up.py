"""`warm_up` compiles what later calls need: few programs, which texts of other lengths share."""

from __future__ import annotations

import pytest

from tests import tiny

LONG = [3, 4, 5] * 12


def test_later_calls_compile_nothing():
    lm, cold = tiny.language_model(), tiny.language_model()
    lm.warm_up(batch_sizes=(1, 2), max_tokens=200, method="ngram")
    assert lm.executables.num_compilations == 4
    for batch in ([[3, 4, 5]], [LONG], [[3, 4, 5], LONG]):
        for new in (3, 30, 120):
            texts = lm.generate(batch, method="ngram", max_new_tokens=new)
            assert [one.tokens for one in texts] == [
                one.tokens for one in cold.generate(batch, method="ngram", max_new_tokens=new)
            ]
    assert lm.executables.num_compilations == 4
    assert cold.executables.num_compilations == 4
    lm.generate([3, 4, 5], max_new_tokens=3)  # another method has other programs
    assert lm.executables.num_compilations == 6


@pytest.mark.full
def test_a_text_may_grow_and_auto_has_its_candidates():
    lm = tiny.language_model()
    lm.warm_up(
        max_tokens=1000 if lm.config.max_position_embeddings >= 1000 else 100, method="auto", among="ngram"
    )
    compiled = lm.executables.num_compilations
    result = lm.generate([3, 4, 5], max_new_tokens=50, method="auto", among="ngram", explain=True)
    assert all(one.ready for one in result.expected)
    assert lm.executables.num_compilations == compiled


@pytest.mark.parametrize(
    ("given", "words"), [({"max_tokens": 1}, "max_tokens is 1"), ({"batch_sizes": (0,)}, "has 0")]
)
def test_wrong_numbers_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        tiny.language_model().warm_up(**given)
