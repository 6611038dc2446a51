"""Ray Data: the rows of a dataset are answered by actors, each with its own model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jaxspec.integrations.ray import Generate
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
    assert found["text"].tolist() == [text, None, text]
    assert found["finish_reason"].tolist() == ["length", "error", "length"]
    assert [error is None for error in found["error"]] == [True, False, True]


@pytest.mark.full
def test_two_actors(model, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    import jaxspec

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
