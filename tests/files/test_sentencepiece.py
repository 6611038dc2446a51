"""A directory with only tokenizer.model is read if the package is installed; otherwise one line names the package."""

from __future__ import annotations

import io
import json

import pytest

from jaxspec.host import extras
from jaxspec.io.tokenizers.tokenizer import copy_files, load_tokenizer
from tests import refused

TEXTS = ["Once upon a time", " lead", "a  b", "日本 🎉", "Tom's red ball.\nYes", "", "<s>Hi</s>"]
SETTINGS = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


@pytest.fixture(scope="module")
def content():
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    stories = [
        "Once upon a time there was a boy.",
        "Tom had a red ball and a dog.",
        "They were happy. Yes!",
    ] * 40
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(stories),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def write(directory, content, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.model").write_bytes(content)
    settings = SETTINGS | {"tokenizer_class": "LlamaTokenizer"} | changes
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"legacy": False}, {"legacy": True}, {"add_eos_token": True}),
        *({"tokenizer_class": name} for name in ("LlamaTokenizerFast", "CodeLlamaTokenizer", None)),
    ],
)
def test_its_ids_are_sentencepiece_s(content, changes, tmp_path):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    directory = write(tmp_path / "m", content, **changes)
    ours = load_tokenizer(directory)
    for text in ("Once upon a time", "a  b", "日本 🎉", "Tom's red ball.\nYes"):
        ids = ours.encode(text)
        end = [2] if changes.get("add_eos_token") else []
        assert ids == [1, *theirs.encode(text), *end], text
        assert ours.decode(ids) == text
    assert ours.vocab_size >= theirs.vocab_size()  # CodeLlama's class adds fill-in-the-middle tokens
    (tmp_path / "copy").mkdir()
    copy_files(directory, tmp_path / "copy")
    copied = load_tokenizer(write(tmp_path / "copy", content, **changes))
    assert all(copied.encode(text) == ours.encode(text) for text in TEXTS)


@pytest.mark.parametrize("damage", [lambda c: c[:200], lambda c: c[:1] + b"\xff" * 100, lambda c: b"\n"])
def test_a_damaged_file_is_named(content, damage, tmp_path, capfd):
    with refused(r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(write(tmp_path / "m", damage(content)))


@pytest.mark.parametrize("missing", ["sentencepiece", "google.protobuf"])
def test_a_missing_package_is_named(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "_is_installed", lambda module: module != missing)
    directory = write(tmp_path / "m", b"\n\x0e\n\x05<unk>")
    with refused(f"no tokenizer.json beside it.*needs {missing}.*pip install") as error:
        load_tokenizer(directory)
    assert "tiktoken" not in str(error.value)
    assert len(str(error.value)) - len(str(directory)) <= 200


@pytest.mark.parametrize("content_", [b"", b"aGk= 0\nZQ== 1\n", b"<html>", b"\x80\x04."])
def test_what_is_no_sentencepiece_is_refused_in_one_line(content_, tmp_path):
    with refused("is not a SentencePiece model; download it again"):
        load_tokenizer(write(tmp_path / "m", content_))
