"""`python -m benchmarks.papers s2d`: a sorted draft, its exits alone, and what the paper says of them."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import papers
from benchmarks.papers import accuracy, baselines, s2d, s2d_average, s2d_runs, s2d_sorted_target, s2d_targets
from benchmarks.papers.counted import Case, Column, Counted, Work
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.tables import FREE, Cell
from benchmarks.papers.workbench import Workbench
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.hf import huggingface
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.bench import prompts, speed
from jaxspec.measuring.bench.prompt_files import Task
from jaxspec.measuring.bench.suite import Suite
from jaxspec.measuring.bench.suite_options import SuiteOptions
from jaxspec.methods import S2D, DraftModel, DraftVerify
from jaxspec.testing.models import TARGET, params
from tests import tiny

SPLITS = {"tuning": {"stories": ("One", "Two")}, "reporting": {"stories": ("Once", "Upon")}}


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: SPLITS[split])
    monkeypatch.setattr(s2d_runs, "CONSTANTS", (2,))
    monkeypatch.setattr(s2d_runs, "THRESHOLDS", (0.0, 1.0))


@pytest.fixture(scope="module")
def draft(lm, tmp_path_factory):
    """A draft with the target's tokens, two layers and an exit after each."""
    directory = tmp_path_factory.mktemp("draft")
    huggingface.save(directory, lm.config, params(TARGET, 3), trained_for=TrainedFor((1, 2)))
    return str(directory)


@pytest.fixture(scope="module")
def options(draft, tmp_path_factory):
    """With records that the tests go on from."""
    other = DraftModel(draft_exit=1, num_draft_tokens=1)
    directory = tmp_path_factory.mktemp("records")
    return PaperOptions(max_new_tokens=8, repeats=1, draft=draft, runs={"other": other}, directory=directory)


@pytest.fixture
def target(lm, monkeypatch):
    """Another target, which `load` finds by its name."""
    other = LanguageModel(lm.config, params(TARGET, 7), lm.tokenizer, name="second")
    other.executables = lm.executables  # of one shape: compiled once
    alone = LanguageModel(
        lm.config, params(TARGET, 9), lm.tokenizer, name="sorted", trained_for=TrainedFor((1, 2))
    )
    alone.executables = lm.executables
    known = {"second": other, "the same": lm, "sorted": alone}
    monkeypatch.setattr(s2d, "load", lambda name, **given: known[name])
    return other


@pytest.mark.full
def test_s2d(lm, options):
    found = papers.find("s2d")(lm, options, print)
    targets, table, thresholds = found.tables
    assert [row.name for row in targets.rows] == ["tiny"]
    ideal = table.rows[-1]
    assert (ideal.name, list(ideal.cells)) == ("oracle stop", ["× plain, T = 0", "MAT, T = 0"])
    names = [row.name.partition(",")[0] for row in table.rows]
    assert names == ["plain", "the target's first 1", "other", "sorted", "sorted", "S2D", "oracle stop"]
    mine = table.rows[-2].name
    assert table.cell(mine, "× plain, T = 0").paper == 1.34
    assert table.cell(mine, "MAT, T = 1").paper == 3.01
    assert table.cell("other", "MAT, T = 0").paper == 3.19
    assert all(cell.ours > 0 for row in table.rows for cell in row.cells.values())
    assert {row.name for row in thresholds.rows} == {"τ 0", "τ 1"}
    figures = [row.cells["× plain"].ours for row in thresholds.rows]
    assert figures == sorted(figures, reverse=True)
    *judged, lacking = found.claims
    assert lacking.because.startswith("no sorted target was given, so Table 1 is left out")
    ratios = [claim.because.partition(" is ")[0] for claim in judged]
    # Measured times decide which exit is the best on tuning prompts.
    assert (ratios[0], ratios[-1]) == ("S2D ÷ plain", "S2D ÷ other")
    assert ratios[1] in [f"S2D ÷ {table.rows[number].name}" for number in (3, 4)]
    assert f"S2D ÷ {table.rows[1].name}" in ratios
    assert all(claim.because for claim in found.claims)


