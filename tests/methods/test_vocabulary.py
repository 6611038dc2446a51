"""Drafts over a part of the vocabulary: their heads, distribution, confidence, the ranking and how it is made."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cli import main
from jaxspec.drafting.chain_drafter import draft_chain
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.methods.method_files import PLAN_NAME, write_plan
from jaxspec.io.methods.vocabulary_file import VOCABULARY_NAME, Ranking, read_vocabulary
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.tuning import token_counts
from jaxspec.methods import LayerSkip, registry
from jaxspec.model.plan import LayerPlan
from jaxspec.model.vocabulary import Vocabulary
from jaxspec.sampling import Greedy, Sampling
from jaxspec.stopping import AnyOf, ConfidenceBelow, Constant, FixedGamma, ProductBelow
from jaxspec.testing.contracts import BUDGETS, PROMPTS
from tests import refused, tiny
from tests.commands import PROMPT

DEEP = tiny.engine_config(tiny.DEEP)
# Letters of `tiny.tokenizer`, the specials of which are 0 and 10.
RANKING = Ranking((0, 10), (1, 12, 7, 6, 2, 9, 4), 200, 13)
OVER_SOME = [name for name in tiny.DRAFTERS if name.endswith("-vocab")]


def write(path, lm: LanguageModel, ranking: Ranking = RANKING) -> str:
    dataclasses.replace(ranking, vocab_size=lm.config.vocab_size).write(path, lm.fingerprint, {})
    return str(path)


@pytest.fixture
def lm(tmp_path) -> LanguageModel:
    """A model with a ranking beside it."""
    lm = LanguageModel(
        DEEP, tiny.params(DEEP), tiny.tokenizer(), directory=tmp_path, trained_for=TrainedFor((1, 2))
    )
    write(tmp_path / VOCABULARY_NAME, lm)
    return lm


# The draft


def equations(jaxpr: Any):
    """Of a jaxpr and of all those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.representatives("draft-model-vocab", "layerskip-vocab", "eagle-vocab")
@pytest.mark.parametrize("name", OVER_SOME)
def test_a_draft_multiplies_by_its_rows_of_the_head_alone(name):
    """Which are an argument: no step gathers them."""
    loop = tiny.loop(tiny.Combination(name, "constant", "greedy"))
    state, _ = jax.eval_shape(lambda: loop.begin(PROMPTS, BUDGETS))
    size, width = loop.config.vocab_size, loop.config.hidden_size
    few = len(tiny.some_tokens(size))
    drafter = loop.parts.drafter

    def propose(weights, state):
        view = tiny.view(state)
        return drafter.propose(state.keys, weights, state.drafter_state, view, Greedy())[0]

    made = list(equations(jax.make_jaxpr(propose)(loop.weights, state).jaxpr))
    products = [one for one in made if one.primitive.name == "dot_general"]
    shapes = {var.aval.shape for one in products for var in one.invars}
    assert (few, width) in shapes
    assert (size, width) not in shapes
    gathered = [one.outvars[0].aval.shape for one in made if one.primitive.name == "gather"]
    assert gathered
    assert (few, width) not in gathered


def test_there_is_such_a_drafter_of_every_method_with_a_head():
    families = {tiny.DRAFTERS[name].family for name in OVER_SOME}
    assert families == {case.family for case in tiny.DRAFTERS.values() if case.has_rule}
    has_head = {name for name, cls in registry.built_in().items() if "draft_vocab" in cls.options()}
    without = {"auto", "autoregressive", "grammar", "ngram", "suffix", "hybrid", "token-recycling"}
    assert has_head == set(registry.built_in()) - without


def chain(rule, distribution=None):
    """Drafts of three tokens of five, by a step that is nearly sure of the first of its two tokens, 3."""
    few, keys = (
        Vocabulary(jnp.zeros((2, 4)), jnp.array([3, 4]), size=5),
        jax.random.split(jax.random.key(0), 1),
    )

    def step(carry, token, i, active):
        return jnp.array([[2.0, -2.0]]), jnp.zeros((1, 4)), carry

    start = jnp.array([0]), jnp.array([9]), 3, keys, distribution or Greedy()
    return draft_chain(step, (), *start, rule, rule.init(1), few)[0]


def test_what_is_proposed_are_tokens_of_the_whole_vocabulary():
    assert chain(Constant()).tokens.tolist() == [[3, 3, 3]]
    sampled = chain(Constant(), Sampling(jnp.ones(1)))
    assert set(sampled.tokens.tolist()[0]) <= {3, 4}
    probs = np.exp(sampled.log_probs[0])
    assert probs[:, :3].tolist() == [[0, 0, 0]] * 3
    assert probs[:, 3:] == pytest.approx(np.tile([0.982, 0.018], (3, 1)), abs=1e-3)


