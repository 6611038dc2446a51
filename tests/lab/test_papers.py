"""`python -m benchmarks.papers`: counts of a tiny model, the tables that stored counts give, and the pages' figures."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import adaspeed, asd, counts, s2d
from benchmarks.papers.__main__ import COUNTS, main
from jaxspec.cli.options import ModelOptions
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.hf import huggingface
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.bench import prompts
from jaxspec.measuring.tuning.s2d_sweep import sorted_draft
from jaxspec.methods import AdaSPEED, LayerSkip
from jaxspec.testing.models import DEEP, engine_config, params, tokenizer

SPLITS = {
    "tuning": {"stories": ("One", "Two"), "code": ("def a",)},
    "reporting": {"stories": ("Once", "Upon"), "code": ("def f",)},
}
RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Rows of the pages by those of the counts.
NAMES = {f"exit {layers} alone": row for layers, row in zip((2, 4, 6), s2d.ALONE, strict=True)}


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(engine_config(DEEP), params(DEEP), tokenizer(), name="tiny")


@pytest.fixture
def little(monkeypatch, lm):
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: SPLITS[split])
    monkeypatch.setattr(ModelOptions, "load", lambda self: lm)
    for module, name, value in (
        *((s2d, "THRESHOLDS", (1.0, 0.9, 0.0)), (s2d, "LENGTHS", (2,))),
        *((adaspeed, "LENGTHS", (2,)), (adaspeed, "GAMMAS", (0.3, 0.8)), (adaspeed, "exits", lambda _: [1])),
        *((asd, "EVERYS", (0, 2)), (asd, "KEEP_LASTS", (0, 1)), (asd, "TRIALS", 2)),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def draft(lm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("draft")
    huggingface.save(directory, lm.config, params(DEEP, 3), trained_for=TrainedFor((1, 2, 3)))
    return str(directory)


ROWS = {
    "asd": {asd.SEARCHED, asd.PRINTED, asd.TUNED, *asd.TABLE_5},
    "adaspeed": {adaspeed.CONSTANT, adaspeed.STOP, adaspeed.PRODUCT},  # without a probe
    "s2d": {*s2d.ALONE, s2d.SORTED, s2d.SINGLE, s2d.SFT},
}


@pytest.mark.full
@pytest.mark.parametrize("paper", ROWS)
def test_tables_are_those_of_the_stored_counts(paper, little, draft, tmp_path, capsys, monkeypatch):
    given = [paper, "--max-new-tokens", "8", "--json"]
    words = [*given, "--output", str(tmp_path)]
    words += ["--draft", draft, "--unsorted", draft] if paper == "s2d" else []
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert main([*given, "--counts", str(tmp_path / COUNTS)]) == 0
    assert json.loads(capsys.readouterr().out) == report
    found = counts.read_counts(tmp_path / COUNTS)
    assert (found.chosen.keys(), list(found.kinds)) == (ROWS[paper], ["stories", "code", "stories"])
    made = importlib.import_module(f"benchmarks.papers.{paper}").PAPER
    assert [table["title"] for table in report["tables"]] == [table.title for table in made.tables]
    assert {claim["says"] for claim in report["claims"]} >= {
        claim.says
        for claim in made.claims
        if claim.row in ROWS[paper] and claim.other in (None, *ROWS[paper])
    }
    for table in report["tables"]:
        assert all(cell["ours"] > 0 for row in table["rows"].values() for cell in row.values())
    # The logs have every count: nothing is generated again.
    monkeypatch.setattr(counts.Bench, "generate", None)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main(words[:-2] if paper == "s2d" else words) == 0  # for people
    assert made.title in capsys.readouterr().out or paper != "s2d"


@pytest.mark.full
def test_drafts_are_counted_with_those_after_the_end(lm, tmp_path, draft):
    """An early exit has a layer and a head for each draft token; S2D with thresholds of 1 is its last exit."""
    bench = counts.Bench(lm, tmp_path, max_new_tokens=12)
    prompt = lm.encode("abc")
    result, (layers, heads) = adaspeed._count(bench, LayerSkip(exit_layer=2, num_draft_tokens=3), prompt)
    statistics = result.statistics
    assert layers == 2 * heads
    assert statistics.num_draft_tokens <= heads <= 3 * statistics.num_rounds
    _, (_, all_heads) = adaspeed._count(
        bench, AdaSPEED(exit_layer=2, num_draft_tokens=3, gamma=0.999), prompt
    )
    assert 0 < all_heads < heads
    made = sorted_draft(lm, draft)
    result, passes = s2d.count(bench, made.drafter, s2d.Setting(made.params, (1.0, 1.0), 3), prompt)
    *depths, heads = passes
    assert depths[:2] == [0, 0]
    assert depths[2] == heads >= result.statistics.num_draft_tokens
    plain = lm.generate(prompt, method="autoregressive", max_new_tokens=12, temperature=0.0)
    assert result.tokens == plain.tokens


@pytest.mark.full
def test_asd_is_counted_as_its_drafter_drafts(lm, tmp_path):
    bench, prompt = counts.Bench(lm, tmp_path, max_new_tokens=10), lm.encode("abcabc")
    numbers = ASDNumbers(every=2, keep_last=1)
    result, (attention, mlp, drafted) = asd.Masks(bench).count(numbers, prompt)
    own = lm.generate(
        prompt, method="asd", alpha=0.985, every=2, keep_last=1, num_draft_tokens=asd.K, max_new_tokens=10
    )
    assert (result.tokens, result.statistics.num_rounds) == (own.tokens, own.statistics.num_rounds)
    assert drafted == own.statistics.num_draft_tokens
    assert 0 < attention <= drafted
    assert 0 < mlp <= drafted


def test_a_round_costs_a_step_and_a_pass_its_parts():
    work = counts.Work([9, 4], [3, 4], [[6.0, 2.0], [0.0, 0.0]])
    assert float(work.speed([0.5, 0.0])) == pytest.approx(13 / 10)
    assert work.speed([0.5, 1.5], np.array([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx([9 / 9, 1.0])


@pytest.mark.parametrize(("tokens", "holds"), [((9, 8, 9), True), ((3, 2, 3), False), ((9, 1, 9), None)])
def test_a_claim_is_judged_by_its_interval(tokens, holds):
    found = counts.Counts(
        *("asd", "m", "float32", ["a", "a", "a"], {counts.FREE: [0.0]}),
        {"all rules": {counts.FREE: "all rules"}},
        {"all rules": [list(tokens), [4, 4, 4], [[0.0]] * 3]},
    )
    paper = counts.Paper("P", (counts.Table("T"),), (counts.Claim("It is fast.", "all rules"),), {})
    (claim,) = counts.report(paper, found)["claims"]
    assert claim["holds"] is holds


def page_cells(paper):
    """Yields the cells of the counts on a paper's page that have a line for `large` and one for `small`."""
    text = (RESULTS / f"{paper}.md").read_text("utf-8").partition("\n## On the clock")[0]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        (_, *headings), _, *rows = (
            [cell.strip() for cell in line[1:-1].split(" | ")] for line in block.splitlines()
        )
        for name, *cells in rows:
            for heading, cell in zip(headings, cells, strict=True):
                if len(lines := cell.split("<br>")) == 2:
                    yield NAMES.get(name, name), heading, dict(zip(("large", "small"), lines, strict=True))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*-*.json")), ids=lambda path: path.stem)
