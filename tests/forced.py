"""Texts of `method="auto"` with given choices."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from jaxspec.choosing.costs import DraftCost
from jaxspec.choosing.policy import Choice, Policy
from jaxspec.engine.auto.candidates import Alternatives
from jaxspec.engine.auto.record import Record
from jaxspec.methods.base import Candidate
from tests import tiny

PROMPTS = ([5], [7, 1, 7, 1, 7, 1, 7, 2], [3, 4, 3])
# One of each kind: lookup, an early exit, a draft with its own cache, a head that processes the text again.
CANDIDATES = ("ngram", "layerskip", "draft-model", "eagle")


def tiny_candidate(name, config=None):
    drafter, params = tiny.drafter_of(name, "constant", config or tiny.engine_config())
    return Candidate(name, drafter, params, DraftCost(layers=1, absorb_layers=1))


@contextlib.contextmanager
def forced(turns, candidates=None):
    """Replaces the policy by a cycle of given choices (candidate, length, rounds)."""
    given = itertools.cycle(turns)
    made = tuple(map(tiny_candidate, CANDIDATES)) if candidates is None else candidates

    def forced_next(self, lengths, remaining, most_rounds, held, ready):
        self.choice = Choice(*next(given))
        self._chosen_at = self._round
        return self.choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "next", forced_next)
        patch.setattr(Policy, "wanted", lambda self, *given: [])
        patch.setattr(Alternatives, "candidates", lambda self, *given: made)
        yield


def auto(lm, prompts=PROMPTS, **options):
    """Returns the results of `method="auto"`."""
    return lm.generate(list(prompts), method="auto", num_draft_tokens=tiny.K, **options)
