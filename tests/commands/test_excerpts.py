"""`benchmarks.excerpts`: prompts that `jaxspec bench` reads, made of a text."""

import json

import pytest

from benchmarks import excerpts
from jaxspec.measuring.bench.prompt_files import read_tasks


def test_what_is_written_is_what_bench_reads(tmp_path, capsys):
    text = tmp_path / "book.txt"
    text.write_text("One day a bear woke.\n\nIt was hungry.\n\nA fox came by\nand laughed.\n\nThey ate.\n")
    assert excerpts.main(["--text", str(text), "--words", "5", "--count", "2", "--category", "tales"]) == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(capsys.readouterr().out)
    tasks = read_tasks([prompts])
    assert [task.category for task in tasks] == ["tales", "tales"]
    assert tasks[0].turns == ("Summarize the following text in a few sentences.\n\nOne day a bear woke.",)
    assert tasks[1].turns[0].endswith("\n\nA fox came by and laughed.")
    assert all(json.loads(line)["question_id"] for line in prompts.read_text().splitlines())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["--words", "99"],
            "part 1 of 20 of the text has fewer than 99 words; give fewer --words, or a smaller --count",
        ),
        (["--count", "0"], "--count is 0; give a whole number of at least 1"),
    ],
)
def test_what_does_not_go_ends_in_one_line(given, says, tmp_path, capsys):
    text = tmp_path / "book.txt"
    text.write_text("One.\n\n" * 20)
    assert excerpts.main(["--text", str(text), *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert len(said.err.splitlines()) == 1
