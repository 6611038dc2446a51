"""Tokenizers of GGUF files, against the tokenizers that the models themselves come with."""

from __future__ import annotations

import dataclasses
import functools
import json
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.cli import main
from jaxspec.io import checkpoint
from jaxspec.io.hf import huggingface
from jaxspec.io.tokenizers.tokenizer import Tokenizer, copy_files, has_tokenizer, load_tokenizer
from jaxspec.testing import reference
from tests import refused
from tests.files.test_gguf import BASE
from tests.gguf_files import CHAT_TEMPLATE, CONVERSATION, TEXTS, byte_level, sentencepiece, write

CONFIG = dataclasses.replace(BASE, vocab_size=700, max_position_embeddings=512)
PRE = ("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken")


@pytest.fixture
def made(tmp_path):
    """Writes a model with a tokenizer of given metadata, and returns its path."""

    def make(metadata, **changes):
        params = reference.random_params(CONFIG, 0)
        return write(tmp_path / "m.gguf", CONFIG, params, changes={**metadata, **changes})

    return make


def pieces(path, text: str) -> list[str]:
    tokenizer = load_tokenizer(path)
    return [tokenizer.decode([index]) for index in tokenizer.encode(text)]


def test_a_template_for_tools_is_used_with_tools(made, tmp_path):
    """Also by the files that are made of it."""
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools[0] }}"}
    path = made(byte_level("smollm"), **named)
    copy_files(path, tmp_path)
    for source in (path, tmp_path):
        chat = load_tokenizer(source).chat
        assert chat.prompt([]) == "plain"
        assert chat.prompt([], {"tools": [{"name": "now"}]}) == "{'name': 'now'}"
    with refused(r"tokenizer\.chat_template\.tool_use is 7, expected a text"):
        load_tokenizer(made(byte_level("smollm"), **{"tokenizer.chat_template.tool_use": 7}))


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_texts_come_back(made, pre):
    tokenizer = load_tokenizer(made(byte_level(pre)))
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if "qwen" in pre else text
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == composed
        stream = tokenizer.stream()
        assert "".join(stream.push([index]) for index in ids) + stream.flush() == composed


def learned(texts):
    """Metadata of a byte-level BPE that merges the beginnings of `texts` from left to right."""
    tokens = list(byte_level("default")["tokenizer.ggml.tokens"])[:260]
    merges = []
    for text in texts:
        word = text.replace(" ", "Ġ").replace("\n", "Ċ")
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return {
        **byte_level("default"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": merges,
    }


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        # GPT-2 keeps digits together; SmolLM takes each one out first, so that all spaces before one stay together
        # (here the merges make two pairs of four); Llama 3 takes up to three, Qwen2 one, and both keep a line end
        # with the punctuation before it.
        ("gpt-2", [" 12345", "   ", " 7", "!", "\n"]),
        ("smollm", [" ", "1", "2", "3", "4", "5", "  ", "  ", "7", "!", "\n"]),
        ("llama-bpe", [" ", "123", "45", "   ", " ", "7", "!\n"]),
        ("qwen2", [" ", "1", "2", "3", "4", "5", "   ", " ", "7", "!\n"]),
        ("tekken", [" ", "1", "2", "3", "4", "5", "   ", " ", "7", "!\n"]),
        ("exaone4", [" 12345", "   ", " 7", "!", "\n"]),
        ("exaone", [" ", "1", "2", "3", "4", "5", "  ", "  ", "7", "!", "\n"]),
        ("dbrx", [" ", "123", "45", "   ", " ", "7", "!\n"]),
    ],
)
def test_splits(made, pre, cut):
    metadata = learned([" 12345", "12345", "45", "     ", "    7", " 7", "!\n"])
    path = made(metadata, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    assert pieces(path, " 12345    7!\n") == cut


def test_a_whole_word_goes_before_its_merges_for_llama_3(made):
    """Its vocabulary has tokens that no merges lead to."""
    base = byte_level("llama-bpe")
    tokens, types = [*base["tokenizer.ggml.tokens"], "zqzqz"], [*base["tokenizer.ggml.token_type"], 1]
    metadata = {**base, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert load_tokenizer(made(metadata)).encode("zqzqz") == [1, len(tokens) - 1]
    assert len(load_tokenizer(made(metadata, **{"tokenizer.ggml.pre": "gpt-2"})).encode("zqzqz")) > 1


@pytest.mark.parametrize(
    ("pre", "said", "bos", "eos"),
    [
        ("llama-bpe", {}, True, False),
        ("smollm", {}, False, False),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, True, False),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False, False),
        ("qwen2", {"tokenizer.ggml.add_eos_token": True}, False, True),
        ("llama-bpe", {"tokenizer.ggml.bos_token_id": None}, False, False),
        ("dbrx", {}, False, False),
    ],
)
def test_what_stands_around_a_text(made, pre, said, bos, eos):
    ids = load_tokenizer(made(byte_level(pre), **said)).encode("a bear")
    assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)
    assert len(ids) > 2


