"""The counts of a text that a stop string cut, rebuilt from its tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.requests.pieces import recount
from jaxspec.requests.text import Token

rounds = st.lists(
    st.integers(0, 5).flatmap(lambda verified: st.tuples(st.just(verified), st.integers(0, verified))),
    max_size=8,
)


def tokens_of(played):
    """The tokens that rounds of (verified, accepted) emit, after the prefill's."""
    tokens = [Token(0)]
    for number, (verified, accepted) in enumerate(played, 1):
        tokens += [Token(0, at < accepted, verified, number) for at in range(accepted + 1)]
    return tokens


@given(rounds)
def test_whole_rounds_are_counted_as_played(played):
    """Without a cut inside a round, the counts are those of the rounds."""
    counts = recount(tokens_of(played))
    drafting = [accepted for verified, accepted in played if verified]
    assert counts["num_rounds"] == len(played)
    assert counts["num_drafts"] == len(drafting)
    assert counts["num_draft_tokens"] == sum(verified for verified, _ in played)
    assert counts["num_accepted_tokens"] == sum(drafting)
    assert sum(counts["acceptance_histogram"]) == len(drafting)
    for size, number in enumerate(counts["acceptance_histogram"]):
        assert number == drafting.count(size)


@pytest.mark.full
def test_a_cut_round_counts_what_is_left_of_it():
    """A stop string inside accepted drafts leaves the drafts after it out of every count."""
    counts = recount(tokens_of([(4, 4)])[:3])
    assert counts == {
        "num_rounds": 1,
        "num_drafts": 1,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 2,
        "acceptance_histogram": (0, 0, 1),
    }
