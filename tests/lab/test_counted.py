"""Tables of exact counts: costs, choice and claims; the counts of S2D's and ASD's drafts in the engine."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import papers
from benchmarks.papers import (
    adaspeed_counts,
    adaspeed_ratios,
    adaspeed_sampled,
    asd_cosines,
    asd_counts,
    asd_runs,
    rules,
    s2d_counts,
    s2d_runs,
)
from benchmarks.papers.counted import Case, Column, Counted, Work, choose
from benchmarks.papers.engine_counts import generated
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.tables import FREE
from benchmarks.papers.workbench import Workbench
from jaxspec.io.hf import huggingface
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.bench.speed import weights
from jaxspec.measuring.tuning.s2d_sweep import sorted_draft
from jaxspec.methods import DraftModel, NGram
from jaxspec.model.plan import LayerPlan
from jaxspec.testing.models import TARGET, params

SPLITS = {
    "tuning": {"stories": ("One", "Two"), "code": ("def a",)},
    "reporting": {"stories": ("Once", "Upon"), "code": ("def f",)},
}
COLUMNS = (Column(FREE, (0.1, 0.0)), Column("dear", (0.5, 0.1)))


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: SPLITS[split])
    monkeypatch.setattr(s2d_runs, "CONSTANTS", (2,))
    monkeypatch.setattr(s2d_runs, "THRESHOLDS", (0.0, 0.9, 1.0))
    monkeypatch.setattr(rules, "CONSTANTS", (2,))
    monkeypatch.setattr(rules, "GAMMAS", (0.8,))
    monkeypatch.setattr(adaspeed_sampled, "CONSTANTS", (2,))
    monkeypatch.setattr(adaspeed_sampled, "GAMMAS", (0.3,))
    monkeypatch.setattr(asd_counts, "EVERYS", (0, 2))
    monkeypatch.setattr(asd_counts, "KEEP_LASTS", (0, 1))
    monkeypatch.setattr(asd_counts, "TRIALS", 2)
    monkeypatch.setattr(asd_counts, "SEARCHES", 2)


@pytest.fixture(scope="module")
def draft(lm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("draft")
    huggingface.save(directory, lm.config, params(TARGET, 3), trained_for=TrainedFor((1, 2)))
    return str(directory)


def work(tokens, rounds, passes):
    return Work(np.array(tokens), np.array(rounds), np.array(passes, float))


def test_costs_decide_the_choice_and_the_speed():
    # 12 tokens: in 6 rounds without drafts, or in 3 with 9 passes of the first part and 3 of the second.
    tuning = {
        Case("x", "K 0"): work([12, 12], [6, 6], [[0, 0]] * 2),
        Case("x", "K 3"): work([12, 12], [3, 3], [[9, 3]] * 2),
    }
    chosen = choose(tuning, COLUMNS)
    assert {heading: case.setting for heading, case in chosen["x"].items()} == {FREE: "K 3", "dear": "K 0"}
    found = Counted(COLUMNS, chosen, tuning, ["a", "a"])
    assert [found.over("x", None, column).ours for column in COLUMNS] == [pytest.approx(12 / 3.9), 2.0]
    table = found.table("t", {"x": {"dear": 1.5}})
    assert [table.cell("x", heading).paper for heading in (FREE, "dear")] == [None, 1.5]
    assert found.settings() == ("x: K 3 (free rows); K 0 (dear).",)


def test_claims_are_judged_at_each_cost():
    slow, fast = Case("slow", ""), Case("fast", "")
    works = {slow: work([9, 9], [9, 9], [[0, 0]] * 2), fast: work([9, 9], [6, 6], [[9, 0]] * 2)}
    found = Counted(COLUMNS, choose(works, COLUMNS), works, ["a", "a"])
    claims = found.claims("It is faster.", "fast", "slow", paper={"dear": 1.1})
    assert [(claim.costs, claim.holds) for claim in claims] == [(FREE, True), ("dear", False)]
    assert claims[1].figure.paper == 1.1
    assert claims[0].figure.ours == pytest.approx(9 / 6.9)


def test_each_task_type_has_a_row_of_its_own_texts_and_all_weigh_the_same_in_the_mean():
    one, other = Case("one", ""), Case("other", "")
    works = {one: work([9, 9, 9], [3, 9, 3], [[0, 0]] * 3), other: work([9, 9, 9], [9, 9, 9], [[0, 0]] * 3)}
    found = Counted(COLUMNS, choose(works, COLUMNS), works, ["sums", "facts", "sums"])
    table = found.by_kind("Table 1", "one", "other")
    assert table.title == "Table 1: one ÷ other"
    assert [(row.name, row.cells[FREE].ours) for row in table.rows] == [
        ("sums", 3.0),
        ("facts", 1.0),
        ("geometric mean over types", pytest.approx(3**0.5)),
    ]
    assert table.cell("sums", FREE).interval == (3.0, 3.0)
    assert table.cell("facts", FREE).interval is None  # a single text
    (claim, _) = found.claims("It is faster.", "one", "other")
    assert (claim.figure.ours, claim.alike.ours) == pytest.approx((27 / 15, 3**0.5))


def test_the_interval_contains_the_seed_of_a_search():
    first, second, plain = Case("searched", ""), Case("searched", "seed 1"), Case("plain", "")
    works = {
        case: work([9, 9], [rounds] * 2, [[0, 0]] * 2)
        for case, rounds in ((first, 3), (second, 9), (plain, 9))
    }
    chosen = choose({first: works[first], plain: works[plain]}, COLUMNS)
    found = Counted(COLUMNS, chosen, works, ["a", "a"], {first: [second]})
    cell = found.over("searched", "plain", COLUMNS[0])
    assert (cell.ours, cell.interval) == (2.0, (1.0, 3.0))
    assert found.raw()["searched"] == [[9, 9], [3, 3], [[0, 0]] * 2]


def test_the_sentences_about_probes_and_about_the_smaller_model():
    """Each text has 9 tokens in 3 rounds. The product drafts 6 tokens for it, the probe 8, the constant length 12."""
    columns = tuple(Column(name, price) for name, price in (("Llama 1B", (0.2, 0)), ("Llama 7B", (0.3, 0))))
    drafted = {adaspeed_ratios.PRODUCT: 6, adaspeed_ratios.PROBE: 8, adaspeed_ratios.CONSTANT: 12}
    works = {Case(row, ""): work([9, 9], [3, 3], [[count, count]] * 2) for row, count in drafted.items()}
    found = Counted(columns, choose(works, columns), works, ["a", "a"])
    *_, smaller, one, seven = adaspeed_ratios._compared(found, adaspeed_ratios.TOP_P, 1)
    assert smaller.figure.ours == pytest.approx((5.4 / 4.2) / (6.6 / 4.8))
    assert (smaller.holds, smaller.costs) == (False, "Llama 1B ÷ Llama 7B")
    assert smaller.figure.paper == pytest.approx(1.42 / 1.21)
    assert [claim.figure.ours for claim in (one, seven)] == pytest.approx([0.75, 0.75])
    assert not one.holds


def test_intervals_have_the_unbiased_variance_of_a_mean():
    """The variance of a bootstrap mean is s² ÷ n with s² over n − 1, for each kind, and kinds keep their weights."""
    values, kinds = np.array([0.0, 3.0, 4.0, 9.0, 1.0]), ["a", "a", "a", "b", "c"]
    drawn = weights(kinds, 100_000)
    assert drawn.sum(axis=1).tolist() == pytest.approx([5.0] * len(drawn))
    assert drawn[1:, :3].sum(axis=1).tolist() == pytest.approx([3.0] * 100_000)
    for own in ([0, 1, 2], [3, 4]):  # the only texts of their kinds are drawn together
        means = drawn[1:, own] @ values[own] / len(own)
        assert means.var() == pytest.approx(values[own].var(ddof=1) / len(own), rel=0.02)
    assert weights(["a"], 3).tolist() == [[1.0]] * 4


def test_prices_that_do_not_rise_are_measured_again(lm, monkeypatch):
    monkeypatch.setattr(adaspeed_counts, "LENGTHS", (1, 2))
    monkeypatch.setattr(adaspeed_counts, "CONSTANT_LENGTHS", (1, 2))
    good = {f"{kind}, exit 1, {n}": 1 + n / 4 for kind in ("rule", "constant") for n in (1, 2)}
    answers = iter([good | {"rule, exit 1, 1": 5.4}, good])
    monkeypatch.setattr(adaspeed_counts, "_measured_prices", lambda bench, exits: next(answers))
    assert adaspeed_counts._prices(None, [1]) == good | {"unsound": []}
    monkeypatch.setattr(
        adaspeed_counts, "_measured_prices", lambda bench, exits: good | {"rule, exit 1, 1": 1.6}
    )
    assert adaspeed_counts._prices(None, [1])["unsound"] == [1]


@pytest.mark.slow
def test_exits_alone_count_like_a_draft_model(lm, draft):
    with Workbench(lm, PaperOptions(max_new_tokens=12)) as bench:
        found, prompt = sorted_draft(lm, draft), bench.encoded("tuning")[0]
        for thresholds, layers, expected in (((0.0,), 1, (1, 0)), ((1.0,), 2, (0, 1))):
            setting = s2d_counts.Setting(found, thresholds, 3)
            result, (*depths, heads) = s2d_counts._counting(bench, setting)(prompt)
            other = generated(bench, prompt, DraftModel(draft=draft, draft_exit=layers, num_draft_tokens=3))
            assert result.tokens == other.tokens
            assert result.statistics.num_rounds == other.statistics.num_rounds
            # Every draft token, also those past the end of the text, is one step through one exit and one head.
            assert sum(depths) == heads >= other.statistics.num_draft_tokens
            assert [bool(depth) for depth in depths] == [bool(one) for one in expected]


def test_task_types_are_those_of_the_limited_prompts(lm):
    with Workbench(lm, PaperOptions(limit=1, max_new_tokens=4)) as bench:
        for types in (["code"], ["stories"], None):
            assert len(bench.kinds("reporting", types)) == len(bench.encoded("reporting", types)) == 1
        assert bench.kinds("reporting", ["code"]) == ["code"]


@pytest.mark.slow
def test_masks_count_like_asd_and_each_once(lm, monkeypatch):
    with Workbench(lm, PaperOptions(max_new_tokens=12)) as bench:
        masks, prompt = asd_counts.Masks(bench), bench.encoded("tuning")[0]
        numbers = ASDNumbers(alpha=1.0, every=2, keep_last=0)
        result, passes = masks.counting(numbers)(prompt)
        other = generated(bench, prompt, asd_runs.asd(lm, numbers))
        assert result.tokens == other.tokens
        counts = ("num_rounds", "num_draft_tokens", "num_accepted_tokens")
        for name in counts:
            assert getattr(result.statistics, name) == getattr(other.statistics, name)
        # Every second of two layers is skipped.
        assert passes == [result.statistics.num_draft_tokens * share for share in (0.5, 0.5, 1.0)]
        monkeypatch.setattr(asd_counts, "generated", lambda *given: pytest.fail("counted again"))
        same = LayerPlan.skipping(lm.config.num_layers, [1], [1])
        assert masks.counting(same)(prompt) == (result, passes)


def test_similarities_have_intervals_over_prompts():
    # Two prompts, three layers; attention is .1 above the MLP, and its range is wider by .2.
    attention = np.array([[0.5, 0.9, 0.9], [0.7, 0.9, 0.9]])
    mlp = np.array([[0.6, 0.8, 0.8], [0.6, 0.8, 0.8]])
    table, claims = asd_cosines.tables(np.stack([attention, mlp], axis=-1), ["a", "a"])
    assert table.cell("min", "attention").ours == pytest.approx(0.6)
    assert table.cell("min", "attention").interval == pytest.approx((0.5, 0.7))
    assert [claim.figure.ours for claim in claims] == pytest.approx([0.2 / 3, 0.1, 0.1])
    assert [claim.holds for claim in claims] == [True, True, None]


@pytest.mark.slow
def test_other_drafts_of_the_sorted_drafts_shape_are_counted(lm, draft, tmp_path):
    twin = tmp_path / "twin"
    huggingface.save(twin, lm.config, params(TARGET, 4))
    words = f"draft-model --draft {twin}"
    given = {"max_new_tokens": 8, "counts": True, "draft": draft, "directory": tmp_path}
    found = papers.find("s2d")(
        lm, PaperOptions(runs={words: DraftModel(draft=str(twin))}, **given), lambda what: None
    )
    assert found.runs == (words,)
    plain, _, _, ratios, thresholds, drawn = found.tables
    assert drawn.cell("SFT + SD", "Vicuna-7B").paper == 1.16
    assert plain.cell("SFT + SD", "Vicuna-7B").paper == 1.19
    assert {row.name[:1] for row in thresholds.rows} == {"τ"}
    assert ratios.cell("S2D", "Vicuna-7B").paper == pytest.approx(1.34 / 1.19)
    assert any("without sorting" in claim.says for claim in found.claims)
    other = {"lookup": NGram()}
    with pytest.raises(ValueError, match=r"`runs` has 'lookup'; for counts give a draft-model"):
        papers.find("s2d")(lm, PaperOptions(runs=other, **given), lambda what: None)


@pytest.mark.full
def test_asd_is_counted_on_prompt_files(lm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": "notes", "turns": [text]} for text in ("One", "Once", "Two", "Upon")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = PaperOptions(max_new_tokens=4, prompt_file=(str(file),), counts=True)
    found = papers.find("asd")(lm, options, lambda what: None)
    assert found.prompts == {"tuning": 2, "reporting": 2}
    # Without the tables of code and of a search on another kind of work.
    titles = [table.title[:7] for table in found.tables]
    assert titles == ["Table 3", "Table 3", "Table 5", "Table 3", "Table 1", "Sublaye"]
    assert [row.name for row in found.tables[1].rows] == ["notes", "geometric mean over types"]
    untuned = dataclasses.replace(options, untuned=True)
    less = papers.find("asd")(lm, untuned, lambda what: None)
    assert less.more == ("--prompt-file", str(file), "--untuned")
    assert [row.name for row in less.tables[0].rows] == ["Draft & Verify", "ASD, the paper's numbers"]
    assert less.tables[0].rows == found.tables[0].rows[:2]
    assert less.tables[2].rows == found.tables[2].rows[:4]
    assert set(less.claims) < set(found.claims)


@pytest.mark.full
@pytest.mark.representatives("s2d")
@pytest.mark.parametrize("paper", ["adaspeed", "s2d", "asd"])
def test_counts_need_no_clock(lm, draft, paper, tmp_path):
    options = PaperOptions(
        max_new_tokens=12, counts=True, draft=draft if paper == "s2d" else None, directory=tmp_path
    )
    found = papers.find(paper)(lm, options, lambda what: None)
    assert found.amount == {"max_new_tokens": 12}
    costs = {"adaspeed": {"Llama 1B ÷ Llama 7B"}, "s2d": {s2d_counts.AVERAGE}, "asd": {""}}[paper]
    assert {claim.costs for claim in found.claims} == costs | {*found.tables[0].columns}
    speeds = [table for table in found.tables if "left out" not in table.title]
    assert all(cell.ours > 0 for table in speeds for row in table.rows for cell in row.cells.values())
    # Stored counts are not counted again.
    again = papers.find(paper)(lm, options, lambda what: pytest.fail(what) if ": " in what else None)
    assert dataclasses.asdict(again) == dataclasses.asdict(found)
