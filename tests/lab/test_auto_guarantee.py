"""The speed of `auto` by prices, from the counts of a text."""

from __future__ import annotations

import types

import pytest

from benchmarks.auto_guarantee import _priced
from jaxspec.texts.text import Token


def text(records: list[Token], drafted_by: str) -> types.SimpleNamespace:
    # Verification of 1 and of up to 3 tokens; drafts of 0 to 2 tokens of a lookup and of a head. The second number of
    # each price is the time per token of the text.
    prices = {
        "candidates": ["ngram", "eagle3"],
        "widths": [1, 3],
        "rows": [1, 2],
        "verify": [[[10.0, 0.0], [12.0, 0.0]], [[10.0, 1.0], [20.0, 1.0]]],
        "draft": [[[[0.0, 0.0]] * 3, [[0.0, 0.0], [2.0, 0.0], [4.0, 0.0]]]] * 2,
    }
    statistics = types.SimpleNamespace(num_prompt_tokens=4)
    return types.SimpleNamespace(
        token_records=records, tokens=records, prices=prices, statistics=statistics, drafted_by=drafted_by
    )


PLAIN = [Token(5), Token(6, round=1), Token(7, round=2)]
DRAFTED = [Token(5), Token(6, drafted=True, proposed=2, round=1), Token(7, proposed=2, round=1)]


@pytest.mark.parametrize(
    ("records", "drafted_by", "batch", "expected"),
    [
        (PLAIN, "auto: plain decoding", 1, (2, 2.0)),
        (DRAFTED, "auto: ngram in 1 round", 1, (2, 1.2)),
        (DRAFTED, "auto: eagle3 in 1 round", 1, (2, 1.6)),
        # Two rows: (20 + 5.5) ÷ (10 + 5.5) for 4 prompt tokens and half of 3 tokens.
        (DRAFTED, "auto: ngram in 1 round", 2, (2, 25.5 / 15.5)),
    ],
)
def test_rounds_have_the_prices_of_their_widths_and_drafts(records, drafted_by, batch, expected):
    tokens, steps = _priced(text(records, drafted_by), batch)
    assert (tokens, pytest.approx(steps)) == expected
