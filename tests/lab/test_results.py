"""The page of results, made from stored reports, and the commands that the pages of figures print."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest

import jaxspec
from benchmarks import figures, results, speeds
from benchmarks.papers import (
    adaspeed_counts,
    adaspeed_sampled,
    asd_counts,
    asd_runs,
    baselines,
    command,
    rules,
    s2d_runs,
)
from jaxspec.cli import main
from jaxspec.cli.methods import parse_run
from jaxspec.cli.options import ModelOptions
from jaxspec.engine.language_model import LanguageModel
from jaxspec.measuring.commands import bench, compare, profile
from jaxspec.measuring.tuning.tuning_options import ASDGrid
from jaxspec.model import llama

TABLES = tuple(f"results/{paper}.md" for paper in results.PAPERS)
MEASUREMENTS = results.DOCS / "measurements"
MEASURED = {
    f"measurements/{path.name}": path.read_text(encoding="utf-8")
    for path in sorted(MEASUREMENTS.glob("*.md"))
}
MEASURING = tuple(page for page, text in MEASURED.items() if "```bash" in text)
PAGES = (*TABLES, *MEASURING, "laboratory.md")
# In bash, a printed command prints its words; loops and variables of the page are expanded.
STUBS = """
say() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >&3; }
for name in jaxspec python pytest pip awk head cp; do eval "$name() { say $name \\"\\$@\\"; }"; done
git() { return 1; }  # what follows a checkout is of another commit
exec 3>&1 >/dev/null
cd "$1"
"""


def printed(page: str, folder: Path) -> list[list[str]]:
    """The commands that a page prints, as words, without those that begin with an environment."""
    text = (results.DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(?!git checkout \w+\n)(.*?)^```", text, re.DOTALL | re.MULTILINE)
    script = STUBS + "\n".join(blocks) + "true\n"
    ran = subprocess.run(["bash", "-c", script, "page", folder], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_the_page_is_made_from_the_stored_reports():
    reports = results.load(results.DOCS / "results")
    for path, text in results.pages(reports).items():
        assert text == (results.DOCS / path).read_text(encoding="utf-8")
    for name, chart in results.charts_of(reports).items():
        assert chart == (results.DOCS / "results" / f"{name}.svg").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in (results.DOCS / "results").iterdir()) < 500_000


def test_the_index_of_measurements_is_made_from_the_figures():
    assert MEASURED["measurements/index.md"] == figures.page(figures.load(MEASUREMENTS / "figures.json"))


def test_tables_within_pages_are_made(capsys):
    """Those of README.md, of a page and of the index; measured cells of the latter are figures of the pages."""
    for page, mark, table in results.tables():
        text = page.read_text("utf-8")
        assert text == speeds.replaced(text, mark, table)
        assert text != speeds.replaced(text, mark, "| another |")
    assert speeds.main([]) == 0
    printed = capsys.readouterr().out
    assert printed in MEASURED["measurements/index.md"]
    assert printed.index("| 1.2b |") < printed.index("| 70b | T4 | no: `--mesh model=16` or `--weights int8")
    for one in json.loads((MEASUREMENTS / "speeds.json").read_text("utf-8"))["measured"]:
        assert re.search(rf"\b{re.escape(one['value'])}\b", MEASURED[f"measurements/{one['page']}"]), one
    assert printed.count("**") == 2 * 4


def test_each_figure_is_in_the_entry_of_its_question():
    """With its interval and its command, which the page may break into lines."""
    for figure in figures.load(MEASUREMENTS / "figures.json"):
        page = MEASURED[f"measurements/{figure.page}"]
        entry = page.partition(f"\n## {figure.question}\n")[2].partition("\n## ")[0]
        for part in (figure.value, figure.interval, figure.machine, figure.date, figure.commit):
            assert part is None or part in entry, (figure.id, part)
        assert figure.command in re.sub(r"\s*\\\n\s*", " ", page), figure.id


def test_no_question_has_two_entries():
    others = {f"measurements/{page}" for page in (*figures.OTHERS, "index.md")}
    texts = "\n".join(text for page, text in MEASURED.items() if page not in others)
    questions = re.findall(r"^## (.+)$", texts, re.MULTILINE)
    assert len({*questions}) == len(questions)
    assert all(question.endswith("?") for question in questions)


FIGURE = dict.fromkeys(("interval", "machine", "date", "commit")) | {
    name: name for name in ("id", "question", "answer", "value", "page", "command")
}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([FIGURE, FIGURE | {"id": "other"}], "has two current figures with the question 'question'"),
        ([FIGURE, FIGURE | {"question": "Why?"}], "has two current figures with the id 'id'"),
        ([FIGURE | {"speed": 1}], "has the wrong fields"),
        ([{"id": "id"}], "has the wrong fields"),
    ],
)
def test_wrong_figures_are_refused(tmp_path, records, message):
    (tmp_path / "figures.json").write_text(json.dumps({"figures": records}))
    with pytest.raises(ValueError, match=message):
        figures.load(tmp_path / "figures.json")


def claim(holds, costs="", ours=1.1, paper=None):
    figure = {"paper": paper, "ours": ours, "interval": [ours - 0.05, ours + 0.05]}
    return {"says": "It is faster.", "holds": holds, "because": "", "costs": costs, "figure": figure}


def report(*claims):
    table = {
        "title": "Table 1: × plain",
        "columns": ["free rows"],
        "rows": [],
        "notes": ["A note."],
        "digits": 2,
    }
    counts = {"tuning": 2, "reporting": 2}
    return {"claims": claims, "tables": [table], "prompts": counts, "amount": {"max_new_tokens": 8}}


def row_of(reports, page):
    """The cells of the first claim of a page."""
    rows = results.pages(reports)[page].splitlines()
    return next(line for line in rows if line.startswith("| It is")).split(" | ")


def judged(holds, low=0.9, high=1.3, model="large"):
    return results.Judged(model, claim(holds, "float32") | {"figure": {"interval": [low, high]}})


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([judged(True), judged(True)], f"{results.HOLDS}: 2 of 2"),
        ([judged(False), judged(False)], f"{results.DOES_NOT}: 0 of 2, not 2"),
        ([judged(None), judged(None)], f"{results.UNKNOWN}: 0 of 2"),
        ([judged(True), judged(False), judged(None)], f"{results.UNKNOWN}: 1 of 3, not 1"),
        ([judged(None, 0.98, 1.05), judged(True, 1.01, 1.02)], "no difference above 5 %: 1 of 2"),
        ([judged(None, 0.92, 1.05)], "no difference above 8 %: 0 of 1"),
        ([judged(None, 0.919, 1.05)], f"{results.UNKNOWN}: 0 of 1"),
        # Disturbed times decide nothing.
        ([judged(True), judged(False, model="small")], f"{results.HOLDS}: 1 of 1"),
        ([judged(False, model="small")], results.UNJUDGED),
        ([], results.UNJUDGED),
    ],
)
def test_verdicts(cases, expected):
    assert results.verdict(cases) == expected


def test_a_row_has_a_verdict_for_the_costs_and_for_the_times():
    counts = report(claim(True, "free rows", 1.2), claim(True, "Llama 1B", 1.15, 1.16))
    reports = {"adaspeed-large": counts, "adaspeed-large-times": report(claim(False))}
    held, refuted = f"{results.HOLDS}: 1 of 1", f"{results.DOES_NOT}: 0 of 1, not 1"
    figure = "`large`, Llama 1B: 1.15 (1.10–1.20)"
    assert row_of(reports, "results.md")[1:] == [held, refuted, "Llama 1B: 1.16", f"{figure} |"]
    assert row_of(reports, "results/adaspeed.md")[1:] == [
        "Llama 1B: 1.16",
        "`large`: 1.20 (1.15–1.25)",
        f"{held}<br>{figure}",
        f"{refuted}<br>`large`, float32: 1.10 (1.05–1.15) |",
    ]


def test_a_claim_that_the_design_cannot_decide_has_no_verdict():
    says, (_, why) = next(iter(results.UNTESTED.items()))
    found = results.pages({"adaspeed-large": report(claim(None) | {"says": says}, claim(True))})
    assert found["results.md"].count(says) == 1
    assert f"| {says} | {why} |" in found["results.md"]


def test_each_table_has_all_its_notes():
    """Also one that an earlier table has, such as a count of texts that differ."""
    twice = report(claim(True))
    twice["tables"] *= 2
    assert results.pages({"asd-large": twice})["results/asd.md"].count("- A note.") == 2


def test_a_claim_of_times_only_has_a_row():
    reports = {"s2d-large": report(), "s2d-large-times": report(claim(False))}
    refuted = f"{results.DOES_NOT}: 0 of 1, not 1"
    figure = "`large`, float32: 1.10 (1.05–1.15)"
    assert row_of(reports, "results.md")[1:] == ["–", refuted, "–", f"{figure} |"]
    assert row_of(reports, "results/s2d.md")[-1] == f"{refuted}<br>{figure} |"


def test_a_claim_of_several_figures_has_its_reason_beside_the_tables():
    said = claim(None, "Llama 1B") | {"figure": None, "because": "exits: 3, 3"}
    assert (
        "- It is faster. (Llama 1B) unclear: exits: 3, 3"
        in results.pages({"asd-large": report(said)})["results/asd.md"]
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("asd-large", {"model": "small"}, "is the report of asd-small; rename it"),
        ("asd-large-times", {}, "is the report of asd-large; rename it"),
        (
            "asd-large",
            {"amount": {"repeats": 2}, "dtype": "float32, int8"},
            "is the report of asd-large-int8",
        ),
        ("s2d-large", {}, "is the report of asd-large; rename it"),
        (
            "asd-large",
            {"format": "jaxspec.paper/0"},
            "is no report of `python -m benchmarks.papers` with format",
        ),
        (
            "medusa-large",
            {},
            "has no name of a report; give PAPER-MODEL, PAPER-MODEL-times or PAPER-MODEL-int8",
        ),
        ("asd", {}, "has no name of a report"),
        ("asd-large-bf16", {}, "has no name of a report"),
        ("asd-large", None, "is not valid JSON"),
        (None, {}, "has no reports; write them with"),
    ],
)
def test_wrong_reports_are_refused(tmp_path, monkeypatch, capsys, name, change, message):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(results, "DOCS", tmp_path)
    made = report() | {
        "format": "jaxspec.paper/1",
        "paper": "Draft on the Fly",
        "model": "large",
        "dtype": "float32",
    }
    if name is not None:
        text = "{" if change is None else json.dumps(made | change)
        (tmp_path / "results" / f"{name}.json").write_text(text)
    assert results.main([]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.md"))


def test_claims_without_a_figure_have_a_reason():
    named = {paper for paper, *_ in results.UNTOLD}
    assert named <= {*results.PAPERS, "blog"}
    assert all(f"| {says} | {why} |" in results.pages({})["results.md"] for _, says, why in results.UNTOLD)


@pytest.mark.parametrize("page", PAGES)
def test_printed_commands_can_be_read(page, tmp_path, monkeypatch):
    commands = {"bench": bench.Bench, "compare": compare.Compare, "profile": profile.Profile}

    def run(self):
        for words in getattr(self, "runs", ()):
            assert parse_run(words)
        return 0

    for one in commands.values():
        monkeypatch.setattr(one, "run", run)
    monkeypatch.setattr(command.Papers, "run", lambda self: 0)
    found = printed(page, tmp_path)
    assert found or "git checkout" in (results.DOCS / page).read_text("utf-8")
    for name, *words in found:
        if name == "jaxspec" and words[0] in commands:
            assert main(words) == 0, words
        elif name == "python":
            assert words[0] == "-m"
            assert importlib.util.find_spec(words[1]), words
            if words[1] == "benchmarks.papers":
                assert command.main(words[2:]) == 0, words


@pytest.mark.slow
def test_the_commands_of_the_results_run(tmp_path, monkeypatch, capsys):
    """The longest form of each, with little text and few settings, on four layers of a model.

    The other commands differ from these in the model and its weights; those of one model share its programs.
    """
    few = {
        rules: {"CONSTANTS": (2,), "GAMMAS": (0.8,)},
        adaspeed_sampled: {"CONSTANTS": (2,), "GAMMAS": (0.6,)},
        adaspeed_counts: {
            "exit_layers": lambda lm: [2],
            "LENGTHS": (2,),
            "CONSTANT_LENGTHS": (2,),
            "PRICED_TOKENS": 4,
            "ATTEMPTS": 1,
        },
        baselines: {"CONSTANTS": (2,), "early_exits": lambda lm: [2]},
        s2d_runs: {"THRESHOLDS": (0.0, 0.5, 1.0), "CONSTANTS": (2,)},
        asd_counts: {"EVERYS": (3,), "KEEP_LASTS": (2,), "TRIALS": 1, "SEARCHES": 1},
        asd_runs: {
            "GRID": ASDGrid(everys=(3,), keep_lasts=(2,)),
            "TRIALS": 1,
            "CONSTANTS": (2,),
            "TRUNCATED": (2,),
        },
    }
    for module, values in few.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    lm = jaxspec.load("small")
    shallow = LanguageModel(lm.config.truncated(4), llama.truncate(lm.params, 4), lm.tokenizer, name="small")
    monkeypatch.setattr(ModelOptions, "load", lambda self: shallow)
    forms = {}
    found = [words for page in TABLES for words in printed(page, tmp_path)]
    for _, _, module, paper, *words in found:
        if module == "benchmarks.papers":
            form = paper, "--counts" in words
            forms[form] = max(forms.get(form, []), words, key=len)
    assert forms.keys() == set(itertools.product(results.PAPERS, (True, False)))
    little = ["--limit", "1", "--max-new-tokens", "4", "--repeats", "1", "--json"]
    for number, ((paper, _), words) in enumerate(forms.items()):
        # A model that the page's commands train has the shape of an embedded one.
        for trained in results.TRAINED:
            words = [word.replace(trained, "sorted") for word in words]
        assert command.main([paper, *words, *little, "--output", str(tmp_path / str(number))]) == 0
        assert json.loads(capsys.readouterr().out)["claims"]


@pytest.mark.slow
def test_the_commands_of_the_measurements_run(tmp_path, monkeypatch, capsys):
    """Those that measure the embedded models and need no file.

    Each method compiles for many seconds, so those with a sorted draft, a head, a model of its own, the target's layers
    and no model run once. `test_printed_commands_can_be_read` reads all of them.
    """
    monkeypatch.setattr(ModelOptions, "load", functools.cache(ModelOptions.load))
    monkeypatch.setattr(baselines, "CONSTANTS", (2,))
    embedded = {model.name for model in (results.DOCS.parent / "checkpoints").iterdir()}
    left, ran = {"s2d", "eagle", "draft-model", "layerskip", "ngram"}, []
    commands = [command for page in MEASURING for command in printed(page, tmp_path)]
    for number, (program, *words) in enumerate(commands):
        if words[:2] == ["-m", "benchmarks.papers"]:
            run, words = command.main, words[2:]
        elif (program, words[0]) == ("jaxspec", "bench"):
            run = main
        else:
            continue
        if "--counts" in words:  # they are those of the results
            continue
        name, *options = words
        pairs = list(zip(options[::2], options[1::2], strict=True))
        given = dict(pairs)
        if given["--model"] not in embedded or "--prompt-file" in given:
            continue
        all_runs = [pair for pair in pairs if pair[0] == "--run"]
        # Another command trains a draft in runs.
        runs = [pair for pair in all_runs if "--draft runs/" not in pair[1]]
        new = {method: pair for pair in runs if (method := pair[1].split()[0]) in left}
        if all_runs and not new:
            continue
        left -= new.keys()
        few = {"--limit": "1", "--repeats": "1", "--max-new-tokens": "4"}
        few = given | few | {"--output": str(tmp_path / str(number))}
        few.pop("--run", None)
        tiny = [*few.items(), *new.values()]
        status = run([name, *itertools.chain(*tiny), "--json"])
        said = capsys.readouterr()
        assert status == 0, (words, said.err)
        assert json.loads(said.out)
        ran.append(name)
    assert set(ran) == {"bench", "sampling"}
    assert not left
