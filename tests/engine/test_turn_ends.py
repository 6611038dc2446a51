"""Ends of texts and forms of conversations: stops, end tokens, template variables, and contents in several parts."""

from __future__ import annotations

import json
import warnings

import pytest

import jaxspec
from jaxspec.cli.options import unescaped
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.requests.text import RowText
from jaxspec.testing import language_model
from tests import refused
from tests.commands import write_model, write_tokenizer

PLAIN = {"max_new_tokens": 24, "ignore_eos": True}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ '' if think is defined and not think else '<think>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain(lm):
    return lm.generate("ab", **PLAIN)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("models") / "chat")
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def chatty(model):
    return jaxspec.load(model, device="cpu")


# Stops


@pytest.mark.representatives("1-ngram", "4-ngram")
@pytest.mark.parametrize("method", ["autoregressive", "ngram"])
@pytest.mark.parametrize("place", [1, 4, 9])
def test_a_text_ends_before_a_stop_token(lm, plain, place, method):
    token = plain.tokens[place]
    end = plain.tokens.index(token)
    result = lm.generate("ab", method=method, stop_token_ids=[token], **PLAIN)
    assert result.finish_reason == "stop"
    assert result.tokens == plain.tokens[: end + 1]
    before = lm.generate("ab", **PLAIN | {"max_new_tokens": end}).text if end else ""
    assert result.text == before
    assert lm.generate("ab", method=method, stop_token_ids=token, **PLAIN).tokens == result.tokens
    pieces = list(lm.stream("ab", method=method, stop_token_ids=[token], **PLAIN))
    assert "".join(piece.text for piece in pieces) == result.text


def test_an_end_token_that_is_a_stop_token_too_is_an_end(lm, plain):
    token = plain.tokens[3]
    ending = language_model(eos_token_ids=(token,))
    ended = ending.generate("ab", max_new_tokens=24)
    both = ending.generate("ab", max_new_tokens=24, stop_token_ids=[token])
    assert (both.tokens, both.finish_reason) == (ended.tokens, "eos")
    assert ending.generate("ab", stop_token_ids=[token], **PLAIN).finish_reason == "stop"


def test_an_end_token_that_the_tokenizer_does_not_call_special_has_no_text(plain):
    """The text ends before it, whole, in a stream and in its spans; with `ignore_eos` it is a token like others."""
    token = plain.tokens[3]
    before = plain.tokens[: plain.tokens.index(token)]
    ending = language_model(eos_token_ids=(token,))
    assert token not in ending.tokenizer.special_ids
    result = ending.generate("ab", max_new_tokens=24)
    assert (result.tokens, result.finish_reason) == ([*before, token], "eos")
    *_, last = pieces = list(ending.stream("ab", max_new_tokens=24))
    texts = {result.text, "".join(piece.text for piece in pieces), "".join(text for text, _ in last.spans)}
    assert texts == {ending.generate("ab", max_new_tokens=len(before)).text}
    assert ending.generate("ab", **PLAIN).text == plain.text


@pytest.mark.full
def test_stop_tokens_are_for_every_row_and_refills(lm):
    prompts = ["ab", "cd", "a", "bd e"]
    whole = lm.generate(prompts, **PLAIN)
    token = whole[0].tokens[2]
    for prompt, result, uncut in zip(
        prompts, lm.generate(prompts, stop_token_ids=[token], max_batch=2, **PLAIN), whole, strict=True
    ):
        end = uncut.tokens.index(token) + 1 if token in uncut.tokens else len(uncut.tokens)
        assert result.tokens == uncut.tokens[:end], prompt


def special_model(plain, place):
    """Returns the same model with the token at position `place` of `plain` made special, and the token's text."""
    from transformers import PreTrainedTokenizerFast

    lm = language_model()
    loaded = lm.tokenizer._loaded
    text = loaded.convert_ids_to_tokens(plain.tokens[place])
    backend = type(loaded._tokenizer).from_str(loaded._tokenizer.to_str())
    backend.add_special_tokens([text])
    lm.tokenizer = Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    )
    return lm, text


def test_a_stop_string_that_is_a_special_token_stops_at_its_id(plain):
    lm, text = special_model(plain, 4)
    end = plain.tokens.index(plain.tokens[4])
    for stop in (text, [text, "never"]):
        result = lm.generate("ab", stop=stop, **PLAIN)
        assert (result.tokens, result.finish_reason) == (plain.tokens[: end + 1], "stop")
        assert text not in result.text
    longer = lm.generate("ab", stop=text + "x", **PLAIN)
    assert longer.tokens == plain.tokens  # the stop string is longer than the token


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop_token_ids": "</s>"}, "stop_token_ids is '</s>'; give a token id"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids has -1, which is outside the vocabulary"),
        ({"stop_token_ids": [10**6]}, "outside the vocabulary; ids are from 0 to"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is for a chat template"),
        ({"chat_template_kwargs": "a=1", "chat": True}, "give variables of the template by name"),
    ],
)
def test_bad_arguments(lm, given, said):
    with refused(said):
        lm.generate("ab", **given)


