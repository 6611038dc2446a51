"""Records of every format become documents; what does not fit is reported; copy-and-edit tasks are right."""

from __future__ import annotations

import dataclasses
import json
import sys
import tracemalloc
import types

import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, trainers

from jaxspec.io.tokenizers.tokenizer import load_tokenizer
from jaxspec.measuring.bench import prompts
from tests import refused
from tests.commands import CONFIG, write_model, write_tokenizer
from training import option_files, sft
from training.data import bpe_tokenizer, conversations, formats, packing, reading, sources, spool
from training.start import document_marks

STORY = (
    "Tim had a red ball. Tim and his dog went to the park. They played until it was dark. "
    "Then Tim and the dog went home. Mom gave them some cake. Tim was happy. The dog was happy too."
)


def read(path, form=formats.AUTO, skip=False, report=print):
    return reading.read_source(str(path), form, conversations.Chat(), skip, report)


def write_lines(path, records):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return path


def texts(documents):
    return [document.text for document in documents]


def test_plain_text_is_cut_at_its_separators(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(f"one\n{reading.SEPARATOR}\n\n two\nlines \n{reading.SEPARATOR}\n \n")
    assert texts(read(file)) == ["one", "two\nlines"]


def test_the_format_of_a_record_is_known_by_its_keys(tmp_path):
    file = write_lines(
        tmp_path / "a.jsonl",
        [
            {"text": "a story"},
            {"question": " How many?", "answer": "1 + 1 = 2\n#### 2"},
            {"text": "Write a function.", "code": "def f():\r\n\treturn 1 \r\n", "task_id": 1},
        ],
    )
    assert texts(read(file)) == [
        "a story",
        "Question: How many?\nAnswer: 1 + 1 = 2\n#### 2",
        "# Write a function.\ndef f():\n    return 1",
    ]
    assert texts(read(file, "text", skip=True, report=lambda _: None)) == ["a story", "Write a function."]


def conversation(*turns):
    return {"conversations": [{"from": who, "value": said} for who, said in turns]}


def test_of_a_conversation_only_the_answers_are_learned(tmp_path):
    talk = conversation(
        ("human", "Hi"), ("gpt", "Hello!"), ("human", "Bye"), ("gpt", "See you."), ("human", "?")
    )
    file = tmp_path / "a.json"
    file.write_text(json.dumps([talk, conversation(("human", "No answer"))], indent=1))
    (document,) = read(file)
    assert [span.text for span in document.spans if span.learn] == [" Hello!</s>", " See you.</s>"]
    assert document.text == "USER: Hi ASSISTANT: Hello!</s>USER: Bye ASSISTANT: See you.</s>"


def test_questions_and_instructions_become_conversations(tmp_path):
    records = [
        {"question": "1 + 1?", "answer": "2"},
        {"prompt": "Say yes. ", "completion": "Yes."},
        {"text": "Add.", "code": "def f():\r\n\treturn 1 \r\n"},
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
        {"instruction": "Count.", "instances": [{"input": "", "output": "1"}, {"input": "x", "output": "2"}]},
    ]
    found = read(write_lines(tmp_path / "a.jsonl", records), "chat")
    assert [[(span.text, span.learn) for span in document.spans] for document in found] == [
        [(f"USER: {asked} ASSISTANT:", False), (f" {answered}</s>", True)]
        for asked, answered in (
            ("1 + 1?", "2"),
            ("Say yes.", "Yes."),
            ("Add.", "def f():\n    return 1"),
            ("Sort.\n\nb a", "a b"),
            ("Count.", "1"),
            ("Count.\n\nx", "2"),
        )
    ]
    assert texts(read(write_lines(tmp_path / "b.jsonl", records[3:4]))) == [found[3].text]


def test_conversations_are_held_out_by_origin_and_the_cases_of_an_instruction_together(tmp_path):
    """Else a task that differs in names alone, or another case of what is judged, would be learned."""
    records = [
        {"instruction": "Count.", "instances": [{"input": "", "output": "1"}, {"input": "x", "output": "2"}]},
        {"prompt": "Tim has 2.", "completion": "2", "origin": "has 2"},
        {"prompt": "Say yes.", "completion": "Yes."},
        {"instruction": "None.", "instances": []},
    ]
    found = read(write_lines(tmp_path / "a.jsonl", records), "chat")
    assert [document.origin for document in found] == [found[0].text] * 2 + ["has 2", found[3].text]


def test_the_end_of_a_completion_that_was_cut_off_is_not_learned(tmp_path):
    words = bpe_tokenizer.train(["Say yes. Yes."], 270)
    record = {"prompt": "Say", "completion": " yes"}
    learned = []
    for more in ({}, {"ended": True}, {"ended": False}):
        documents = read(write_lines(tmp_path / "a.jsonl", [record | more]))
        (encoded,) = bpe_tokenizer.encode_documents(words, documents, 0, [1])
        learned.append(encoded.learn.tolist())
        assert encoded.tokens[-1] == 1
    assert learned[0] == learned[1] == [*learned[2][:-1], True]
    assert learned[2][-2:] == [True, False]


def test_the_chat_template_and_its_tokens_are_those_of_the_tokenizer(tmp_path):
    bos = {"__type": "AddedToken", "content": "<b>"}
    settings = {"chat_template": "own", "bos_token": bos, "eos_token": "<e>", "pad_token": "<p>"}
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert conversations.chat_of(tmp_path) == conversations.Chat("own", "<b>", "<e>", {"pad_token": "<p>"})
    (tmp_path / "chat_template.jinja").write_text("other")
    assert conversations.chat_of(tmp_path).template == "other"
    assert conversations.chat_of(tmp_path / "nowhere") == conversations.Chat()


def test_records_of_a_json_list_have_lines_too(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('[\n {"text": "a"},\n {"text":\n  4}\n]')
    with pytest.raises(reading.Malformed, match=r"a\.json:3: `text`"):
        read(file)
    file.write_text('[\n {"text": "a"},\n {"text" "b"}]')
    with pytest.raises(reading.Malformed, match=r"a\.json:3: not JSON"):
        read(file, skip=True)
    file.write_text('{"text": "a"}')
    assert texts(read(file)) == ["a"]


def offline(*_, **__):
    raise ConnectionError("no network\nmore lines")


def hub_files(directory, files):
    for name, words in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(directory / name, [{"text": word} for word in words])
    return f"hf:{directory}"


def test_the_files_of_a_split_are_read_in_the_order_of_their_names(tmp_path, monkeypatch):
    shards = {f"data/train-0000{at}-of-00003.jsonl": [f"a{at}", f"b{at}"] for at in (2, 0, 1)}
    path = hub_files(tmp_path / "a", shards | {"data/train_gen.jsonl": ["no"], "data/test.jsonl": ["t"]})
    (tmp_path / "a" / "dataset_infos.json").write_text("{}")
    assert texts(read(path)) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert texts(read(path + ":test")) == ["t"]
    assert texts(read(path + ":train_gen")) == ["no"]
    with refused("no file of the split dev"):
        read(path + ":dev")
    # Without names of splits all files are the split train, as in `load_dataset`.
    assert texts(read(hub_files(tmp_path / "b", {"x.jsonl": ["x"], "y.jsonl": ["y"]}))) == ["x", "y"]
    several = hub_files(tmp_path / "c", {"main/train.jsonl": ["m"], "other/train.jsonl": ["o"]})
    with refused("has the subsets main, other; give one of them as hf:NAME/SUBSET"):
        read(several)
    assert texts(read(several + "/main")) == ["m"]
    # By name: the hub's snapshot is such a directory.
    monkeypatch.setitem(sys.modules, "datasets", None)
    asked = []

    def snapshot(name, repo_type, allow_patterns):
        asked.append((name, repo_type, allow_patterns[0]))
        return str(tmp_path / "c")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert texts(read("hf:owner/name/other")) == ["o"]
    assert asked == [("owner/name", "dataset", "*train*.parquet")]


def test_parquet_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1....PAR1")
    with refused(r"a\.parquet is a Parquet file, .* pip install pyarrow"):
        read(tmp_path / "a.parquet")


@pytest.mark.peers
def test_parquet_is_read_by_record(tmp_path):
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", None], "more": [None] * 3}), file)
    with pytest.raises(reading.Malformed, match=r"train\.parquet record 2: `text` is null"):
        read(file)
    assert texts(read(f"hf:{tmp_path}", skip=True, report=lambda _: None)) == ["a", "b"]
    file.write_bytes(b"PAR1 damaged")
    with refused(r"cannot read .*train\.parquet"):
        read(file)


def test_the_number_of_tokens_is_estimated_from_a_sample(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"text": STORY[: 20 + n % 100]} for n in range(1000)])
    sums = [{"question": f"{n} + {n % 7}?", "answer": str(n + n % 7)} for n in range(300)]
    short = write_lines(tmp_path / "b.jsonl", sums)
    kinds = {"long": read(file), "short": read(short)}
    words = bpe_tokenizer.train([STORY], 300)
    encoded = [
        one for part in kinds.values() for one in bpe_tokenizer.encode_documents(words, part, None, [1])
    ]
    tokens = sum(len(one.tokens) for one in encoded)
    assert bpe_tokenizer.estimated_tokens(words, kinds) == pytest.approx(tokens, rel=0.05)


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    """Lines, documents, tokens and windows are in files; a list of any of them would need more than is allowed."""
    monkeypatch.setattr(spool, "_IN_MEMORY_BYTES", 1)
    file = write_lines(tmp_path / "a.jsonl", [{"text": f"{at} " + "a tale " * 2000} for at in range(600)])
    assert file.stat().st_size > 8e6
    tracemalloc.start()
    try:
        documents = read(file)
        training, _ = packing.split(documents, 20)
        encoded = (
            packing.Encoded(
                np.frombuffer(one.text.encode(), np.uint8).astype(np.int32), np.ones(len(one.text), bool)
            )
            for one in training
        )
        windows = packing.pack(encoded, 512)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert windows["segments"].astype(bool).sum() == sum(len(one.text) for one in training)
    assert peak < 3e6


