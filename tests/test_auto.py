"""`method="auto"`: texts that change their drafter on the way are the texts of plain decoding, or follow its law."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.choosing.costs import Draft
from jaxspec.engine import choices
from jaxspec.methods import Auto
from jaxspec.methods.base import Candidate
from tests import tiny

PROMPTS = ([5], [7, 1, 7, 1, 7, 1, 7, 2], [3, 4, 3])
# Of each kind: copied from text, an early exit, with a cache of its own, with a head that is fed the text again.
CANDIDATES = ("ngram", "layerskip", "draft-model", "eagle")


def candidate(name):
    drafter, params = tiny.drafter_of(name, "constant", tiny.engine_config())
    return Candidate(name, drafter, params, Draft(layers=1, absorb_layers=1))


@pytest.fixture(scope="module")
def model():
    """Of this module, so that each program is compiled once."""
    return tiny.language_model()


@contextlib.contextmanager
def forced(turns):
    """Makes the choice what is given: (candidate, length, rounds), over and over."""
    given = itertools.cycle(turns)

    def forced_next(self, lengths, remaining, most_rounds, held, ready):
        *self._last, rounds = next(given)
        return (*self._last, rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices.Choices, "next", forced_next)
        patch.setattr(choices.Choices, "wanted", lambda self, *given: [])
        patch.setattr(Auto, "candidates", lambda self, *given: tuple(map(candidate, CANDIDATES)))
        yield


def auto(lm, prompts=PROMPTS, **options):
    return lm.generate(list(prompts), method="auto", num_draft_tokens=tiny.K, **options)


TURNS = st.lists(
    st.tuples(st.integers(0, len(CANDIDATES)), st.integers(1, tiny.K), st.integers(1, 3)), min_size=1
)


@settings(max_examples=12, deadline=None)
@given(turns=TURNS, data=st.data())
def test_a_greedy_text_is_plain_decodings_whatever_is_chosen(model, turns, data):
    """Rows that have ended make room for others meanwhile, and the caches grow."""
    budgets = [data.draw(st.integers(1, 20)) for _ in PROMPTS]
    with forced(turns):
        rows = auto(model, max_new_tokens=budgets, max_batch=2, ignore_eos=True)
    for prompt, budget, row in zip(PROMPTS, budgets, rows, strict=True):
        assert row.tokens == tiny.greedy(tuple(prompt), budget)
