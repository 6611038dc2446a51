"""The command line: what goes where, every bad input in one line, and what an interruption leaves."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
import shlex
import signal
import sys
import types
from typing import ClassVar

import jax
import numpy as np
import pytest

import jaxspec
import training
from jaxspec.cli import main
from jaxspec.cli.generate import Generate, coloured
from jaxspec.cli.methods import made_of, names, parse_run
from jaxspec.cli.options import TextOptions
from jaxspec.console.errors import in_options
from jaxspec.console.parsing import option_names, parse_as
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io import embedded
from jaxspec.io.embedded import EMBEDDED
from jaxspec.io.hf import huggingface
from jaxspec.io.tokenizers import tokenizer as tokenizers
from jaxspec.io.tokenizers.tokenizer import load_tokenizer
from jaxspec.io.trained_for import TrainedFor
from jaxspec.measuring.commands.compare import _texts
from jaxspec.measuring.commands.profile import Profile
from jaxspec.measuring.commands.search import Search
from jaxspec.measuring.commands.tune import Tune
from jaxspec.methods import Method, registry
from jaxspec.model.llama import num_params
from jaxspec.requests.results import Piece, Statistics
from jaxspec.requests.text import RowText, Token, row_text
from jaxspec.serving.commands.serve import Serve
from jaxspec.testing import reference
from tests import caching, refused
from tests.commands import CONFIG, PROMPT, called, one_error, write_model, write_tokenizer
from tests.files.test_tokenizer import tokenizer

STATISTICS = {field.name for field in dataclasses.fields(Statistics)} | {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "tokens_per_second",
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The commands' compilation cache, in a directory of its own and only for these tests."""
    directory = tmp_path_factory.mktemp("cache")
    with caching.user_cache(directory), pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAXSPEC_DEBUG", raising=False)
        yield directory


@pytest.fixture
def run(capsys):
    """Runs a command in this process; returns status, standard output and standard error."""
    return functools.partial(called, capsys)


# Output


@pytest.mark.full
def test_generate_json(run, model, cache):
    options = ("--max-new-tokens", 24, "--method", "ngram", "--num-draft-tokens", 3, "--ignore-eos")
    status, out, err = run("generate", PROMPT, "--model", model, "--json", *options)
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert " ".join(report) == "model method text tokens finish_reason drafted_by lossy statistics"
    assert set(report["statistics"]) == STATISTICS
    assert len(report["statistics"]["acceptance_histogram"]) == 4
    lm = jaxspec.load(model)
    expected = lm.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert report["tokens"] == expected.tokens
    assert report["text"] == expected.text
    assert (report["model"], report["method"], report["finish_reason"]) == (str(model), "ngram", "length")
    assert report["lossy"] is False
    assert any((cache / "compiled").iterdir())


@pytest.mark.full
def test_generate_under_a_grammar(run, model, tmp_path):
    (schema := tmp_path / "schema.json").write_text('{"enum": [[1], "ab"]}')
    options = "generate", PROMPT, "--model", model, "--max-new-tokens", 12, "--method", "ngram"
    for grammar, wanted in (
        (("--choices", "cd", "--choices", "c d"), ("cd", "c d")),
        (("--regex", "x{3}"), ("xxx",)),
        (("--json-schema", schema), ("[1]", '"ab"', "[\n  1\n]")),
    ):
        status, out, _ = run(*options, *grammar)
        assert (status, out.strip() in wanted) == (0, True), out
    schema.write_text("{")
    assert "the JSON schema is not valid JSON" in one_error(run, *options, "--json-schema", schema)
    assert "got both --json-schema and regex" in one_error(
        run, *options, "--json-schema", schema, "--regex", "a"
    )