def test_hugging_face_data_sets_are_read_when_their_package_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with refused(r"cannot load hf:owner/name from the hub: no network more lines; .* pip install datasets"):
        read("hf:owner/name")
    asked = []
    package = types.SimpleNamespace(
        load_dataset=lambda name, split: asked.append((name, split)) or [{"text": "a"}, {"question": "b"}]
    )
    monkeypatch.setitem(sys.modules, "datasets", package)
    with pytest.raises(reading.Malformed, match="hf:owner/name:test record 1: no known keys"):
        read("hf:owner/name:test")
    assert texts(read("hf:owner/name", skip=True, report=lambda _: None)) == ["a"]
    assert asked == [("owner/name", "test"), ("owner/name", "train")]


# The project's prompts


@pytest.mark.parametrize("split", ["tuning", "reporting"])
def test_the_projects_prompts_have_the_form_of_the_training_data(split):
    known = prompts.load(split)
    assert {kind: len(texts) for kind, texts in known.items()} == {
        "stories": 10, "mathematics": 10, "code": 10, "copy-edit": 10,
    }  # fmt: skip
    assert all(
        text == formats.gsm8k_prompt(text[len("Question: ") : -len("\nAnswer:")])
        for text in known["mathematics"]
    )
    assert all(text == formats.mbpp_prompt(text[2:-1]) for text in known["code"])
    for text in known["copy-edit"]:
        instruction, passage, end = text.split("\n")
        assert text == f"{instruction}\n{passage}\nResult:"
        assert end == "Result:"


