"""Ray Data: the rows of a dataset are answered by actors, each with its own model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec.serving.ray import Generate
from tests import tiny

ROOT = Path(__file__).parents[2]
OPTIONS = {"max_new_tokens": 5, "ignore_eos": True, "method": "autoregressive"}


def batch(*prompts, **columns):
    return {"prompt": np.array(prompts, object), "id": np.arange(len(prompts))} | columns


def test_a_row_does_not_depend_on_its_block(lm):
    """Rows without a seed have one, so that a block that runs again has the same texts."""
    prompts = ("ab", "cd ab", "ab", "ba")
    answer = Generate(lm, temperature=1.0, max_batch=2, **OPTIONS)
    whole = answer(batch(*prompts))
    alone = [answer(batch(prompt))["text"][0] for prompt in prompts]
    assert whole["text"].tolist() == alone
    assert whole["id"].tolist() == [0, 1, 2, 3]
    own = answer(batch("ab", "ab", seed=np.array([1, 2])))
    assert own["text"][0] == own["text"][1]  # the column is not named
    columns = Generate(lm, temperature=1.0, columns=("seed", "max_new_tokens"), **OPTIONS)
    given = columns(batch("ab", "ab", seed=np.array([1, 2]), max_new_tokens=np.array([5, 3])))
    texts = [
        lm.generate("ab", temperature=1.0, seed=1, **OPTIONS),
        lm.generate("ab", temperature=1.0, seed=2, **OPTIONS),
    ]
    assert given["text"][0] == texts[0].text
    assert texts[1].text.startswith(given["text"][1])
    assert given["num_tokens"].tolist() == [5, 3]


def test_a_wrong_row_has_an_error():
    lm = tiny.language_model(chat_template="{% for one in messages %}{{ one.content }}{% endfor %}")
    messages = np.empty(3, object)
    messages[:] = [[{"role": "user", "content": "ab"}], [], np.array([{"role": "user", "content": "ab"}])]
    found = Generate(lm, **OPTIONS)({"messages": messages})
    text = lm.generate(messages=[{"role": "user", "content": "ab"}], **OPTIONS).text
    assert found["text"].tolist() == [text, "", text]
    assert found["finish_reason"].tolist() == ["length", "error", "length"]
    assert [error == "" for error in found["error"]] == [True, False, True]


@pytest.mark.full
def test_two_actors(model, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    variables = {"JAX_PLATFORMS": "cpu", "JAXSPEC_CACHE": "off"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        prompts = ray.data.from_items(
            [{"id": number, "prompt": "Once " * (number % 4 + 1)} for number in range(40)]
        )
        answers = prompts.repartition(4).map_batches(
            Generate,
            fn_constructor_kwargs={"model": str(model), "load_options": {"device": "cpu"}, **OPTIONS},
            batch_size=10,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        rows = answers.take_all()
    finally:
        ray.shutdown()
    assert sorted(row["id"] for row in rows) == list(range(40))
    lm = jaxspec.load(model, device="cpu")
    expected = [lm.generate("Once " * (number + 1), **OPTIONS).text for number in range(4)]
    assert all(row["text"] == expected[row["id"] % 4] for row in rows)


# The job of docs/batch.md on local files. The call that gets the row 0 ends its actor, as a lost machine does, and the
# one that gets the row 79 waits; neither does where the file `marks/ID` exists.
JOB = """
import os, sys, time
from pathlib import Path

import ray
from ray.data.checkpoint import CheckpointConfig

from jaxspec.serving.ray import Generate

model, folder, marks = sys.argv[1], sys.argv[2], Path(sys.argv[3])


class Faulty(Generate):
    def __call__(self, batch):
        if 0 in batch["id"] and not (marks / "0").exists():
            (marks / "0").touch()
            os._exit(1)
        if 79 in batch["id"] and not (marks / "79").exists():
            time.sleep(600)
        return super().__call__(batch)


ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
context = ray.data.DataContext.get_current()
context.checkpoint_config = CheckpointConfig("id", f"{folder}/checkpoint", delete_checkpoint_on_success=False)
prompts = ray.data.read_parquet(f"{folder}/prompts").repartition(target_num_rows_per_block=10)
answers = prompts.map_batches(
    Faulty,
    fn_constructor_kwargs={"model": model, "load_options": {"device": "cpu"}, "max_new_tokens": 5, "max_batch": 4},
    batch_size=10,
    compute=ray.data.ActorPoolStrategy(size=2),
)
answers.write_parquet(f"{folder}/answers")
"""


@pytest.mark.full
def test_a_killed_job_goes_on(model, tmp_path):
    """Also after its end: each prompt has one answer, in files of one type."""
    pytest.importorskip("ray.data")
    dataset = pytest.importorskip("pyarrow.dataset")
    from pyarrow import Table, parquet

    for name in ("prompts", "marks"):
        (tmp_path / name).mkdir()
    prompts = ["Once " * (number % 4 + 1) for number in range(80)]
    prompts[33] = ""
    table = Table.from_pydict({"id": list(range(80)), "prompt": prompts})
    parquet.write_table(table, tmp_path / "prompts" / "all.parquet")
    variables = {"JAX_PLATFORMS": "cpu", "JAXSPEC_CACHE": "off", "RAY_USAGE_STATS_ENABLED": "0"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", JOB, *map(str, (model, tmp_path, tmp_path / "marks"))]

    def started():
        with (tmp_path / "log").open("a") as log:
            return subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)

    def answered():
        found = dataset.dataset(tmp_path / "answers").to_table().to_pylist()
        return sorted(found, key=lambda row: row["id"])

    with started() as first:
        try:
            for _ in range(12000):
                done = [
                    one for one in (tmp_path / "checkpoint").glob("*.parquet") if "pending" not in one.name
                ]
                if first.poll() is not None or len(done) > 1:
                    break
                time.sleep(0.1)
        finally:
            first.kill()
    assert len(done) > 1, (tmp_path / "log").read_text()
    assert (tmp_path / "marks" / "0").exists()
    assert len(answered()) < 80
    (tmp_path / "marks" / "79").touch()
    for _ in range(2):
        assert started().wait(1200) == 0, (tmp_path / "log").read_text()
        rows = answered()
        assert [row["id"] for row in rows] == list(range(80))
        assert [row["id"] for row in rows if row["error"]] == [33]
    lm = jaxspec.load(model, device="cpu")
    expected = [lm.generate("Once " * (number + 1), max_new_tokens=5).text for number in range(4)]
    assert all(row["text"] == expected[row["id"] % 4] for row in rows if row["id"] != 33)