@pytest.mark.full
def test_s2d_with_several_targets(lm, target, options):
    def measured(**changes):
        return papers.find("s2d")(lm, dataclasses.replace(options, **changes), print)

    found = measured(targets=("second",))
    average, targets, first, _, second, _ = found.tables
    assert (first.title, second.title) == (
        "Table 2: one sorted draft, target tiny",
        "Table 2: one sorted draft, target second",
    )
    # Each target has a draft length of its own, and one row in the average.
    names = [row.name for row in average.rows]
    assert names == [
        *("plain", "the target's first 1, untrained", "other", "sorted, exit 1 + SD", "sorted, exit 2 + SD"),
        *("S2D", "oracle stop"),
    ]
    assert list(average.rows[-1].cells) == ["T = 0"]
    mine = [next(row.name for row in one.rows if row.name.startswith("S2D")) for one in (first, second)]
    speeds = [one.cell(run, "× plain, T = 1") for one, run in zip((first, second), mine, strict=True)]
    assert [cell.paper for cell in speeds] == [1.27, 1.38]
    assert average.cell("S2D", "T = 1").ours == pytest.approx(sum(cell.ours for cell in speeds) / 2)
    # A draw of two prompts is one of them, and here one has no speed: the ends need not enclose the figure.
    low, high = average.cell("S2D", "both").interval
    assert low <= high
    assert average.cell("S2D", "both").paper == 1.55
    assert any(note.startswith("There is no fitness test of second") for note in second.notes)
    says = [claim.says for claim in found.claims]
    assert any(
        one.startswith("second: S2D is faster than its whole draft alone (1.38 against 1.23)") for one in says
    )
    (claim,) = [one for one in found.claims if "every exit of its draft alone" in one.says]
    ratio = average.cell("S2D", "both").ours / average.cell("sorted, exit 2 + SD", "both").ours
    assert f"S2D ÷ sorted, exit 2 + SD is {ratio:.2f}" in claim.because
    assert [row.name for row in targets.rows] == ["tiny", "second"]
    assert targets.cell("second", "S2D").ours == second.cell(mine[1], "× plain, T = 0").ours
    assert all(row.cells["plain, tokens/s"].ours > 0 for row in targets.rows)
    assert found.claims[-2].because.startswith("no two targets of one size are known to differ")
    # Nothing is measured again, whatever the order: the second target's records are its own.
    again = measured(targets=("second",))
    assert dataclasses.asdict(again) == dataclasses.asdict(found)
    assert {path.parent.name for path in options.directory.rglob("temperature-1.jsonl")} == {
        *(options.directory.name, f"target-{target.fingerprint}")
    }
    with pytest.raises(ValueError, match="`targets` has the same, which is measured already; give each"):
        measured(targets=("second", "the same"))


@pytest.mark.slow
def test_a_sorted_target_drafts_for_itself(lm, target, options):
    found = papers.find("s2d")(lm, dataclasses.replace(options, sorted_target="sorted"), print)
    table = found.tables[-1]
    assert table.title.startswith("Table 1")
    names = [re.sub(r" \(.*|, K 2", "", row.name) for row in table.rows]
    assert names == [
        *("plain", "the target's first 1, untrained", "sorted draft, best single exit", "sorted draft, S2D"),
        *("sorted draft, oracle stop", "sorted target, best single exit", "sorted target, S2D"),
        "sorted target, oracle stop",
    ]
    *_, draft, _, _, mine, _ = table.rows
    assert (draft.cells["× plain"].paper, mine.cells["× plain"].paper) == (1.53, 1.21)
    assert all(row.cells["× plain"].ours > 0 for row in table.rows)
    assert mine.cells["right, %"] == Cell(33.51)
    assert any("there is no fitness.json beside tiny" in note for note in table.notes)
    speed, right = found.claims[-2:]
    assert speed.because.startswith("sorted draft ÷ sorted target is ")
    assert right.holds is None
    (records,) = (options.directory / "sorted-target").glob("temperature-*.jsonl")
    assert records.name == "temperature-0.jsonl"


