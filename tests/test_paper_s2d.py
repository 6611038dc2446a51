"""`jaxspec bench --paper s2d`: a sorted draft, its exits alone, and what the paper says of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxspec.bench import papers, prompts
from jaxspec.bench.papers import s2d
from jaxspec.bench.papers.options import PaperOptions
from jaxspec.bench.papers.tables import Cell
from jaxspec.bench.papers.workbench import Workbench
from jaxspec.bench.prompt_files import Task
from jaxspec.bench.suite import Suite
from jaxspec.bench.suite_options import SuiteOptions
from jaxspec.io import huggingface
from jaxspec.methods import DraftModel, DraftVerify
from jaxspec.testing.models import TARGET, params
from tests import tiny

SPLITS = {"tuning": {"stories": ("One", "Two")}, "reporting": {"stories": ("Once", "Upon")}}


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: SPLITS[split])
    monkeypatch.setattr(s2d, "CONSTANTS", (2,))
    monkeypatch.setattr(s2d, "THRESHOLDS", (0.0, 1.0))


@pytest.fixture(scope="module")
def lm():
    return tiny.language_model()


@pytest.fixture(scope="module")
def draft(lm, tmp_path_factory):
    """A draft with the target's tokens, two layers and an exit after each."""
    directory = tmp_path_factory.mktemp("draft")
    huggingface.save(directory, lm.config, params(TARGET, 3), exits=(1, 2))
    return str(directory)


def test_s2d(lm, draft, tmp_path):
    other = DraftModel(draft_exit=1, num_draft_tokens=1)
    options = PaperOptions(
        max_new_tokens=8, repeats=1, draft=draft, runs={"other": other}, directory=tmp_path
    )
    found = papers.find("s2d")(lm, options, print)
    table, thresholds = found.tables
    names = [row.name.partition(",")[0] for row in table.rows]
    assert names == ["plain", "the target's first 1", "other", "sorted", "sorted", "S2D"]
    mine = table.rows[-1].name
    assert table.cell(mine, "× plain, T = 0").paper == 1.34
    assert table.cell(mine, "MAT, T = 1").paper == 3.01
    assert table.cell("other", "MAT, T = 0").paper == 3.19
    assert all(cell.ours > 0 for row in table.rows for cell in row.cells.values())
    assert {row.name for row in thresholds.rows} == {"τ 0", "τ 1"}
    figures = [row.cells["× plain"].ours for row in thresholds.rows]
    assert figures == sorted(figures, reverse=True)
    assert [claim.because.partition(" is ")[0] for claim in found.claims] == [
        "S2D ÷ plain",
        f"S2D ÷ {table.rows[4].name}",
        f"{table.rows[3].name} ÷ S2D",
        f"S2D ÷ {table.rows[1].name}",
        "S2D ÷ other",
    ]
    assert all(claim.because for claim in found.claims)


def test_thresholds_are_those_of_the_run(lm, draft):
    # Always the first exit, or never: as drafts, the first layer alone and both.
    with Workbench(lm, PaperOptions(max_new_tokens=8, repeats=1)) as bench:
        found = s2d.sorted_draft(lm, draft)
        by_exit = {1: s2d._sorted(bench, draft, found, (0.0,)), 2: s2d._sorted(bench, draft, found, (1.0,))}
        for layer, method in by_exit.items():
            alone = DraftModel(
                draft=draft, draft_exit=layer, stop_rule=("adaptive-length",), num_draft_tokens=12
            )
            mine, its = (
                lm.generate([3, 4, 5], method=one, max_new_tokens=20).statistics for one in (method, alone)
            )
            assert mine.num_accepted_tokens == its.num_accepted_tokens
            assert mine.num_draft_tokens == its.num_draft_tokens


def test_a_draft_of_the_users_is_tuned_as_the_others_are(lm, draft):
    free, fixed = DraftModel(draft=draft), DraftModel(draft=draft, stop_rule=("confidence",))
    with Workbench(lm, PaperOptions(max_new_tokens=8, draft=draft, runs={"a": free, "b": fixed})) as bench:
        found = s2d.sorted_draft(lm, draft)
        drafts = {one.name: one for one in s2d._drafts(bench, draft, found, (0.5,))}
        asked = []

        def fastest(name, split, candidates):
            asked.append((split, list(candidates)))
            return SimpleNamespace(best=max, ratio=lambda run: Cell(ours=1.5))

        bench.measure = fastest
        tuned = s2d._with_best_length(bench, drafts["a"], 0)
        assert asked == [("tuning", ["schedule", "K 2"])]
        assert (tuned.method.stop_rule, tuned.tuning) == (("adaptive-length",), 1.5)
        assert s2d._with_best_length(bench, drafts["b"], 1).method == fixed


def test_another_draft_in_the_same_place_has_records_of_its_own(lm, draft, tmp_path):
    def header(seed):
        huggingface.save(tmp_path / "draft", lm.config, params(TARGET, seed), exits=(1, 2))
        method = DraftModel(draft=str(tmp_path / "draft"))
        law = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return Suite(
            tiny.language_model(), [Task("1", "a", ("One",))], {"x": method}, SuiteOptions(), law=law
        ).header()

    assert header(3) == header(3)
    assert header(3)["drafts"]["x"] != header(4)["drafts"]["x"]


def test_a_run_that_cannot_be_is_refused_before_anything_is_tuned(lm, draft, monkeypatch):
    monkeypatch.setattr(Workbench, "measure", lambda *given, **options: pytest.fail("tuned"))
    runs = {"x": DraftVerify(plan="no/plan.json")}
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        papers.find("s2d")(lm, PaperOptions(draft=draft, runs=runs), print)


def test_a_draft_is_needed(lm, monkeypatch):
    monkeypatch.setattr(s2d, "embedded_names", list)
    with pytest.raises(ValueError, match="needs a sorted draft; give draft=DIR"):
        papers.find("s2d")(lm, PaperOptions(), print)
