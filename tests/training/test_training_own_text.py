"""A model's own texts: as the decoder writes them, read by the trainer, resumed, and refused where options changed."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.io.hf import huggingface
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from training import own_text
from training.data import bpe_tokenizer, conversations, packing, reading

QUESTIONS = [f"Who had a {thing} and gave it to {name}?" for thing in "uvwxyz" for name in "abc"]
STORIES = [f"{number} {question}" for number, question in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    words = bpe_tokenizer.train(QUESTIONS, 280)
    config = LlamaConfig(words.get_vocab_size(), 16, 24, 1, 2, 1, 8, 64, bos_token_id=0, eos_token_ids=(1,))
    huggingface.save(folder, config, llama.init_params(config, jax.random.key(0), scale=3.0), np.float32)
    bpe_tokenizer.save(words, folder, 64, conversations.CHAT_TEMPLATE)
    lines = [json.dumps({"question": question, "answer": "Tim."}) for question in QUESTIONS]
    (folder / "asked.jsonl").write_text("\n".join(lines))
    (folder / "story.txt").write_text(f"\n{reading.SEPARATOR}\n".join(STORIES))
    return folder


def arguments(directory, name: str, *more: str) -> list[str]:
    sources = [f"{directory}/asked.jsonl,format=chat", f"{directory}/story.txt"]
    sizes = "--prompts 6 --new-tokens 6 --held-out 3 --batch 2"
    return [
        *("--model", str(directory), "--data", *sources, "--output", str(directory / name)),
        *(*sizes.split(), *more),
    ]


def records(directory, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


@pytest.mark.full
def test_texts_are_the_decoders_and_the_trainer_reads_them(directory):
    assert own_text.main(arguments(directory, "a.jsonl")) == 0
    found, lm = records(directory, "a.jsonl"), jaxspec.load(directory)
    assert len(found) == 6
    for record in found:
        result = lm.generate(record["prompt"], max_new_tokens=6)
        assert record["completion"] == result.text
        assert record["ended"] == (result.finish_reason == "eos")
    asked = [record["prompt"] for record in found if record["prompt"].startswith("USER: ")]
    assert 0 < len(asked) < 6
    assert all(prompt.endswith(" ASSISTANT:") for prompt in asked)
    # Held out as the documents that the prompts are of.
    documents = reading.read_source(str(directory / "a.jsonl"), "auto", conversations.Chat(), False)
    sources = reading.read_source(
        str(directory / "asked.jsonl"), "chat", conversations.chat_of(directory), False
    )
    origins = {document.origin: packing.is_held_out(document.origin, 3) for document in sources}
    assert all(document.origin in origins or document.origin in STORIES for document in documents)
    assert (directory / "a.txt").read_text() == "\n\n".join(record["completion"] for record in found) + "\n"


@pytest.mark.full
@pytest.mark.representatives("distribution0")
@pytest.mark.parametrize("distribution", [[], ["--temperature", "0.8"]])
def test_what_is_written_is_not_written_again(directory, distribution, monkeypatch, capsys):
    name = f"b{len(distribution)}.jsonl"
    assert own_text.main(arguments(directory, f"whole-{name}", *distribution)) == 0
    stopped = own_text.LineLog.add

    def killed(log, entry):
        stopped(log, entry)
        if len(log.entries) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(own_text.LineLog, "add", killed)
    assert own_text.main(arguments(directory, name, *distribution)) == 130
    first = records(directory, name)
    monkeypatch.setattr(own_text.LineLog, "add", stopped)
    assert len(first) == 3
    assert own_text.main(arguments(directory, name, *distribution)) == 0
    got, wanted = records(directory, name), records(directory, f"whole-{name}")
    assert got == wanted
    assert all(one in got for one in first)
    # Of a source that is taken back nothing stays.
    stories = [word for word in arguments(directory, name, *distribution) if "format=chat" not in word]
    assert own_text.main(stories) == 0
    assert not [one for one in records(directory, name) if one["prompt"].startswith("USER: ")]
    capsys.readouterr()
    assert own_text.main(arguments(directory, name, *distribution, "--new-tokens", "5")) == 2
    assert "its new tokens is 6, now 5" in capsys.readouterr().err


def test_the_file_is_one_of_records(directory, capsys):
    assert own_text.main(arguments(directory, "a.txt")) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.full
def test_questions_without_room_for_an_answer_are_left_out_and_said(directory, capsys):
    """None is asked by halves, which would be written down without the marks of its template."""
    long = json.dumps({"question": "Who had it? " * 20, "answer": "Tim."})
    asked = (directory / "asked.jsonl").read_text()
    (directory / "long.jsonl").write_text(asked + "\n" + long)
    given = arguments(directory, "c.jsonl", "--prompts", "99")
    given[3] = f"{directory}/long.jsonl,format=chat"
    assert own_text.main(given) == 0
    assert "1 of 37 prompts leave no room for" in capsys.readouterr().err
    asked = [one["prompt"] for one in records(directory, "c.jsonl") if "USER" in one["prompt"]]
    assert asked
    assert all(prompt.endswith(" ASSISTANT:") for prompt in asked)
    assert own_text.main(arguments(directory, "d.jsonl", "--new-tokens", "64")) == 2
    said = capsys.readouterr().err
    assert "6 of 6 prompts leave no room for --new-tokens 64 in the context of 64 tokens; give fewer" in said
    assert not (directory / "d.jsonl").exists()
