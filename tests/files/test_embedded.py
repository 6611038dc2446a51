"""What travels with the package is what its cards say: models that need their depth, and files of their weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import jaxspec
from benchmarks.papers.workbench import fitness_beside
from jaxspec.host.files import read_json
from jaxspec.io import embedded
from jaxspec.measuring.bench import prompts
from training.data import tasks

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "checkpoints"
TARGETS = ("large", "small")


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return jaxspec.load(request.param, dtype="float32")


def test_a_target_passes_the_gate_but_for_the_check_that_its_readers_are_told_of(target):
    fitness = fitness_beside(target)  # which refuses a report of other weights
    assert fitness is not None
    failed = [check["name"] for check in fitness["checks"] if not check["passed"]]
    assert failed == ["loss on answers falls from 9 to 12 layers"]
    assert failed[0].partition(" falls")[0] in (CHECKPOINTS / "README.md").read_text("utf-8")


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
    asked = [task.prompt for family in ("code", "facts") for task in tasks.tasks(family, 2)]
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


@pytest.mark.slow
def test_a_target_does_what_it_was_trained_for():
    lm = jaxspec.load("small")
    asked = [task for family in ("sums", "code", "edits", "facts") for task in tasks.tasks(family, 6)]
    answers = lm.generate([task.prompt for task in asked], max_new_tokens=160)
    right = [
        answer.text.strip() == task.completion.strip() for answer, task in zip(answers, asked, strict=True)
    ]
    assert sum(right) >= 20, [answer.text for answer, fits in zip(answers, right, strict=True) if not fits]


def test_the_models_are_small_enough_to_travel():
    """Weights are nearly all of a checkout, whose archive then has 55 MB: bfloat16 shrinks by a fifth."""
    found = [*embedded.embedded_names(), "heads"]
    files = [path for name in found for path in (CHECKPOINTS / name).rglob("*")]
    assert 50e6 < sum(path.stat().st_size for path in files if path.is_file()) <= 66e6


@pytest.mark.parametrize("name", ["README.md", *(f"{name}/README.md" for name in (*TARGETS, "sorted"))])
def test_the_recipes_that_a_card_names_are_there(name):
    named = re.findall(r"(?:training/recipes|\$R)/([\w*/-]+\.yaml)", (CHECKPOINTS / name).read_text("utf-8"))
    assert named
    for recipe in named:
        assert list((ROOT / "training" / "recipes").glob(recipe)), recipe
