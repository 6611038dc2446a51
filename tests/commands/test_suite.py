"""`jaxspec bench`: what is generated in which order, how it goes on, and what the times come to."""

from __future__ import annotations

import functools
import json
import re
import shlex
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import pytest

from jaxspec import methods
from jaxspec.cli.methods import parse_run
from jaxspec.costs.rounds import DraftCost
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.measuring.bench import free_rows, prompts, suite
from jaxspec.measuring.bench.prompt_files import Task
from jaxspec.measuring.bench.suite import Suite, plan
from jaxspec.measuring.bench.suite_options import SuiteOptions
from jaxspec.measuring.bench.suite_report import cells, columns, report
from jaxspec.measuring.commands import bench
from jaxspec.measuring.line_log import LineLog
from jaxspec.methods.base import share_of_step
from jaxspec.model.llama import floor_bytes
from jaxspec.requests.results import Result, Statistics
from jaxspec.requests.text import Token
from jaxspec.testing import language_model
from tests import refused, tiny
from tests.commands import called

pytestmark = pytest.mark.usefixtures("no_default_method")

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TASKS = [Task("a/1", "a", ("Once",)), Task("a/2", "a", ("Upon",)), Task("b/1", "b", ("def f",))]
KINDS = {"stories": ("Once", "Upon"), "code": ("def f", "def g")}


def result(tokens: list[int], decode_ms: float, drafts: int = 0, accepted: int = 0, text: str = "") -> Result:
    rounds, histogram = len(tokens) - 1 - accepted, (drafts - accepted, accepted)
    counts = (len(tokens), rounds, drafts, drafts, accepted, histogram)
    statistics = Statistics(*counts, 2 * decode_ms, decode_ms, 0.0)
    return Result(text, list(map(Token, tokens)), "length", statistics)


class Fake:
    """A language model that takes 8 ms for a text, by ngram 4 ms, and is stopped at a given call.

    Its tokens are characters; a text says how long its prompt is.
    """

    def __init__(self, stopped_at: int | None = None, context: int = 1000, chats: bool = False) -> None:
        self.name, self.precision, self.platform, self.fingerprint = "fake", "float32", "cpu", "f00d"
        self.device_kind, self.loaded = "abacus", language_model().loaded
        self.executables = SimpleNamespace(wait=lambda: None, num_compilations=0)
        self.compiled_early = nullcontext
        self.config = SimpleNamespace(context_length=context)
        self.tokenizer = SimpleNamespace(has_chat_template=chats)
        self.ngram_says = [5, 6, 7, 8, 9]
        self.calls: list = []
        self.checked: list = []
        self._stopped_at = stopped_at

    def encode(self, text):
        if not isinstance(text, str):
            text = "|".join(f"{one['role'][0]}:{one['content']}" for one in text)
        return list(map(ord, text))

    def stream(self, prompts, *, method, **options):
        self.checked.append((method.name, len(prompts), options))
        return iter(())

    def drafter(self, method, *, distributions):
        return (NGramDrafter() if method.name == "ngram" else AutoregressiveDrafter()), None

    def generate(self, prompts, *, method, seed, **options):
        if len(self.calls) == self._stopped_at:
            raise KeyboardInterrupt
        texts = ["".join(map(chr, prompt)) for prompt in prompts]
        self.calls.append((method.name, texts, seed))
        if method.name == "ngram":
            return [result(self.ngram_says, 4.0, drafts=3, accepted=2, text=f"<{len(t)}>") for t in texts]
        return [result([5, 6, 7, 8, 9], 8.0, text=f"<{len(t)}>") for t in texts]


def make(lm: Fake, tasks=TASKS, distribution=GREEDY, runs=("ngram",), **options) -> Suite:
    options = {"repeats": 1, "max_new_tokens": 5, **options}
    return Suite(
        lm,
        tasks,
        {run: parse_run(run) for run in runs},
        SuiteOptions(**options),
        distribution=distribution,
        seed=3,
    )


