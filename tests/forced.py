"""Texts of `method="auto"` for which is said what drafts when."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from jaxspec.choosing.costs import DraftCost
from jaxspec.engine.alternatives import Alternatives
from jaxspec.engine.choices import Choices
from jaxspec.methods.base import Candidate
from tests import tiny

PROMPTS = ([5], [7, 1, 7, 1, 7, 1, 7, 2], [3, 4, 3])
# Of each kind: copied from text, an early exit, with a cache of its own, with a head that is fed the text again.
CANDIDATES = ("ngram", "layerskip", "draft-model", "eagle")


def tiny_candidate(name, config=None):
    drafter, params = tiny.drafter_of(name, "constant", config or tiny.engine_config())
    return Candidate(name, drafter, params, DraftCost(layers=1, absorb_layers=1))


@contextlib.contextmanager
def forced(turns, candidates=None):
    """What is chosen is what is given, (candidate, length, rounds), over and over."""
    given = itertools.cycle(turns)
    made = tuple(map(tiny_candidate, CANDIDATES)) if candidates is None else candidates

    def forced_next(self, lengths, remaining, most_rounds, held, ready):
        *self._last, rounds = next(given)
        self._chosen_at = self._round
        return (*self._last, rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choices, "next", forced_next)
        patch.setattr(Choices, "wanted", lambda self, *given: [])
        patch.setattr(Alternatives, "candidates", lambda self, *given: made)
        yield


def auto(lm, prompts=PROMPTS, **options):
    """The texts of `method="auto"`."""
    return lm.generate(list(prompts), method="auto", num_draft_tokens=tiny.K, **options)
