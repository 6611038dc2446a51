"""`benchmarks.llama_cpp`: what is asked of llama.cpp, and what is counted; its package is played by a stand-in."""

import json
import sys
import types

import gguf
import numpy as np
import pytest

from benchmarks import llama_cpp
from jaxspec.bench import prompts
from jaxspec.testing import reference
from tests.gguf_files import write
from tests.test_gguf import WIDE


class Nothing:
    """Takes any attribute."""

    def __getattr__(self, name):
        setattr(self, name, Nothing())
        return getattr(self, name)


class Server:
    """Answers with 11 tokens in 100 ms, or as many tokens as were asked for in ten times as many milliseconds."""

    def __init__(self, params):
        Server.params, Server.asked = params, []

    def handle_chat_completions(self, request):
        Server.asked.append(request)
        count = min(request["max_tokens"], 11)
        return {"timings": {"predicted_n": count, "predicted_ms": 10.0 * (count - 1), "prompt_ms": 7.0}}


@pytest.fixture
def stand_in(monkeypatch):
    kinds = types.SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE="simple")
    package = types.SimpleNamespace(Server=Server, CommonParams=Nothing, common_speculative_type=kinds)
    monkeypatch.setitem(sys.modules, "xllamacpp", package)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", WIDE, reference.random_params(WIDE, 0), kind="Q8_0"
    )


def test_every_prompt_is_a_chat_and_its_tokens_after_the_first_are_counted(stand_in, file, capsys):
    assert llama_cpp.main([str(file), "--limit", "2", "--speculation", "simple", "--threads", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_per_second"] == dict.fromkeys([*prompts.KINDS, "all"], 100.0)
    assert (report["first_token_ms"], report["threads"], report["speculation"]) == (7.0, 3, "simple")
    texts = [text for some in prompts.load().values() for text in some[:2]]
    assert [one["messages"][0]["content"] for one in Server.asked] == texts
    assert {one["temperature"] for one in Server.asked} == {0}
    assert Server.params.model.path == str(file)
    assert Server.params.speculative.types == ["simple"]


def test_float32_is_the_same_file_with_other_numbers(file, tmp_path):
    llama_cpp.in_float32(file, tmp_path / "whole.gguf")
    before, after = gguf.GGUFReader(file), gguf.GGUFReader(tmp_path / "whole.gguf")
    kept = {name for name in before.fields if not name.startswith("GGUF.")} - {"general.file_type"}
    assert kept <= set(after.fields)
    for name in kept:
        assert before.fields[name].contents() == after.fields[name].contents()
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.tensor_type == gguf.GGMLQuantizationType.F32
        assert list(new.shape) == list(old.shape)
        values = gguf.dequantize(old.data, old.tensor_type)
        np.testing.assert_array_equal(np.ravel(new.data), np.ravel(values))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["no.gguf"], "no.gguf is no GGUF file; give one, such as model.Q8_0.gguf"),
        (["FILE", "--limit", "0"], "--limit is 0; give a whole number of at least 1"),
        (["FILE"], "this needs xllamacpp, which brings llama.cpp: pip install xllamacpp"),
    ],
)
def test_what_does_not_go_ends_in_one_line(given, says, file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert llama_cpp.main([str(file) if one == "FILE" else one for one in given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
