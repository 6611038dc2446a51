"""lm-evaluation-harness with a tiny model; skipped without the package `lm-eval`."""

from __future__ import annotations

import json

import pytest

from jaxspec.testing import reference
from tests import tiny

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from jaxspec.serving.lm_eval import JaxspecLM

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
EXACT = """
task: tiny_exact
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""
QUESTIONS = ("ab", "cd ab", "ba", "dd ca", "ab cd ab")


def expected_text(lm, question: str) -> str:
    """Returns the greedy text up to the stop string."""
    tokens = reference.greedy(
        lm.config, reference.as_float64(lm.params), lm.encode(question), 8, lm.config.eos_token_ids
    )
    return lm.tokenizer.decode(tokens).split("e")[0]


@pytest.fixture(scope="module")
def tasks(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    docs = [
        {
            "question": one,
            "choices": ["a", "b cd", "d"],
            "answer": at % 3,
            "text": expected_text(lm, one) if at else "x",
        }
        for at, one in enumerate(QUESTIONS)
    ]
    path = folder / "docs.jsonl"
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, text in {"choice": CHOICE, "exact": EXACT}.items():
        (folder / f"{name}.yaml").write_text(text.format(path=path))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.parametrize("method", ["autoregressive", "ngram"])
def test_scores_of_tasks(lm, tasks, method):
    model = JaxspecLM(lm, method=method, batch_size=2)
    report = simple_evaluate(model, tasks=["tiny_choice", "tiny_exact"], task_manager=tasks, log_samples=True)
    assert report["results"]["tiny_exact"]["exact_match,none"] == 0.8  # the first one has a wrong answer
    for sample in report["samples"]["tiny_choice"]:
        for at, (log_prob, greedy) in enumerate(sample["filtered_resps"]):
            context, continuation = sample["arguments"][at]
            assert context + continuation == sample["doc"]["question"] + sample["doc"]["choices"][at]
            score = lm.score(*model._encode_pair(context, continuation))
            assert float(log_prob) == pytest.approx(score.log_prob, abs=1e-4)
            assert greedy == score.is_greedy
    assert len(model.results) == len(QUESTIONS)


def test_rolling_windows_cover_a_text(lm):
    model = JaxspecLM(lm, max_length=8)
    text = "ab cd ab ba dd"
    (found,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    tokens, total = model.tok_encode(text), 0.0
    for begin in range(0, len(tokens), 8):
        size = len(tokens[begin : begin + 8])
        context = [model.prefix_token_id, *tokens][max(begin + size - 8, 0) : begin + 1]
        total += lm.score(context, tokens[begin : begin + size]).log_prob
    assert found == pytest.approx(total, abs=1e-4)


def test_long_contexts_are_cut_from_the_left(lm):
    model = JaxspecLM(lm, max_length=16)
    long = "ab cd " * 10
    ((found, _),) = model.loglikelihood([Instance("loglikelihood", {}, (long, "ab"), 0)])
    tokens = lm.encode(long.rstrip() + " ab")
    size = len(lm.encode(long.rstrip()))
    continuation = tokens[size:]
    context = tokens[:size][-(17 - len(continuation)) :]
    assert found == pytest.approx(lm.score(context, continuation).log_prob, abs=1e-4)
    settings = {"until": ["e"], "max_gen_toks": 8}
    (text,) = model.generate_until([Instance("generate_until", {}, (long, settings), 0)])
    assert text == lm.generate(lm.encode(long)[-8:], max_new_tokens=8, stop=["e"]).text


def test_a_model_by_its_name(tmp_path):
    model = JaxspecLM.create_from_arg_string(
        "model=small,method=ngram,ngram_max=3,dtype=float32", {"batch_size": "2", "device": None}
    )
    assert (model.model.name, model.batch_size, model._options) == ("small", 2, {"ngram_max": 3})
    bare = type(model.model)(tiny.TARGET, tiny.params())
    with pytest.raises(ValueError, match="model has no tokenizer; lm-eval gives prompts as texts"):
        JaxspecLM(bare)
