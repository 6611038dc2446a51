"""Prompt sets: every form that is read, and one clear line for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.prompt_files import Task, final_number, own_tasks, read_tasks
from tests import refused

FORMS = {
    "bench.jsonl": (
        [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}],
        Task("bench/81", "writing", ("Write.", "Again."), message=True),
    ),
    "gsm.jsonl": (
        [{"question": "How many?", "answer": "4 + 1,003 = <<4+1003=1007>>1007\n#### 1,007"}],
        Task("gsm/1", "gsm8k", ("How many?",), message=True, answer="1007"),
    ),
    "human.jsonl": (
        [{"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""}],
        Task("human/HumanEval/0", "humaneval", ("def f():\n",)),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(tmp_path, name):
    entries, task = FORMS[name]
    path = tmp_path / name
    path.write_text("\ufeff" + "".join(json.dumps(entry) + "\n\n" for entry in entries), encoding="utf-8")
    assert read_tasks([path]) == [task]
    path.write_text(json.dumps(entries, indent=1))
    assert read_tasks([path]) == [task]


def test_plain_lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text('Once\n\n {"turns": 1}\n')
    assert read_tasks([path]) == [
        Task("lines/1", "lines", ("Once",)),
        Task("lines/3", "lines", (' {"turns": 1}',)),
    ]


def test_several_files(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("x")
    second.write_text("y")
    assert [task.id for task in read_tasks([first, second])] == ["a/1", "b/1"]
    with refused("two prompts are called 'a/1'; give each file once"):
        read_tasks([first, first])


def test_the_projects_own():
    tasks = own_tasks()
    assert [task.category for task in tasks[::10]] == list(prompts.KINDS)
    assert (tasks[1].id, tasks[1].turns) == ("stories/2", (prompts.load("reporting")["stories"][1],))
    assert own_tasks(directory=Path("nowhere")) == tasks


def test_those_of_a_model(tmp_path):
    content = {"tuning": {"sums": ["a"]}, "reporting": {"sums": ["b", "c"], "code": ["d"]}}
    (tmp_path / prompts.NAME).write_text(json.dumps(content))
    found = own_tasks(directory=tmp_path)
    assert [(task.id, task.turns[0]) for task in found] == [("sums/1", "b"), ("sums/2", "c"), ("code/1", "d")]
    assert [task.id for task in own_tasks("tuning", tmp_path)] == ["sums/1"]


@pytest.mark.parametrize(
    "part", [None, [], {}, {"a": []}, {"a": "b"}, {"a": [""]}, {"a": [3]}, {"a": [" "]}, {"a": ["\ud800"]}]
)
def test_a_model_with_other_prompts(part, tmp_path):
    (tmp_path / prompts.NAME).write_text(json.dumps({"reporting": {"a": ["b"]}, "tuning": part}))
    with refused(r"tuning is not a list of prompts|in `tuning`, expected an"):
        prompts.load("reporting", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; give JSON lines with `turns`"),
        (" \n\n", "is empty; give"),
        ("[]", "is empty; give"),
        ("Once upon a time", r"line 1 is not valid JSON \(Expecting value.*\); give JSON lines"),
        ('{"turns": ["a"]}\n{"turns"', r"line 2 is not valid JSON"),
        ("[1, 2", "is not valid JSON"),
        ("[5]", "entry 1 is 5; give JSON lines"),
        ('"a"', "line 1 is 'a'; give JSON lines"),
        ('{"text": "a"}', r"line 1 has the fields \['text'\]; give JSON lines"),
        ('{"turns": []}', r"line 1 has the turns \[\]; give a list of at least one text"),
        ('{"turns": "abc"}', "line 1 has the turns 'abc'; give a list"),
        ('{"turns": ["a", ""]}', r"line 1 has the turns \['a', ''\]"),
        ('{"turns": ["\\ud800"]}', "line 1 has the turns"),
        ('{"question": "a", "answer": "b"}', "line 1 has an answer without a number: 'b'; end it with ####"),
        ('{"question": 5, "answer": "6"}', "line 1 has the question 5; give a text"),
        ('{"prompt": "", "entry_point": "f"}', "line 1 has the prompt ''; give a text"),
        ('{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["b"]}', "two prompts are called"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with refused(message):
        read_tasks([path])


def test_no_file(tmp_path):
    with refused("does not exist; `prompt_file` must be a prompt set", FileNotFoundError):
        read_tasks([tmp_path / "no.jsonl"])
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with refused("is not text in UTF-8"):
        read_tasks([tmp_path / "latin.txt"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("so 5 #### $1,200.50 of 7", "1200.5"),
        ("The answer is 18.", "18"),
        ("from 3 to -4", "-4"),
        ("7.00", "7"),
        ("it is 16-7", "7"),
        ("100", "100"),
        ("1 #### none", "1"),
        ("none", None),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 1 + 1 = 2", True),
        (" 2\n\nQuestion: What is 1 + 2?\nAnswer: 3", True),
        (" #### 2\nQuestion: What is 1 + 2?\nAnswer: 3 #### 3", True),
        (" 3\n\nQuestion: What is 2?\nAnswer: 2", False),
        ("", False),
    ],
)
def test_an_answer_ends_where_a_model_asks_a_question_of_its_own(text, right):
    assert Task("1", "gsm8k", ("What is 1 + 1?",), answer="2").is_right(text) is right