# Order


def test_methods_take_turns_prompt_by_prompt_after_calls_that_compile():
    lm = Fake()
    lm.ngram_says = [5, 6]  # texts drawn at random are not compared
    made = make(lm, repeats=2, distribution=GREEDY | {"temperature": 0.6})
    made.measure()
    given = GREEDY | {"temperature": 0.6, "max_new_tokens": 5, "max_batch": 1}
    assert lm.checked == [("autoregressive", 3, given), ("ngram", 3, given)]
    there = ["autoregressive", "ngram"]
    # The second time after the compilation in the background.
    expected = [(name, "Once", 3) for name in there * 2]
    for number, text in enumerate(["Once", "def f", "Upon"]):  # one of each category first
        for repeat in range(2):
            order = there if (number + repeat) % 2 == 0 else there[::-1]
            expected += [(name, text, 3 + repeat) for name in order]
    assert [(name, texts[0], seed) for name, texts, seed in lm.calls] == expected
    assert made.sampling
    assert not make(Fake(), distribution=GREEDY | {"temperature": 9e-6}).sampling
    assert all(record.difference is None for record in made.records)
    assert report(lm, made)["runs"]["ngram"]["all"]["identical_to_autoregressive"] is None


def test_later_turns_hold_the_answers_of_plain_decoding():
    tasks = [Task("1", "a", ("x", "y", "z"), message=True)]
    for chats, asked in ((False, ["x", "x<1>\n\ny", "x<1>\n\ny<7>\n\nz"]), (True, None)):
        lm = Fake(chats=chats)
        lm.ngram_says = [5, 6]  # another answer, which nobody goes on from
        make(lm, tasks).measure()
        said = [texts[0] for name, texts, _ in lm.calls[4:] if name == "autoregressive"]
        assert said == (asked or ["u:x", "u:x|a:<3>|u:y", "u:x|a:<3>|u:y|a:<13>|u:z"])
        assert [texts[0] for name, texts, _ in lm.calls[4:] if name == "ngram"] == said


@pytest.mark.parametrize(
    ("chat", "message", "has_template", "chats"),
    [
        ("auto", True, True, True),
        ("auto", False, True, False),
        ("auto", True, False, False),
        ("on", False, True, True),
        ("off", True, True, False),
    ],
)
def test_who_gets_the_chat_template(chat, message, has_template, chats):
    lm = Fake(chats=has_template)
    make(lm, [Task("1", "a", ("x",), message=message)], chat=chat).measure()
    assert lm.calls[0][1] == ["u:x" if chats else "x"]


def test_batches_are_of_one_category_and_turn():
    tasks = [*TASKS, Task("a/3", "a", ("Long", "ago"))]
    units = plan(tasks, SuiteOptions(batch=2))
    assert [(unit.batch, unit.turn, [task.id for task in unit.tasks]) for unit in units] == [
        (0, 0, ["a/1", "a/2"]),
        (1, 0, ["b/1"]),
        (2, 0, ["a/3"]),
        (2, 1, ["a/3"]),
    ]
    lm = Fake()
    made = make(lm, tasks, batch=2)
    made.measure()
    assert lm.calls[0][1] == ["Once", "Upon"]
    assert len(made.records) == 2 * 5
    found = report(lm, made)
    # Two texts of 4 tokens each in 8 ms, and in 4 ms.
    assert found["runs"]["autoregressive"]["a"]["tokens_per_second"] == pytest.approx(1e3 * 16 / 24)
    assert found["runs"]["ngram"]["a"]["speedup"] == pytest.approx(2)


def test_a_limit_is_over_the_categories_in_turn():
    assert [unit.tasks[0].id for unit in plan(TASKS, SuiteOptions(limit=2))] == ["a/1", "b/1"]