def test_no_prompt_is_there_twice():
    """Above all none for tuning and for reporting."""
    every = [
        text for split in ("tuning", "reporting") for texts in prompts.load(split).values() for text in texts
    ]
    assert len(set(every)) == len(every) == 80


# Tokens of documents


def test_spans_say_which_tokens_to_learn():
    words = bpe_tokenizer.train([STORY], 300)
    document = formats.Document((formats.Span("é Tim", learn=False), formats.Span(" had a ball.</s>")), "x")
    (encoded,) = bpe_tokenizer.encode_documents(
        words, [document], bpe_tokenizer.BOS_ID, [bpe_tokenizer.EOS_ID]
    )
    first = words.encode("é Tim", add_special_tokens=False).ids
    second = words.encode(" had a ball.", add_special_tokens=False).ids
    # The end is spelled out by the text, and not put a second time.
    assert encoded.tokens.tolist() == [bpe_tokenizer.BOS_ID, *first, *second, bpe_tokenizer.EOS_ID]
    assert np.array_equal(encoded.learn, [False] * (len(first) + 1) + [True] * (len(second) + 1))


@pytest.mark.parametrize("cut", [len("USER: Hi ASSISTANT:"), len("USER: Hi ASSISTANT: ")])
def test_spans_are_tokens_of_one_text(cut):
    """As Llama 2's tokenizer: a mark in front of a text, and none where a span begins."""
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [bpe_tokenizer.BOS, bpe_tokenizer.EOS]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    words.train_from_iterator(["USER:", "Hi", "ASSISTANT:", "Hello"], trainer)
    text = "USER: Hi ASSISTANT: Hello"
    document = formats.Document((formats.Span(text[:cut], learn=False), formats.Span(text[cut:])), "x")
    (encoded,) = bpe_tokenizer.encode_documents(
        words, [document], bpe_tokenizer.BOS_ID, [bpe_tokenizer.EOS_ID]
    )
    found = [words.id_to_token(index) for index in encoded.tokens]
    assert found == ["<s>", "▁USER:", "▁Hi", "▁ASSISTANT:", "▁Hello", "</s>"]
    # A token over the border is one of the span in which it ends.
    assert encoded.learn.tolist() == [False, False, False, False, True, True]


