"""llama.cpp in `benchmarks.peers`: its requests, its counts and its files; a stand-in plays the package xllamacpp."""

import http.server
import json
import sys
import threading
import types

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from benchmarks import peers
from jaxspec.testing import reference
from tests import refused
from tests.files.test_gguf import WIDE
from tests.gguf_files import write


class Nothing:
    """Takes any attribute."""

    def __getattr__(self, name):
        setattr(self, name, Nothing())
        return getattr(self, name)


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers with the asked number of tokens, each after the first in 10 ms; two of them were drafted."""

    asked: list = []  # noqa: RUF012

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Answers.asked.append(request)
        count = request["n_predict"]
        timings = {"predicted_n": count, "predicted_ms": 10.0 * (count - 1), "prompt_ms": 7.0}
        timings |= {"draft_n": 4, "draft_n_accepted": 2}
        answer = json.dumps({"content": "a", "tokens": [5] * count, "timings": timings}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        """Prints nothing."""


@pytest.fixture
def loaded(monkeypatch):
    """Puts the stand-in in place; returns the parameters of its servers."""
    served = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    found = []

    def server(params):
        found.append(params)
        return types.SimpleNamespace(listening_address=f"http://127.0.0.1:{served.server_port}")

    kinds = types.SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE="simple")
    package = types.SimpleNamespace(Server=server, CommonParams=Nothing, common_speculative_type=kinds)
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    yield found
    served.shutdown()
    served.server_close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    params = reference.random_params(WIDE, 0)
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", WIDE, params, kind="Q8_0")


def test_each_type_of_weights_runs_without_and_with_lookup(loaded, file, tmp_path):
    runs = peers.llama_cpp_runs(file, tmp_path, 512, 3, lambda step: None)
    types_of_weights = [peers.file_type(file), *(one.name for one in peers.CONVERTED)]
    wanted = [f"llama.cpp {name}{end}" for name in dict.fromkeys(types_of_weights) for end in ("", " lookup")]
    assert list(runs) == wanted
    assert loaded[0].model.path == str(file)
    assert {params.model.path for params in loaded[2:]} == set(map(str, tmp_path.iterdir()))
    assert loaded[1].speculative.types == ["simple"]
    assert {params.cpuparams.n_threads for params in loaded} == {3}
    result = runs[wanted[0]]([3, 4], 11)
    assert Answers.asked[-1]["prompt"] == [3, 4]
    assert (Answers.asked[-1]["temperature"], Answers.asked[-1]["ignore_eos"]) == (0, True)
    assert result.tokens == [5] * 11
    assert result.statistics.tokens_per_second == pytest.approx(100.0)
    assert (result.statistics.num_rounds, result.statistics.num_accepted_tokens) == (8, 2)
    assert result.statistics.elapsed_ms - result.statistics.decode_ms == pytest.approx(7.0)


@pytest.mark.parametrize("wanted", peers.CONVERTED, ids=lambda one: one.name)
def test_a_converted_file_is_the_same_model(wanted, tmp_path):
    source = write(tmp_path / "source.gguf", WIDE, reference.random_params(WIDE, 0), kind="Q4_0")
    peers.convert(source, tmp_path / "converted.gguf", wanted)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "converted.gguf")
    kept = {name for name in before.fields if not name.startswith("GGUF.")} - {"general.file_type"}
    assert kept <= set(after.fields)
    for name in kept:
        assert before.fields[name].contents() == after.fields[name].contents()
    assert peers.file_type(tmp_path / "converted.gguf") == wanted.name
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    exact = wanted == GGMLQuantizationType.F32
    for old, new in zip(before.tensors, after.tensors, strict=True):
        matrix = len(old.shape) > 1
        assert new.tensor_type == (wanted if matrix else GGMLQuantizationType.F32)
        assert list(new.shape) == list(old.shape)
        one, other = (gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new))
        tolerance = 0.0 if exact or not matrix else np.abs(one).max() / 127
        np.testing.assert_allclose(np.ravel(other), np.ravel(one), rtol=0, atol=tolerance)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch, file, tmp_path):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with refused("needs the package xllamacpp: pip install xllamacpp"):
        peers.llama_cpp_runs(file, tmp_path, 512, 1, lambda step: None)
