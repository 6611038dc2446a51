"""Training renders conversations as inference does, with any feature of a template, and learns only the answers."""

from __future__ import annotations

import json

import pytest

from jaxspec.io.tokenizers.tokenizer import copy_files, load_tokenizer
from jaxspec.serving.openai import CHAT, request_of
from jaxspec.serving.translation import encoded
from jaxspec.testing import language_model
from tests import refused
from tests.commands import write_tokenizer
from training.data import conversations, formats, reading, sources

END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}" + END
)
# Auxiliary hidden states that transformers' own rendering adds to plain Jinja or changes.
TEMPLATES = {
    "generation": MARKED,
    "break": "{% for m in messages %}{% if loop.index > 50 %}{% break %}{% endif %}[{{ m.role }}]{{ m.content }}"
    + END,
    "continue": "{% for m in messages %}{% if not m.content %}{% continue %}{% endif %}[{{ m.role }}]{{ m.content }}"
    + END,
    "strftime_now": "{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}" + END,
    "tojson": "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}" + END,
    "tojson_indent": "{% for m in messages %}[{{ m.role }}]{{ m | tojson(indent=2) }}" + END,
    "special": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{{ pad_token }}"
    "{{ unk_token }}" + END,
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}[{{ m.role }}]{{ ns.n }}"
    "{{ m.content }}" + END,
    "macro": "{% macro put(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}{% for m in messages %}{{ put(m) }}"
    + END,
    "methods": "{% for m in messages %}[{{ m['role'] }}]{{ m['content'].strip().split(' ')[0].upper() }}"
    + END,
    "blocks": "{% for m in messages %}\n    {% if true %}\n[{{ m.role }}]{{ m.content }}\n {% endif %}\n{%- endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "test": "{% for m in messages if m.content is string and m is mapping %}[{{ m.role }}]{{ m.content | trim }}"
    + END,
}
TALK = [{"role": "user", "content": "Hi <b> 'é' & \"x\""}, {"role": "assistant", "content": "Yo  two"}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_training_text_is_that_of_transformers(name, tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATES[name], "pad_token": "<pad>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(TALK, tokenize=False)
    chat = conversations.chat_of(tmp_path)
    assert "".join(text for text, _ in chat.pieces(TALK)) == theirs
    data = tmp_path / "data.jsonl"
    turns = [{"from": one["role"], "value": one["content"]} for one in TALK]
    data.write_text(json.dumps({"conversations": turns}))
    (document,) = reading.read_source(str(data), formats.AUTO, chat, False)
    assert document.text == theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_that_of_transformers(name, tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    text = theirs.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    ids = theirs.encode(text, add_special_tokens=False)
    assert load_tokenizer(tmp_path).encode_chat(TALK[:1]) == ids


NAMED = {"default": "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + END}
NAMED["tool_use"] = "{% for t in tools %}<{{ t.function.name }}>{% endfor %}" + NAMED["default"]
TOOLS = {"tools": [{"type": "function", "function": {"name": "now", "parameters": {}}}]}
FORMS = {
    "list": lambda made: {"chat_template": [{"name": name, "template": text} for name, text in made.items()]},
    "object": lambda made: {"chat_template": made},
    "folder": lambda made: {},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_template_for_tools_is_used_with_tools(form, tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | FORMS[form](NAMED)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if form == "folder":
        (tmp_path / "chat_template.jinja").write_text(NAMED["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    (tmp_path / "copy").mkdir()
    copy_files(tmp_path, tmp_path / "copy")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    for variables in ({}, TOOLS):
        text = theirs.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True, **variables)
        assert text.startswith("<now>" if variables else "[user]")
        for directory in (tmp_path, tmp_path / "copy"):
            assert load_tokenizer(directory).chat.prompt(TALK[:1], variables) == text


def test_a_message_that_is_left_out_is_refused_wherever_a_conversation_is_given():
    lm = language_model(
        chat_template="{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a b"}]
    said = "leaves out messages\\[0\\], of role 'system'"
    for use in (
        lambda: lm.generate(messages=talk, max_new_tokens=2),
        lambda: lm.generate([talk], max_new_tokens=2),
        lambda: lm.encode(talk),
        lambda: next(iter(lm.chat("Be brief.").stream("a b"))),
        lambda: encoded(lm, request_of(CHAT, {"messages": talk})),
    ):
        with refused(said):
            use()
    lm.generate(messages=talk[1:], max_new_tokens=2)


def test_answers_are_what_a_template_marks():
    talk = [
        {"role": "system", "content": "S"},
        *TALK,
        *TALK[:1],
        {"role": "assistant", "content": "Z"},
        *TALK[:1],
    ]
    asked = TALK[0]["content"]
    assert conversations.Chat(MARKED).pieces(talk) == [
        (f"[system]S\n[user]{asked}\n[assistant]", False),
        ("Yo  two</s>", True),
        (f"\n[user]{asked}\n[assistant]", False),
        ("Z</s>", True),
        ("\n", False),
    ]
    plain = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    # Without marks, an answer is the text that its message adds.
    assert conversations.Chat(plain).pieces(talk) == [
        (f"[system]S\n[user]{asked}\n[assistant]", False),
        ("Yo  two</s>\n", True),
        (f"[user]{asked}\n[assistant]", False),
        ("Z</s>\n", True),
    ]
    assert conversations.Chat(MARKED).pieces(talk[:2]) == []


def test_a_template_that_rewrites_earlier_turns_marks_its_answers():
    """Qwen3's template does this: it removes the thoughts from all answers but the last."""
    rewriting = "{% for m in messages %}{{ loop.revindex }}" + MARKED.removeprefix("{% for m in messages %}")
    talk = [*TALK, *TALK]
    answers = [text for text, learn in conversations.Chat(rewriting).pieces(talk) if learn]
    assert answers == ["Yo  two</s>", "Yo  two</s>"]
    unmarked = rewriting.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with refused("rewrites earlier turns"):
        conversations.Chat(unmarked).pieces(talk)


def test_vicuna_s_form_is_for_a_model_without_a_template(tmp_path):
    write_tokenizer(tmp_path)
    text = "".join(text for text, _ in conversations.chat_of(tmp_path).pieces(TALK))
    assert text == f"USER: {TALK[0]['content']} ASSISTANT: Yo  two</s>"


# Forms by name

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.mark.parametrize(
    ("form", "begin", "text"),
    [
        ("vicuna", f"<s>{VICUNA} ", "USER: Hi ASSISTANT: Hello.</s>USER: Bye ASSISTANT: Bye.</s>"),
        ("llama-2", "", "<s>[INST] Hi [/INST] Hello. </s><s>[INST] Bye [/INST] Bye. </s>"),
        ("chatml", "", "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in TURNS)),
    ],
)
def test_forms_by_name_are_those_of_their_models(form, begin, text, tmp_path):
    """The same text in training, where answers alone are learned, and at inference."""
    write_tokenizer(tmp_path)
    chat = conversations.chat_of(tmp_path, form)
    pieces = chat.pieces(TURNS)
    assert "".join(piece for piece, _ in pieces) == begin + text
    answers = ["".join(piece.split("<|im_end|>")[0].split()) for piece, learn in pieces if learn]
    assert [one.removesuffix("</s>") for one in answers] == ["Hello.", "Bye."]
    tokenizer = load_tokenizer(tmp_path, form)
    asked = tokenizer.chat.render(TURNS[:3], ask=True).text
    assert (begin + text).startswith(asked)
    assert asked == "".join(piece for piece, _ in pieces[:3])


def test_a_system_message_replaces_vicunas_and_begins_llama_2s(tmp_path):
    write_tokenizer(tmp_path)
    turns = [{"role": "system", "content": "Be kind."}, *TURNS[:2]]
    texts = [
        "".join(text for text, _ in conversations.chat_of(tmp_path, form).pieces(turns))
        for form in ("vicuna", "llama-2")
    ]
    assert texts[0] == "<s>Be kind. USER: Hi ASSISTANT: Hello.</s>"
    assert texts[1] == "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello. </s>"


def test_a_model_without_a_template_is_named_in_training_and_at_inference(tmp_path):
    write_tokenizer(tmp_path)
    with refused("give one with chat_template=FILE, or vicuna, llama-2, chatml"):
        load_tokenizer(tmp_path).encode_chat("Hi")
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"messages": [*TURNS[:1], {"role": "assistant", "content": str(at)}]}) + "\n"
            for at in range(3)
        )
    )
    options = sources.DataOptions((sources.Source.parse(str(data)),))
    for template, said in ((None, 1), ("vicuna", 0)):
        reported = []
        sources.read_kinds(options, conversations.chat_of(tmp_path, template), reported.append)
        assert len(reported) == said
    assert "--chat-template FILE, or vicuna, llama-2, chatml" in conversations.assumption()
    with refused("alpaca", FileNotFoundError):
        conversations.chat_of(tmp_path, "alpaca")
