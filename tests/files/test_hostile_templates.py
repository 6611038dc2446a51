"""A model's chat template runs no code, in training too."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import jinja2
import pytest

from jaxspec.io.hf import huggingface
from jaxspec.io.tokenizers.chat import ChatTemplate
from jaxspec.io.tokenizers.tokenizer import load_tokenizer
from tests import refused
from tests.commands import CONFIG, write_byte_level, write_model, write_tokenizer
from tests.files.test_gguf_tokenizer import made  # noqa: F401
from tests.gguf_files import byte_level
from training.data import conversations, formats, reading

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
# MARK is a file that the template tries to create.
COMMANDS = [
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ joiner.__init__.__globals__['os'].system('touch MARK') }}",
    "{{ namespace.__init__.__globals__.os.system('touch MARK') }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "{{ (lipsum | attr('__globals__'))['os'].system('touch MARK') }}",
    "{{ ([lipsum] | map(attribute='__globals__') | first)['os'].system('touch MARK') }}",
    "{{ self.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{% set g = cycler['__in' ~ 'it__']['__glo' ~ 'bals__'] %}{{ g['os'].system('touch MARK') }}",
    "{% for c in ''.__class__.__mro__[1].__subclasses__() if c.__name__ == '_wrap_close' %}"
    "{{ c.__init__.__globals__['system']('touch MARK') }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
    "{{ messages.__class__.__base__.__subclasses__() | selectattr('__name__', 'equalto', '_wrap_close') "
    "| map(attribute='__init__.__globals__') | map(attribute='system') | first | string }}"
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
]
SECRETS = [
    "{{ '{0.__init__.__globals__}'.format(cycler) }}",
    "{{ '{c.__init__.__globals__[os]}'.format_map({'c': cycler}) }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ strftime_now.__code__.co_code }}",
    "{{ namespace(__class__=1) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
]
WRONG = [
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ range(10**12) | list }}",
    "{% for i in range(10**12) %}{% endfor %}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ 1",
    "{% generation %}",
]


@pytest.mark.parametrize("template", COMMANDS)
def test_a_template_runs_no_command(template, tmp_path):
    mark = tmp_path / "mark"
    template = template.replace("MARK", str(mark))
    jinja2.Environment().from_string(template).render(messages=MESSAGES)
    assert mark.exists()  # the template creates it without a sandbox
    mark.unlink()
    with refused("the chat template cannot render the conversation: ") as error:
        ChatTemplate(template).render(MESSAGES)
    assert not mark.exists()
    assert_line(error.value)


@pytest.mark.parametrize("template", SECRETS)
def test_a_template_reads_and_changes_nothing_else(template):
    with refused("the chat template cannot render the conversation: ") as error:
        ChatTemplate(template).render(MESSAGES)
    assert_line(error.value)


@pytest.mark.parametrize("template", WRONG)
def test_a_wrong_template_gives_one_line(template):
    with refused("the chat template cannot render the conversation: ") as error:
        ChatTemplate(template).render(MESSAGES)
    assert_line(error.value)
    assert ChatTemplate("{{ messages[0].content }}").render(MESSAGES).text == "Hi"


def test_what_a_template_says_is_one_short_line():
    for said in ("no\nsystem role", "x" * 100_000, "\x1b[31mred\x07", "\u202e" * 400):
        with refused("cannot render") as error:
            ChatTemplate("{{ raise_exception(messages[0].content) }}").render(
                [{"role": "a", "content": said}]
            )
        assert_line(error.value)


EVIL = COMMANDS[0]
PLACES = {
    "jinja": lambda evil: {"chat_template.jinja": evil},
    "settings": lambda evil: {"tokenizer_config.json": json.dumps(settings(evil))},
    "named": lambda evil: {
        "tokenizer_config.json": json.dumps(settings([{"name": "default", "template": evil}]))
    },
    "object": lambda evil: {"tokenizer_config.json": json.dumps(settings({"default": evil}))},
    "legacy": lambda evil: {"chat_template.json": json.dumps({"chat_template": evil})},
}


def settings(template):
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}


@pytest.mark.parametrize("model", ["llama", None])  # read from tokenizer.json alone, and by transformers
@pytest.mark.parametrize("place", PLACES)
def test_no_place_of_a_template_is_trusted(place, model, tmp_path):
    mark = tmp_path / "mark"
    write_tokenizer(tmp_path)
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    for name, content in PLACES[place]("{{ bos_token }}fine").items():
        (tmp_path / name).write_text(content)
    assert load_tokenizer(tmp_path).has_chat_template  # the template is read
    for name, content in PLACES[place](EVIL.replace("MARK", str(mark))).items():
        (tmp_path / name).write_text(content)
    check_refused(tmp_path, mark)


def test_no_template_of_a_gguf_file_is_trusted(made, tmp_path):  # noqa: F811
    mark = tmp_path / "mark"
    path = made(byte_level("smollm"), **{"tokenizer.chat_template": EVIL.replace("MARK", str(mark))})
    check_refused(path, mark)


def check_refused(path: Path, mark: Path) -> None:
    """Checks that inference and training refuse the template at `path`, and that it does not create the mark."""
    with refused("access to attribute"):
        load_tokenizer(path).encode_chat("Hi")
    data = path.parent / "data.jsonl"
    data.write_text(
        json.dumps({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]})
    )
    with pytest.raises(reading.Malformed, match="access to attribute"):
        reading.read_source(str(data), formats.AUTO, conversations.chat_of(path), False)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ([{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "x"}], "none of which is"),
        ({"tool_use": "x"}, "none of which is called default"),
        (7, "neither a text nor a list"),
        ([7], "neither a text nor a list"),
        ([{"name": "default"}], "neither a text nor a list"),
    ],
)
def test_templates_without_a_default_are_refused(template, said, tmp_path):
    write_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings(template)))
    for use in (lambda: load_tokenizer(tmp_path).encode_chat("Hi"), lambda: conversations.chat_of(tmp_path)):
        with refused(said) as error:
            use()
        assert_line(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
        {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}},
        {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": "evil.Evil"}},
        {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
        {"tokenizer_class": "evil.Evil"},
        {"tokenizer_class": "Evil"},
        {"tokenizer_class": "Evil", "trust_remote_code": True, "auto_map": {"AutoTokenizer": "evil.Evil"}},
        {"tokenizer_class": None, "auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}},
    ],
)
def test_code_beside_a_tokenizer_is_not_imported(changes, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    write_model(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} | changes))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    # The tokenizer may be read with a class of transformers, or refused.
    with contextlib.suppress(ValueError):
        load_tokenizer(tmp_path)
    assert huggingface.read_config(tmp_path) == CONFIG
    assert not mark.exists()


def assert_line(error: BaseException) -> None:
    assert len(str(error)) <= 300
    assert str(error).isprintable()