def test_special_tokens_and_chat(made):
    path = made(byte_level("smollm"))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode_chat(CONVERSATION)
    assert ids[0] == 1
    assert ids.count(1) == len(CONVERSATION) + 1
    assert ids.count(2) == len(CONVERSATION)
    assert tokenizer.decode(ids).startswith("system\nAnswer briefly.\nuser\n")  # control tokens are left out
    thought = tokenizer.encode("a<think>b")
    assert thought.count(3) == 1
    assert tokenizer.decode(thought) == "a<think>b"  # a token of the user is text
    assert tokenizer.vocab_size == len(byte_level("smollm")["tokenizer.ggml.tokens"])
    template = path.with_suffix(".jinja")
    template.write_text("{{ messages[0]['content'] }}")
    other = load_tokenizer(path, template)
    assert other.encode_chat("a bear") == tokenizer.encode("a bear")


def test_padding_is_no_vocabulary(made):
    """Qwen2's files fill it up with [PAD…]; a draft's tokenizer.json has none of them."""
    base = byte_level("qwen2")
    tokens = [*base["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    types = [*base["tokenizer.ggml.token_type"], 5, 5]
    metadata = {**base, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    padded, plain = load_tokenizer(made(metadata)), load_tokenizer(made(base))
    assert padded.same_vocabulary(plain)
    for token in ("[PAD1]", "a bear"):
        assert padded.encode(token) == plain.encode(token)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(made, prefix):
    """The ids equal those of transformers for the same vocabulary and scores, where llama.cpp agrees with it."""
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    metadata = sentencepiece()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    theirs = LlamaTokenizer(vocab=vocabulary, merges=merges, add_prefix_space=prefix, add_bos_token=True)
    ours = load_tokenizer(made(metadata, **{"tokenizer.ggml.add_space_prefix": prefix}))
    assert sum(len(theirs.encode(text)) < len(text) for text in TEXTS) > 3  # it merges
    same = [text for text in TEXTS if not text.startswith(" ")] + ["\n\n"]
    for text in same if prefix else [*TEXTS, "  two", "<s>a bear</s> x", "▁"]:
        assert ours.encode(text) == Tokenizer(theirs).encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.encode_chat(CONVERSATION)[0] == 1


@pytest.mark.parametrize("kind", [3, 4])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # A space is put before every piece of text: a text that begins with a space has two, and a text between or
        # after special tokens has its own. The pieces are those of llama.cpp (xllamacpp 2026.10) for the same file.
        ("go on", ["<s>", "▁go", "▁on"]),
        (" go", ["<s>", "▁", "▁go"]),
        ("  go", ["<s>", "▁", "▁", "▁go"]),
        ("▁go", ["<s>", "▁", "▁go"]),
        (" ", ["<s>", "▁", "▁"]),
        ("", ["<s>"]),
        ("<s>go", ["<s>", "▁go"]),
        ("go</s>on", ["<s>", "▁go", "</s>", "▁on"]),
        ("go</s> on", ["<s>", "▁go", "</s>", "▁", "▁on"]),
        ("</s></s>", ["<s>", "</s>", "</s>"]),
        ("<tool>go<tool>\non", ["<s>", "<tool>", "▁go", "<tool>", "▁", "<0x0A>", "o", "n"]),
    ],
)
def test_sentencepiece_puts_a_space_before_every_piece_of_text(made, kind, text, pieces):
    more = ["▁", "g", "o", "n", "▁g", "▁go", "▁o", "▁on", "<tool>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *more]
    vocabulary = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(more))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(more) - 1) + [kind],
    }
    tokenizer = load_tokenizer(made(sentencepiece() | vocabulary))
    assert [tokens[index] for index in tokenizer.encode(text)] == pieces


def test_only_sentencepiece_has_a_space_prefix(made):
    plain, told = (
        load_tokenizer(made(byte_level("gpt-2"), **changes)).encode("a bear")
        for changes in ({}, {"tokenizer.ggml.add_space_prefix": True})
    )
    assert told == plain


SCORES = "tokenizer.ggml.scores"
ENDS = [
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "<|end_of_text|>", "[EOT]", "<end_of_utterance>"),
]