@pytest.mark.parametrize("rule", [ConfidenceBelow, ProductBelow])
def test_confidence_is_the_probability_among_the_drafts_tokens(rule):
    assert chain(rule(FixedGamma(0.9))).count.tolist() == [3]
    assert chain(rule(FixedGamma(0.99))).count.tolist() == [1]
    assert chain(AnyOf((rule(FixedGamma(0.99)),))).count.tolist() == [1]


# The methods

OPTIONS: dict[str, dict[str, Any]] = {
    "asd": {"alpha": 0.84, "every": 2, "keep_last": 0},
    "draft-verify": {},
    "layerskip": {"exit_layer": 1},
    "adaspeed": {"exit_layer": 2},
    "draft-model": {"draft_exit": 2},
    "s2d": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_draft_has_the_rows_of_its_tokens(lm, name, tmp_path):
    plan = LayerPlan.skipping(DEEP.num_layers, [1], [0])
    write_plan(tmp_path / PLAN_NAME, lm.fingerprint, plan, {})
    few = lm.drafter(name, draft_vocab=6, **OPTIONS[name])[1]["vocabulary"]
    assert few.ids.tolist() == [0, 1, 6, 7, 10, 12]
    np.testing.assert_array_equal(few.head, np.asarray(lm.params["head"])[np.asarray(few.ids)])


def test_rows_are_those_of_a_draft_of_its_own_or_of_tied_embeddings(lm, tmp_path):
    config = dataclasses.replace(tiny.engine_config(), num_layers=2)
    draft = LanguageModel(
        config, tiny.params(tiny.TARGET, 7), tiny.tokenizer(), trained_for=TrainedFor((1, 2)), name="sorted"
    )
    few = lm.drafter("s2d", draft=draft, draft_vocab=6)[1]["vocabulary"]
    np.testing.assert_array_equal(few.head, np.asarray(draft.params["head"])[np.asarray(few.ids)])
    config = dataclasses.replace(tiny.DEEP, tie_embeddings=True)
    weights = {name: leaf for name, leaf in tiny.params(tiny.DEEP).items() if name != "head"}
    tied = LanguageModel(config, weights, directory=tmp_path)
    write(tmp_path / VOCABULARY_NAME, tied)
    few = tied.drafter("layerskip", draft_vocab=5)[1]["vocabulary"]
    np.testing.assert_array_equal(few.head, np.asarray(weights["embed"])[np.asarray(few.ids)])


def test_rows_are_gathered_once_and_another_choice_compiles_nothing(lm, tmp_path):
    def few(**options):
        return lm.drafter("layerskip", exit_layer=1, **options)[1]["vocabulary"]

    assert few(draft_vocab=6) is few(draft_vocab=6) is few(draft_vocab="6")
    other = write(tmp_path / "other.json", lm, Ranking((0, 10), (5, 3, 2, 9), 50, 13))
    assert few(draft_vocab=other).ids.tolist() == [0, 2, 3, 5, 9, 10]
    assert few(draft_vocab=tmp_path / "other.json") is few(draft_vocab=other)
    counts = []
    for vocab in (6, other):
        lm.generate("ab", method="layerskip", exit_layer=1, draft_vocab=vocab, max_new_tokens=4)
        counts.append(lm.executables.num_compilations)
    assert counts[0] == counts[1]


def test_an_option_is_a_number_or_a_file():
    assert (
        LayerSkip(draft_vocab="8192").draft_vocab == LayerSkip(draft_vocab=np.int64(8192)).draft_vocab == 8192
    )
    assert LayerSkip(draft_vocab="8192.json").draft_vocab == "8192.json"
    assert str(LayerSkip(draft_vocab=8)) == "layerskip draft_vocab=8"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            1,
            "draft_vocab is 1; .*jaxspec.vocab.json ranks 9 tokens, 2 of which must always be there: give 2 to 9",
        ),
        (0, "draft_vocab is 0; .* give 2 to 9, or count more text with `jaxspec vocab`"),
        ("-4", "draft_vocab is -4; "),
        (10, "draft_vocab is 10; "),
        (2.5, "draft_vocab is 2.5; give a whole number"),
        (True, "draft_vocab is True; give a whole number"),
        ("none.json", "none.json does not exist; make one with `jaxspec vocab`"),
    ],
)
def test_what_does_not_fit_is_one_line(lm, given, message):
    with refused(message, (ValueError, FileNotFoundError)):
        lm.generate("ab", method="layerskip", draft_vocab=given)


