"""The text of a row and of its tokens: stop strings, characters of several tokens, and broken ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.requests.text import RowText, StopStrings, Token, row_text
from tests.files.test_tokenizer import BYTES, byte_ids, certain, text_of, tokenizer

NAMES = ["byte_level", "byte_fallback"]
EURO = "€".encode()


def first_stop(text: str, stops: list[str]) -> int | None:
    """The place of the stop string that ends first, and of these the longest; None if there is none."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


@st.composite
def cases(draw):
    """Bytes that are characters or not, and stop strings of which some are parts of their text."""
    name = draw(st.sampled_from(NAMES))
    whole = st.sampled_from(["A", "\n", "é", "€", "😀", "\ufffd", "A€"]).map(str.encode)
    broken = st.lists(st.sampled_from([*BYTES]), max_size=3).map(bytes)
    data = b"A" + b"".join(draw(st.lists(st.one_of(whole, whole, broken), max_size=30)))
    text = text_of(name, data)
    stops = draw(
        st.lists(st.sampled_from(["\n", "€", "\ufffd", "A\n", "é€A", "\ufffd\ufffd", "z"]), max_size=3)
    )
    if text and draw(st.booleans()):
        begin = draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : begin + draw(st.integers(1, 4))])
    return name, data, stops, draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))


def steps_of(tokens, sizes):
    """The tokens in pieces of these sizes again and again, with whether a piece is the last."""
    at = 0
    while at < len(tokens):
        for size in sizes:
            if at < len(tokens):
                yield tokens[at : at + size], at + size >= len(tokens)
                at += size


@settings(max_examples=60)
@given(cases())
def test_a_stop_string_ends_a_text_at_the_token_that_completes_it(case):
    """At whatever pieces: the text is cut before the stop, and no token after the one that makes it certain is used."""
    name, data, stops, sizes = case
    ids = byte_ids(name, data)
    row, used = RowText(tokenizer(name).stream(), stops), 0
    for part, last in steps_of(ids, sizes):
        _, number, stopped = row.push(part, last)
        used += number
        if stopped:
            break
    stop = first_stop(text_of(name, data), stops)
    assert stopped == (stop is not None)
    assert row.text == text_of(name, data)[:stop]
    if stopped:
        fewer = next(
            (n for n in range(len(data)) if first_stop(certain(name, data[:n]), stops) is not None), len(data)
        )
        assert used == fewer


@settings(max_examples=60)
@given(cases())
def test_the_texts_and_bytes_of_tokens_are_those_of_the_row(case):
    """In whatever pieces, and the same as without the stop string up to it."""
    name, data, stops, sizes = case
    tokens = [Token(index, log_prob=-float(at)) for at, index in enumerate(byte_ids(name, data))]
    new = lambda stops: row_text(tokenizer(name), (), stops)  # noqa: E731
    plain = new(()).by_token().push(tokens, text_of(name, data), last=True)
    assert "".join(token.text for token in plain) == text_of(name, data)
    assert b"".join(token.raw for token in plain) == data
    row, texts, found, pushed = new(stops), new(stops).by_token(), [], 0
    for part, last in steps_of(tokens, sizes):
        text, used, stopped = row.push([token.id for token in part], last)
        found += texts.push(part[:used], text, stopped or last)
        pushed += used
        # A chunk of a stream never has a token without its text, and the text of a token is whole.
        assert row.text.startswith("".join(token.text for token in found))
        if stopped:
            break
    assert len(found) == pushed
    assert [token.log_prob for token in found] == [token.log_prob for token in tokens[:pushed]]
    assert "".join(token.text for token in found) == row.text
    if not stopped:
        assert found == plain
    for token, other in zip(found, plain, strict=False):
        assert other.text.startswith(token.text)
        assert other.raw.startswith(token.raw)
    if "\ufffd" not in text_of(name, data):
        assert b"".join(token.raw for token in found).decode() == row.text


@pytest.mark.parametrize("name", NAMES)
def test_a_token_waits_while_its_text_may_belong_to_a_stop(name):
    """It comes with its text, one by one otherwise."""
    row, texts = row_text(tokenizer(name), (), ["AB"]), row_text(tokenizer(name), (), ["AB"]).by_token()
    came = []
    for index in byte_ids(name, b"\nA\nA" + EURO):
        text, _, _ = row.push([index], False)
        came.append([token.text for token in texts.push([Token(index)], text, last=False)])
    assert came == [["\n"], [], ["A", "\n"], [], [], [], ["A", "", "", "€"]]


@pytest.mark.parametrize("name", NAMES)
def test_an_end_token_after_half_a_character(name):
    """The end token has no text; the broken character belongs to the token that began it."""
    end, ids = 2 if name == "byte_fallback" else 1, byte_ids(name, b"A\xe2")
    row, texts = (row_text(tokenizer(name), (), (), (end,)) for _ in range(2))
    text, _, _ = row.push([*ids, end], True)
    found = texts.by_token().push([Token(index) for index in (*ids, end)], text, last=True)
    assert [(token.text, token.raw) for token in found] == [("A", b"A"), ("\ufffd", b"\xe2"), ("", b"")]


def test_stop_strings_hold_back_only_what_may_begin_one():
    stops = StopStrings(["\n\n", "€A"])
    assert [stops.push(one) for one in ("\n", "A", "€", "é", "€", "A")] == [
        ("", False),
        ("\nA", False),
        ("", False),
        ("€é", False),
        ("", False),
        ("", True),
    ]