@pytest.mark.slow
def test_a_sorted_target_is_counted(lm, target, options, tmp_path, monkeypatch):
    monkeypatch.setattr(s2d_runs, "THRESHOLDS", (0.0, 0.9, 1.0))
    given = dataclasses.replace(options, counts=True, runs={}, sorted_target="sorted", directory=tmp_path)
    found = papers.find("s2d")(lm, given, lambda what: None)
    assert found.sorted_target == "sorted"
    table, (free, priced, right) = found.tables[-1], found.claims[-3:]
    assert (table.columns, priced.costs) == ((FREE, "Vicuna-13B", "right, %"), "Vicuna-13B")
    ours = [table.cell(f"sorted {whose}", FREE).ours for whose in ("draft, S2D", "target, best single exit")]
    assert free.figure.ours == pytest.approx(ours[0] / ours[1])
    # An exit of a draft that costs half a step gives at most two tokens for each step.
    assert 0 < table.cell("sorted target, best single exit", "Vicuna-13B").ours < 2
    assert right.because.endswith("the prompts have no certain answers.")
    with pytest.raises(ValueError, match="`targets` is given, and `counts` are of one target"):
        papers.find("s2d")(lm, dataclasses.replace(given, targets=("second",)), print)


def test_table_1_compares_two_models_on_the_same_prompts():
    headings, kinds = (FREE, "Vicuna-13B"), ["a", "a"]

    def model(name, share, rounds, prices):
        tokens = np.array([12, 12])
        work = {
            Case(row, ""): Work(tokens, np.array([rounds] * 2), np.array([[4.0]] * 2)) for row in ("x", "S2D")
        }
        columns = tuple(Column(heading, [price]) for heading, price in zip(headings, prices, strict=True))
        chosen = {case.row: dict.fromkeys(headings, case) for case in work}
        return bench(name, sums=(share, 1000)), Counted(columns, chosen, work, kinds)

    table, claims = s2d_sorted_target.from_counts(
        model("plain", 0.9, 4, (0.5, 0.0)), model("sorted", 0.4, 5, (0.25, 0.75)), "x"
    )
    assert [row.name for row in table.rows] == [
        "plain",
        *(f"sorted {whose}, {row}" for whose in ("draft", "target") for row in ("x", "S2D")),
    ]
    # 12 tokens in 4 rounds and 4 passes.
    assert table.cell("sorted draft, S2D", FREE) == Cell(None, 2.0, (2.0, 2.0))
    assert table.cell("sorted target, S2D", "Vicuna-13B") == Cell(1.21, 1.5, (1.5, 1.5))
    assert table.cell("sorted target, S2D", "right, %").ours == 40
    faster, priced, right = claims
    assert (faster.figure.ours, faster.holds, faster.costs) == (1.0, None, FREE)
    assert (priced.figure.ours, priced.figure.paper, priced.holds) == (2.0, 1.53 / 1.21, True)
    assert (right.figure.ours, right.holds, right.costs) == (50, True, "")
    assert right.figure.paper == pytest.approx(15.46)


def bench(name, **kinds):
    """A workbench with a report of the fitness test: by kind of work, its accuracy and how many answers there are."""
    figures = {
        kind: {"accuracy": share and [0.0, share], "answers": count} for kind, (share, count) in kinds.items()
    }
    return SimpleNamespace(lm=SimpleNamespace(name=name), fitness={"kinds": figures} if kinds else None)


def measured(right=()):
    records = [SimpleNamespace(run="autoregressive", right=one, category="sums") for one in right]
    return SimpleNamespace(suite=SimpleNamespace(records=records))


def test_accuracy_is_of_the_kinds_that_all_reports_have():
    models = [
        (bench("a", sums=(0.9, 1000), edits=(0.7, 1000), stories=(None, None)), measured([None])),
        (bench("b", sums=(0.4, 1000), labels=(1.0, 10)), measured([None])),
    ]
    found = accuracy.accuracies(models)
    assert [found.cell(model).ours for model in (0, 1)] == [90, 40]
    low, high = found.cell(0).interval
    assert 87 < low < 90 < high < 93
    assert found.note.endswith("the mean over sums.")
    claim = found.more("A is right.", (0, 1), ("a", "b"))
    assert claim.holds
    assert claim.because.startswith("a − b, in percentage points, is 50.00 (4")
    # Older reports do not say how many answers they have.
    old = accuracy.accuracies([(bench("a", sums=(0.9, None)), measured()), models[1]])
    assert (old.cell(0).ours, old.cell(0).interval) == (90, None)
    claim = old.more("A is right.", (0, 1), ("a", "b"))
    assert (claim.holds, "is 50.0, without an interval" in claim.because) == (None, True)
    none = accuracy.accuracies(
        [(bench("a", sums=(0.9, 3)), measured()), (bench("b", edits=(0.9, 3)), measured())]
    )
    assert none.drawn == (None, None)
    assert "no kind of answers in common" in none.note


