"""`python -m benchmarks.peers` with transformers, on a tiny model with random weights."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from benchmarks import peers
from tests.commands import write_tiny

METHODS = ("", " ngram", " layerskip --exit-layer 1")
pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("fast_compile")]


def test_transformers_generates_the_same_texts(capsys, tmp_path_factory):
    directory = write_tiny(tmp_path_factory)
    words = ["--model", str(directory), "--run", "ngram", "--run", "layerskip --exit-layer 1"]
    assert peers.main([*words, "--limit", "2", "--max-new-tokens", "8"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    ours = [f"jaxspec {weights}{method}" for weights in ("float32", "int8") for method in METHODS]
    theirs = ["transformers", "transformers prompt lookup", "transformers early exit"]
    assert list(report["runs"]) == [*ours, *theirs]
    for run in theirs:
        assert report["runs"][run]["all"]["same_texts"] == 1
        assert report["runs"][run]["all"]["tokens"] == report["runs"][ours[0]]["all"]["tokens"]
    ratio, low, high = report["ratios"]["jaxspec float32 ngram"]["transformers prompt lookup"]["all"]
    assert 0 < low <= ratio <= high
    (line,) = report["left_out"]
    assert line == f"llama.cpp is left out: {directory} is no GGUF file"
    assert line in said.err
