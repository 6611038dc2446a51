"""The scores that tuning compares."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types

import pytest

from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.engine.language_model import LanguageModel
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.tuning import objectives
from jaxspec.measuring.tuning.texts import read_prompts
from jaxspec.measuring.tuning.tuning_options import PromptOptions
from jaxspec.methods import registry
from jaxspec.requests.results import Result, Statistics
from jaxspec.requests.text import Token
from tests import refused, tiny


def deep() -> LanguageModel:
    config = tiny.engine_config(tiny.DEEP)
    return LanguageModel(config, tiny.params(tiny.DEEP), tiny.tokenizer(), name="deep")


def result(num_tokens: int, ms: float) -> Result:
    """A text of so many tokens in so many milliseconds after the first."""
    statistics = Statistics(num_tokens, 1, 0, 0, 0, (), ms, ms, 0.0)
    return Result(None, [Token(1)] * num_tokens, "length", statistics)


# The scores that tuning compares


class Clock:
    """A model whose texts take known times: by prompt, (tokens, plain ms, ms of the method)."""

    def __init__(self, texts):
        self.texts, self.calls, self.executables, self.num_compilations = texts, [], self, 0

    def wait(self):
        pass

    def compiled_early(self):
        return contextlib.nullcontext()

    def generate(self, prompt, *, method, **given):
        self.calls.append((prompt, method, given))
        tokens, plain_ms, ms = self.texts[prompt]
        return result(tokens, plain_ms if method == "autoregressive" else ms)


def test_a_score_is_all_tokens_in_all_time():
    """Not a median over prompts, of which the short ones would count as much as the long ones."""
    lm = Clock({"long": (101, 1000.0, 500.0), "short": (11, 100.0, 200.0), "shorter": (6, 50.0, 100.0)})
    speed = objectives.Speed(lm, ["long", "short", "shorter"], 101, "fast")
    row = speed("fast")
    assert row["score"] == pytest.approx(1150 / 800)
    assert row["tokens_per_second"] == pytest.approx(1e3 * 115 / 800)
    assert row["plain_tokens_per_second"] == pytest.approx(1e3 * 115 / 1150)
    # As the suite generates: texts end where the model ends them.
    assert all(given == {"max_new_tokens": 101, "temperature": 0.0} for _, _, given in lm.calls)
    # Each prompt by both, there and back.
    order = [(prompt, method) for prompt, method, _ in lm.calls[8:]]
    assert [prompt for prompt, _ in order] == ["long", "long", "short", "short", "shorter", "shorter"]
    assert order[0][1] != order[1][1]
    assert order[0][1] != order[2][1]


@pytest.mark.full
def test_the_baseline_is_plain_decoding_whatever_the_default_is(monkeypatch):
    monkeypatch.setattr(registry, "DEFAULT", "auto")
    lm, drafted_by = deep(), []
    generate = lm.generate

    def recorded(prompt, **given):
        made = generate(prompt, **given)
        drafted_by.append(made.drafted_by)
        return made

    lm.generate = recorded
    objectives.Speed(lm, [[3, 4, 5]], 6, (LayerSkipDrafter(lm.config, 1), None))
    assert len(drafted_by) == 4
    assert drafted_by.count("autoregressive") == 2


def test_numbers_are_tuned_on_other_prompts_than_those_that_are_reported():
    lm = deep()
    lm.encode = lambda text, chat=False: [hash(text)]
    lm.config = dataclasses.replace(lm.config, max_position_embeddings=1000)
    tuned = {ids[0] for ids in read_prompts(lm, 8)}
    assert len(tuned) == 8
    assert not tuned & {hash(text) for texts in prompts.load().values() for text in texts}


def _reader():
    """A model with one token per character; the first message of a chat has one more token before it."""

    def encode(text, chat=False):
        return [*map(ord, text)] if isinstance(text, str) else [0, *map(ord, text[0]["content"])]

    lm = deep()
    lm.encode, lm.tokenizer = encode, types.SimpleNamespace(has_chat_template=True)
    lm.config = dataclasses.replace(lm.config, max_position_embeddings=20)
    return lm


def test_prompts_to_tune_on_are_read_as_the_suite_reads_them(tmp_path):
    lm = _reader()
    turns = [("a", "ab"), ("a", "abc"), ("b", "x" * 13), ("b", "y"), ("c", "z")]
    entries = [
        {"question_id": i, "category": kind, "turns": [text, "?"]} for i, (kind, text) in enumerate(turns)
    ]
    prompts_of = {"set": tmp_path / "set.jsonl", "text": tmp_path / "text.txt"}
    prompts_of["set"].write_text("\n".join(map(json.dumps, entries)))
    prompts_of["text"].write_text("one\ntwo\n")

    def read(name, **options):
        files = tuple(str(prompts_of[one]) for one in name.split())
        found = read_prompts(lm, 8, PromptOptions(files, **options))
        return ["".join(chr(one or ord("<")) for one in ids) for ids in found]

    assert read("set") == ["<ab", "<z", "<abc", "<y"]  # one is too long
    assert read("set", limit=3, chat="off") == ["ab", "z", "abc"]
    assert read("set", limit=1) == ["<ab"]
    assert read("text") == ["one\ntwo"]
    assert read("text", chat="on") == ["<one\ntwo"]
    with refused(r"has .*text\.txt, a text, and .*set\.jsonl, a prompt set; give files of"):
        read("text set")
    with refused(r"the prompts and max_new_tokens \(19\) exceed .* context of 20; give"):
        read_prompts(lm, 19, PromptOptions((str(prompts_of["set"]),)))
    with refused("limit is 0; give at least 1"):
        PromptOptions(limit=0)