def test_a_model_without_a_ranking_says_how_to_make_one(tmp_path):
    lm = LanguageModel(DEEP, tiny.params(DEEP), tiny.tokenizer(), directory=tmp_path)
    for model, where in (
        (lm, f", but there is no {tmp_path / VOCABULARY_NAME}"),
        (tiny.language_model(), ""),
    ):
        line = f"draft_vocab=8 needs a ranking of tokens{where}; make one with `jaxspec vocab --data FILE`, or give"
        with refused(re.escape(line), FileNotFoundError):
            model.generate("ab", method="layerskip", draft_vocab=8)
    for name in ("ngram", "autoregressive"):
        with refused(f"method {name} has no option `draft_vocab`"):
            lm.generate("ab", method=name, draft_vocab=8)


# The file


def test_a_ranking_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "v.json"
    RANKING.write(path, "print", {"command": "x"})
    read = read_vocabulary(path, "print", 13)
    assert read == RANKING
    assert json.loads(path.read_text())["format"] == "jaxspec.vocab/1"
    assert (len(read), read.first(2).tolist(), read.first(4).tolist()) == (9, [0, 10], [0, 1, 10, 12])
    assert read.first().tolist() == sorted((0, 10, 1, 12, 7, 6, 2, 9, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "jaxspec.plan/1"}, "has the format jaxspec.plan/1, expected jaxspec.vocab/1; make one"),
        ({"model": "0"}, "belongs to another model (0, this one is print); make one with `jaxspec vocab`"),
        ({"vocab_size": 14}, "ranks a vocabulary of 14 tokens, the model has 13"),
        ({"ids": None}, "has None in `ids`, expected a list, each entry a whole number"),
        ({"ids": [1, 13]}, "has the token 13; expected ids from 0 to 12, each once"),
        ({"ids": [1, 10]}, "has a token twice; expected ids from 0 to 12, each once"),
        ({"ids": [], "always": []}, "has no token; expected ids"),
        ({"always": [None]}, "in `always`, expected a list, each entry a whole number"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "v.json"
    RANKING.write(path, "print", {})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(re.escape(message)):
        read_vocabulary(path, "print", 13)


# How it is made


def test_tokens_are_counted_and_ranked(tmp_path):
    lm = tiny.language_model()
    ranking, counts = token_counts.rank(lm, [[0, 1, 7, 7], [0, 12, 7, 12]])
    assert ranking == Ranking((0, 10), (7, 12, 1), 8, 13)
    assert counts.tolist() == [2, 1, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 2]
    assert token_counts.coverage(ranking, counts) == {2: 0.25, 4: 0.875, 5: 1.0}
    assert token_counts.rank(lm, [[1, 7, 7]], size=3)[0].ids == (7,)
    for size in (1, 5):
        with refused(f"size is {size}; 2 tokens are always needed and 2 others were"):
            token_counts.rank(lm, [[1, 7, 7]], size=size)
    with refused("no token was counted; give data=FILE"):
        token_counts.rank(lm, [])


def test_every_second_text_of_a_kind_is_held_out():
    """Its tokens do not count for the ranking that covers it, and empty texts do not count at all."""
    lm = tiny.language_model()
    texts = [("a", [7, 7, 0]), ("b", [12]), ("a", []), ("a", [7, 1, 0, 12]), ("b", [1, 1]), ("a", [7, 5, 5])]
    # The others: 7 four times, 5 and 12; 0 and 10 are always there.
    expected = {"a": {2: 0.25, 4: 0.5, 5: 0.75}, "b": {2: 0.0, 4: 0.0, 5: 0.0}}
    assert token_counts.held_out_coverage(lm, texts) == expected
    assert token_counts.held_out_coverage(lm, [("a", [7]), ("b", [5])]) == {}


def test_long_texts_are_read_in_pieces_that_end_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(token_counts, "_PIECE", 8)
    seen = []
    lm = tiny.language_model()
    monkeypatch.setattr(lm, "encode", lambda text: seen.append(text) or [])
    text = "abc\nde\nabcdeabcdeabcde\nab"
    (tmp_path / "a.txt").write_text(text)
    list(token_counts.encoded(lm, [str(tmp_path / "a.txt")]))
    assert "".join(seen) == text
    assert seen == ["abc\nde\n", "abcdeabc", "deabcde\n", "ab"]


def test_of_records_the_texts_are_counted(tmp_path, monkeypatch):
    """Not the names of their fields, nor backslashes for the ends of lines."""
    seen = []
    lm = tiny.language_model()
    monkeypatch.setattr(lm, "encode", lambda text: seen.append(text) or [])
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\\nb", "n": 3}\n\n{"turns": ["c", {"d": "\\u00e9"}]}\n')
    list(token_counts.encoded(lm, [str(file)]))
    assert seen == ["a\nb\nc\né"]
    file.write_text('{"text": "a"}\nabc\n')
    with refused(r"a\.jsonl:2 is not JSON; give one record a line, or plain text"):
        list(token_counts.encoded(lm, [str(file)]))


def test_special_tokens_are_always_there():
    lm = tiny.language_model()
    assert token_counts.always_there(lm) == [0, 10]
    template = "{% for m in messages %}ab{{ m.content }}{% if loop.first %}cd{% endif %}{% endfor %}"
    lm.tokenizer._loaded.chat_template = template
    try:
        ids = lm.encode([{"role": "user", "content": ""}] * 3)
        assert token_counts.always_there(lm) == sorted({0, 10, *ids})
        lm.tokenizer._loaded.chat_template = "{{ raise_exception('only one turn') }}"
        assert token_counts.always_there(lm) == [0, 10]
    finally:
        lm.tokenizer._loaded.chat_template = None
    bare = LanguageModel(tiny.engine_config(), tiny.params())
    assert token_counts.always_there(bare) == [10]


# The command


@pytest.mark.full
def test_the_command_counts_and_the_methods_find_its_file(model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(PROMPT + " and so on\n")
    made = ["vocab", "--model", str(model), "--data", str(text)]
    assert main([*made, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output"] == str(model / VOCABULARY_NAME)
    content = json.loads((model / VOCABULARY_NAME).read_text())
    assert (content["vocab_size"], content["always"][:2]) == (300, [0, 1])
    assert content["found_by"]["data"] == ["text.txt"]
    assert report["ranked"] == len(content["always"]) + len(content["ids"])
    assert report["coverage"][str(report["ranked"])] == 1
    assert main(made) == 0
    assert "of the counted tokens" in capsys.readouterr().out

    shared = ["--model", str(model), "--max-new-tokens", "8", "--ignore-eos", "--json"]
    words = f"layerskip --draft-vocab {report['ranked'] - 1}"
    assert main(["compare", PROMPT, "--run", words, "--repeats", "1", *shared]) == 0
    plain, found = json.loads(capsys.readouterr().out)["results"]
    assert (found["method"], found["identical_to_autoregressive"]) == (words, True)
    file = ["--draft-vocab", str(model / VOCABULARY_NAME)]
    assert main(["generate", PROMPT, "--method", "layerskip", *file, *shared]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == plain["text"]
    assert main(["generate", PROMPT, "--method", "layerskip", "--draft-vocab", "299", *shared]) == 2
    assert "error: --draft-vocab is 299; " in capsys.readouterr().err


def test_the_command_counts_what_the_model_writes(model, tmp_path, capsys):
    prompt, output = tmp_path / "prompt.txt", tmp_path / "v.json"
    prompt.write_text(PROMPT)
    places = ["--model", str(model), "--prompt-file", str(prompt), "--output", str(output)]
    assert main(["vocab", *places, "--generate", "--max-new-tokens", "6", "--size", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["texts_generated"], report["ranked"]) == (1, 3)
    assert 0 < report["tokens_generated"] == report["num_counted"] <= 6
    assert report["held_out"] == {}

    prompt = prompt.with_suffix(".jsonl")
    entries = [{"turns": [PROMPT[n:]], "category": kind} for n, kind in enumerate("abab")]
    prompt.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = ["vocab", "--model", str(model), "--prompt-file", str(prompt), "--output", str(output)]
    words += ["--generate", "--max-new-tokens", "6"]
    assert main([*words, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["held_out"]
    assert list(held) == ["a", "b"]
    assert all(0 <= share <= 1 for shares in held.values() for share in shares.values())
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "answers held out" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.split()[:1] in (["a"], ["b"])] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "there is no text to count; give --data FILE, or --generate for"),
        ("--data none.txt", "none.txt does not exist; --data must be text files"),
        ("--data none.txt --chat", "--chat belongs to --generate; give both or neither"),
        ("--data none.txt --prompt-file a", "--prompt-file belongs to --generate;"),
        ("--generate --max-new-tokens 0", "--max-new-tokens is 0; give at least"),
        ("--generate --chat", "the model has no chat template"),
    ],
)
def test_wrong_use_of_the_command_is_one_line(model, words, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["vocab", "--model", str(model), *words.split()]) == 2
    said = capsys.readouterr().err
    assert line in said.splitlines()[-1]
