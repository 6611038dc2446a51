"""Tests that a damaged or hostile tokenizer gives a text or an error of one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.console.errors import Guard
from jaxspec.io.tokenizers.tokenizer import load_tokenizer
from tests import refused

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MODEL = models.BPE({one: index for index, one in enumerate(BYTES)}, [])


def backend() -> dict[str, Any]:
    made = Tokenizer(MODEL)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    content: dict[str, Any] = json.loads(made.to_str())
    return content


def template(sequence: str, ids: list[int], named: bool = True) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "Q", "type_id": 0}}, {"Sequence": {"id": sequence, "type_id": 0}}]
    token = {"Q": {"id": "Q", "ids": ids, "tokens": ["a", "b"]}} if named else {}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": token}


def of_type(kind: str, **content: Any) -> dict[str, Any]:
    return {"type": kind, **content}


def nested() -> dict[str, Any]:
    inner = of_type("NFC")
    for _ in range(100):
        inner = of_type("Sequence", normalizers=[inner])
    return inner


# Changes to tokenizer.json. Those in PANICS make the library panic, and a panic is not an Exception.
PANICS: dict[str, dict[str, Any]] = {
    "character map of no bytes": {"normalizer": of_type("Precompiled", precompiled_charsmap="AAAA")},
    "character map": {"normalizer": of_type("Precompiled", precompiled_charsmap="BAAAAP////8AAAAA")},
    "unnamed token": {"post_processor": template("A", [], named=False)},
    "one id for two tokens": {"post_processor": template("B", [5])},
    "empty text replaced": {"normalizer": of_type("Replace", pattern={"String": ""}, content="x")},
    "pieces of length 0": {"pre_tokenizer": of_type("FixedLength", length=0)},
}
FAILURES: dict[str, dict[str, Any]] = {
    "no unknown token": {"model": of_type("WordLevel", unk_token="Q", vocab={"a": 0})},
    "no unknown piece": {
        "model": of_type("Unigram", unk_id=None, vocab=[["a", -1.0]]),
        "pre_tokenizer": None,
    },
    "unknown piece absent": {"model": of_type("Unigram", unk_id=99, vocab=[["a", 0.0]])},
    "expression": {
        "pre_tokenizer": of_type("Split", pattern={"Regex": "("}, behavior="Isolated", invert=False)
    },
    "nested": {"normalizer": nested()},
    "type": {"model": of_type("x")},
    "model absent": {"model": None},
    "merge of no token": {"model": of_type("BPE", vocab={"a": 0}, merges=[["zz", "q"]])},
    "half of a pair": {"added_tokens": "\ud800"},
    "long": {"x" * 10_000: "y" * 10_000, "model": of_type("x" * 10_000)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "number as a token": {"eos_token": 5},
    "number as a class": {"tokenizer_class": 5},
    "class of several": {"tokenizer_class": "RagTokenizer"},
    "bytes": {"tokenizer_class": "ByT5Tokenizer"},
    "argument": {"cls": 3, "self": 5},
    "own code": {"auto_map": {"AutoTokenizer": ["x.Y", "x.Y"]}, "tokenizer_class": "Y"},
    "added token": {"added_tokens_decoder": {"x": {"content": "z"}}},
    "added tokens": {"added_tokens_decoder": [1]},
    "named tokens": {"extra_special_tokens": {"a": 5}},
}


def used(directory, content: dict[str, Any], settings: dict[str, Any]) -> None:
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(json.dumps(usual | settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("hello\n\u1234 <|end|>x")
    tokenizer.decode([*ids, 0, 99_999])


def test_the_tokenizer_without_changes_is_read(tmp_path):
    used(tmp_path, backend(), {})


@pytest.mark.parametrize("name", [*PANICS, *FAILURES])
def test_a_tokenizer_that_fails_is_one_line(tmp_path, name):
    with refused("tokenizer") as error:
        used(tmp_path, backend() | {**PANICS, **FAILURES}[name], {})
    assert_line(str(error.value))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_fail_are_one_line(tmp_path, name):
    with refused("tokenizer") as error:
        used(tmp_path, backend(), SETTINGS[name])
    assert_line(str(error.value))


def test_a_command_ends_with_a_line_where_a_library_panics(capsys):
    class PanicException(BaseException):
        pass

    def run() -> int:
        raise PanicException("index out of bounds")

    assert Guard("jaxspec")(run) == 1
    assert capsys.readouterr().err == "jaxspec: error: PanicException: index out of bounds\n"


def assert_line(message: str) -> None:
    assert message.isprintable(), repr(message)
    assert len(message) <= 300