def test_what_does_not_fit_is_left_out(tmp_path):
    tasks = [Task("1", "a", ("x" * 20,)), Task("2", "a", ("x", "y" * 8, "z")), Task("3", "a", ("x",))]
    lm = Fake(context=17)
    made = make(lm, tasks)
    made.resume(LineLog(tmp_path / "log", made.header(), of="benchmark"))
    made.measure()
    assert made.left_out == {"1": 0, "2": 1}
    assert {record.id for record in made.records} == {"2", "3"}
    again = make(lm, tasks)
    again.resume(LineLog(tmp_path / "log", again.header(), of="benchmark"))
    again.measure()
    assert again.left_out == made.left_out
    with refused("none of the prompts fits into the context of 17 tokens"):
        make(lm, tasks[:1])


# Going on


def test_an_interrupted_suite_goes_on(tmp_path):
    tasks = [*TASKS, Task("b/2", "b", ("p", "q"), message=True, answer="1")]
    whole, whole_path = make(Fake(), tasks), tmp_path / "whole.jsonl"
    whole.resume(LineLog(whole_path, whole.header(), of="benchmark"))
    whole.measure()
    path = tmp_path / "records.jsonl"
    # Four calls of the warm-up, then three units of two calls each, then one of the next.
    stopped = make(Fake(stopped_at=4 + 2 * 3 + 1), tasks)
    assert stopped.resume(LineLog(path, stopped.header(), of="benchmark")) == 0
    with pytest.raises(KeyboardInterrupt):
        stopped.measure()
    assert len(stopped.records) == 2 * 3
    with open(path, "a") as file:  # killed within a line, which has a unit's every run
        file.write(whole_path.read_text().splitlines()[4][:-9])
    lm = Fake()
    resumed = make(lm, tasks)
    assert resumed.resume(LineLog(path, resumed.header(), of="benchmark")) == 3
    resumed.measure()
    assert resumed.records == whole.records
    assert {texts[0] for _, texts, _ in lm.calls} == {"Question: p\nAnswer:", "Question: p\nAnswer:<19>\n\nq"}
    done = make(Fake(stopped_at=0), tasks)
    assert done.resume(LineLog(path, done.header(), of="benchmark")) == 5
    done.measure()
    assert done.records == whole.records


@pytest.mark.full
def test_a_carried_gamma_goes_on_too(tmp_path):
    lm, tasks = tiny.language_model(), [Task(str(at), "a", ("ab cd"[at:],)) for at in range(3)]
    words, options = "adaspeed --exit-layer 1 --gamma 0.5", SuiteOptions(None, 9, 1, carry_gamma=True)

    def gammas(limit: int, path) -> list[float]:
        made = Suite(lm, tasks, {words: parse_run(words)}, options, distribution=GREEDY)
        made.resume(LineLog(path, made.header(), of="benchmark"))
        del made.units[limit:]
        made.measure()
        return [record.texts[0].gamma for record in made.records if record.run == words]

    whole = gammas(3, tmp_path / "whole")
    assert len(gammas(2, tmp_path / "parts")) == 2
    # Calls that compile go before the first text, and before the one that goes on: they move no γ.
    assert gammas(3, tmp_path / "parts") == whole
    assert len({*whole, 0.5}) == 4
    method = parse_run(words)
    first = lm.generate([lm.encode(tasks[0].turns[0])], method=method, max_new_tokens=9)[0]
    assert whole[0] == first.gamma


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"repeats": 2}, "repeats is 1, now 2"),
        ({"tasks": TASKS[:2]}, "prompts is '"),
        ({"runs": ("ngram --ngram-max 2",)}, "runs is {"),
        ({"distribution": GREEDY | {"temperature": 1.0}}, "temperature is 0.0, now 1.0"),
    ],
)
def test_another_suites_records_are_refused(tmp_path, changes, name):
    path = tmp_path / "records.jsonl"
    LineLog(path, make(Fake()).header(), of="benchmark")
    with refused(re.escape(f"belongs to another benchmark: its {name}")):
        LineLog(path, make(Fake(), **changes).header(), of="benchmark")
    LineLog(path, make(Fake(), **changes).header(), of="benchmark", resume=False)


