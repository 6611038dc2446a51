"""Tokens per round as a function of the learned tokens."""

from __future__ import annotations

import dataclasses
import json

import pytest

import jaxspec
from jaxspec.methods import LayerSkip
from tests.commands import CONFIG, write_model, write_tokenizer
from training import acceptance, layerskip, soft

pytestmark = pytest.mark.usefixtures("no_default_method")
TOKENS = 12
PROMPTS = ("Once upon", "Two girls", "A time")


@pytest.mark.full
@pytest.mark.parametrize("job", [soft, layerskip])
def test_the_counts_of_a_run_are_those_of_the_engine(tmp_path, capsys, job):
    """Before the first step a draft is an early exit of the given model, in both jobs."""
    config = dataclasses.replace(CONFIG, num_layers=3, bos_token_id=0, eos_token_ids=(1,))
    write_tokenizer(model := write_model(tmp_path / "model", config))
    texts, prompts = tmp_path / "texts.txt", tmp_path / "prompts.jsonl"
    texts.write_text("".join(f"Once upon a time {n} girls went out.<|endoftext|>" for n in range(60)))
    prompts.write_text("".join(json.dumps({"category": "a", "turns": [text]}) + "\n" for text in PROMPTS))
    words = f"--start {model} --data {texts} --window 32 --batch 2 --steps 4 --every 2 --keep 3 --exits 1 2"
    words += f" --learning-rate 1e-2 --accumulate 1 --run {tmp_path / 'run'}"
    assert job.main(words.split()) == 0
    counted = f"--run {tmp_path / 'run'} --output {tmp_path / 'a.jsonl'} --prompt-file {prompts}"
    counted += f" --max-new-tokens {TOKENS}" + (f" --target {model}" if job is soft else "")
    capsys.readouterr()
    assert acceptance.main(counted.split()) == 0
    table = capsys.readouterr().out
    header, *entries = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert header["exits"] == [1, 2]
    assert [entry["step"] for entry in entries] == [0, 2, 4]
    assert 0 == entries[0]["tokens"] < entries[1]["tokens"] < entries[2]["tokens"]
    assert entries[0]["exits"] != entries[2]["exits"]
    lm = jaxspec.load(model, dtype="float32")
    for layers in (1, 2):
        for length in (1, 3):
            method = LayerSkip(exit_layer=layers, num_draft_tokens=length)
            for text, right in zip(PROMPTS, entries[0]["exits"][str(layers)], strict=True):
                found = lm.generate(text, method=method, max_new_tokens=TOKENS, temperature=0.0)
                assert len(right) == len(found.tokens) - 1
                assert acceptance.rounds(right, length) == found.statistics.num_rounds
    # The same command counts nothing again.
    assert acceptance.main(counted.split()) == 0
    assert capsys.readouterr() == (table, "")
