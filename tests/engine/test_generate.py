"""Text in, text out: stop strings, streams, and one clear line for each wrong use."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxspec import methods
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.engine.language_model import LanguageModel
from tests import refused, tiny

PROMPTS = ["c", "dabababc"]
BUDGET = 24
# The text does not depend on the source of a round's tokens. One method of each kind always runs, the others in the
# slow tier. `tests/engine/test_session.py` runs every method in the engine.
ORDINARY = ("autoregressive", "ngram", "token-recycling", "draft-model")
each_method = pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[] if one in ORDINARY else [pytest.mark.slow]) for one in tiny.METHODS]
)


def generate(lm, prompts, method="autoregressive", **options):
    return lm.generate(prompts, **tiny.options(method), max_new_tokens=BUDGET, **options)


def test_a_piece_shows_the_whole_text_so_far(lm):
    """Also after later pieces; the last one shows what the result shows."""
    pieces = list(lm.stream("dabababc", method="ngram", max_new_tokens=BUDGET))
    assert len(pieces) > 2
    text = ""
    for piece in pieces:
        text += piece.text
        assert "".join(part for part, _ in piece.spans) == text
    assert pieces[-1]._repr_html_() == pieces[-1].result._repr_html_()
    assert "<span" in pieces[-2]._repr_html_()
    assert repr(pieces[-1]) == repr(pieces[-1].result)
    assert re.fullmatch(r"<Piece '.+': \d+ tokens so far>", repr(pieces[-2]))


def test_a_result_shows_its_accepted_drafts(lm):
    """The parts make the text; a notebook shows drafted parts with another background, and escapes HTML."""
    result = lm.generate("dabababc", method="ngram", max_new_tokens=BUDGET, stop=["zz"])
    assert "".join(text for text, _ in result.spans) == result.text
    assert [drafted for _, drafted in result.spans] == [token.drafted for token in result.token_records]
    assert any(text and drafted for text, drafted in result.spans)
    assert result._repr_html_().count("<span") == result.statistics.num_accepted_tokens
    assert "&lt;b&gt;" in dataclasses.replace(result, text="<b>", new_text=None)._repr_html_()


def stream(lm, prompts, method, **options):
    return lm.stream(prompts, **tiny.options(method), max_new_tokens=BUDGET, **options)


@pytest.fixture(scope="module")
def plain(lm):
    """The texts of plain decoding without stop strings."""
    rows = generate(lm, PROMPTS, ignore_eos=True)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert row.tokens == tiny.greedy(lm.encode(prompt), BUDGET)
        assert row.text == lm.tokenizer.decode(row.tokens)
        assert len(set(row.text)) > 2
    return rows


@pytest.mark.representatives("draft-model")
@each_method
def test_pieces_add_up_to_the_text(lm, plain, method):
    texts = ["", ""]
    for piece in stream(lm, PROMPTS, method, ignore_eos=True):
        texts[piece.index] += piece.text
        if piece.result is not None:
            assert piece.result.text == texts[piece.index] == plain[piece.index].text
    assert generate(lm, PROMPTS[1], method, ignore_eos=True).text == plain[1].text


@each_method
@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings_across_token_borders(lm, plain, method, streams):
    """The text ends before the first stop string; the tokens end with the one that completes it."""
    for at, size in [(3, 1), (4, 3), (7, 5), (9, 2)]:
        stops = [plain[0].text[at : at + size], plain[1].text[at + 1 : at + 1 + size], "nowhere"]
        if not streams:
            found = generate(lm, PROMPTS, method, ignore_eos=True, stop=stops)
        else:
            pieces = list(stream(lm, PROMPTS, method, ignore_eos=True, stop=stops))
            found = [next(p.result for p in pieces if p.index == index and p.result) for index in range(2)]
            for index, row in enumerate(found):
                assert "".join(piece.text for piece in pieces if piece.index == index) == row.text
        for row, whole in zip(found, plain, strict=True):
            ends = [whole.text.find(stop) for stop in stops if stop in whole.text]
            assert row.finish_reason == "stop"
            assert row.text == whole.text[: min(ends)]
            used = len(row.tokens)
            assert row.tokens == whole.tokens[:used]
            decode = lm.tokenizer.decode
            assert any(stop in decode(row.tokens) for stop in stops)
            assert not any(stop in decode(row.tokens[:-1]) for stop in stops)
            assert len(row.token_records) == used == row.statistics.num_tokens


def test_a_stopped_row_makes_room(lm, plain):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    stop = plain[0].text[3:6]
    rows = generate(lm, prompts, ignore_eos=True, stop=stop, max_batch=2)
    assert rows[0].text == rows[2].text == plain[0].text[: plain[0].text.find(stop)]


@pytest.mark.full
def test_messages_go_through_the_template(lm):
    """Several turns and a system prompt; a list of conversations is a batch in either argument."""
    chat = LanguageModel(lm.config, lm.params, tiny.tokenizer.__wrapped__())
    chat.executables = lm.executables
    chat.tokenizer._loaded.chat_template = (
        "<s>{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}a"
    )
    turns = [("d", "ab"), ("a", "c"), ("b", "cab")]
    talk = [{"role": role, "content": content} for role, content in turns]
    expected = generate(lm, ["dabacbcaba", "daba"], ignore_eos=True)
    assert generate(chat, talk, ignore_eos=True).tokens == expected[0].tokens
    assert generate(chat, None, messages=talk, ignore_eos=True).tokens == expected[0].tokens
    for given in ({"prompts": [talk, talk[:1]]}, {"prompts": None, "messages": [talk, talk[:1]]}):
        rows = generate(chat, **given, ignore_eos=True)
        assert [row.tokens for row in rows] == [row.tokens for row in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts is empty; give at least one"),
        ({"prompts": ""}, "prompt is empty"),
        ({"prompts": ["ab", ""]}, r"prompts\[1\] is empty"),
        ({"prompts": [[]]}, "prompt is empty"),
        ({"prompts": [13]}, "outside the vocabulary; ids are from 0 to 12"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 10_000}, "exceed the model's context of 512"),
        ({"max_new_tokens": [1, 2, 3]}, "3 values for 1 prompt;"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"stop": [""]}, "stop string is empty"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"method": "ngram", "ngram_min": 4}, "ngram_min=4 and ngram_max=3"),
        ({"method": "suffix", "suffix_max": 0}, "suffix_max is 0; give 1 to 128"),
        ({"method": "suffix", "suffix_factor": 0}, "suffix_factor is 0.0; give a number above 0"),
        ({"method": "suffix", "suffix_min_prob": 2}, "suffix_min_prob is 2.0; give a number from 0 to 1"),
        ({"method": "ngram", "zebra": 1}, "unknown option zebra; see help"),
        ({"tempature": 1.0}, "perhaps you meant temperature"),
        ({"prompts": None}, "prompts is None; give a text, token ids, messages"),
        ({"prompts": 5}, "prompts is 5; give a text"),
        ({"prompts": b"The"}, "prompts is b'The'; give a text"),
        ({"prompts": ["ab", 5]}, r"prompts\[1\] is 5; give a text"),
        ({"prompts": [3, 4.5]}, r"prompts\[1\] is 4.5; give a token id"),
        (
            {"prompts": "a\udce9"},
            r"the prompt is not text in UTF-8: it has the surrogate '\\udce9' at position 1",
        ),
        ({"prompts": [3] * 603}, "the prompt has 603 tokens, the model's context is 512; shorten the prompt"),
        ({"max_new_tokens": 2.7}, "max_new_tokens is 2.7; give a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True; give a whole number"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot'; give a number"),
        ({"temperature": [1.0, 2.0]}, "temperature has 2 values for 1 prompt; give one, or one per prompt"),
        ({"stop": 5}, "stop is 5; give a string or a list of strings"),
        ({"stop": b"ab"}, "stop is b'ab'; give a string"),
        (
            {"method": 3},
            r"method is 3; give a name \(adaspeed, .*\), an instance of one of .*, or a subclass of ",
        ),
        ({"method": "layerskip", "stop_rule": "confidence", "gamma": "x"}, "gamma is 'x'; give a number"),
        ({"messages": "ab"}, "got both prompts and messages; give one of them"),
        ({"prompts": None, "messages": "ab"}, "messages is 'ab'; give a list of messages"),
        (
            {"prompts": None, "messages": [{"role": "user"}]},
            r"messages\[0\] is .*'role'.*; give a message with",
        ),
        ({"prompts": None, "messages": [["ab"]]}, r"messages\[0\]\[0\] is 'ab'; give a message with"),
        ({"method": "draft-model"}, "needs a draft"),
        ({"method": "draft-model", "draft_exit": 3}, "from 1 to 2"),
        ({"method": "draft-model", "draft_exit": 1, "gamma": 0.5}, "no option `gamma`"),
        ({"method": "draft-model", "draft_exit": 1, "stop_rule": "confidence", "gamma": 2.0}, "gamma is 2.0"),
        ({"temperature": 1.0, "acceptor": "greedy"}, "needs temperature 0"),
        ({"method": "draft-model", "draft_exit": 1, "stop_rule": "bogus"}, "unknown stop_rule 'bogus'"),
        ({"method": "ngram", "acceptor": "usual"}, "unknown acceptor 'usual'"),
        ({"method": NGramDrafter(), "acceptor": "usual"}, "unknown acceptor 'usual'"),
        ({"method": "ngram", "ngram_max": 1000}, "max <= 128"),
        ({"method": NGramDrafter(), "num_draft_tokens": 3}, "num_draft_tokens belongs to a method's name"),
        (
            {"method": methods.NGram(), "ngram_max": 2},
            "ngram_max belongs to a method's name; NGram carries its own",
        ),
        ({"seed": -1}, "seed is -1"),
        ({"n": 0}, "n is 0; give at least 1"),
        ({"n": 1.5}, "n is 1.5"),
        ({"min_new_tokens": -1, "max_new_tokens": 4}, r"give a number from 0 to max_new_tokens \(4\)"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, r"give a number from 0 to max_new_tokens \(4\)"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": [1.0, 1.0]}, "repetition_penalty"),
        ({"top_k": 2**40, "temperature": 1.0}, "top_k"),
        ({"seed": [1, 2]}, "seed has 2 values for 1 prompt;"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; give True or False"),
        ({"stream": True}, r"generate has no option stream; call LanguageModel\.stream"),
        ({"logprobs": 1}, "logprobs is 1; give True or False"),
        ({"chat": None}, "chat is None; give True or False"),
        ({"stop_sequences": ["a"]}, "unknown option stop_sequences; perhaps you meant stop$"),
        ({"max_batch": 10**5000}, "max_batch is a number of about 5000 digits; give a whole number"),
        ({"prompts": [3, 10**5000]}, r"prompts\[1\] is a number of about 5000 digits; give a token id"),
    ],
)
def test_wrong_use_is_told_in_one_line(lm, options, message):
    with refused(message):
        lm.generate(options.pop("prompts", "ab"), **options)


def test_a_draft_without_a_tokenizer_has_as_many_tokens_as_the_target(lm):
    config = dataclasses.replace(tiny.SMALL, vocab_size=12)
    other = LanguageModel(config, tiny.params(config))
    with refused("vocabulary of 12 tokens, the target of 13, and one of them no tokenizer"):
        lm.generate("ab", method="draft-model", draft=other)


@pytest.mark.full
def test_without_a_tokenizer_there_are_only_tokens(lm):
    bare = LanguageModel(lm.config, lm.params)
    bare.executables = lm.executables
    assert bare.generate([5], max_new_tokens=4).text is None
    with refused("no tokenizer"):
        bare.generate("ab")
    with refused("no tokenizer"):
        bare.generate([5], stop="a")