def test_records_of_another_chat_template_are_refused(tmp_path):
    path, lm = tmp_path / "records.jsonl", Fake(chats=True)
    tasks = [Task("b/2", "b", ("p",), message=True)]
    LineLog(path, make(lm, tasks).header(), of="benchmark")
    encode = lm.encode
    lm.encode = lambda text: encode(text) if isinstance(text, str) else [7, *encode(text)]
    with refused("its prompts is '"):
        LineLog(path, make(lm, tasks).header(), of="benchmark")


def test_records_that_are_none_are_refused(tmp_path):
    made = make(Fake())
    log = LineLog(tmp_path / "log", made.header(), of="benchmark")
    log.add({"id": "a/1"})
    with refused("has a record that cannot be read; add resume=False"):
        made.resume(log)


# Figures


def measured(lm: Fake | None = None, **options) -> dict:
    lm = lm or Fake()
    made = make(lm, **options)
    made.measure()
    return report(lm, made)


def test_figures():
    found = measured(repeats=3)
    about = {"model": "fake", "law": "greedy", "prompts": 3, "left_out": {}, "interrupted": False}
    assert found | about == found
    assert list(found["runs"]["ngram"]) == ["a", "b", "all"]
    assert found["runs"]["ngram"]["a"] == {
        "prompts": 2,
        "texts": 2,
        "tokens": 10,
        "tokens_per_second": pytest.approx(1000),
        "speedup": pytest.approx(2),
        "speedup_interval": (pytest.approx(2), pytest.approx(2)),
        "mean_acceptance_length": 2.0,
        "mean_acceptance_length_drafting": pytest.approx(1 + 2 / 3),
        "draft_acceptance_rate": pytest.approx(2 / 3),
        "mean_draft_length": 1.5,
        "acceptance_by_position": [pytest.approx(2 / 3)],
        "rows_free": 2.0,  # a search reads no weights
        "first_token_ms": {"median": 4.0, "p95": 4.0},
        "token_ms": {"median": 1.0, "p95": 1.0},
        "accuracy": None,
        "identical_to_autoregressive": True,
        "num_different": 0,
        "largest_margin": None,
    }
    assert found["runs"]["ngram"]["b"]["speedup_interval"] is None  # of one prompt
    assert found["best"] == {"a": "ngram", "b": "ngram", "all": "ngram"}
    assert "rows\nfree" in columns(found)
    for one in (one for kinds in found["runs"].values() for one in kinds.values()):
        one["rows_free"] = None  # nobody knows what drafts read
    assert "rows\nfree" not in columns(found)


CHAIN = SimpleNamespace(num_draft_tokens=8, drafts_trees=False)
# A tree of any size that is 2 deep takes two passes.
TREE = SimpleNamespace(num_draft_tokens=2, drafts_trees=True)


@pytest.mark.parametrize(
    ("draft", "drafter", "passes", "heads"),
    [
        # A layer of two, and the head: half of the layers and all else; 4 draft tokens a round.
        (DraftCost(layers=1), CHAIN, 4, 1),
        (DraftCost(layers=1, heads=0), CHAIN, 4, 0),
        # S2D with three exits looks at two heads on average.
        (DraftCost(layers=1, heads=2), CHAIN, 4, 2),
        (DraftCost(layers=1, once=True), CHAIN, 1, 1),
        (DraftCost(layers=1), TREE, 2, 1),
        (DraftCost(lookup=True), CHAIN, 0, 0),
    ],
)
def test_free_rows(draft, drafter, passes, heads):
    lm = language_model()
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params["layers"]))
    whole = floor_bytes(lm.config, lm.params)
    read = layers / 2 / whole + heads * (1 - layers / whole)
    found = free_rows.free_rows(lm, SimpleNamespace(cost=lambda *_: draft), drafter, None)
    assert found.speedup(3.0, 4.0) == pytest.approx(3 / (1 + passes * read))