def test_accuracy_is_of_prompts_with_answers_where_there_are_some():
    some = [(True, True), (True, False), None, (False, False), (True, True)]
    found = accuracy.accuracies([(bench("a", sums=(0.9, 9)), measured(some))])
    assert found.cell(0).ours == 62.5
    assert found.cell(0).interval[0] < 62.5
    assert "answers to 4 prompts" in found.note
    alone = accuracy.accuracies([(bench("a"), measured(some[:1]))])
    assert (alone.cell(0).ours, alone.cell(0).interval) == (100, None)


def test_an_average_is_drawn_from_the_same_prompts_of_all_targets():
    # One target is fast where the other is slow: on every draw of prompts the average is the same.
    def served(fast):
        drawn = SimpleNamespace(drawn=lambda run: 1 + speed.weights("aa")[:, fast] / 2)
        return SimpleNamespace(named={"x": "x"}, runs={0.0: drawn})

    both = s2d_average.drawn([served(0), served(1)], "x", [0.0])
    assert speed.spread(both) == (1.5, (1.5, 1.5))


def test_targets_that_have_room_for_other_prompts_are_refused(lm, draft, monkeypatch):
    wide = tiny.language_model(max_position_embeddings=64)
    long = {"tuning": {"stories": ("One",)}, "reporting": {"stories": ("Once", "Once" * 20)}}
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: long[split])
    config = dataclasses.replace(lm.config, max_position_embeddings=32)
    narrow = LanguageModel(config, params(TARGET, 7), lm.tokenizer, name="narrow")
    monkeypatch.setattr(s2d, "load", lambda name, **given: narrow)
    options = PaperOptions(max_new_tokens=8, draft=draft, targets=("narrow",))
    with pytest.raises(
        ValueError, match="1 of the prompts fit into the context of only one of tiny and narrow with"
    ):
        s2d.measure(wide, options)


def test_further_targets_are_spread_over_the_mesh_of_the_first(monkeypatch):
    monkeypatch.setattr(s2d, "load", lambda name, **given: given["mesh"])
    lm = SimpleNamespace(dtype="float32", weights=None, platform="cpu", mesh="of the first")
    assert s2d._loaded(SimpleNamespace(lm=lm, on_progress=print), "x") == "of the first"


def served(name, right, speeds, size=1):
    """A target of which prompt by prompt it is known whether plain decoding is right, and S2D's speed-up."""
    config = SimpleNamespace(num_layers=size, hidden_size=8, intermediate_size=8, vocab_size=8)
    records = [
        SimpleNamespace(run="autoregressive", right=(one,), category="sums", texts=()) for one in right
    ]
    drawn = speed.weights(["sums"] * len(right)) @ np.array(speeds) / len(right)
    run = SimpleNamespace(
        suite=SimpleNamespace(records=records),
        taken=lambda run: [()] * len(right),
        drawn=lambda run: drawn,
        ratio=lambda run, paper=None: Cell(paper, drawn[0]),
    )
    draft = SimpleNamespace(run="x")
    made = SimpleNamespace(lm=SimpleNamespace(name=name, config=config), fitness=None)
    return SimpleNamespace(bench=made, target=name, runs={0.0: run}, single=draft, mine=draft)


def test_of_targets_of_one_size_the_one_that_is_more_often_right_was_trained(monkeypatch):
    monkeypatch.setattr(s2d_targets, "tokens_per_second", lambda taken: 9.0)
    vanilla = served("vanilla", [False, False, False], [1.2, 1.3, 1.2])
    trained = served("trained", [True, True, True], [1.5, 1.6, 1.5])
    larger = served("larger", [True, True, True], [1.1, 1.1, 1.1], size=2)
    table, claim = s2d_targets.table([vanilla, larger, trained])
    printed = {row.name: (row.cells["right, %"].paper, row.cells["S2D"].paper) for row in table.rows}
    assert printed == {"vanilla": (28.7, 1.38), "larger": (None, None), "trained": (48.97, 1.53)}
    assert claim.holds
    assert claim.because.startswith(
        "S2D's speed-up on trained (100.0 % right) ÷ on vanilla (0.0 % right) is 1.24 ("
    )
    # Which of two is better at the task must be known first.
    alike = served("alike", [False, True, False], [1.2, 1.3, 1.2])
    claim = s2d_targets.table([vanilla, alike])[1]
    assert (claim.holds, claim.because[:60]) == (
        None,
        "alike − vanilla, in percentage points, is 33.33 (0.00–100.00",
    )
    assert s2d_targets.table([vanilla, larger])[1].holds is None


