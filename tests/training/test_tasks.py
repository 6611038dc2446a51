"""Tasks made by rule: each answer is checked by other means than the ones that made it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.prompt_files import read_tasks
from training import tasks as task_command
from training.data import bpe_tokenizer, conversations, formats, packing, reading, sources, tasks
from training.data.tasks import code, edits, sums
from training.data.tasks import task as task_words

COUNT = 400


def made(family):
    return list(tasks.tasks(family, COUNT))


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_tasks_are_different_and_always_the_same(family):
    first = made(family)
    assert first == made(family)
    assert len({task.prompt for task in first}) == COUNT
    assert all(task.completion[0] in " \n" and not task.prompt.endswith((" ", "\n")) for task in first)


def test_sums_are_right_and_stay_small():
    for task in made("sums"):
        given = set(re.findall(r"\d+", task.prompt)) | {"2", "3"}  # "half", "twice", "three times"
        calculations = re.findall(r"(\S+)=<<(\S+)=(\d+)>>(\d+)", task.completion)
        assert calculations
        for shown, inner, result, again in calculations:
            assert shown == inner
            assert result == again
            assert eval(shown) == int(result)
            assert 2 <= int(result) <= 99
            assert set(re.findall(r"\d+", shown)) <= given, task
            given.add(result)
        assert task.completion.endswith(f"\n#### {calculations[-1][3]}")
        assert "[" not in task.completion
        assert "{" not in task.prompt + task.completion


def test_code_runs_and_traces_say_what_it_computes():
    kinds = set()
    for task in made("code"):
        scope: dict = {}
        if task.prompt.startswith("# "):
            name = re.match(r"# (\w+): ", task.prompt)[1]
            exec(task.completion, scope)
            assert callable(scope[name])
            kinds.add("idiom")
        else:
            exec(task.prompt, scope)
            *program, end = task.prompt.split("\n")
            assert end == "# step by step"
            for line, step in zip(program, task.completion.strip().split("\n"), strict=True):
                name, right = line.split(" = ")
                said, *read = step.split(" = ")
                assert (said, read[0]) == (name, right)
                assert len(read) == (1 if right.isdigit() else 3 if set("+-*") & set(right) else 2)
                assert all(eval(part, scope) == scope[name] for part in read)
                assert not any(part.isidentifier() for part in read[1:])
            kinds.add("trace")
    assert kinds == {"idiom", "trace"}


@pytest.mark.parametrize(
    ("description", "argument", "expected"),
    [
        ("even numbers of xs", [1, 2, 3, 4], [2, 4]),
        ("how often each of xs occurs", "aab", {"a": 2, "b": 1}),
        ("running sums of xs", [1, 2, 3], [1, 3, 6]),
        ("differences of neighbours of xs", [1, 4, 9], [3, 5]),
        ("second largest of xs", [5, 1, 9], 5),
        ("word with its words backwards", "one two", "two one"),
        ("whether word reads the same backwards", "level", True),
        ("how many vowels word has", "banana", 3),
    ],
)
def test_idioms_do_what_their_descriptions_say(description, argument, expected):
    template, body = next(
        (one, body) for one, body in code.IDIOMS if one.format(x="xs", s="word", k=3) == description
    )
    scope: dict = {}
    name = "xs" if "{x}" in template else "word"
    exec(f"def tool({name}):\n    {body.format(x='xs', s='word', k=3)}", scope)
    assert scope["tool"](argument) == expected


def test_edits_change_what_they_say_and_nothing_else():
    kinds = set()
    for task in made("edits"):
        instruction, passage, end = task.prompt.split("\n")
        before = re.findall(r"\w+|\W+", passage)
        after = re.findall(r"\w+|\W+", task.completion.removeprefix(" "))
        assert end == "Result:"
        changed = {(a, b) for a, b in zip(before, after, strict=True) if a != b}
        old = {a for a, _ in changed}
        assert not (old & set(after)) or "change places" in instruction
        for a, b in changed:
            assert a in instruction
            assert b in instruction or (b == a.upper() and "capitals" in instruction)
        kinds.add(
            "copy" if not changed else "capitals" if "capitals" in instruction
            else "swap" if "change places" in instruction else f"replace {len(changed)}"
        )  # fmt: skip
    assert kinds == {"copy", "capitals", "swap", "replace 1", "replace 2"}
    assert edits.replaced("The cat saw a caterpillar.", {"cat": "dog"}) == "The dog saw a caterpillar."
    assert edits.replaced("Tim saw Sam.", {"Tim": "Sam", "Sam": "Tim"}) == "Sam saw Tim."


def test_answers_to_questions_follow_from_the_facts():
    """A second reading of the facts, by rules of its own, answers what it can and must agree."""
    read = 0
    for task in made("facts"):
        lines = task.prompt.split("\n")
        questions = [line.partition(". ")[2] for line in lines if re.match(r"\d\. ", line)]
        facts = [line for line in lines if not re.match(r"\d\. |Answers:", line)]
        answers = [line.partition(". ")[2] for line in task.completion.strip().split("\n")]
        assert len(answers) == len(questions) >= 1
        labels = dict(fact.split(": ") for fact in facts if ": " in fact)
        ages = {m[1]: int(m[2]) for m in (re.match(r"(\w+) is (\d+) years", fact) for fact in facts) if m}
        boxes = {m[1]: m[2] for m in (re.match(r"The (\w+) box is in the (\w+)", f) for f in facts) if m}
        inside = {m[1]: m[2] for m in (re.match(r"The (\w+) is in the (\w+) box", f) for f in facts) if m}
        friends = {m[1]: m[2] for m in (re.match(r"The friend of (\w+) is (\w+)", f) for f in facts) if m}
        has = {m[1]: m[2] for m in (re.match(r"(\w+) has a (.*)\.", fact) for fact in facts) if m}
        for question, answer in zip(questions, answers, strict=True):
            said = set(re.findall(r"\w+", answer))
            if labels:
                assert answer == f"{question[:-1]}: {labels[question[:-1]]}"
            elif match := re.match(r"Who is (older|younger), (\w+) or (\w+)", question):
                word, n, m = match.groups()
                chosen = (max if word == "older" else min)(n, m, key=ages.__getitem__)
                assert answer == f"{n} is {ages[n]}, {m} is {ages[m]}: {chosen} is {word}."
            elif match := re.match(r"In which place is the (\w+)\?", question):
                box = inside[match[1]]
                assert answer == f"The {match[1]} is in the {box} box, in the {boxes[box]}."
            elif match := re.match(r"In which box is the (\w+)\?", question):
                assert inside[match[1]] in said
            elif match := re.match(r"Where is the (\w+) box\?", question):
                assert boxes[match[1]] in said
            elif match := re.match(r"What does the friend of (\w+) have", question):
                friend = friends[match[1]]
                assert answer == f"The friend of {match[1]} is {friend}: {friend} has a {has[friend]}."
            elif match := re.match(r"What does (\w+) have", question):
                assert has[match[1]] in answer
            else:
                continue
            read += 1
    assert read > COUNT


def test_labels_are_asked_for_in_another_order():
    orders, forms = 0, dict.fromkeys((": ", " = ", " is in the "), 0)
    for task in made("labels"):
        *lines, end = task.prompt.split("\n")
        if end.startswith("Who is "):
            continue
        mark = next(mark for mark in forms if mark in lines[0])
        asked = end.removeprefix("In this order: ").split(", ")
        label = {}
        for line in lines:
            first, *terms, last = line.split(mark)
            label[first.removeprefix("The ")] = last
            if terms:
                assert eval(terms[0]) == int(last)
        assert 2 <= len(label) == len(lines) <= 14
        assert sorted(asked) == sorted(label)
        the = "The " * (mark == " is in the ")
        assert task.completion == "".join(f"\n{the}{key}{mark}{label[key]}" for key in asked)
        orders += asked != list(label)
        forms[mark] += 1
    assert orders > COUNT / 3
    assert min(forms.values()) > COUNT / 8


def test_chains_end_where_their_steps_lead_and_sums_of_three_are_right():
    """Each answer by another way: the pairs are walked one by one, and Python adds."""
    steps_asked = []
    for task in made("chains"):
        *lines, end = task.prompt.split("\n")
        answers = task.completion.removeprefix("\n").split("\n")
        if end == "Results:":
            assert [answer.split(" = ")[0] for answer in answers] == lines
            for answer in answers:
                asked, said = answer.split(" = ")
                assert len(re.findall(r"\d+", asked)) == 3
                assert 2 <= eval(asked) == int(said) <= 99
            continue
        following = dict(line.split(": ") for line in lines)
        assert 10 <= len(following) == len(lines) == len(set(following.values())) <= 14
        assert [answer.split(": ")[0] for answer in answers] == end.removeprefix("Steps: ").split(", ")
        for answer in answers:
            asked, said = answer.split(": ")
            word, steps = asked.split(" ")
            steps_asked.append(int(steps))
            for _ in range(int(steps)):
                word = following[word]
            assert word == said
    assert set(steps_asked) == set(range(1, 9))
    assert 0.4 < sum(steps >= 4 for steps in steps_asked) / len(steps_asked) < 0.6
    assert len(steps_asked) > COUNT


def test_of_each_pair_the_older_or_the_younger_is_said():
    for task in made("labels"):
        *lines, end = task.prompt.split("\n")
        if not end.startswith("Who is "):
            continue
        word = end.removeprefix("Who is ").removesuffix("?")
        assert word in ("older", "younger")
        for line, answer in zip(lines, task.completion.strip().split("\n"), strict=True):
            said = re.fullmatch(r"(\w+) is (\d+), (\w+) is (\d+)", line)
            first_is_older = int(said[2]) > int(said[4])
            chosen = said[1] if first_is_older == (word == "older") else said[3]
            assert answer == f"{line}: {chosen} is {word}."


def test_of_a_task_only_the_completion_is_learned(tmp_path):
    (first, *_) = documents = reading.read("tasks:sums:30", formats.AUTO, conversations.Chat(), False)
    assert len(documents) == 30
    assert [span.learn for span in first.spans] == [False, True]
    assert first.origin
    words = bpe_tokenizer.train([document.text for document in documents], 300)
    (encoded,) = bpe_tokenizer.encode_documents(words, [first], 0, [1])
    assert words.decode(encoded.tokens[encoded.learn].tolist()) == first.spans[1].text
    assert encoded.learn[-1]
    assert not encoded.learn[0]
    assert np.flatnonzero(encoded.learn)[0] == len(encoded.tokens) - encoded.learn.sum()
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Two?", "completion": " 2"}) + "\n")
    (own,) = reading.read(str(file), formats.AUTO, conversations.Chat(), False)
    assert own.spans == (formats.Span("Two?", False), formats.Span(" 2"))
    assert not own.chat


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tasks:sumz", "no family of tasks 'sumz'; choose one of sums, code, edits, facts"),
        ("tasks:sums:many", "'many' in 'tasks:sums:many'; expected tasks:FAMILY or tasks:FAMILY:COUNT"),
        ("tasks:sums:0", "'0' in 'tasks:sums:0'"),
    ],
)
def test_a_wrong_name_of_tasks_is_refused(path, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        reading.read(path, formats.AUTO, conversations.Chat(), False)


def test_an_empty_completion_is_refused(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Two?", "completion": ""}) + "\n")
    with pytest.raises(reading.Malformed, match=r"own.jsonl:1: `completion` is empty"):
        reading.read(str(file), formats.AUTO, conversations.Chat(), False)


@pytest.mark.parametrize("family", ["sums", "edits", "facts"])
def test_the_language_of_tasks_has_no_a_before_a_vowel_and_no_plural_of_one(family):
    for task in made(family):
        text = task.prompt + task.completion
        assert not re.search(r"\b[Aa] [aeio]\w", text), text
        assert not re.search(r"(?<!\d)1 \w+s\b", re.sub(r"^1\. .*", "", text, flags=re.MULTILINE)), text


def test_what_is_asked_of_boxes_has_one_answer():
    """A thing in a box is in a place too, and so is the box: the question says which of them it asks for."""
    asked = [task for task in made("facts") if " box is in the " in task.prompt]
    assert asked
    for task in asked:
        assert not re.search(r"Where is the \w+\?", task.prompt)
        assert "What is" not in task.prompt
        assert "The box" not in task.prompt + task.completion


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_a_held_out_task_is_no_task_of_the_training_with_other_names(family):
    documents = reading.read(f"tasks:{family}:3000", formats.AUTO, conversations.Chat(), False)
    training, held_out = packing.split(documents, 20)
    if family in ("code", "sums"):
        assert len({one.origin for one in documents}) < len(documents)
    things = "|".join(sorted(map(sums._plural, task_words.THINGS), key=len, reverse=True))

    def bare(document):
        """Without what is named after nothing."""
        text = re.sub(r"^# \w+: ", "", document.spans[0].text)
        words = rf"\b({things}|{'|'.join([*task_words.NAMES, *task_words.COLORS])})\b"
        return re.sub(words, "_", text) if family == "sums" else text

    assert not {bare(one) for one in held_out} & {bare(one) for one in training}
    assert 0.02 < len(held_out) / len(documents) < 0.09


def test_a_kind_that_is_not_named_is_the_family():
    """The gate of the fitness test knows the families by name."""
    assert [sources.Source.parse(text).kind for text in ("tasks:sums", "tasks:edits:30", "tasks:code,kind=c")] == [
        "sums", "edits", "c",
    ]  # fmt: skip
    assert sources.Source.parse("hf:some/set:train").kind == "set:train"


@pytest.mark.full
def test_prompts_to_measure_on_are_none_that_are_trained_on(tmp_path, monkeypatch, capsys):
    """Not in other words either: with other names, say."""
    monkeypatch.setattr(tasks, "USUAL_COUNT", 2000)
    file = tmp_path / "tasks.jsonl"
    assert task_command.main(["--output", str(file), "--count", "40", "--families", "sums", "edits"]) == 0
    read = read_tasks([file])
    assert [task.category for task in read] == ["sums"] * 40 + ["edits"] * 40
    for family in ("sums", "edits"):
        learned = {task.origin for task in tasks.tasks(family, 2000)}
        origins = {task.prompt: task.origin for task in tasks.tasks(family, 4000)}
        assert not {origins[task.turns[0]] for task in read if task.category == family} & learned
    assert task_command.main(["--output", str(file), "--families", "sum"]) == 2
    assert "--families is 'sum'; choose some of sums, code" in capsys.readouterr().err


def test_prompts_of_a_model(tmp_path, monkeypatch, capsys):
    """Half to tune with, half to report on, found beside the model."""
    monkeypatch.setattr(tasks, "USUAL_COUNT", 200)
    assert task_command.main(["--model", str(tmp_path)]) == 2
    assert "which is no model's directory; give one with a config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert task_command.main(["--model", str(tmp_path), "--count", "6"]) == 0
    splits = [prompts.load(split, tmp_path) for split in ("tuning", "reporting")]
    for found in splits:
        assert {kind: len(texts) for kind, texts in found.items()} == dict.fromkeys(
            ("stories", "mathematics", "code", "copy-edit", "facts"), 3
        )
    texts = [text for found in splits for texts in found.values() for text in texts]
    assert len(set(texts)) == len(texts)
    assert prompts.sample(1, tmp_path) == tuple(texts[0] for texts in splits[1].values())
    assert task_command.main(["--model", str(tmp_path), "--count", "5"]) == 2
    assert "--count is 5; give an even number up to 20" in capsys.readouterr().err