@pytest.mark.parametrize("method", [methods.LayerSkip(exit_layer=1), methods.ASD(), methods.CLaSp()])
def test_a_head_of_few_tokens_is_read_too(method):
    lm = language_model()
    drafter, _ = lm.drafter(method)
    # All that is not a layer is replaced by half of the head's rows.
    head = lm.params["head"]
    few = {"vocabulary": head[: len(head) // 2]}
    shares = [share_of_step(method.cost(lm.loaded, drafter, params), lm.loaded) for params in (None, few)]
    whole = floor_bytes(lm.config, lm.params)
    rest = whole - sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params["layers"]))
    assert shares[0] - shares[1] == pytest.approx((rest - few["vocabulary"].nbytes) / whole)


def test_a_text_that_differs_is_told_with_its_margin(monkeypatch):
    asked = []
    monkeypatch.setattr(suite, "margin", lambda lm, *given: asked.append(given) or 0.25)
    lm = Fake()
    lm.ngram_says = [5, 6, 9, 8, 9]
    found = measured(lm, tasks=TASKS[:1])
    assert asked == [([*map(ord, "Once"), 5, 6], 7, 9)]
    where = {"id": "a/1", "turn": 0, "run": "ngram", "repeat": 0, "position": 2, "tokens": [7, 9]}
    assert found["differences"] == [where | {"margin": 0.25}]
    one = found["runs"]["ngram"]["all"]
    about = one["identical_to_autoregressive"], one["num_different"], one["largest_margin"]
    assert about == (False, 1, 0.25)
    assert cells(found, "ngram", "all")[0] == "1 not\n≤ 0.2"
    # A text that is shorter has no token to compare.
    lm.ngram_says = [5, 6]
    assert measured(lm, tasks=TASKS[:1])["differences"] == [where | {"tokens": [7, None], "margin": None}]


def test_accuracy():
    tasks = [
        Task("1", "gsm8k", ("How many?",), message=True, answer="27"),  # what the fake says of this prompt
        Task("2", "gsm8k", ("How many are there?",), message=True, answer="1"),
    ]
    found = measured(tasks=tasks, repeats=2)
    assert found["runs"]["ngram"]["all"]["accuracy"] == 0.5
    assert "right" in columns(found)
    assert "right" not in columns(measured())


def test_a_margin_is_one_of_logits():
    lm = tiny.language_model()
    text = lm.generate([3, 4], method="autoregressive", max_new_tokens=6, ignore_eos=True).tokens
    for at, token in enumerate(text):
        gaps = [suite.margin(lm, [3, 4, *text[:at]], token, other) for other in range(13)]
        assert min(gaps) == 0.0 == gaps[token]


