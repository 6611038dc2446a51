"""`python -m benchmarks.papers adaspeed`: rules tuned alike by replay, run in the engine; the claims of the paper."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import papers
from benchmarks.papers import adaspeed, adaspeed_sampled, baselines, rules
from benchmarks.papers import adaspeed_counts as counts
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.rules import Case, Rounds
from benchmarks.papers.workbench import Workbench
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods import method_files
from jaxspec.measuring.bench import prompts
from jaxspec.model import llama
from jaxspec.testing.models import DEEP, TARGET, engine_config, params, tokenizer
from tests import tiny

SPLITS = {"tuning": {"stories": ("One", "Two")}, "reporting": {"stories": ("Once", "Upon")}}


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: SPLITS[split])
    # A tiny model compiles longer than it runs.
    monkeypatch.setattr(counts, "LENGTHS", (2, 16))
    monkeypatch.setattr(counts, "CONSTANT_LENGTHS", (2,))
    monkeypatch.setattr(baselines, "CONSTANTS", (2,))
    monkeypatch.setattr(baselines, "_SHARES", (4,))
    monkeypatch.setattr(adaspeed_sampled, "CONSTANTS", (2,))
    monkeypatch.setattr(adaspeed_sampled, "GAMMAS", (0.3,))
    monkeypatch.setattr(rules, "CONSTANTS", (2,))
    monkeypatch.setattr(rules, "GAMMAS", (0.1, 0.3, 0.6, 0.8, 0.95))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A tiny model with probes at its first exit, for greedy texts and for the paper's."""
    directory = tmp_path_factory.mktemp("model")
    made = LanguageModel(engine_config(DEEP), params(DEEP), tokenizer(), directory=directory)
    for distribution in ("greedy", method_files.distribution_name(**adaspeed_sampled.TOP_P)):
        probe = method_files.ProbeFile(
            np.linspace(-1, 1.5, DEEP.hidden_size, dtype=np.float32), 0.3, 1, distribution
        )
        path = method_files.probe_path(directory, 1, distribution)
        path.parent.mkdir(exist_ok=True)
        method_files.write_probe(path, made.fingerprint, probe)
    return made


@pytest.mark.full
def test_adaspeed(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "exit_layers", lambda lm: [1])
    options = PaperOptions(max_new_tokens=12, repeats=1, directory=tmp_path)
    found = papers.find("adaspeed")(lm, options, print)
    greedy, drawn, exits, gammas = found.tables
    names = [row.name for row in greedy.rows]
    assert names[0] == "plain"
    assert names[1] == "untrained: first 1 layers, K 2"
    assert [name.partition(":")[0] for name in names[2:]] == [*adaspeed.NAMES.values()]
    for table in (greedy, drawn):
        cells = table.rows[1].cells
        assert (table.rows[1].name, list(cells)) == (names[1], ["× LayerSkip", "× plain"])
        assert all(cell.ours > 0 for cell in cells.values())
    product = next(name for name in names if name.startswith("AdaSPEED:"))
    assert greedy.cell(product, "× LayerSkip").paper == 1.16
    assert greedy.cell(product, "× plain").ours > 0
    assert greedy.cell(product, "rows free").ours > 0
    assert drawn.cell(drawn.rows[-1].name, "× LayerSkip").paper == 1.51
    assert exits.columns == ("1",)
    assert [row.name for row in exits.rows] == [*adaspeed.NAMES.values()]
    assert [row.name for row in gammas.rows] == ["γ0 0.1", "γ0 0.3", "γ0 0.6", "γ0 0.8", "γ0 0.95", "settled"]
    assert all(len(row.cells) == 3 for row in gammas.rows)
    assert found.claims[0].figure.ours == greedy.rows[2].cells["× plain"].ours
    assert [claim.holds for claim in found.claims][-1] is None  # one exit cannot be lower than itself
    records = [json.loads(line) for line in (tmp_path / "greedy.jsonl").read_text().splitlines()[1:]]
    assert len(records) == 2
    # Priced again, the clock would choose other cases, which the records are not of.
    monkeypatch.setattr(counts, "round_prices", lambda *given, **options: pytest.fail("priced again"))
    again = papers.find("adaspeed")(lm, options, print)
    assert dataclasses.asdict(again) == dataclasses.asdict(found)


