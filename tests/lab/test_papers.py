"""`python -m benchmarks.papers`: a paper's figures beside ours, its claims judged, and the command's messages."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import papers
from benchmarks.papers import asd_runs, baselines, command, sampling
from benchmarks.papers.options import PaperOptions
from benchmarks.papers.tables import Cell, Claim, Report, Row, Table, all_hold, more_than
from benchmarks.papers.workbench import Column, Workbench, speeds
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.method_files import FITNESS_FORMAT
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.line_log import LineLog
from jaxspec.measuring.tuning import inspection, mask_search
from jaxspec.measuring.tuning.round_costs import Costs
from jaxspec.measuring.tuning.tuning_options import ASDGrid
from jaxspec.methods import DraftModel, LayerSkip, NGram
from tests import tiny
from tests.commands import called

SPLITS = {
    "tuning": {
        "stories": ("One", "Two"),
        "code": ("def a", "def badcab(ab, cd): dad"),
        "copy-edit": ("Copy: x", "Copy: y"),
    },
    "reporting": {
        "stories": ("Once", "Upon"),
        "code": ("def f", "def g"),
        "copy-edit": ("Copy: p", "Copy: q"),
    },
}
REPORT = Report(
    "A paper (2024)",
    "tiny",
    "cpu",
    "float32",
    ("AUROC",),
    {"tuning": 0, "reporting": 2},
    {"max_new_tokens": 9, "repeats": 2, "seed": 5},
    (
        Table(
            "Table 3: × plain",
            ("T = 0", "T = 0.2", "T = 0.6"),
            (
                Row("Draft & Verify", {"T = 0": Cell(1.495, 1.2, (1.1, 1.3)), "T = 0.6": Cell(ours=12345.0)}),
                Row("a run whose name is rather long, so that it breaks", {"T = 0.2": Cell(1.422)}),
            ),
            ("A note.",),
        ),
    ),
    (Claim("It is fast.", None, "one prompt"), Claim("It is good.", True, "1 > 0")),
)


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: SPLITS[split])
    # A tiny model compiles longer than it runs.
    monkeypatch.setattr(baselines, "CONSTANTS", (1,))
    monkeypatch.setattr(baselines, "_SHARES", (2,))


# Tables and claims


@pytest.mark.parametrize(
    ("cell", "bound", "holds", "because"),
    [
        (Cell(ours=1.2, interval=(1.1, 1.3)), 1.0, True, "a ÷ b is 1.20 (1.10–1.30), above 1.00"),
        (Cell(ours=1.2, interval=(1.1, 1.3)), 2.0, False, "a ÷ b is 1.20 (1.10–1.30), below 2.00"),
        (
            Cell(ours=1.2, interval=(0.9, 1.3)),
            1.0,
            None,
            "a ÷ b is 1.20 (0.90–1.30), and its interval contains 1.00",
        ),
        (Cell(ours=1.2), 1.0, None, "a ÷ b is 1.20, of one prompt, which has no interval"),
        (Cell(1.5), 1.0, None, "a ÷ b was not measured"),
    ],
)
def test_an_interval_judges_a_claim(cell, bound, holds, because):
    figure = None if cell.ours is None else cell
    assert more_than("It is.", "a ÷ b", cell, bound) == Claim("It is.", holds, because, figure=figure)


@pytest.mark.parametrize(
    ("parts", "holds"),
    [((True, True), True), ((True, None), None), ((None, False), False), ((True, False), False)],
)
def test_a_claim_of_several_parts(parts, holds):
    assert all_hold("All.", [Claim("", part, "x") for part in parts]) == Claim("All.", holds, "x; x")


# The workbench


@pytest.mark.full
def test_speeds_by_column_are_of_the_kinds_it_names(tmp_path):
    lm = tiny.language_model()
    told = []
    with Workbench(lm, PaperOptions(max_new_tokens=4, repeats=1, directory=tmp_path), told.append) as bench:
        measured = bench.measure("greedy", "reporting", {"ngram": NGram(num_draft_tokens=1)})
        columns = {"all": Column(measured), "code": Column(measured, ("code",))}
        made = speeds("Table 1", columns, {"ngram": {"code": 2.0}})
        report = bench.report("A paper", [made], [])
    assert [len(measured.taken("ngram", kinds)) for kinds in ((), ("code",))] == [6, 2]
    assert made.columns == ("all", "code")
    assert made.cell("plain", "code") == Cell(1.0, 1.0)
    assert made.cell("ngram", "code").paper == 2.0
    assert made.cell("ngram", "all").ours == measured.ratio("ngram").ours
    assert made.cell("ngram", "code").ours == measured.ratio("ngram", kinds=("code",)).ours
    assert (report.prompts, report.fitness) == ({"tuning": 0, "reporting": 6}, None)
    assert told[0].startswith("greedy: ")
    # What is written down is not measured again.
    before = (tmp_path / "greedy.jsonl").read_text()
    with Workbench(lm, PaperOptions(max_new_tokens=4, repeats=1, directory=tmp_path)) as bench:
        again = bench.measure("greedy", "reporting", {"ngram": NGram(num_draft_tokens=1)})
    assert again.ratio("ngram") == measured.ratio("ngram")
    assert (tmp_path / "greedy.jsonl").read_text() == before


@pytest.mark.full
def test_tuning_prompts_are_others_and_are_measured_once():
    with Workbench(tiny.language_model(), PaperOptions(limit=2, max_new_tokens=4, repeats=2)) as bench:
        name, method = baselines.fastest(bench, "tuning", {"a": LayerSkip(exit_layer=1, num_draft_tokens=1)})
        assert (name, method.exit_layer) == ("a", 1)
        assert [task.turns[0] for task in bench.tasks("tuning")] == ["One", "def a"]
        assert [task.turns[0] for task in bench.tasks("reporting", ["code"])] == ["def f", "def g"]
        log = (bench.directory / "tuning.jsonl").read_text()
        assert '"repeats": 1' in log
    assert not bench.directory.exists()


def test_models_that_cannot_be_measured_are_refused():
    one = tiny.language_model(tiny.SMALL)
    with pytest.raises(ValueError, match="has one layer, and the papers' drafts leave layers out"):
        Workbench(one, PaperOptions())
    lm = LanguageModel(tiny.TARGET, tiny.params(), name="mute")
    with pytest.raises(ValueError, match="mute has no tokenizer; prompts of text need one"):
        Workbench(lm, PaperOptions())
    short = tiny.language_model(max_position_embeddings=64)
    with Workbench(short, PaperOptions(max_new_tokens=57)) as bench:
        lengths = [len(bench.lm.encode(task.text([]))) for task in bench.tasks("tuning")]
        assert min(lengths) <= 7 < max(lengths)
        assert list(map(len, bench.encoded("tuning"))) == [one for one in lengths if one <= 7]
        # What did not fit was not measured.
        assert bench.report("A paper", [], []).prompts["tuning"] == sum(one <= 7 for one in lengths)
    with (
        pytest.raises(ValueError, match="none of the prompts fits into the context of 64 tokens"),
        Workbench(short, PaperOptions(max_new_tokens=64)) as bench,
    ):
        bench.encoded("tuning")


def fitness(lm, loss: list[float], failed: bool = False) -> dict:
    check = {"name": "AUROC", "value": 0.5, "wanted": "at least 0.85", "passed": not failed}
    kind = {"tokens": 10, "loss": loss}
    return {"format": FITNESS_FORMAT, "model": lm.fingerprint, "kinds": {"a": kind}, "checks": [check]}


def test_a_model_that_does_not_need_its_depth_is_cut(tmp_path):
    lm = tiny.language_model()
    options = PaperOptions(max_new_tokens=4)

    def cut() -> baselines.Cut:
        with Workbench(lm, options) as bench:
            return baselines.cut(bench)

    assert cut().name is None  # in memory
    lm.directory = tmp_path
    assert "no fitness.json beside the model" in cut().note
    path = tmp_path / "fitness.json"
    path.write_text(json.dumps(fitness(lm, [3.0, 2.9], failed=True)))
    assert (cut().name, cut().note) == (
        None,
        "Plain, cut to the useful depth: none; no exit has the whole model's held-out loss within .02.",
    )
    with Workbench(lm, options) as bench:
        assert bench.report("A paper", [], []).fitness == ("AUROC",)
    path.write_text(json.dumps(fitness(lm, [2.915, 2.9])))
    found = cut()
    assert found.name == "plain, cut to 1 layers"
    assert [model.config.num_layers for model in found.models] == [1]
    alone = found.peers[found.name]([3, 4], 0)
    assert alone.tokens == found.models[0].generate([3, 4], method="autoregressive", max_new_tokens=4).tokens
    path.write_text(json.dumps(fitness(lm, [3.0, 2.9]) | {"model": "f00d"}))
    with pytest.raises(ValueError, match=r"fitness\.json belongs to another model"):
        cut()


@pytest.mark.full
def test_the_ideal_stop_drafts_nothing_wrong_after_the_first():
    lm = tiny.language_model()
    with Workbench(lm, PaperOptions(max_new_tokens=16)) as bench:
        found = baselines.ideal_exit(bench, 1)([3, 4], 0)
    plain = lm.generate([3, 4], method="autoregressive", max_new_tokens=16, temperature=0.0)
    assert found.tokens == plain.tokens
    histogram = found.statistics.acceptance_histogram
    drafted = found.statistics.num_draft_tokens - found.statistics.num_accepted_tokens
    assert drafted == histogram[0]  # only a draft's first token may be wrong


# The papers


@pytest.mark.slow
def test_sampling(monkeypatch, tmp_path):
    monkeypatch.setattr(sampling, "TEMPERATURES", (0.0, 1.0))
    monkeypatch.setattr(sampling, "K", 2)
    lm = tiny.language_model()
    found = papers.find("sampling")(lm, PaperOptions(max_new_tokens=8, repeats=1, directory=tmp_path), print)
    speed, accepted, copying = found.tables
    draft = "first 1 layers, K 2, untrained"
    assert [row.name for row in speed.rows] == [
        *("plain", draft, "best constant: exit 1, K 1", f"{draft}, token-wise", "oracle stop")
    ]
    assert speed.cell(draft, "T = 0").paper == 2.61
    assert speed.cell(f"{draft}, token-wise", "T = 0") == Cell()
    assert speed.cell(f"{draft}, token-wise", "T = 1").ours > 0
    assert copying.cell("ngram", "copy-edit").paper == 2.06
    for row in accepted.rows:
        rate = row.cells["a"].ours
        assert row.cells["expected"].ours == pytest.approx(1 + rate + rate**2)
    assert {claim.says[:6] for claim in found.claims} >= {"A draf", "N-gram"}
    assert all(claim.because for claim in found.claims)


def deep_model() -> LanguageModel:
    """Of enough layers to skip some."""
    config = dataclasses.replace(tiny.engine_config(tiny.TARGET), num_layers=3)
    weights = tiny.params(dataclasses.replace(tiny.TARGET, num_layers=3))
    return LanguageModel(config, weights, tiny.tokenizer(), name="deep")


@pytest.mark.full
def test_asd(monkeypatch, tmp_path):
    monkeypatch.setattr(asd_runs, "TRIALS", 2)
    monkeypatch.setattr(asd_runs, "GRID", ASDGrid((0.9, 1.0), (0, 2), (0, 1)))
    monkeypatch.setattr(asd_runs, "CONSTANTS", (1,))
    monkeypatch.setattr(asd_runs, "TRUNCATED", (1,))
    monkeypatch.setattr(asd_runs, "K", 2)
    costs = Costs(1.0, 2.0, 0.5, tuple((rows, 10.0 + rows) for rows in range(1, 20)))
    monkeypatch.setattr(mask_search, "measure_costs", lambda lm, on_progress: costs)
    monkeypatch.setattr(inspection, "sublayer_ms", lambda *given: {"attention": 2.0, "mlp": 1.0})
    lm, options = deep_model(), PaperOptions(limit=2, max_new_tokens=6, repeats=1, directory=tmp_path)
    found = papers.find("asd")(lm, options, print)
    tables = {table.title.partition(":")[0]: table for table in found.tables}
    assert list(tables) == ["Table 1", "Table 3", "Table 4", "Table 5", "Section 4", "Section 4.1"]
    three = tables["Table 3"]
    plain, truncated, *others = [row.name for row in three.rows]
    assert (plain, truncated[:16]) == ("plain", "untrained: first")
    assert others == [
        "best constant: ASD, tuned, K 1",
        "Draft & Verify",
        "ASD, the paper's numbers",
        "ASD, tuned",
        "oracle stop",
    ]
    for table, row, column, paper in [
        ("Table 1", "median", "mlp", 0.960),
        ("Table 3", "Draft & Verify", "T = 0.2", 1.479),
        ("Table 4", "ASD, the paper's numbers", "T = 0.6", 1.340),
        ("Table 5", "cosine and rule 2", "the paper's numbers", 1.340),
        ("Section 4", "Draft & Verify", "seconds", 39600),
        ("Section 4.1", "ASD, the paper's numbers", "code", 1.365),
    ]:
        cell = tables[table].cell(row, column)
        assert cell.paper == paper
        assert cell.ours > 0
    assert tables["Section 4"].cell("Draft & Verify", "masks tried").ours == 4
    assert all(claim.because for claim in found.claims)
    # Greedy texts are plain decoding's, and γ goes from text to text.
    assert not any("not plain decoding's" in note for table in found.tables for note in table.notes)
    lines = [json.loads(line) for line in (tmp_path / "temperature-0.jsonl").read_text().splitlines()]
    assert lines[0]["carry_gamma"] is True
    # Nothing is measured again.
    files = {path: path.read_text() for path in tmp_path.glob("*.jsonl")}
    again = papers.find("asd")(lm, options, print)
    assert dataclasses.asdict(again) == dataclasses.asdict(found)
    assert files == {path: path.read_text() for path in tmp_path.glob("*.jsonl")}


# The command


@pytest.fixture
def run(capsys, monkeypatch, model):
    """Runs the command with a paper that is measured already; returns status, standard output and standard error."""
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    asked = []

    def measure(lm, options, on_progress):
        asked.append((lm.name, options))
        if not isinstance(call.found, Report):
            raise call.found
        return call.found

    def call(*arguments: object) -> tuple[int, str, str]:
        paper = "s2d" if "--draft" in arguments else "sampling"
        return called(capsys, paper, "--model", model, *arguments, main=command.main)

    monkeypatch.setattr(command, "find", lambda name: measure)
    call.found, call.asked = REPORT, asked
    return call


def test_the_command_prints_a_papers_tables(run, tmp_path):
    status, out, err = run(
        "--limit", 3, "--repeats", 2, "--max-new-tokens", 9, "--seed", 5, "--output", tmp_path
    )
    assert status == 0, err
    (_, options) = run.asked[0]
    assert options == PaperOptions(3, 9, 2, seed=5, directory=tmp_path)
    assert "tiny, float32, cpu; prompts: 2 reporting; 9 tokens, 2 turns" in out
    assert "1.495 | 1.20" in out
    assert "– | 12,345" in out
    assert "(1.10–1.30)" in out
    assert "1.422 | –" in out
    assert "fitness: FAILED (AUROC)" in out
    assert "cannot be told: It is fast.\n  one prompt" in out
    drawn = [line for line in out.splitlines() if "|" in line or "─" in line]
    assert max(map(len, drawn)) <= 80
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(json.dumps(dataclasses.asdict(REPORT)))
    assert written["format"] == "jaxspec.paper/1"


def test_a_paper_is_measured_on_a_mesh(run):
    status, _, err = run("--mesh", "data=1,model=1")
    assert status == 0, err
    assert run.asked


def test_a_paper_about_drafts_takes_them(run):
    words = "draft-model --draft other"
    targets = ("--target", "a", "--target", "b", "--sorted-target", "c")
    status, _, err = run("--draft", "some", "--run", words, "--prompt-file", "x.txt", *targets)
    assert status == 0, err
    options = run.asked[0][1]
    assert (options.draft, options.prompt_file) == ("some", ("x.txt",))
    assert (options.targets, options.sorted_target) == (("a", "b"), "c")
    assert options.runs == {words: DraftModel(draft="other")}


def test_the_command_prints_json(run):
    status, out, _ = run("--json", "--no-resume")
    assert (status, json.loads(out)["paper"]) == (0, "A paper (2024)")
    assert run.asked[0][1] == PaperOptions(resume=False)


def test_an_interruption_says_what_is_kept(run, tmp_path):
    run.found = KeyboardInterrupt()
    status, _, err = run()
    assert (status, err.splitlines()[-1]) == (
        130,
        "jaxspec: interrupted; no measurements were stored; give --output to be able to resume",
    )
    output = tmp_path / "new"
    _, _, err = run("--output", output)
    assert err.splitlines()[-1] == "jaxspec: interrupted; no measurements were stored"
    assert not output.exists()
    (tmp_path / "grid.jsonl").write_text("{}")
    _, _, err = run("--output", tmp_path)
    assert f"the measurements are in {tmp_path}; the same command resumes them" in err
    _, _, err = run("--output", tmp_path, "--no-resume")
    assert f"the measurements are in {tmp_path}; the same command, without --no-resume, resumes them" in err


@pytest.mark.parametrize(
    ("arguments", "differs"),
    [
        (("s2d", "--counts"), "its paper is 'asd', now 's2d'"),
        (("asd",), "its form is 'counts', now 'times'"),
        (("asd", "--counts", "--weights", "int8"), "its dtype is 'float32', now 'float32, int8 weights"),
    ],
)
def test_an_output_has_one_measurement(capsys, monkeypatch, model, tmp_path, arguments, differs):
    monkeypatch.setattr(command, "find", lambda name: lambda lm, options, say: REPORT)
    where = ("--model", model, "--output", tmp_path)
    assert called(capsys, "asd", "--counts", *where, main=command.main)[0] == 0
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    status, _, err = called(capsys, *arguments, *where, main=command.main)
    assert (status, err.count("\n")) == (2, 1)
    assert f"belongs to another measurement: {differs}" in err
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}
    log = LineLog(tmp_path / "grid.jsonl", {"format": "jaxspec.paper/1/grid"}, of="benchmark")
    own = tmp_path / "prompts.jsonl"
    own.write_text('{"prompt": "mine"}\n')
    assert called(capsys, *arguments, *where, "--no-resume", main=command.main)[0] == 0
    assert (log.path.exists(), own.exists()) == (False, True)
    (tmp_path / command.MEASUREMENT).unlink()
    status, _, err = called(capsys, *arguments, *where, "--no-resume", main=command.main)
    assert (status, err.count("\n")) == (2, 1)
    assert f"{tmp_path / command.REPORT} has no {command.MEASUREMENT} beside it" in err


def test_a_refused_measurement_leaves_no_output(run, tmp_path):
    output = tmp_path / "new"
    run.found = ValueError("no draft")
    assert run("--output", output)[0] == 2
    assert not output.exists()
    run.found = REPORT
    assert run("--output", output, "--draft", "some")[0] == 0


def test_a_missing_model_leaves_no_output(capsys, tmp_path):
    output = tmp_path / "new"
    status, _, _ = called(capsys, "asd", "--model", tmp_path / "none", "--output", output, main=command.main)
    assert (status, output.exists()) == (2, False)


def test_the_times_of_asd_take_no_prompt_files(capsys, monkeypatch, model):
    arguments = ("asd", "--model", model, "--prompt-file", "x.txt")
    status, _, err = called(capsys, *arguments, main=command.main)
    assert (status, err.count("\n")) == (2, 1)
    assert "kinds of the project's own prompts; give --counts too, or leave --prompt-file out" in err
    assert called(capsys, *arguments[:3], "--untuned", main=command.main)[0] == 2
    asked = []
    monkeypatch.setattr(
        command, "find", lambda name: lambda lm, options, say: asked.append(options) or REPORT
    )
    assert called(capsys, *arguments, "--counts", main=command.main)[0] == 0
    assert (asked[0].prompt_file, asked[0].counts) == (("x.txt",), True)


@pytest.mark.parametrize(
    "arguments",
    [("--run", "ngram"), ("--prompt-file", "x.txt"), ("--target", "x"), ("--sorted-target", "x")],
)
def test_options_of_another_paper_are_refused(run, arguments):
    status, _, err = run(*arguments)
    assert status == 2
    assert err == f"benchmarks.papers: error: paper sampling has no option {arguments[0]}; leave it out\n"
    assert not run.asked


@pytest.mark.parametrize(
    "arguments",
    [
        ("--methods", "ngram"),
        ("--batch", "2"),
        ("--chat-template", "x.jinja"),
        ("--temperature", "1"),
        ("--exit-layer", "3"),
        ("--carry-gamma",),
    ],
)
def test_options_of_prompt_sets_are_refused(run, arguments):
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert arguments[0] in err
    assert not run.asked


def test_the_benchmark_of_prompt_sets_measures_no_paper(capsys, model):
    status, _, err = called(capsys, "bench", "--model", model, "--paper", "sampling")
    assert (status, err.count("\n")) == (2, 1)
    assert "--paper" in err


@pytest.mark.full
def test_an_unknown_paper_is_refused(run):
    assert command.main(["eagle"]) == 2
    with pytest.raises(ValueError, match=r"unknown paper 'eagle'; give one of .*sampling"):
        papers.find("eagle")