@pytest.mark.full
def test_the_ideal_stop_of_a_draft_is_that_of_an_exit_of_the_same_layers(lm, tmp_path):
    huggingface.save(tmp_path / "twin", lm.config, lm.params)
    with Workbench(lm, PaperOptions(max_new_tokens=16)) as made:
        apart, within = baselines.ideal_draft(made, str(tmp_path / "twin"), 1), baselines.ideal_exit(made, 1)
        found, other = apart([9, 9], 0), within([9, 9], 0)
    plain = lm.generate([9, 9], method="autoregressive", max_new_tokens=16, temperature=0.0)
    assert found.tokens == other.tokens == plain.tokens
    mine, its = found.statistics, other.statistics
    assert mine.num_accepted_tokens == its.num_accepted_tokens > 1
    assert mine.num_draft_tokens == its.num_draft_tokens < 19  # as many as without the rule


def test_a_small_model_that_was_sorted_stands_for_table_4(lm, draft, tmp_path):
    small = str(tmp_path / "small")
    huggingface.save(small, lm.config, params(TARGET, 8), trained_for=TrainedFor((1, 2)))
    runs = {
        "small S2D": S2D(draft=small),
        "twin": DraftModel(draft=draft),
        "small exit": DraftModel(draft=small, draft_exit=1),
        "other": DraftModel(draft=draft, draft_exit=1),
    }
    options = PaperOptions(max_new_tokens=8, draft=draft, runs=runs, directory=tmp_path)
    with Workbench(lm, options) as bench:
        asked = []

        def fastest(name, split, candidates):
            asked.append((name, [one.draft for one in candidates.values()]))
            return SimpleNamespace(ratio=lambda run: Cell(ours={"τ 0": 1.0, "τ 1": 2.0}[run]))

        bench.measure = fastest
        found = s2d_runs.sorted_draft(lm, draft)
        drafts = {one.name: one for one in s2d_runs._drafts(bench, draft, found, (0.5,))}
    assert {name: drafts[name].role for name in runs} == {
        "small S2D": "small S2D",
        "twin": "SFT",
        "small exit": "small first",
        "other": None,
    }
    # Tuned as the paper's own draft is.
    assert asked == [("thresholds-run-0", [small, small])]
    assert drafts["small S2D"].note == "small S2D: τ 1, the fastest on tuning prompts."
    assert drafts["small S2D"].method.thresholds == str(tmp_path / "thresholds-run-0-1.json")


@pytest.mark.full
def test_thresholds_are_those_of_the_run(lm, draft):
    # Always the first exit, or never: as drafts, the first layer alone and both.
    with Workbench(lm, PaperOptions(max_new_tokens=8, repeats=1)) as bench:
        found = s2d_runs.sorted_draft(lm, draft)
        by_exit = {
            1: s2d_runs._sorted(bench, S2D(draft=draft), found, (0.0,)),
            2: s2d_runs._sorted(bench, S2D(draft=draft), found, (1.0,)),
        }
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
        found = s2d_runs.sorted_draft(lm, draft)
        drafts = {one.name: one for one in s2d_runs._drafts(bench, draft, found, (0.5,))}
        asked = []

        def fastest(name, split, candidates):
            asked.append((split, list(candidates)))
            return SimpleNamespace(best=max, ratio=lambda run: Cell(ours=1.5))

        bench.measure = fastest
        tuned = s2d_runs._with_best_length(bench, drafts["a"], 0)
        assert asked == [("tuning", ["schedule", "K 2"])]
        assert (tuned.method.stop_rule, tuned.tuning) == (("adaptive-length",), 1.5)
        assert s2d_runs._with_best_length(bench, drafts["b"], 1).method == fixed


def test_another_draft_in_the_same_place_has_records_of_its_own(lm, draft, tmp_path):
    def header(seed):
        huggingface.save(tmp_path / "draft", lm.config, params(TARGET, seed), trained_for=TrainedFor((1, 2)))
        method = DraftModel(draft=str(tmp_path / "draft"))
        distribution = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return Suite(
            tiny.language_model(),
            [Task("1", "a", ("One",))],
            {"x": method},
            SuiteOptions(),
            distribution=distribution,
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