def test_the_ideal_stop_may_draft_as_much_as_the_rules(lm, monkeypatch):
    asked = []
    monkeypatch.setattr(adaspeed.baselines, "ideal_exit", lambda bench, *given: asked.append(given))
    with Workbench(lm, PaperOptions(max_new_tokens=4)) as bench:
        monkeypatch.setattr(bench, "measure", lambda *given, **options: None)
        adaspeed._greedy(bench, {"oracle": Case("oracle", 1)}, {})
    assert asked == [(1, rules.LONGEST)]


def test_drawn_texts_are_tuned_at_the_same_exits_by_all_rules(lm, monkeypatch):
    chosen = {rule: Case(rule, 2, 1) for rule in ("constant", "confidence", "product")}
    tried = []

    def measure(name, split, methods, **options):
        tried.extend(methods if split == "tuning" else ())
        return SimpleNamespace(best=lambda names: names[0])

    monkeypatch.setattr(
        adaspeed.rules, "probe", lambda lm, layer, distribution: "probe" if layer == 1 else None
    )
    with Workbench(lm, PaperOptions(max_new_tokens=4)) as bench:
        monkeypatch.setattr(bench, "measure", measure)
        adaspeed._drawn(bench, [1, 2, 3], chosen, {})
    both = ("exit 1", "exit 2")  # the probe's, and the one chosen
    assert {run.rpartition(",")[0] for run in tried if not run.startswith("probe")} == {
        f"{rule}, {layer}" for rule in chosen for layer in both
    }


def counted(speedups: dict[Case, float]) -> counts.Counted:
    """Cases of these speed-ups on tuning texts and half of them on the others, by rounds without a draft."""

    def rounds(speedup: float) -> Rounds:
        return Rounds(np.array([60, 60]), np.array([[60 / speedup, 0], [60 / speedup, 0]]), 0, 0)

    made = {case: (rounds(value), rounds(value / 2)) for case, value in speedups.items()}
    prices = {1: {1: 1.5}, 2: {1: 1.75}}
    return counts.Counted(made, prices, prices, {1: 0.25, 2: 0.5})


def test_the_best_case_is_chosen_on_tuning_texts_and_told_of_the_others():
    cases = {Case("product", 1, 0.3): 1.5, Case("product", 2, 0.3): 2.0, Case("constant", 1, 2): 3.0}
    found = counted(cases)
    assert found.best("product") == Case("product", 2, 0.3)
    assert found.best("product", 1) == Case("product", 1, 0.3)
    assert found.best("probe") is None
    assert found.speedup(Case("product", 2, 0.3)).ours == pytest.approx(2.0)
    assert found.speedup(Case("product", 2, 0.3), 1).ours == pytest.approx(1.0)


def test_with_free_rows_a_round_costs_the_weights_that_it_reads():
    # 10 rounds of 2 drafts for 30 tokens: each reads the model once and half of it twice.
    rounds = Rounds(np.array([30]), np.array([[0, 0, 10]]), 20, 20)
    case = Case("product", 2, 0.3)
    found = counts.Counted({case: (rounds, rounds)}, {}, {}, {2: 0.5})
    assert found.free(case).ours == pytest.approx(30 / (10 * 2))


def test_exits_of_shallow_models():
    assert counts.exit_layers(tiny.language_model()) == [1]
    config = engine_config(TARGET).truncated(1)
    short = LanguageModel(config, llama.truncate(params(TARGET), 1), tokenizer())
    with pytest.raises(ValueError, match="the model has one layer"):
        papers.find("adaspeed")(short, PaperOptions(), print)


@pytest.mark.full
def test_prompt_files_are_divided_by_category(tmp_path):
    file = tmp_path / "tasks.jsonl"
    turns = [("sums", "1"), ("sums", "2"), ("edits", "3"), ("edits", "4"), ("sums", "5")]
    lines = [{"category": category, "turns": [text, "later"]} for category, text in turns]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = PaperOptions(prompt_file=(str(file),))
    with Workbench(tiny.language_model(), options) as bench:
        assert [task.turns for task in bench.tasks("tuning")] == [("1",), ("3",), ("5",)]
        assert [task.turns for task in bench.tasks("reporting")] == [("2",), ("4",)]
        with pytest.raises(ValueError, match="own prompts; leave it out"):
            bench.tasks("reporting", ["code"])
    file.write_text(json.dumps(lines[0]))
    with Workbench(tiny.language_model(), options) as bench, pytest.raises(ValueError, match="give more"):
        bench.tasks("reporting")
