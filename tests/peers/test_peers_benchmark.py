"""`python -m benchmarks.peers` with transformers, on a tiny model with random weights."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from benchmarks import peers
from tests.commands import CONFIG, write_model, write_tokenizer

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("fast_compile")]


def test_transformers_generates_the_same_texts(capsys, tmp_path):
    directory, draft = tmp_path / "target", tmp_path / "draft"
    for seed, one in enumerate((directory, draft), 1):
        write_model(one, CONFIG, seed)
        write_tokenizer(one)
    methods = [
        f"{method} --num-draft-tokens 3"
        for method in ("ngram", "layerskip --exit-layer 1", f"draft-model --draft {draft}")
    ]
    words = ["--model", str(directory), *(word for method in methods for word in ("--run", method))]
    assert peers.main([*words, "--limit", "2", "--max-new-tokens", "8"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    ours = [
        f"jaxspec {weights}{run}"
        for weights in ("float32", "int8")
        for run in ("", *(f" {one}" for one in methods))
    ]
    theirs = ["transformers", *(f"transformers {way}" for way in ("prompt lookup", "early exit", "assisted"))]
    assert list(report["runs"]) == [*ours, *theirs]
    for run in theirs:
        assert report["runs"][run]["all"]["same_texts"] == 1
        assert report["runs"][run]["all"]["tokens"] == report["runs"][ours[0]]["all"]["tokens"]
    ratio, low, high = report["ratios"][ours[1]]["transformers prompt lookup"]["all"]
    assert 0 < low <= ratio <= high
    (line,) = report["left_out"]
    assert line == f"llama.cpp is left out: {directory} is no GGUF file"
    assert line in said.err