def test_a_broken_tokenizer_gets_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(r"tokenizer\.json is no tokenizer: "):
        bpe_tokenizer.load(tmp_path)


def test_a_tokenizer_is_there_once_its_settings_are(tmp_path, monkeypatch):
    def broken(path, content):
        raise OSError("no space")

    words = bpe_tokenizer.train([STORY], 300)
    monkeypatch.setattr(bpe_tokenizer.files, "write_atomic", broken)
    with pytest.raises(OSError, match="no space"):
        bpe_tokenizer.save(words, tmp_path, 64)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "tokenizer_config.json").mkdir()  # cannot be written over
    with pytest.raises(OSError, match="tokenizer_config"):
        bpe_tokenizer.save(words, tmp_path, 64)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_document_that_spells_out_its_marks_gets_no_second_ones():
    words = bpe_tokenizer.train([STORY], 300)
    documents = [formats.Document((formats.Span(text, learn=False),), "x") for text in ("<s>Tim</s>", "Tim")]
    spelt, plain = bpe_tokenizer.encode_documents(
        words, documents, bpe_tokenizer.BOS_ID, [bpe_tokenizer.EOS_ID]
    )
    assert spelt.tokens.tolist() == plain.tokens.tolist()
    assert not spelt.learn.any()
    assert not plain.learn.any()


TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}END{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "ends", "learned", "last"),
    [
        (TURNS.replace("END", "<|im_end|>\n"), ["<|im_end|>"], "Hi.<|im_end|>", "\n"),
        (TURNS.replace("END", "<|im_end|>\n"), ["</s>", "<|im_end|>"], "Hi.<|im_end|>", "\n"),
        (TURNS.replace("END", "<|im_end|></s>"), ["<|im_end|>", "</s>"], "Hi.<|im_end|>", "</s>"),
        (TURNS.replace("END", "</s>"), ["</s>"], "Hi.</s>", "</s>"),
        (TURNS.replace("END", "\n"), ["</s>", "<|im_end|>"], "Hi.\n", "</s>"),
        (MARKED.replace("END", "<|im_end|>\n"), ["<|im_end|>"], "Hi.", "\n"),
    ],
    ids=["one end", "two ends", "a second one in the template", "the usual one", "none", "outside of the answer"],
)  # fmt: skip
def test_an_answer_is_learned_up_to_the_token_that_ends_it(tmp_path, template, ends, learned, last):
    words = bpe_tokenizer.train(["[user] Hi. [assistant]"], 300)
    words.add_special_tokens(["<|im_end|>"])
    ends = [words.token_to_id(end) for end in ends]
    talk = conversation(("human", "A"), ("gpt", "Hi."), ("human", "B"), ("gpt", "Hi."))
    chat = conversations.Chat(template)
    documents = reading.read_source(str(write_lines(tmp_path / "a.jsonl", [talk])), formats.AUTO, chat, False)
    (encoded,) = bpe_tokenizer.encode_documents(words, documents, None, ends)
    # Where the template has no end of its own, one document end follows the last answer.
    end = "</s>" if last == "</s>" and learned == "Hi.\n" else ""
    found = words.decode(encoded.tokens[encoded.learn].tolist(), skip_special_tokens=False)
    assert found == 2 * learned + end
    assert words.decode(encoded.tokens[-1:].tolist(), skip_special_tokens=False) == last


