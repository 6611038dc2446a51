"""Data in the forms of other projects, and files whose content, not their name, decides their kind."""

from __future__ import annotations

import gzip
import json

import pytest

from tests import refused
from training.data import conversations, formats, reading, sources

ASKED, ANSWERED = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
TURNS = [ASKED, ANSWERED]
PARTS = [{"type": "text", "text": text} for text in ("Hi", "you")]
TALK = "USER: Hi ASSISTANT: Hello.</s>"
SUM = "USER: Add\n\n1 2 ASSISTANT: 3</s>"
RECORDS = b'{"text": "x"}\n{"text": "y"}\n'


def read(path, form=formats.AUTO, skip=False, report=lambda line: None):
    return reading.read_source(str(path), form, conversations.Chat(), skip, report)


def texts(documents):
    return [document.text for document in documents]


def written(tmp_path, *records):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def said(*turns, who="from", what="value"):
    return [{who: name, what: text} for name, text in turns]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": TURNS}, TALK),
        ({"messages": TURNS, "prompt": "Hi", "prompt_id": "7"}, TALK),
        ({"messages": TURNS, "text": None, "code": None}, TALK),
        ({"messages": said(("USER", "Hi"), ("Assistant", "Hello."), who="role", what="content")}, TALK),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}]}, TALK),
        # As in inference, a line end joins the parts.
        ({"messages": [{"role": "user", "content": PARTS}, ANSWERED]}, TALK.replace("Hi", "Hi\nyou")),
        ({"messages": [{"role": "developer", "content": "Go."}, *TURNS]}, "Go. " + TALK),
        ({"conversations": TURNS}, TALK),
        ({"conversation": TURNS}, TALK),
        ({"conversations": TURNS, "system": "Go."}, "Go. " + TALK),
        ({"conversations": said(("human", "Hi"), ("chatgpt", "Hello."))}, TALK),
        ({"conversations": said(("user", "Hi"), ("bard", "Hello."))}, TALK),
        ({"conversations": said(("human", "Hi"), ("bing", "Hello."))}, TALK),
        ({"conversations": said(("system", "Go."), ("human", "Hi"), ("model", "Hello."))}, "Go. " + TALK),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, TALK),
        ({"instruction": "Add", "context": "1 2", "response": "3", "category": "sums"}, SUM),
        ({"instruction": "Add", "context": "", "response": "3"}, "USER: Add ASSISTANT: 3</s>"),
        ({"instruction": "Add", "input": None, "output": "3"}, "USER: Add ASSISTANT: 3</s>"),
        ({"instruction": "Add", "input": "1 2", "output": "3", "text": "### Add"}, SUM),
        ({"instruction": "Add", "instances": [{"input": None, "output": "3"}]}, "USER: Add ASSISTANT: 3</s>"),
        ({"question": "1 + 2?", "answer": "3", "text": None}, "Question: 1 + 2?\nAnswer: 3"),
    ],
)
def test_records_of_other_projects_are_read(tmp_path, record, text):
    assert texts(read(written(tmp_path, record))) == [text]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": [*TURNS, {"role": "tool", "content": "4"}, ANSWERED]}, "'tool'.* tool calls"),
        ({"conversations": said(("human", "Hi"), ("function_call", "f()"))}, "'function_call'.* tool calls"),
        ({"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [1]}]}, "tool calls"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "image"}]}]}, "`content` .* text"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "`content` is missing"),
        ({"messages": [ASKED, {"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a turn is not from"),
        ({"messages": ["Hi"]}, "a turn is"),
        ({"messages": "Hi"}, "`messages` is not a list"),
        ({"prompt": "Hi", "completion": TURNS[1:]}, "`prompt` is a text and `completion` a list"),
        ({"prompt": TURNS[:1], "completion": TURNS[:1]}, "no turn of the assistant"),
        ({"text": "half \ud800 pair"}, "`text` .* surrogate"),
        ({"text": None}, "`text` is null"),
        ({"prompt": "x", "completion": "y", "ended": "no"}, "`ended`"),
        ({"instruction": "Add", "output": None}, "`output` is null"),
        ({"instruction": "x", "instances": ["y"]}, "`instances` is not a list of objects"),
        ({"prompt": "x"}, r"no known keys in \(prompt\)"),
        ({"question": "x", "answer": 3}, "`answer` is not a text"),
        ({"conversations": []}, "no list `conversations`"),
        (["x"], "a JSON list, expected an object"),
    ],
)
def test_a_record_that_does_not_fit_is_named_and_skipped(tmp_path, record, why):
    file = written(tmp_path, {"text": "good"}, record, {"text": "fine"})
    with pytest.raises(reading.Malformed, match=rf"a\.jsonl:2: .*{why}.*--skip-malformed") as error:
        read(file)
    assert len(str(error.value)) - len(str(file)) <= 300
    reported = []
    assert texts(read(file, skip=True, report=reported.append)) == ["good", "fine"]
    assert "a.jsonl:2" in reported[0]


def test_of_a_completion_in_messages_only_the_completion_is_learned(tmp_path):
    earlier = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    (document,) = read(written(tmp_path, {"prompt": [*earlier, ASKED], "completion": [ANSWERED]}))
    assert [(span.text, span.learn) for span in document.spans] == [
        ("USER: 1 ASSISTANT: 2</s>USER: Hi ASSISTANT:", False),
        (" Hello.</s>", True),
    ]
    same = {"prompt": [ASKED], "completion": [ANSWERED], "origin": "a"}
    assert read(written(tmp_path, same))[0].origin == "a"


def test_an_answer_of_weight_zero_is_read_and_not_learned(tmp_path):
    (document,) = read(written(tmp_path, {"messages": [ASKED, ANSWERED | {"weight": 0}, *TURNS]}))
    assert [span.text for span in document.spans if span.learn] == [" Hello.</s>"]
    assert document.text == TALK * 2


def test_messages_are_read_as_chat_where_that_format_is_given(tmp_path):
    assert texts(read(written(tmp_path, {"messages": TURNS}), "chat")) == [TALK]
    dolly = {"instruction": "Add", "context": "1 2", "response": "3"}
    assert texts(read(written(tmp_path, dolly), "chat")) == [SUM]


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.ndjson", RECORDS, ["x", "y"]),
        ("A.JSONL", RECORDS, ["x", "y"]),
        ("a.json", RECORDS, ["x", "y"]),
        ("a.Json", b'[{"text": "x"},\n{"text": "y"}]', ["x", "y"]),
        ("a.jsonl", b'[\n{"text": "x"},\n{"text": "y"}\n]\n', ["x", "y"]),
        ("a.jsonl", b'[{"text": "x"}, {"text": "y"}]', ["x", "y"]),
        ("a.json", b'{\n "text": "x"\n}\n{\n "text": "y"\n}\n', ["x", "y"]),
        ("a.txt", RECORDS, ["x", "y"]),
        ("a", RECORDS, ["x", "y"]),
        ("a.data", b'[{"text": "x"}, {"text": "y"}]', ["x", "y"]),
        ("a.jsonl", MARK + RECORDS, ["x", "y"]),
        ("a.jsonl", RECORDS + MARK + b'{"text": "z"}', ["x", "y", "z"]),
        ("a.json", MARK + b'[{"text": "x"}]', ["x"]),
        ("a.jsonl", RECORDS.replace(b"\n", b"\r\n"), ["x", "y"]),
        ("a.jsonl", RECORDS.replace(b"\n", b"\r"), ["x", "y"]),
        ("a.jsonl", b'{"text":\r"x"}\n{"text": "y"}\n', ["x", "y"]),
        ("a.jsonl", '{"text": "x\u2028\x85y"}\n'.encode(), ["x\u2028\x85y"]),
        ("a.txt", MARK + b"x\r\n<|endoftext|>\r\n" + MARK + b"y\r\nz\rw", ["x", "y\nz\nw"]),
        ("A.TXT", b"x", ["x"]),
        ("a.py", b"{x}", ["{x}"]),
        ("a.txt", b"[Chorus]\nla", ["[Chorus]\nla"]),
        ("a.txt", b'{"text": "x"}\n<|endoftext|>\n{"text": "y"}', ['{"text": "x"}', '{"text": "y"}']),
        ("a.txt", b'In JSON:\n{"text": "x"}\nThat is all.', ['In JSON:\n{"text": "x"}\nThat is all.']),
    ],
)
def test_a_file_is_read_by_what_it_holds(tmp_path, name, content, found):
    file = tmp_path / name
    file.write_bytes(content)
    assert texts(read(file)) == found


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl.gz", gzip.compress(RECORDS, mtime=0)[:-9], "a damaged gzip file"),
        ("a.txt", b"PK\x03\x04rest", "zip"),
        ("a", b"PAR1restPAR1", "Parquet"),
        ("a.parquet", b"PAR1restPAR1", "Parquet"),
        ("a.zst", b"\x28\xb5\x2f\xfd0", "Zstandard"),
        ("a.arrow", b"ARROW1\0\0", "Arrow"),
        ("a.pdf", b"%PDF-1.7\n", "PDF"),
        ("a.gguf", b"GGUF\x03\0\0\0", "GGUF"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.txt", b"text\0text", "binary"),
        ("a.txt", b"te\xffxt", "not UTF-8 at byte 2"),
        ("a.csv", b"text\nx\n", "table"),
        ("a.TSV", b"text\nx\n", "table"),
        ("b.json", b'{"data":[{"text":"x"}]}', r"no known keys in \(data\)"),
        ("b.jsonl", b'{"text": "x"}\n{"text": "y"', r"b\.jsonl:2: not JSON"),
        ("b.log", b'{"text": "x"}\n{"text": "y"}\nbroken\n', r"b\.log:3: not JSON"),
        ("b.json", b'[{"text": "x"}] rest', r"b\.json:1: not JSON"),
        ("b.json", b'[{"text": "x"}', r"b\.json:1: not JSON"),
        ("b.jsonl", b"", "no document"),
        ("b.json", b"plain text", r"b\.json:1: not JSON"),
    ],
)
def test_what_is_neither_text_nor_records_is_refused_by_what_it_is(tmp_path, name, content, why):
    file = tmp_path / name
    file.write_bytes(content)
    with refused(why) as error:
        read(file)
    assert len(str(error.value)) - len(str(file)) <= 300


