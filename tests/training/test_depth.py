"""What the upper layers of a model are worth: loss by exit, and the cut model's speed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.commands import CONFIG, write_model, write_tokenizer
from training import depth

pytestmark = pytest.mark.usefixtures("no_default_method")


@pytest.mark.full
def test_losses_by_exit_and_the_speed_of_the_cut_model(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, num_layers=3, bos_token_id=0, eos_token_ids=(1,))
    write_tokenizer(write_model(tmp_path / "model", config))
    stories = "".join(f"Once upon a time {n} girls went out.<|endoftext|>" for n in range(60))
    (tmp_path / "stories.txt").write_text(stories)
    words = (
        f"--model {tmp_path / 'model'} --data {tmp_path / 'stories.txt'},kind=stories --window 32 --batch 2"
    )
    more = "--documents 4 --prompts 1 --max-new-tokens 4 --repeats 1"
    assert depth.main([*words.split(), "--cut", "1", *more.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    losses = report["fitness"]["kinds"]["stories"]["loss"]
    assert len(losses) == len(set(losses)) == 3
    assert report["cut"]["layers"] == 1
    assert report["cut"]["speedup"] > 0
    assert depth.main([*words.split(), "--cut", "3"]) == 2
    assert "cut is 3; give 1 to 2" in capsys.readouterr().err