@pytest.mark.parametrize(
    ("text", "learned"),
    [
        ("Hi.<|im_end|>\n", "Hi.<|im_end|>"),
        ("Hi.<|im_end|>", "Hi.<|im_end|>"),
        ("Hi.<|im_end|>\nHo.", "Hi.<|im_end|>\nHo.</s>"),
        ("Hi.", "Hi.</s>"),
    ],
)
def test_a_text_with_an_end_of_its_own_gets_no_second_one(text, learned):
    words = bpe_tokenizer.train(["Hi. Ho."], 300)
    words.add_special_tokens(["<|im_end|>"])
    document = formats.Document((formats.Span("Q", learn=False), formats.Span(text)), "x")
    (encoded,) = bpe_tokenizer.encode_documents(words, [document], None, [1, words.token_to_id("<|im_end|>")])
    assert words.decode(encoded.tokens[encoded.learn].tolist(), skip_special_tokens=False) == learned


def test_a_document_begins_as_a_prompt_does(tmp_path):
    directory = write_model(tmp_path)
    write_tokenizer(directory)
    assert document_marks(CONFIG, directory) == (0, (1,))
    assert document_marks(CONFIG, None) == (0, (1,))
    # As SmolLM2's: its config names a BOS, and its tokenizer puts none before a text.
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    marks = document_marks(CONFIG, directory)
    assert marks == (None, (1,))
    document = formats.Document((formats.Span("Once"),), "x")
    (encoded,) = bpe_tokenizer.encode_documents(bpe_tokenizer.load(directory), [document], *marks)
    assert encoded.tokens.tolist() == [*load_tokenizer(directory).encode("Once"), 1]
    with refused("no EOS token"):
        document_marks(dataclasses.replace(CONFIG, eos_token_ids=()), directory)


def test_digits_are_tokens_of_their_own():
    words = bpe_tokenizer.train(["1234 1234 1234 1234"] * 50, 300)
    assert words.encode("1234", add_special_tokens=False).tokens == list("1234")


# Sources and YAML


def test_a_source_is_read_as_it_is_written():
    source = sources.Source.parse("data/a.jsonl,weight=0.5,kind=code,format=mbpp")
    assert source == sources.Source("data/a.jsonl", "code", "mbpp", 0.5)
    assert sources.Source.parse(str(source)) == source
    assert sources.Source.parse("data/a.txt").kind == "a"
    fine = sources.Source.parse("a.txt,weight=0.123456789")
    assert sources.Source.parse(str(fine)) == fine
    for wrong in ("a.txt,colour=red", "a.txt,weight"):
        with refused("expected PATH"):
            sources.Source.parse(wrong)


def test_sources_of_one_kind_have_one_weight():
    same = sources.DataOptions(tuple(map(sources.Source.parse, ("a.txt,kind=x", "b.txt,kind=x", "c.txt"))))
    assert same.weights == {"x": 1.0, "c": 1.0}
    with refused(r"kind x weigh 1\.0 and 2\.0"):
        sources.DataOptions((sources.Source("a.txt", "x"), sources.Source("b.txt", "x", weight=2.0)))


@pytest.mark.full
def test_data_given_several_times_is_put_together(tmp_path):
    def data(*arguments):
        parsed = option_files.parse(sft.Options, [*arguments, "--run", "r"], "sft")
        return [source.path for source in parsed.data.data]

    assert data("--data", "a", "b", "--batch", "2") == ["a", "b"]
    assert data(*["--data", "a", "--batch", "2", "--data=b", "--data", "c", "d", "--remat"]) == [
        "a",
        "b",
        "c",
        "d",
    ]
    (tmp_path / "data.yaml").write_text("data: [a, b]")
    assert data("--config", str(tmp_path / "data.yaml")) == ["a", "b"]
    assert data("--config", str(tmp_path / "data.yaml"), "--data", "c", "--data", "d") == ["c", "d"]
