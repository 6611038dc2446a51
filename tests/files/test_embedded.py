"""What travels with the package is what its cards say: models that need their depth, and files of their weights."""

from __future__ import annotations

import pytest

import jaxspec
from jaxspec.host.files import read_json
from jaxspec.io import embedded
from jaxspec.measuring.bench import prompts
from tests import ROOT

CHECKPOINTS = ROOT / "checkpoints"
TARGETS = ("large", "small")


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return jaxspec.load(request.param, dtype="float32")


@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.6, "top_p": 0.9}])
def test_a_target_has_probes_and_thresholds_of_its_own_weights(target, distribution):
    for exit_layer in (3, 6):
        options = {"method": "adaspeed-probe", "exit_layer": exit_layer}
        target.stream("Copy", max_new_tokens=2, **options, **distribution).close()
    thresholds = list((CHECKPOINTS / target.name / "thresholds").iterdir())
    draft = jaxspec.load("sorted")
    assert [path.stem for path in thresholds] == [draft.fingerprint]


def test_a_target_brings_prompts_of_its_own_work(target):
    for split in ("tuning", "reporting"):
        kinds = prompts.load(split, CHECKPOINTS / target.name)
        assert {kind: len(texts) for kind, texts in kinds.items()} == dict.fromkeys(
            ("stories", "mathematics", "code", "copy-edit", "facts"), 8
        )


@pytest.mark.full
@pytest.mark.representatives("eagle")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "kangaroo", "uno"])
def test_a_head_that_comes_along_is_found_and_drafts_well(kind):
    lm = jaxspec.load("large", dtype="float32")
    kinds = prompts.load("reporting", CHECKPOINTS / "large")
    asked = [text for kind in ("code", "facts") for text in kinds[kind][:2]]
    plain = lm.generate(asked, max_new_tokens=48)
    drafted = lm.generate(asked, method=kind, max_new_tokens=48)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    counts = [one.statistics for one in drafted]
    assert sum(one.num_tokens for one in counts) > 1.5 * sum(one.num_rounds for one in counts)


def test_every_head_has_its_weights_or_its_counts():
    """Counts of chains and of a tree, that fit together, and a command."""
    heads = sorted((CHECKPOINTS / "heads").iterdir())
    with_weights = {head.name for head in heads if (head / "model.safetensors").is_file()}
    assert with_weights == {path.parent.name for path in (CHECKPOINTS / "heads").glob("*/config.json")}
    counted = {path.stem: read_json(path) for path in (ROOT / "docs/results/heads").glob("*.json")}
    names = {name: name.removesuffix("-temperature-1") for name in counted}
    assert {head.name for head in heads} == with_weights | set(names.values())
    assert counted
    for head in heads:
        card = (head / "README.md").read_text("utf-8")
        assert card.startswith("# ")
        assert "python -m training.heads" in card
    for name, found in counted.items():
        card = (CHECKPOINTS / "heads" / names[name] / "README.md").read_text("utf-8")
        assert f"docs/results/heads/{name}.json" in card
        assert {"--tree" in run for run in found["runs"]} == {True, False}
        for run in found["runs"].values():
            assert {len(values) for values in run.values()} == {len(found["categories"])}
            for number, histogram in enumerate(run["histograms"]):
                accepted = sum(length * drafts for length, drafts in enumerate(histogram))
                assert sum(histogram) == run["num_drafts"][number] <= run["num_rounds"][number]
                assert accepted >= run["num_accepted_tokens"][number]


def test_the_models_are_small_enough_to_travel():
    """Weights are nearly all of a checkout, whose archive then has 55 MB: bfloat16 shrinks by a fifth."""
    found = [*embedded.embedded_names(), "heads"]
    files = [path for name in found for path in (CHECKPOINTS / name).rglob("*")]
    assert 50e6 < sum(path.stat().st_size for path in files if path.is_file()) <= 66e6