def test_generate_several_texts_with_log_probabilities(run, model):
    options = shlex.split("--max-new-tokens 5 --method ngram --temperature 1 --n 3 --min-new-tokens 5")
    _, out, _ = run("generate", "Copy", "--model", model, *options, "--json", "--logprobs")
    found = [json.loads(line) for line in out.splitlines()]
    asked = {"method": "ngram", "temperature": 1.0, "max_new_tokens": 5, "min_new_tokens": 5}
    expected = jaxspec.load(model).generate("Copy", n=3, logprobs=True, **asked)
    assert [one["tokens"] for one in found] == [one.tokens for one in expected]
    assert [one["logprobs"] for one in found] == [
        [token.log_prob for token in one.token_records] for one in expected
    ]
    _, out, err = run("generate", "Copy", "--model", model, *options, "--logprobs")
    assert out == "".join(f"{one.text}\n" for one in expected)
    lines = [line for line in err.splitlines() if re.match(r" *-?[\d.]+  '", line)]
    assert len(lines) == 15
    assert lines[0].startswith(f"{expected[0].token_records[0].log_prob:9.4f}  ")


def test_generate_writes_the_text_and_then_the_speed(run, model, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    words = "--max-new-tokens 12 --seed 3 --temperature 1 --top-k 20 --ignore-eos"
    draft = "--method draft-model --draft-exit 1 --stop-rule confidence --gamma 0.01"
    given = [*words.split(), *draft.split()]
    status, out, err = run("generate", "--prompt-file", tmp_path / "prompt", "--model", model, *given)
    options = {"max_new_tokens": 12, "seed": 3, "temperature": 1.0, "top_k": 20, "ignore_eos": True}
    options |= {"method": "draft-model", "draft_exit": 1, "stop_rule": ("confidence",), "gamma": 0.01}
    expected = jaxspec.load(model).generate(PROMPT, **options)
    assert (status, out) == (0, expected.text + "\n")
    assert re.fullmatch(
        r"12 tokens · [\d.]+ tokens/s · mean acceptance length [\d.]+ · acceptance rate [\d.]+ · draft-model\n",
        err,
    )


def test_an_option_is_read_as_its_method_declares_it():
    """A method of another package may have a flag with the name of a built-in method's number, and the reverse."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Method):
        """Mine.

        Attributes:
          alpha: a flag.
          explain: a number.
        """

        name: ClassVar[str] = "mine"
        alpha: bool = False
        explain: int = 0

    kinds = types.SimpleNamespace(
        available=lambda: ({**registry.available()[0], "mine": Mine}, []), chosen=lambda name, given: (Mine,)
    )
    words = ["--method", "mine", "--alpha", "hello", "--explain", "5"]
    command = parse_as(Generate, words, "jaxspec generate", kinds=kinds)
    assert (command.prompt, command.drafting) == ("hello", Mine(alpha=True, explain=5))


def test_words_are_options_of_generate():
    words = r"--top-k 7 --top-p 0.9 --frequency-penalty 2 --stop 'a\n' --stop-string . --stop-token-ids 5"
    words += " --stop-token-ids 7"
    words += " --method layerskip --stop-rule product --chat --chat-template-kwargs '{\"a\": false}'"
    command = parse_as(Generate, ["a", *shlex.split(words)], "jaxspec generate", kinds=registry)
    wanted = {
        "top_k": 7,
        "top_p": 0.9,
        "frequency_penalty": 2.0,
        "stop": ("a\n", "."),
        "stop_token_ids": (5, 7),
    }
    wanted |= {"chat": True, "chat_template_kwargs": {"a": False}, "presence_penalty": None}
    found = command.generation()
    assert {name: found[name] for name in wanted} == wanted
    assert command.drafting.stop_rule == ("product",)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_shows_accepted_drafts_in_colour(model, monkeypatch, no_colour):
    output = Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1" if no_colour else "")
    monkeypatch.setattr(LanguageModel, "stream", canned)
    assert main(["generate", PROMPT, "--model", str(model)]) == 0
    plain = "a bear"
    if no_colour:
        assert output.getvalue() == plain + "\n"
    else:
        green = "".join(f"\x1b[32m{character}\x1b[0m" for character in " be")
        assert output.getvalue() == f"\x1b[2m{PROMPT}\x1b[0ma{green}ar\n"


def canned(lm: LanguageModel, prompt: str, **options):
    """Instead of `stream`: "a", then " bear", in tokens of one character; " be" were drafts."""
    first = [Token(token) for token in lm.encode("a")[1:]]
    second = [Token(token, lm.tokenizer.decode([token]) in " be") for token in lm.encode(" bear")[1:]]
    statistics = Statistics(1 + len(second), 2, 1, 3, 1, (0, 1), 9.0, 8.0, 0.0)
    new_text = functools.partial(row_text, lm.tokenizer, lm.encode(prompt), ())
    yield Piece(0, "a", first, statistics, None, first, new_text)
    result = jaxspec.Result("a bear", first + second, "eos", statistics)
    yield Piece(0, " bear", second, statistics, result, first + second, new_text)


def test_painted_text_keeps_its_first_space(tmp_path):
    """A SentencePiece decoder drops a space at the very beginning: the prompt stands before it."""
    loaded = tokenizer("byte_fallback")
    lm = LanguageModel(CONFIG, {}, tokenizer=loaded, name="x", device=jax.devices()[0])
    text = row_text(loaded, lm.encode("ab"), ())
    tokens = [Token(token) for token in loaded.encode("bear")[1:]]
    assert coloured(text, Piece(0, " bear", tokens, None, object())) == " bear"


def test_painted_text_is_the_text(model):
    tokenizer = load_tokenizer(model)
    text = "Ünïcödé 🎉\n\ntime STOP more"
    tokens = tokenizer.encode(text)[1:]
    rng = np.random.default_rng(0)
    for stops in ((), ("STOP",), ("never",)):
        row, again = RowText(tokenizer.stream(), stops), RowText(tokenizer.stream(), stops)
        shown, stopped, at = "", False, 0
        while at < len(tokens) and not stopped:
            size = int(rng.integers(1, 6))
            last = at + size >= len(tokens)
            gained, used, stopped = row.push(tokens[at : at + size], last)
            records = [Token(token, bool(rng.integers(0, 2))) for token in tokens[at : at + used]]
            result = object() if last or stopped else None
            shown += coloured(again, Piece(0, gained, records, None, result))
            at += size
        assert ANSI.sub("", shown) == row.text
        assert ANSI.search(shown)
        assert row.text == (text.split("STOP")[0] if stops == ("STOP",) else text)


@pytest.mark.parametrize("json_too", [False, True])
def test_an_interruption_keeps_what_was_generated(run, model, monkeypatch, json_too):
    stream = LanguageModel.stream

    def interrupted(*given, **options):
        for piece in stream(*given, **options):
            yield piece
            signal.raise_signal(signal.SIGINT)

    whole = jaxspec.load(model).generate(PROMPT, method="ngram", max_new_tokens=100, ignore_eos=True).text
    monkeypatch.setattr(LanguageModel, "stream", interrupted)
    words = f"--method ngram --max-new-tokens 100 --ignore-eos {'--json' * json_too}"
    status, out, err = run("generate", PROMPT, "--model", model, *words.split())
    assert (status, err) == (130, "jaxspec: interrupted\n")
    report = json.loads(out) if json_too else {"text": out.removesuffix("\n")}
    assert 0 < len(report["text"]) < len(whole)
    assert whole.startswith(report["text"])
    if json_too:
        assert report["finish_reason"] == "interrupted"
        assert set(report["statistics"]) == STATISTICS


@pytest.mark.full
def test_compare(run, model):
    arguments = ("compare", PROMPT, "--model", model, "--max-new-tokens", 8, "--repeats", 1)
    status, out, err = run(*arguments, "--run", "ngram --num-draft-tokens 3", "--json")
    assert status == 0
    report = json.loads(out)
    assert list(report) == ["model", "device", "dtype", "results"]
    assert (report["device"], report["dtype"]) == ("cpu", "float32")
    plain, ngram = report["results"]
    assert (plain["method"], ngram["method"]) == ("autoregressive", "ngram --num-draft-tokens 3")
    assert (plain["speedup"], plain["mean_acceptance_length"]) == (1.0, 1.0)
    assert plain["draft_acceptance_rate"] is None
    assert ngram["identical_to_autoregressive"] is True
    expected = jaxspec.load(model).generate(PROMPT, max_new_tokens=8).text
    assert plain["text"] == ngram["text"] == expected
    assert plain["first_token_ms"] > 0
    assert ("slower here than plain decoding" in err) == (ngram["speedup"] < 0.95)


def test_compare_shows_texts_that_differ():
    plain = {"method": "autoregressive", "text": "a bear", "identical_to_autoregressive": True}
    same, other = plain | {"method": "ngram"}, plain | {"method": "asd", "text": "a boar"}
    other["identical_to_autoregressive"] = False
    assert _texts([plain, same, other]) == [
        "text by autoregressive:",
        "a bear",
        "\ntext by asd, from character 4 where it differs:",
        "oar",
    ]
    drawn = [one | {"identical_to_autoregressive": None} for one in (plain, other)]
    assert _texts(drawn)[2:] == ["\ntext by asd, drawn at random:", "a boar"]
    assert _texts([plain | {"text": None}]) == []


# Conversion


def test_convert(run, model, tmp_path):
    status, out, err = run("convert", model, tmp_path / "half", "--dtype", "bfloat16")
    assert (status, out) == (0, "")
    count = num_params(CONFIG)
    about = f"2 layers, {count:,} parameters, bfloat16, {2e-6 * count:.1f} MB"
    assert err == f"jaxspec: wrote {tmp_path / 'half'} ({about})\n"
    assert huggingface.stored_dtype(tmp_path / "half") == np.dtype("bfloat16")
    assert huggingface.read_config(tmp_path / "half") == CONFIG
    assert load_tokenizer(tmp_path / "half").encode(PROMPT) == load_tokenizer(model).encode(PROMPT)


def test_an_interrupted_conversion_does_not_look_whole(run, model, tmp_path, monkeypatch):
    def interrupt(source, destination):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "copy_files", interrupt)
    assert run("convert", model, tmp_path / "new")[0] == 130
    assert not (tmp_path / "new" / "config.json").exists()


def test_convert_keeps_everything(run, tmp_path):
    """Weights, tokenizer, sampling defaults and what it was trained for."""
    source, there = (tmp_path / name for name in ("source", "there"))
    params = jax.tree.map(np.float32, reference.random_params(CONFIG, 3))
    generation = {"do_sample": True, "temperature": 0.6}
    trained_for = TrainedFor((1, 2), (0, 3), (0.5,), "0123")
    huggingface.save(source, CONFIG, params, generation=generation, trained_for=trained_for)
    write_tokenizer(source)
    assert run("convert", source, there)[0] == 0
    assert huggingface.read_config(there) == CONFIG
    assert huggingface.generation_defaults(there) == generation
    assert huggingface.read_trained_for(there, CONFIG) == trained_for
    assert load_tokenizer(there).encode(PROMPT) == load_tokenizer(source).encode(PROMPT)
    loaded = huggingface.load_params(there, CONFIG, np.float32)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, loaded))


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"])
def test_convert_overwrites_nothing(run, model, tmp_path, name):
    (tmp_path / "mine" / name).parent.mkdir(parents=True)
    (tmp_path / "mine" / name).write_text("mine")
    message = one_error(run, "convert", model, tmp_path / "mine")
    assert f"or a part of one ({name.split('/')[0]})" in message
    assert [path.read_text() for path in (tmp_path / "mine").rglob("*") if path.is_file()] == ["mine"]
    assert "is a file; give a directory" in one_error(run, "convert", model, tmp_path / "mine" / name)


def test_convert_takes_the_names_that_model_takes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_ROOTS", (tmp_path,))
    write_model(tmp_path / "own")
    assert run("convert", "own", tmp_path / "copy")[0] == 0
    assert huggingface.read_config(tmp_path / "copy") == CONFIG
    assert "(perhaps you meant own)" in one_error(run, "convert", "Own", tmp_path / "other")


# Wrong use


GENERATE = f"generate '{PROMPT}' --model MODEL"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{GENERATE} --max-new-tokens 0", "--max-new-tokens is 0"),
        (f"{GENERATE} --max-new-tokens 508", "exceed the model's context of 512"),
        (f"{GENERATE} --method draft-model", "needs a draft; give --draft DIR"),
        (f"{GENERATE} --method guess", "the methods are adaspeed, adaspeed-probe, asd, auto, autoregressive"),
        (f"{GENERATE} --method layerskip --stop-rule never", "'never'.*'constant'"),
        (f"{GENERATE} --chat", "give one with --chat-template FILE"),
        (f"{GENERATE} --chat-template nowhere.jinja", "nowhere.jinja"),
        (f"{GENERATE} --reference nowhere.txt --method ngram", "nowhere.txt"),
        (f"{GENERATE} --prompt-file nowhere.txt", "got both PROMPT and --prompt-file"),
        (f"{GENERATE} --temprature 1", "--temprature.*perhaps you meant --temperature"),
        (f"{GENERATE} -n 1", "unknown option -n; perhaps you meant --max-new-tokens; see"),
        (f"{GENERATE} --int8", "unknown option --int8; perhaps you meant --weights int8; see"),
        (f"{GENERATE} --tensor_parallel_size 2", "perhaps you meant --mesh; see"),
        (f"{GENERATE} -p a", "unexpected argument 'Once upon a time'"),
        (f"{GENERATE} --quantization fp8", "--weights is 'fp8'; give one of 'int8'"),
        (f"{GENERATE} --frobnicate a", "unknown option --frobnicate; see"),
        ("generate ---json", "unknown option ---json"),
        ("generate -é", "unknown option -é"),
        (f"{GENERATE} --max-new-tokens abc", "error: --max-new-tokens is 'abc'; give a whole number; see"),
        (f"{GENERATE} --temperature hot", "--temperature is 'hot'; give a number; see"),
        (f"{GENERATE} --repetition-penalty -1", "--repetition-penalty is -1.0; give a number from 1e-05 to"),
        (rf"{GENERATE} --stop '\q'", r"--stop has the escape .*; the escapes are"),
        (rf"{GENERATE} --stop '\ud83d'", "--stop is not text in UTF-8"),
        (f"{GENERATE} --chat-template-kwargs think=false", "give a JSON object"),
        (f"{GENERATE} more", "unexpected argument 'more'; put a text in quotes"),
        (f"{GENERATE} --method asd --every 2147483648", "--every is 2147483648; give 0 .* at most 10000"),
        (f"{GENERATE} --method draft-verify --plan .", r"error: \. is a directory, not a file"),
        (f"{GENERATE} --method ngram --reference .", r"\. is a directory, .*; --reference must be a text"),
        (f"{GENERATE} --acceptor greedy --temperature 1", "--acceptor greedy needs temperature 0"),
        ("generate '' --model MODEL", "the prompt is empty"),
        ("generate --prompt-file no.txt --model MODEL", r"no\.txt does not exist; --prompt-file must be a"),
        ("generate a --model Large", r"large, small, sorted, smollm2 \(perhaps you meant large\)"),
        ("compare a --model MODEL --repeats 0", "--repeats is 0"),
        ("profile --shape huge", "unknown shape 'huge'"),
        ("profile --model MODEL --shape 31m", "got both --model .* and --shape 31m; give one"),
        ("convert nowhere there", "no directory 'nowhere'"),
        ("convert", "error: SRC and DST must be given; see jaxspec convert --help"),
        ("tune", r"error: --method \{asd,s2d\} must be given; see jaxspec tune --help"),
        ("inspect a --model MODEL --every 4294967296", "--every is 4294967296; give 0"),
        ("generat", "unknown command 'generat'; the commands are generate, chat, batch, serve, compare, be"),
        ("--verbose", "--verbose"),
    ],
)
def test_wrong_use_is_one_line(run, model, words, message):
    given = [str(model) if word == "MODEL" else word for word in shlex.split(words)]
    assert re.search(message, one_error(run, *given))


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("JAXSPEC_DEBUG", "1")
    with refused("unknown method"):
        main(["generate", PROMPT, "--method", "guess"])


def pipe(content: bytes) -> io.TextIOWrapper:
    """Standard input as Python makes it in the locales C and C.UTF-8."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="surrogateescape")


def test_the_prompt_from_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdin", pipe(b"two\r\nlines\n\n"))
    assert TextOptions().read_prompt() == "two\nlines\n"
    monkeypatch.setattr(sys, "stdin", Terminal())
    with refused("no prompt; give PROMPT, --prompt-file FILE or --messages FILE, or pipe"):
        TextOptions().read_prompt()


def test_a_prompt_that_is_not_text(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", pipe(b"caf\xe9 Once"))
    with refused("standard input is not text in UTF-8"):
        TextOptions().read_prompt()
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\xff")
    with refused("prompt is not text in UTF-8"):
        TextOptions(prompt_file=str(tmp_path / "prompt")).read_prompt()
    for options, name in (
        ({"prompt": "a\udce9"}, "PROMPT"),
        ({"prompt": "a", "system": "\udce9"}, "--system"),
    ):
        with refused(f"{name} is not text in UTF-8"):
            TextOptions(**options).read_prompt()


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "a bear"}
TURNS = [SYSTEM, USER, {"role": "assistant", "content": "time"}, USER]


@pytest.mark.full
def test_conversations(run, model, monkeypatch, tmp_path):
    """A system prompt, and several turns from a file, go through the chat template."""
    (tmp_path / "template").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    lm = jaxspec.load(model, chat_template=tmp_path / "template")
    options = ("--model", model, "--chat-template", tmp_path / "template", "--max-new-tokens", 5, "--json")
    for content in (TURNS, {"messages": TURNS}):
        (tmp_path / "turns.json").write_text(json.dumps(content))
        status, out, _ = run("generate", "--messages", tmp_path / "turns.json", *options)
        assert status == 0
        assert json.loads(out)["tokens"] == lm.generate(messages=TURNS, max_new_tokens=5).tokens
    for chat in ([], ["--chat"]):
        _, out, _ = run("generate", "a bear", "--system", "Be brief.", *chat, *options)
        assert json.loads(out)["tokens"] == lm.generate(messages=[SYSTEM, USER], max_new_tokens=5).tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", r"turns.json is not valid JSON \(Exp.*\); --messages must be a JSON list of messages with `ro"),
        ("[" * 100_000, r"turns.json is not valid JSON \(it is nested too deeply\)"),
        ("{}", 'turns.json holds an object without the key "messages"; --messages must be a JSON list of'),
        ("5", "turns.json: messages is 5; give a list of messages"),
        ('[{"role": "user"}]', r"turns.json: messages\[0\] is {'role': 'user'}; give a message"),
        ('[{"role": "user", "content": 5}]', r"turns.json: messages\[0\] has the content 5; give a text"),
        (json.dumps([TURNS]), "turns.json: it holds several conversations"),
    ],
)
def test_wrong_conversations(run, model, tmp_path, content, message):
    (tmp_path / "turns.json").write_text(content)
    arguments = ("generate", "--model", model, "--messages", tmp_path / "turns.json")
    assert re.search(message, one_error(run, *arguments))
    assert "got both --messages and --system" in one_error(run, *arguments, "--system", "a")
    assert "got both PROMPT and --messages" in one_error(run, *arguments, "a")


# The program


MODEL_COMMANDS = ["generate", "compare", "bench", "inspect", "profile", "search", "tune", "vocab"]


@pytest.mark.parametrize("command", ["", *MODEL_COMMANDS, "convert", "batch", "serve"])
def test_help(run, command):
    status, out, err = run(*filter(None, [command]), "--help")
    assert (status, err) == (0, "")
    assert f"usage: jaxspec {command}".strip() in out
    assert "None" not in out
    assert "(default: )" not in out
    if command in MODEL_COMMANDS:
        assert re.search(r"--model DIR\|ID.*?\(default: (.*?)\)", " ".join(out.split()))[1] == EMBEDDED
        assert "small model" not in out


@pytest.mark.parametrize("method", registry.built_in())
def test_help_shows_the_options_of_a_method(run, method):
    _, out, _ = run("generate", "--help", "--method", method)
    for option in option_names(registry.find(method)).values():
        assert re.search(rf"^  {option}[ ,].*\n* +\S", out, re.MULTILINE)
    assert f"Method {method}: {registry.find(method).summary()}" in " ".join(out.split())
    # The offered choices are those that the method takes.
    for option, choices in re.findall(r"^  --([a-z-]+) \{([^}]*)\}", out, re.MULTILINE):
        if option.replace("-", "_") in registry.find(method).options():
            for choice in "".join(choices.split()).split(","):
                parse_run(f"{method} --{option} {choice}")
    # By default hybrid has layerskip.
    with_probe = method in ("adaspeed", "adaspeed-probe", "dspark", "hybrid", "layerskip")
    assert (re.search(r"[,{ ]probe[,} ]", out) is not None) == with_probe


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("200", 80), ("1", 53)])
def test_help_fits_the_terminal(run, monkeypatch, columns, width):
    """The names of options are not broken, so a very narrow terminal gets pages of their width."""
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = run("generate", "--help", "--method", "autoregressive")
    assert max(map(len, out.splitlines())) <= width


def test_help_of_generate_is_short_and_names_every_method(run):
    _, out, _ = run("generate", "--help")
    assert len([line for line in out.splitlines() if line.strip()]) <= 100
    assert "--exit-layer" not in out
    for method in registry.built_in():
        assert re.search(rf"\b{method}[,.]", out)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("generate --draft-exit 2", "method auto has no option --draft-exit; it is an option of "),
        ("generate --method ngram --plan=x", "method ngram has no option --plan; it is an option of draft"),
        ("generate --method ngram --explain", "--explain reports the choices of method auto, not ngram; ja"),
        ("generate --method layrskip", "unknown method 'layrskip'; perhaps you meant layerskip; "),
        ("generate --method asd --alpah 1", "unknown option --alpah; perhaps you meant --alpha; see"),
        ("generate --method medusa --suffix-min-prob", "no option --suffix-min-prob; it is an option of suf"),
        ("generate --method auto --among nothing", "--among: unknown method 'nothing'; the methods are"),
        ("generate --method hybrid --second clasp --exit-layer 3", "hybrid has no option --exit-layer"),
        ("compare x --run 'ngram --plan x'", "--run 'ngram --plan x': method ngram has no option --plan; it"),
        ("compare x --run 'ngram --ngram-mx 3'", "unknown option --ngram-mx; perhaps you meant --ngram-max"),
    ],
)
def test_an_option_of_another_method_is_refused(run, words, line):
    err = one_error(run, *shlex.split(words))
    assert line in err
    assert len(err) <= 320  # with a list of all methods


@pytest.mark.parametrize(
    ("command", "message", "said"),
    [
        (Generate, "max_new_tokens is 0; give at least 1", "--max-new-tokens is 0; give at least 1"),
        (Generate, "prompt and max_new_tokens (3) exceed", "prompt and --max-new-tokens (3) exceed"),
        (Generate, "seed is -1; give", "--seed is -1; give"),
        (Generate, "give draft=DIR, or draft_exit=N for", "give --draft DIR, or --draft-exit N for"),
        (Generate, "acceptor='greedy' would", "--acceptor greedy would"),
        (Generate, "leave out adaptive_gamma=False", "leave out --no-adaptive-gamma"),
        (Generate, "has no option `gamma`, `stop_rule`;", "has no option --gamma, --stop-rule;"),
        (Generate, "model.alpha is 1; the seed is 2", "model.alpha is 1; the seed is 2"),
        (Generate, "/a/top_p/b.json: 'top_p' is 2", "/a/top_p/b.json: 'top_p' is 2"),
        (Generate, '/a/top_p.json has "alpha" 2', '/a/top_p.json has "alpha" 2'),
        (Tune, "alphas is 3; thresholds=0.5", "--alpha is 3; --threshold 0.5"),
        (Search, "add keep_first_last=False", "add --no-keep-first-last"),
    ],
)
def test_messages_of_the_library_name_options(command, message, said):
    """Python is told of parameters, the command line of its options; what is quoted or a path stays."""
    assert in_options(message, (names() if command is Generate else {}) | option_names(command)) == said


def test_methods_are_named_with_commas_or_blanks():
    assert list(made_of("ngram, suffix clasp", ())) == ["ngram", "suffix", "clasp"]
    with refused("unknown method ''"):
        made_of("", ())


def test_the_trainer_has_the_same_door(run, monkeypatch):
    status, out, err = run("train", "--help")
    assert (status, err) == (0, "")
    assert "usage: jaxspec train [-h] {soft,heads,own-text," in out
    assert "Sorted fine-tuning" in out
    _, out, _ = run("train", "plots", "--help")
    assert out.startswith("usage: jaxspec train plots [-h] [OPTIONS]")
    with monkeypatch.context() as patched:
        patched.setattr(training, "JOBS", dict.fromkeys(training.JOBS, "not_imported"))
        assert "unknown command 'sotf'; the commands are soft, heads," in one_error(run, "train", "sotf")
    status, _, err = run("train", "plots", "--run", "nowhere")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("jaxspec train plots: error: no metrics.jsonl in nowhere")
    monkeypatch.setitem(sys.modules, "training", None)
    assert "the package training is not installed; install jaxspec from its repository" in one_error(
        run, "train", "soft"
    )


def test_the_programs_help_ends_with_its_environment(run):
    for arguments in ([], ["--help"]):
        status, out, _ = run(*arguments)
        assert status == 0
        for name in ("JAXSPEC_CACHE", "JAXSPEC_DATA", "JAXSPEC_DEBUG"):
            assert out.index(f"  {name}  ") > out.index("tune")


def test_words_of_other_tools_are_understood():
    words = "-p Hi -m small --temp 0.5 --max_tokens 3 --device cuda --dtype half --quantization int8"
    words += " --method ngram --num-speculative-tokens 4"
    command = parse_as(Generate, words.split(), "jaxspec generate", kinds=registry)
    model = command.model
    assert (command.prompt, command.max_new_tokens, command.sampling.temperature) == ("Hi", 3, 0.5)
    assert (model.model, model.device, model.dtype, model.weights) == ("small", "cuda", "half", "int8")
    assert command.drafting.num_draft_tokens == 4
    words = "small -c 64 --max-num-seqs 2 --alias a --served-model-name b"
    served = parse_as(Serve, words.split(), "jaxspec serve", kinds=registry)
    assert (served.model.model, served.max_model_len, served.max_batch) == ("small", 64, 2)
    assert served.served_model_name == ("a", "b")
    assert parse_as(Profile, ["--max-batch", "3"], "jaxspec profile").batch == 3
    with refused("unexpected argument 'large'"):
        parse_as(Serve, ["--model", "small", "large"], "jaxspec serve", kinds=registry)


def test_a_process_without_output(monkeypatch):
    """As started by a service, or after `>&- 2>&-`: Python has no streams then."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["--version"]) == 0
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", PROMPT, "--model", "nowhere"]) == 2