@pytest.mark.parametrize("make", [sentencepiece, functools.partial(byte_level, "llama-bpe")])
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_a_turn_ends_at_a_token_with_the_text_of_an_end(made, make, kind):
    base = make()
    columns = [list(base.get(f"tokenizer.ggml.{name}", ())) for name in ("tokens", "token_type", "scores")]
    tokens, types, scores = columns
    for text in ENDS:
        if text not in tokens:
            for column, value in zip(columns, (text, kind, -1000.0), strict=True):
                column.append(value)
        types[tokens.index(text)] = kind
    changes = {"tokens": tokens, "token_type": types} | ({"scores": scores} if SCORES in base else {})
    path = made({**base, **{f"tokenizer.ggml.{name}": values for name, values in changes.items()}})
    tokenizer, ends = load_tokenizer(path), checkpoint.read_config(path).eos_token_ids
    assert 2 in ends  # the token that the metadata names
    for text in ENDS:
        index = tokens.index(text)
        assert index in ends
        assert index in tokenizer.special_ids
        assert tokenizer.encode(f"a{text}").count(index) == 1


def test_a_turn_does_not_end_at_other_tokens(made):
    base = byte_level("llama-bpe")
    more = ["<|start_header_id|>", "<|im_start|>x", "endoftext", "<|eot_id|> "]
    tokens, types = [*base["tokenizer.ggml.tokens"], *more], [*base["tokenizer.ggml.token_type"], *[3] * 4]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert (
        checkpoint.read_config(made(base | changes)).eos_token_ids
        == checkpoint.read_config(made(base)).eos_token_ids
    )


def test_sentencepiece_ids_that_a_file_leaves_out(made):
    names = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "unknown")}
    path = made(sentencepiece(), **names, **{"tokenizer.ggml.add_bos_token": None})
    assert load_tokenizer(path).encode("a bear")[0] == 1
    config = checkpoint.read_config(path)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not supported; supported: .*qwen2"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.merges": ["qqqq zzzz"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.merges": None}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.bos_token_id": 4_000_000}, "its tokenizer is damaged"),
    ],
)
def test_bad_tokenizers(made, changes, match):
    with refused(match):
        load_tokenizer(made(byte_level("smollm"), **changes))


@pytest.mark.full
def test_no_tokenizer(made):
    path = made({})
    assert not has_tokenizer(path)
    lm = jaxspec.load(path, device="cpu")
    assert lm.tokenizer is None
    assert len(lm.generate([5, 6], max_new_tokens=3, ignore_eos=True).tokens) == 3


# The whole way


@pytest.mark.full
def test_generate_and_draft(made, tmp_path):
    """A GGUF file is a model as any other, and a draft."""
    path = made(byte_level("smollm"))
    lm = jaxspec.load(path, device="cpu", dtype="float32")
    assert lm.directory == tmp_path
    assert lm.config.eos_token_ids == (2, 0)  # <|im_end|> by its name, and <|endoftext|> by its text
    huggingface.save(tmp_path / "hf", CONFIG, reference.random_params(CONFIG, 0))
    plain = jaxspec.load(tmp_path / "hf", device="cpu", dtype="float32")
    prompt = lm.encode("What is 12 + 30?", chat=True)
    expected = plain.generate(prompt, max_new_tokens=20, ignore_eos=True)
    result = lm.generate("What is 12 + 30?", chat=True, max_new_tokens=20, ignore_eos=True)
    assert result.tokens == expected.tokens
    drafted = lm.generate(prompt, method="draft-model", draft=str(path), max_new_tokens=20, ignore_eos=True)
    assert drafted.tokens == expected.tokens
    assert drafted.statistics.num_rounds < 6  # a draft that is the target is always right


def test_convert(made, tmp_path):
    source = made(byte_level("smollm"))
    directory = tmp_path / "hf"
    assert main(["convert", str(source), str(directory)]) == 0
    config = huggingface.read_config(directory)
    assert config == checkpoint.read_config(source)
    direct = checkpoint.load_params(source, config, jnp.float32)
    again = huggingface.load_params(directory, config, jnp.float32)
    assert jax.tree.all(jax.tree.map(np.array_equal, direct, again))
    ours, theirs = load_tokenizer(source), load_tokenizer(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_chat(CONVERSATION) == theirs.encode_chat(CONVERSATION)
    assert ours.same_vocabulary(theirs)
    said = json.loads((directory / "tokenizer_config.json").read_text())
    assert said["chat_template"] == CHAT_TEMPLATE
    assert (said["bos_token"], said["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert main(["convert", str(source), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert huggingface.stored_dtype(tmp_path / "half") == jnp.bfloat16


@pytest.mark.full
def test_convert_sentencepiece(made, tmp_path):
    source = made(sentencepiece())
    assert main(["convert", str(source), str(tmp_path / "hf")]) == 0
    ours, theirs = load_tokenizer(source), load_tokenizer(tmp_path / "hf")
    for text in [*TEXTS, "  two"]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_chat(CONVERSATION) == theirs.encode_chat(CONVERSATION)