def test_variables_beside_ids_are_refused(lm):
    with refused("chat_template_kwargs is for a chat template"):
        lm.generate([1, 2], chat_template_kwargs={"a": 1}, chat=True)


def test_a_silent_token_is_no_part_of_a_row_s_text(lm):
    row = RowText(lm.tokenizer.stream(), (), (5,))
    text, used, stopped = row.push([4, 5], True)
    assert (text, used, stopped) == (lm.tokenizer.decode([4]), 2, False)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"\n", "\n"),
        (r"a\tb\r", "a\tb\r"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"\u00e9\u000A", "é\n"),
        (r"\ud83d\ude00", "😀"),
        ("\n plain é 😀", "\n plain é 😀"),
        ("", ""),
    ],
)
def test_escapes(text, read):
    assert unescaped(text) == read


@pytest.mark.parametrize("text", ["\\", r"\d", "a\\", r"\u12", r"\u", r"\U0001F600", "\\\n", r"\ud83"])
def test_escapes_that_are_none(text):
    with refused("--stop has the escape "):
        unescaped(text)


# End tokens


@pytest.mark.parametrize(("ends", "warned"), [([1], 0), ([0], 1), ([0, 1], 0), (None, 1)])
def test_an_end_token_that_ends_nothing_is_named(ends, warned, tmp_path):
    write_tokenizer(write_model(tmp_path))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": ends}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jaxspec.load(tmp_path, device="cpu")
    said = [str(one.message) for one in found if "the tokenizer's end token '</s>' (1)" in str(one.message)]
    assert len(said) == warned
    assert all(len(one) <= 300 for one in said)


# Conversations


ASK = [{"role": "user", "content": "Hi"}]


def text_of(lm, messages, **options):
    return lm.tokenizer._loaded.decode(
        lm.encode(messages, **options), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def test_a_last_message_of_the_assistant_is_continued(chatty):
    for begun in ("Sure, ", "Sure", "", "  two  "):
        text = text_of(chatty, [*ASK, {"role": "assistant", "content": begun}])
        assert text == f"[user]Hi</s>[assistant]{begun}"
    assert text_of(chatty, ASK) == "[user]Hi</s>[assistant]<think>"
    again = [*ASK, {"role": "assistant", "content": "Yo"}, *ASK]
    assert text_of(chatty, again) == "[user]Hi</s>[assistant]Yo</s>[user]Hi</s>[assistant]<think>"


def test_variables_reach_the_template(chatty):
    assert text_of(chatty, ASK, chat_template_kwargs={"think": False}) == "[user]Hi</s>[assistant]"
    assert (
        text_of(chatty, "Hi", chat=True, chat_template_kwargs={"think": False}) == "[user]Hi</s>[assistant]"
    )
    ids = chatty.encode(ASK, chat_template_kwargs={"think": False})
    expected = chatty.generate(ids, **PLAIN).tokens
    assert chatty.generate(messages=ASK, chat_template_kwargs={"think": False}, **PLAIN).tokens == expected
    assert chatty.generate(messages=ASK, chat_template_kwargs={}, **PLAIN).tokens != expected
    for name in ("messages", "add_generation_prompt", "continue_final_message", "chat_template"):
        with refused(f"chat_template_kwargs has {name}"):
            chatty.encode(ASK, chat_template_kwargs={name: True})


def test_a_grammar_begins_at_once_where_nothing_asks_for_reasoning():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think></think>{% endif %}"
    lm = language_model(chat_template=template)
    for given in ({"prompts": "ab", "chat": True}, {"messages": [{"role": "user", "content": "ab"}]}):
        assert lm.generate(**given, choices=["cd"], max_new_tokens=6).text == "cd"


def test_a_content_of_text_parts_is_its_text(chatty):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    one = chatty.generate(messages=[{"role": "user", "content": parts[:1]}], **PLAIN)
    assert one.tokens == chatty.generate(messages=ASK, **PLAIN).tokens
    two = chatty.generate([[{"role": "user", "content": parts}]], **PLAIN)[0]
    joined = [{"role": "user", "content": "Hi\nyou"}]
    assert two.tokens == chatty.generate(messages=joined, **PLAIN).tokens


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "image_url", "image_url": "x"}],
        ["Hi"],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        None,
    ],
)
def test_other_contents_are_refused(chatty, content):
    with refused(r"messages\[0\] has the (part|content) .*; give a text"):
        chatty.generate(messages=[{"role": "user", "content": content}])
