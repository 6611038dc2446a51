"""`jaxspec bench --peer transformers`: its ways to generate, in the same turns, on the same prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from jaxspec.cli import main
from tests.commands import CONFIG, write_model, write_tokenizer

pytestmark = pytest.mark.peers

MODELS = Path(__file__).parents[3].parent / "shared" / "data" / "models"


def bench(capsys, *arguments: object) -> dict:
    status = main(["bench", *map(str, arguments), "--repeats", "1", "--json", "--peer", "transformers"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 1), ("draft", 2)):
        write_model(directory / name, CONFIG, seed)
        write_tokenizer(directory / name)
    return directory / "target", directory / "draft"


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_way(capsys, models, temperature):
    target, draft = models
    runs = ("ngram", f"draft-model --draft {draft}", "layerskip --exit-layer 1")
    runs = [f"{run} --num-draft-tokens 3" for run in runs]
    found = bench(
        capsys,
        *("--model", target, *(word for run in runs for word in ("--run", run))),
        *("--limit", 4, "--max-new-tokens", 12, "--temperature", temperature),
    )
    theirs = ["transformers", *(f"transformers {way}" for way in ("prompt lookup", "assisted", "early exit"))]
    assert list(found["runs"]) == ["autoregressive", *runs, *theirs]
    for run in theirs:
        one = found["runs"][run]["all"]
        assert one["identical_to_autoregressive"] is (None if temperature else True), found["differences"]
        assert one["tokens_per_second"] > 0
        assert one["first_token_ms"]["median"] > 0
        assert one["mean_acceptance_length"] >= 1
        assert one["mean_acceptance_length_drafting"] is None
    assert found["runs"]["transformers"]["all"]["mean_acceptance_length"] == 1
    if not temperature:
        assert found["runs"]["transformers"]["all"]["tokens"] == found["runs"][runs[0]]["all"]["tokens"]


def test_a_gguf_file(capsys):
    model = MODELS / "smollm2-135m-instruct"
    if not model.is_dir():
        pytest.skip("the shared data is not here")
    found = bench(capsys, "--model", model, "--methods", "ngram", "--limit", 1, "--max-new-tokens", 8)
    assert list(found["runs"]) == ["autoregressive", "ngram", "transformers", "transformers prompt lookup"]
    assert found["runs"]["transformers"]["all"]["identical_to_autoregressive"]