def test_a_directory_is_refused_by_what_it_is(tmp_path):
    with refused("is a directory"):
        read(tmp_path)


def test_every_malformed_record_is_skipped_and_counted_and_no_good_one_is_lost(tmp_path):
    good = [json.dumps({"text": f"good {number}"}).encode() for number in range(20)]
    bad = [
        b"{broken",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"text": ' + b"9" * 5000 + b"}",
        b"\0\0\0\0",
        b"3",
        b'{"text": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": 1}]}',
        b'{"text": "a"} {"text": "b"}',
    ]
    lines = [line for pair in zip(good, bad, strict=False) for line in pair] + good[len(bad) :]
    file = tmp_path / "a.jsonl"
    for first in (lines, [*bad, *good]):
        file.write_bytes(b"\n".join(first) + b"\n")
        reported = []
        found = read(file, skip=True, report=reported.append)
        assert texts(found) == [f"good {number}" for number in range(20)]
        assert f"skipped 9 malformed records of 29 in {file}" in reported[-1]


@pytest.mark.parametrize("kind", ["a|b", " ", "a\nb", "\udce9", "a\0"])
def test_a_kind_that_no_file_can_name_is_refused_at_once(kind):
    with refused("kind"):
        sources.Source.parse(f"x.txt,kind={kind}")
    with refused("kind=NAME"):
        sources.Source.parse(f"{kind}.txt")
    assert sources.Source.parse(f"{kind}.txt,kind=stories").kind == "stories"


@pytest.mark.parametrize("weight", ["inf", "nan", "1e308", "0", "-1", "x"])
def test_a_weight_that_cannot_be_drawn_by_is_refused_at_once(weight):
    with refused("weight"):
        sources.Source.parse(f"x.txt,weight={weight}")