# The command


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command on a few prompts; returns status, standard output and standard error."""
    monkeypatch.setattr(prompts, "load", lambda split="reporting", directory=None: KINDS)
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    return functools.partial(called, capsys, "bench")


@pytest.mark.full
def test_the_command_on_a_model(run, model, tmp_path):
    arguments = ("--model", model, "--max-new-tokens", 6, "--repeats", 1, "--limit", 3)
    arguments += ("--methods", "ngram", "--run", "layerskip --exit-layer 1")
    status, out, err = run(*arguments, "--json", "--output", tmp_path / "out")
    assert status == 0, err
    found = json.loads(out)
    assert list(found["runs"]) == ["autoregressive", "ngram", "layerskip --exit-layer 1"]
    assert found["header"]["runs"]["ngram"] == "ngram"
    for kinds in found["runs"].values():
        assert {kind: one["prompts"] for kind, one in kinds.items()} == {"stories": 2, "code": 1, "all": 3}
        for one in kinds.values():
            assert one["identical_to_autoregressive"] is True
            assert one["speedup"] > 0
    assert found["runs"]["autoregressive"]["all"]["mean_acceptance_length"] == 1
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == found
    records = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert len(records) == 1 + 3
    # The same command has nothing left to do, another one is refused.
    status, out, _ = run(*arguments, "--output", tmp_path / "out")
    assert status == 0
    assert re.search(r"^all \(3\)$", re.sub(" +$", "", out, flags=re.M), re.M)
    assert max(map(len, out.split("\n\n")[1].splitlines())) <= 80
    assert "…" not in out
    assert (tmp_path / "out" / "records.jsonl").read_text().splitlines() == records
    status, _, err = run(*arguments, "--output", tmp_path / "out", "--temperature", 1)
    assert status == 2
    assert "another benchmark: its temperature is 0.0, now 1.0; give the same, add --no-resume" in err


@pytest.mark.full
def test_interrupted(run, model, monkeypatch, tmp_path):
    def generate(self, *given, before=[], **options):  # noqa: B006
        if len(before) == calls:
            raise KeyboardInterrupt
        before.append(1)
        return original(self, *given, **options)

    original = suite.Suite._prompts.__globals__["LanguageModel"].generate
    monkeypatch.setattr(suite.LanguageModel, "generate", generate)
    arguments = ("--model", model, "--methods", "ngram", "--max-new-tokens", 4, "--repeats", 1)
    calls = 9
    status, out, err = run(*arguments, "--output", tmp_path)
    assert status == 130
    assert "interrupted, these are the results until then" in out
    assert err.endswith(
        "jaxspec: interrupted; above is what was measured, and the same command goes on from here\n"
    )
    assert json.loads((tmp_path / "report.json").read_text())["interrupted"] is True
    monkeypatch.setattr(suite.LanguageModel, "generate", original)
    status, out, _ = run(*arguments, "--output", tmp_path)
    assert (status, "interrupted" in out) == (0, False)


def test_texts_that_differ_are_told(run, model, monkeypatch):
    monkeypatch.setattr(bench, "show", lambda *given: None)
    wrong = lambda self, prompt, plain, texts: suite.Difference(0, 1, (2, 3), 0.1)  # noqa: E731
    monkeypatch.setattr(suite.Suite, "_difference", wrong)
    _, _, err = run(
        "--model", model, "--methods", "ngram", "--max-new-tokens", 4, "--limit", 1, "--repeats", 1
    )
    assert "jaxspec: warning: 1 text of ngram is not plain decoding's\n" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--frob", "unknown option --frob; see jaxspec bench --help"),
        ("--limit 0", "--limit is 0; give at least 1"),
        ("--repeats 0", "--repeats is 0; give at least 1"),
        ("--batch 0", "--batch is 0; give at least 1"),
        ("--max-new-tokens 1", "--max-new-tokens is 1; give at least 2"),
        ("--batch 2 --carry-gamma", "got --carry-gamma and --batch 2, but γ is carried between texts"),
        ("--methods ngram,guess", "unknown method 'guess'"),
        ("--run ''", "--run '': unknown method ''"),
        ("--run 'layerskip --exit-layer three'", "--run 'layerskip --exit-layer three': "),
        ('--run "ngram \'x"', '--run "ngram \'x": No closing quotation'),
        ("--run 'layerskip --exit-layer 99'", "--exit-layer is 99; the model has 2 layers"),
        ("--prompt-file no.jsonl", "no.jsonl does not exist; --prompt-file must be a prompt set"),
        ("--chat on", "the model has no chat template; give one with --chat-template FILE"),
        ("--max-new-tokens 600", "none of the prompts fits into the context of 512 tokens with"),
    ],
)
def test_wrong_use_is_one_line(run, model, words, message):
    status, _, err = run("--model", model, *shlex.split(words))
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("jaxspec: error: " + message)
