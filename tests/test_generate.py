"""Text in, text out: stop strings, streams, and one clear line for each wrong use."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.engine.text import StopStrings
from tests import tiny

PROMPTS = ["c", "dabababc"]
BUDGET = 24
each_method = pytest.mark.parametrize("method", tiny.METHODS)


def generate(lm, prompts, method="autoregressive", **options):
    return lm.generate(prompts, **tiny.options(method), max_new_tokens=BUDGET, **options)


@pytest.fixture(scope="module")
def plain(lm):
    """The texts without stop strings, by plain decoding."""
    rows = generate(lm, PROMPTS, ignore_eos=True)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert row.tokens == tiny.greedy(lm.encode(prompt), BUDGET)
        assert row.text == lm.tokenizer.decode(row.tokens)
        assert len(set(row.text)) > 2
    return rows


@each_method
def test_pieces_add_up_to_the_text(lm, plain, method):
    texts = ["", ""]
    for piece in generate(lm, PROMPTS, method, ignore_eos=True, stream=True):
        texts[piece.index] += piece.text
        if piece.result is not None:
            assert piece.result.text == texts[piece.index] == plain[piece.index].text
    assert generate(lm, PROMPTS[1], method, ignore_eos=True).text == plain[1].text


@each_method
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_token_borders(lm, plain, method, stream):
    """The text ends before the first of them; the tokens with the one that completes it."""
    for at, size in [(3, 1), (4, 3), (7, 5), (9, 2)]:
        stops = [plain[0].text[at : at + size], plain[1].text[at + 1 : at + 1 + size], "nowhere"]
        found = generate(lm, PROMPTS, method, ignore_eos=True, stop=stops, stream=stream)
        if stream:
            pieces = list(found)
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
            assert len(row.drafted) == used == row.statistics.num_tokens


def test_a_stop_string_that_never_comes_changes_nothing(lm, plain):
    rows = generate(lm, PROMPTS, ignore_eos=True, stop="nowhere")
    assert [(row.text, row.finish_reason) for row in rows] == [(row.text, "length") for row in plain]


def test_a_stopped_row_makes_room(lm, plain):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    stop = plain[0].text[3:6]
    rows = generate(lm, prompts, ignore_eos=True, stop=stop, max_batch=2)
    assert rows[0].text == rows[2].text == plain[0].text[: plain[0].text.find(stop)]


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_stop_strings_piece_by_piece(cut):
    """What is given out is never taken back, and nothing is held longer than it must be."""
    text, watch = "aabaabcaab", StopStrings(["aabc", "cx"])
    out, stopped = "", False
    for start in range(0, len(text), cut):
        piece, stopped = watch.push(text[start : start + cut])
        out += piece
        assert "aabaab".startswith(out)
        if stopped:
            break
    assert (out, stopped) == ("aab", True)
    watch = StopStrings(["aabc"])
    assert watch.push("xxaab") == ("xx", False)
    assert watch.push("b") == ("aabb", False)
    assert watch.push("aa") == ("", False)
    assert watch.flush() == "aa"


def test_chat_needs_a_template(lm):
    with pytest.raises(ValueError, match="no chat template"):
        generate(lm, "ab", chat=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": ""}, "prompt is empty"),
        ({"prompts": ["ab", ""]}, "prompt is empty"),
        ({"prompts": [[]]}, "prompt is empty"),
        ({"prompts": [13]}, "outside the vocabulary; ids are from 0 to 12"),
        ({"max_new_tokens": 0}, "max-new-tokens is 0"),
        ({"max_new_tokens": 10_000}, "exceed the model's context of 512"),
        ({"max_new_tokens": [1, 2, 3]}, "3 values for 1 prompts"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top-p is 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"top_k": -1}, "top-k is -1"),
        ({"min_p": 2.0}, "min-p is 2.0"),
        ({"stop": [""]}, "stop string is empty"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"method": "magic"}, "unknown method 'magic'; the methods are autoregressive, ngram,"),
        ({"method": "ngram", "num_draft_tokens": 0}, "num-draft-tokens is 0"),
        ({"method": "ngram", "ngram_min": 4}, "ngram-min 4 and --ngram-max 3"),
        ({"method": "ngram", "draft_exit": 1}, "no option --draft-exit"),
        ({"method": "ngram", "wrong": 1}, "unknown option wrong"),
        ({"method": "draft-model"}, "needs a draft"),
        ({"method": "draft-model", "draft_exit": 3}, "from 1 to 2"),
        ({"method": "draft-model", "draft_exit": 1, "gamma": 0.5}, "no option --gamma"),
        ({"method": "draft-model", "draft_exit": 1, "stop_rule": "confidence", "gamma": 2.0}, "gamma is 2.0"),
        ({"temperature": 1.0, "acceptor": "greedy"}, "would not follow the law"),
    ],
)
def test_wrong_use_is_told_in_one_line(lm, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        lm.generate(options.pop("prompts", "ab"), **options)
    assert "\n" not in str(caught.value)


def test_a_draft_must_share_the_vocabulary(lm):
    config = dataclasses.replace(tiny.SMALL, vocab_size=12)
    other = LanguageModel(config, tiny.params(config))
    with pytest.raises(ValueError, match="vocabulary of 12 tokens, the target of 13"):
        lm.generate("ab", method="draft-model", draft=other)


def test_without_a_tokenizer_there_are_only_tokens(lm):
    bare = LanguageModel(lm.config, lm.params)
    bare.executables = lm.executables
    assert bare.generate([5], max_new_tokens=4).text is None
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate("ab")
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate([5], stop="a")