def test_the_page_has_figures_of_the_stored_counts(path):
    """The page has the mean of five searches of Draft & Verify. Only the counts of the first search are stored."""
    paper, model = path.stem.split("-")
    made = counts.report(
        importlib.import_module(f"benchmarks.papers.{paper}").PAPER, counts.read_counts(path)
    )
    shown = collections.defaultdict(list)
    for name, heading, lines in page_cells(paper):
        shown[name, heading].append(re.findall(r"\d+\.\d\d", lines[model])[:3])
    checked = 0
    for table in made["tables"]:
        columns = collections.defaultdict(list)
        for name, row in table["rows"].items():
            for heading, cell in row.items():
                # The row of the baseline is left out on the page.
                if (
                    (name, heading) in shown
                    and asd.SEARCHED not in table["title"] + name
                    and cell["ours"] != 1
                ):
                    numbers = [f"{one:.2f}" for one in (cell["ours"], *cell["interval"])]
                    columns[heading].append(numbers in shown[name, heading])
        # The page has all of a column or nothing.
        assert all(all(same) or not any(same) for same in columns.values()), table["title"]
        checked += sum(map(sum, columns.values()))
    assert checked >= 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["asd", "--draft", "x"], "paper asd has no option --draft or --unsorted; leave it out"),
        (["s2d", "--limit", "0"], "--limit is 0; give at least 1"),
        (["asd", "--distributed"], "a paper is counted by one process; leave out --distributed"),
        (["asd", "--counts", "FILE"], "has the counts of paper s2d; give that name"),
        (["asd", "--counts", "OTHER"], "is not a file of counts with format jaxspec.paper-counts/1; count"),
    ],
)
def test_wrong_use_is_one_line(words, message, tmp_path, capsys):
    empty = dataclasses.asdict(counts.Counts("s2d", "m", "float32", [], {}, {}, {}))
    (tmp_path / "FILE").write_text(json.dumps(empty))
    (tmp_path / "OTHER").write_text('{"format": "other/1"}')
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
