"""`jaxspec batch`."""

from __future__ import annotations

import json
import signal

import pytest

from jaxspec.console import interrupts
from jaxspec.serving import batch
from tests.commands import called, one_error


@pytest.fixture
def run(capsys, model):
    return lambda *arguments: called(
        capsys, "batch", *arguments, "--model", model, "--max-new-tokens", 3, "--method", "autoregressive"
    )


def test_a_file_is_answered(run, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "folder" / "results.jsonl"
    prompts.write_text('{"id": 1, "prompt": "Once"}\n\n{"id": 2}\n')
    status, out, err = run(prompts, "--output", output)
    assert (status, out) == (0, "")
    begin, err = err.split("\n", 1)
    assert begin == "jaxspec: answering 2 prompts by autoregressive; the programs are compiled first"
    assert err.startswith("jaxspec: 2 prompts answered (1 of them with an error); 3 tokens, ")
    assert err.endswith(f" tokens/s: {output}\n")
    found = {one["id"]: one for one in map(json.loads, output.read_text().splitlines())}
    assert found[1]["num_tokens"] == 3
    assert "prompt" in found[2]["error"]
    assert found[2]["line"] == 3
    prompts.write_text(prompts.read_text() + '{"id": 3}\n')
    status, _, err = run(prompts, "--output", output)
    assert status == 0
    answered = (
        "1 prompts answered (1 of them with an error), 2 had a result (1 of them with an error); 0 tokens"
    )
    assert f"3 prompts by autoregressive; {output} has 2 results; the programs" in err
    assert f"\njaxspec: {answered}" in err
    status, _, err = run(prompts, "--output", output, "--shard", "0/2")
    assert status == 0
    assert "answering part 0/2 of 3 prompts" in err
    assert (tmp_path / "folder" / "results-0-of-2.jsonl").exists()


def test_sigterm_and_ctrl_c_report_that_the_results_are_kept(run, tmp_path, monkeypatch):
    lines = []

    def interrupted(*_):
        lines.append(interrupts._Program.at_sigterm)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch.Batch, "run", interrupted)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n')
    status, _, err = run(prompts, "--output", tmp_path / "results.jsonl")
    assert status == 130
    assert err.endswith("jaxspec: interrupted; the same command goes on from here\n")
    assert lines == [
        "jaxspec: terminated; the results so far are kept, and the same command goes on from here"
    ]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_wrong_use_is_one_line(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    assert "does not exist; give a file with one JSON object per line" in one_error(run, prompts)
    prompts.write_text('{"prompt": "Once"}\n')
    assert "--shard is '2/2'" in one_error(run, prompts, "--shard", "2/2")
    assert "--max-batch is 0" in one_error(run, prompts, "--max-batch", 0)
    assert "--prefix-cache is" in one_error(run, prompts, "--prefix-cache", "much")
    assert "is not a file" in one_error(run, prompts, "--output", tmp_path)
    assert one_error(run)
