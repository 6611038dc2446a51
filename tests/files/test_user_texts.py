"""Each reader of a text that a user gives reads it alike in every form in which a user has it."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
import types

import pytest

from jaxspec.cli import options as cli_options
from jaxspec.host import files
from jaxspec.io.tokenizers import chat_forms
from jaxspec.measuring.bench import prompt_files
from jaxspec.measuring.commands.inspect import Inspect
from jaxspec.measuring.tuning import token_counts
from jaxspec.methods.files import Resources, read_reference
from jaxspec.serving import batch_files
from tests import python, refused, tiny
from training import option_files
from training.data import records

PROSE = "One\u2028two.\n\nThree\x0bfour\x85five.\n"
TURNS = json.dumps({"messages": [{"role": "user", "content": PROSE}]}, ensure_ascii=False)
LINES = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in (PROSE, "b"))
SETS = "".join(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n" for text in (PROSE, "b"))
MODEL = types.SimpleNamespace(encode=lambda text: [*map(ord, text)], config=tiny.TARGET)


def batch(path: str) -> list[object]:
    with files.as_file(path) as prompts:
        assert batch_files.count_prompts(prompts)[0] == 2
        return [(line.digest, line.content, line.number) for line in batch_files.read_lines(prompts)]


def data(path: str) -> list[object]:
    return [record() for _, record in records.of_file(path)]


def reference(path: str) -> object:
    return [*read_reference([path], Resources(load_draft=None, encode=lambda text: list(text.encode())))]


# For each reader: the ending of the file's name, its text, and a function of its path. Prompts of a `.txt` set are
# recognised by the ending, which standard input lacks.
READERS = {
    "--prompt-file": ("", PROSE, lambda path: cli_options.TextOptions(prompt_file=path).read_prompt()),
    "--messages": (".json", TURNS, lambda path: cli_options.TextOptions(messages=path).read_prompt()),
    "inspect": ("", PROSE, lambda path: Inspect(prompt_file=(path,)).read_prompts()),
    "a set of texts": (".txt", PROSE, lambda path: [one.turns for one in prompt_files.read_tasks([path])]),
    "a set of turns": (".jsonl", SETS, lambda path: [one.turns for one in prompt_files.read_tasks([path])]),
    "tokens of a text": (".txt", PROSE, lambda path: [*token_counts.encoded(MODEL, [path])]),
    "tokens of records": (".jsonl", LINES, lambda path: [*token_counts.encoded(MODEL, [path])]),
    "reference": (".txt", PROSE, reference),
    "chat template": (".jinja", PROSE, chat_forms.template_of),
    "batch": (".jsonl", LINES, batch),
    "data": (".txt", PROSE, data),
    "records": (".jsonl", LINES, data),
    "options": (".yaml", "window: 8\ntags: [a]\n", lambda path: option_files._read_yaml(path)),
}
BY_ENDING = ("a set of texts", "tokens of records")
MARK = "\N{BYTE ORDER MARK}".encode()
FORMS = {
    "mark": lambda content: MARK + content,
    "returns": lambda content: content.replace(b"\n", b"\r\n"),
    "packed": lambda content: gzip.compress(content, mtime=0),
    "packed with a mark": lambda content: gzip.compress(MARK + content, mtime=0),
}


@pytest.fixture(params=READERS)
def reader(request, tmp_path):
    """A reader, the path of its plain text, the text's bytes, and what is read."""
    ending, text, read = READERS[request.param]
    path = tmp_path / f"a{ending}"
    path.write_bytes(text.encode())
    found = read(str(path))
    assert found
    return read, path, text.encode(), found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_is_the_same_text(reader, form):
    read, path, content, found = reader
    path.write_bytes(FORMS[form](content))
    assert read(str(path)) == found
    if form.startswith("packed"):
        assert read(str(path.rename(f"{path}.gz"))) == found


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("form", [*FORMS, "plain"])
def test_a_pipe_is_the_same_text(reader, form):
    read, path, content, found = reader
    made = FORMS.get(form, bytes)(content)
    path.unlink()
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(made,))
    writer.start()
    assert read(str(path)) == found
    writer.join()


@pytest.mark.parametrize("reader", [name for name in READERS if name not in BY_ENDING], indirect=True)
@pytest.mark.parametrize("form", [*FORMS, "plain"])
def test_standard_input_is_the_same_text(reader, form, monkeypatch):
    read, _, content, found = reader
    stream = io.TextIOWrapper(io.BytesIO(FORMS.get(form, bytes)(content)))
    monkeypatch.setattr(sys, "stdin", stream)
    assert read("-") == found


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no such device")
def test_a_text_without_end_is_refused(reader, monkeypatch, tmp_path):
    read, *_ = reader
    monkeypatch.setattr(files, "_MAX_UNSIZED", 1_000_000)
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(bytes(2_000_000)))
    for path in ("/dev/zero", str(packed)):
        with refused(r"has more than 1 MB, unpacked or from a pipe"):
            read(path)


def test_a_damaged_file_of_gzip_is_refused(reader):
    read, path, content, _ = reader
    packed = gzip.compress(content * 50, mtime=0)
    for damaged in (packed[:-9], packed[:2], packed[:20] + b"x" * 9 + packed[29:]):
        path.write_bytes(damaged)
        with refused("is a damaged gzip file"):
            read(str(path))


def test_standard_input_that_is_a_file_is_read_from_its_start(tmp_path):
    """As a shell's `< file` gives it."""
    (tmp_path / "a.txt").write_bytes(MARK + PROSE.encode())
    script = "from jaxspec.host.files import read_text; print(ascii(read_text('-', 'x')))"
    with (tmp_path / "a.txt").open() as file:
        done = python("-c", script, stdin=file, check=True)
    assert done.stdout.strip() == ascii(PROSE)


def test_json_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(MARK + b'{"a": 1}')
    assert files.read_json(path) == files.parse_json(path.read_bytes()) == {"a": 1}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_text_is_cut_at_line_ends_only(tmp_path, end):
    lines = ["One\u2028two.", "Three\x0bfour\x85five\x0csix\u2029", "a\x1cb\x1ec"]
    (tmp_path / "a.txt").write_bytes(end.join(lines).encode())
    assert [task.turns[0] for task in prompt_files.read_tasks([str(tmp_path / "a.txt")])] == lines
