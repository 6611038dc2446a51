"""Tools of chats: what the template gets, and calls in answers, whole and in pieces."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re

import jax
import jsonschema
import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.grammar import Grammar, compile_grammar
from jaxspec.grammar.calls import Calls
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.io.tokenizers.tokenizer_file import FileTokenizer
from jaxspec.serving.openai import CHAT, joined, request_of
from jaxspec.serving.tools import FORMS, Reader, told
from jaxspec.serving.translation import Choice, encoded
from tests.commands import CONFIG
from tests.files.test_tokenizer import byte_ids, directory, tokenizer
from tests.grammar.test_grammar import Bytes, accepts, walk
from tests.server import Scripted, application, client
from tests.server.test_app import asked, chunks

HERMES, PHI, GRANITE, NAMED, MISTRAL, LLAMA = FORMS
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "P\\"}{aris", "more": {"a": [1, {}]}}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "now", "arguments": {}}'
# The form, the text, the content and the calls.
ANSWERS = {
    "hermes": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    "two": (
        HERMES,
        f"Well. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n",
        "Well.",
        [("weather", ARGUMENTS), ("now", "{}")],
    ),
    "a list": (
        HERMES,
        f"<tool_call>[{CALL},\n{OTHER}]</tool_call>",
        "",
        [("weather", ARGUMENTS), ("now", "{}")],
    ),
    "text after": (HERMES, f"<tool_call>{OTHER}</tool_call> Done.", " Done.", [("now", "{}")]),
    "another order": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "b"}</tool_call>',
        "",
        [("b", '{"a": 1}')],
    ),
    "wrong": (HERMES, " <tool_call>{now}</tool_call> Oh ", " <tool_call>{now}</tool_call> Oh ", []),
    "no call": (HERMES, " a <tool_cal \n", " a <tool_cal \n", []),
    "cut": (HERMES, '<tool_call>{"name": "b", "arguments": {"a": "}', "", [("b", '{"a": "}')]),
    "phi": (PHI, f"<|tool_call|>[{OTHER}]<|/tool_call|>", "", [("now", "{}")]),
    "granite": (GRANITE, f"<|tool_call|>[{OTHER}]", "", [("now", "{}")]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", [("weather", ARGUMENTS), ("now", "{}")]),
    "mistral's ids": (MISTRAL, '[TOOL_CALLS][{"name": "b", "arguments": {}, "id": "A"}]', "", [("b", "{}")]),
    "named": (
        NAMED,
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}",
        "",
        [("weather", ARGUMENTS), ("now", "{}")],
    ),
    "llama": (LLAMA, '{"name": "b", "parameters": {"a": 1}}', "", [("b", '{"a": 1}')]),
    "llama's tag": (
        LLAMA,
        '<|python_tag|>{"name": "b", "parameters": {}}; {"type": "function", "name": "c", "parameters": {}}',
        "",
        [("b", "{}"), ("c", "{}")],
    ),
    "llama's JSON": (LLAMA, '{"answer": [42]}', '{"answer": [42]}', []),
}


def read(reader, pieces):
    choice = Choice(0, reader=reader)
    whole = joined([*(choice.read(text, (), None) for text in pieces), choice.read("", (), "stop")])
    calls: dict[int, list[str]] = {}
    for call in whole.calls:
        calls.setdefault(call.index, ["", ""])
        calls[call.index][0] += call.name or ""
        calls[call.index][1] += call.arguments
    return whole, [tuple(calls[index]) for index in range(len(calls))]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_in_any_pieces_is_its_content_and_its_calls(name):
    form, text, content, calls = ANSWERS[name]
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        whole, found = read(Reader(form), pieces)
        assert (whole.text, found) == (content, calls), size
        assert whole.finish_reason == ("tool_calls" if calls else "stop")


def test_reasoning_and_single_calls():
    text = f"<think>\nHm <b> </thin\n</think>\n\n<tool_call>\n{CALL}"
    for pieces in (text, [text]):
        whole, found = read(Reader(HERMES, "</think>"), pieces)
        assert (whole.reasoning, whole.text) == ("\nHm <b> </thin\n", "")
        assert found == [("weather", ARGUMENTS)]
        whole, found = read(Reader(None, "</think>"), pieces)
        assert (whole.reasoning, whole.text, found) == ("\nHm <b> </thin\n", f"<tool_call>\n{CALL}", [])
    _, found = read(Reader(MISTRAL, most=1), f"[TOOL_CALLS] [{CALL}, {OTHER}]")
    assert found == [("weather", ARGUMENTS)]


def test_pieces_of_arguments_come_as_they_are_written():
    reader = Reader(HERMES)
    assert not reader.push('<tool_call>{"name": "b", "argu', False).calls
    (begin, first) = reader.push('ments": {"a"', False).calls
    (second,) = reader.push(': "c', False).calls
    assert (begin.name, first.arguments, second.arguments) == ("b", '{"a"', ': "c')


SKY = {"type": "object", "properties": {"blue": {"type": "boolean"}}, "required": ["blue"]}
SCHEMAS = {
    "weather": WEATHER["function"]["parameters"] | {"additionalProperties": False},
    "now": {"$ref": "#/$defs/any", "$defs": {"any": {"enum": [{}, {"zone": 1}]}}},
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.mark}{form.written}")
@pytest.mark.parametrize("rest", ["text", "calls", "document"])
def test_texts_of_a_grammar_are_documents_or_calls_that_follow_their_schemas(form, rest):
    """Random texts, over bytes alone and over a vocabulary that has the markers as tokens."""
    functions = tuple((name, json.dumps(schema)) for name, schema in SCHEMAS.items())
    spec = Grammar.json_schema(SKY) if rest == "document" else Grammar(rest)
    markers = [text for text in (form.begin, form.end, "[ARGS]") if text]
    for added, several in ((markers, True), ((), False)):
        used = Bytes(added)
        made = compile_grammar(
            dataclasses.replace(spec, calls=Calls(form, functions, several)), used, 256 + len(added)
        )
        assert bool(made.final[0]) == (rest == "text")
        rng, counts = random.Random(0), set()
        for _ in range(60):
            ids = walk(made, rng, 60)
            pieces = [bytes([one]) if one < 256 else added[one - 256].encode() for one in ids]
            whole, found = read(Reader(form), [b"".join(pieces).decode(errors="replace")])
            counts.add(len(found))
            for name, arguments in found:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            if rest == "document" and not found:
                jsonschema.validate(json.loads(whole.text), SKY)
            elif rest != "text":
                assert not whole.text.strip()
        assert counts >= ({1} if rest == "calls" else {0})
        assert max(counts) > 0 or rest != "calls"
        assert not (counts - {0, 1}) or several
        call = {
            "named": f"{form.begin}now[ARGS]{{}}",
            "bare": f'{{"name": "now", "{form.arguments}": {{}}}}',
            "list": f'{form.begin}[{{"name": "now", "arguments": {{}}}}]{form.end}',
            "objects": f'{form.begin}\n{{"name": "now", "arguments": {{}}}}\n{form.end}',
        }[form.written]
        for text, right in {
            call: True,
            call.replace("now", "weather"): False,
            f"Hm. {call}": rest == "text",
            f"{call} {call}": several
            and (form.written in ("objects", "named") or (form is PHI and rest == "text")),
            "<tool": rest == "text",
            '{"blue": true}': rest == "document" or (rest == "text" and form.written != "bare"),
        }.items():
            assert accepts(made, tokens_of(text, used)) == right, text


def tokens_of(text, used):
    """The tokens of a text, markers first."""
    parts = re.split("|".join(map(re.escape, used._added)), text) if used._added else [text]
    marks = re.findall("|".join(map(re.escape, used._added)), text) if used._added else []
    ids = list(parts[0].encode())
    for mark, part in zip(marks, parts[1:], strict=True):
        ids += [used._added[mark], *part.encode()]
    return ids


# Templates of the families, shortened to what tools and calls need.
TEMPLATES = {
    "qwen": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<tool_call>{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    ),
    "none": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
]


def scripted(template, data=b"", lm_name="bytes"):
    """A model with a token for each byte, whose texts are scripted, and the function that makes its scheduler."""
    text = tokenizer("byte_level")
    text._loaded.chat_template = template
    assert isinstance(text, Tokenizer)
    lm = LanguageModel(CONFIG, {}, tokenizer=text, name=lm_name, device=jax.devices()[0])
    return lm, functools.partial(Scripted, text, byte_ids("byte_level", data))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gets_tools_calls_and_results(name):
    lm, _ = scripted(TEMPLATES[name])
    request = request_of(CHAT, {"messages": TALK, "tools": [WEATHER, NOW], "tool_choice": "auto"})
    prompts = encoded(lm, request)
    text = lm.tokenizer.decode(prompts.ids[0])
    assert prompts.form == HERMES
    for tool in (WEATHER, NOW):
        assert json.dumps(tool) in text
    if name == "qwen":
        assert text.endswith(
            '[system]Be brief.[user]Weather?[assistant]<tool_call>{"city": "Rome"}[tool]Sunny.'
        )
    else:
        assert text.startswith("[system]Be brief.\n\n")
        assert text.endswith(
            '[user]Weather?[assistant]<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
            "[user]<tool_response>\nSunny.\n</tool_response>"
        )
    without = request_of(CHAT, {"messages": TALK[:2], "tools": [WEATHER], "tool_choice": "none"})
    assert encoded(lm, without).form is None
    assert "weather" not in lm.tokenizer.decode(encoded(lm, without).ids[0])


def test_the_grammar_of_a_request_follows_from_its_tools():
    lm, _ = scripted(TEMPLATES["qwen"])
    strict = NOW | {"function": NOW["function"] | {"strict": True}}
    form = {"response_format": {"type": "json_object"}}
    for body, kind, several in (
        ({}, None, None),
        ({"tools": [strict, WEATHER]}, "text", True),
        (form, "json_object", True),
        (form | {"tool_choice": "required", "parallel_tool_calls": False}, "calls", False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "calls", False),
        (form | {"tool_choice": "none"}, "json_object", None),
    ):
        request = request_of(CHAT, {"messages": TALK[:2], "tools": [NOW, WEATHER], **body})
        grammar = encoded(lm, request).grammar
        assert (grammar and grammar.kind, grammar and grammar.calls and grammar.calls.several) == (
            kind,
            several,
        )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("tools <tool_call>", HERMES),
        ("tools <|tool_call|> <|/tool_call|>", PHI),
        ("tools <|tool_call|>", GRANITE),
        ("tools [TOOL_CALLS] [ARGS]", NAMED),
        ("tools [TOOL_CALLS]", MISTRAL),
        ('tools is not none \'{"name": function name, "parameters": dictionary of', LLAMA),
    ],
)
def test_a_form_is_found_in_the_template(template, form):
    assert told([], [NOW], template)[0] is form


def test_forms_that_are_not_read_are_one_line():
    for template in ("tools <tool_call><arg_key>", "tools <function_calls>"):
        with pytest.raises(ValueError, match="its calls have a form that is not read"):
            told([], [NOW], template)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "give a list of functions"),
        ({"tools": {"name": "now"}}, "tools", "give a list of functions"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools", "give a list of functions"),
        ({"tools": [NOW], "tool_choice": "now"}, "tool_choice", "give auto, none, required"),
        (
            {
                "response_format": {"type": "json_object"},
                "tools": [{"function": {"name": "a", "parameters": {"not": {}}}}],
            },
            "tools",
            "function a: JSON schema: $.not cannot be expressed",
        ),
        ({"tool_choice": "required"}, "tool_choice", "give auto, none, required"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            "tool_choice",
            "give auto, none, required",
        ),
        (
            {"messages": [*TALK[:2], {"role": "assistant", "content": None}]},
            "messages",
            "has the content None",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}
                ]
            },
            "messages",
            "`arguments`",
        ),
    ],
)
def test_wrong_tools_and_calls_name_their_field(body, param, said):
    lm, make = scripted(TEMPLATES["qwen"])
    with client(application(make, lm=lm)[0]) as http:
        answer = http.post(CHAT, json={"messages": TALK[:2], **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert "\n" not in error["message"]


def test_calls_in_responses_and_streams():
    data = f"Hm.\n<tool_call>\n{CALL}\n</tool_call>".encode()
    lm, make = scripted(TEMPLATES["qwen"], data)
    body = {
        "messages": TALK[:2],
        "tools": [WEATHER],
        "max_tokens": len(data),
        "temperature": 0,
        "stop": "call>\n\n",
    }
    with client(application(make, lm=lm)[0]) as http:
        choice = asked(http, CHAT, **body, logprobs=True)["choices"][0]
        parts = [one["choices"][0] for one in chunks(http, CHAT, **body)]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert message["content"] == "Hm."
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }
    assert len(call["id"]) == 9
    assert len(choice["logprobs"]["content"]) == len(data)
    pieces = [one for part in parts for one in part["delta"].get("tool_calls", ())]
    assert pieces[0] | {"id": ""} == {
        "index": 0,
        "id": "",
        "type": "function",
        "function": {"name": "weather", "arguments": "{"},
    }
    assert "".join(one["function"]["arguments"] for one in pieces) == ARGUMENTS
    assert all(one.keys() == {"index", "function"} for one in pieces[1:])
    assert len(pieces) > 10
    assert "".join(part["delta"].get("content", "") for part in parts) == "Hm."


def test_a_call_alone_has_no_content():
    lm, make = scripted(TEMPLATES["qwen"], b'<tool_call>{"name": "now", "arguments": {}}</tool_call>xy')
    body = {"messages": TALK[:2], "tools": [NOW], "max_tokens": 57, "stop": "xy"}
    with client(application(make, lm=lm)[0]) as http:
        choice = asked(http, CHAT, **body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_tokens_of_calls_are_text():
    """Mistral's and Llama's markers are special tokens, which a text leaves out otherwise."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(directory("byte_level") / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[X]"])
    made = Tokenizer(FileTokenizer(backend, {}))
    ids = made.encode("a[TOOL_CALLS] [X]b")
    assert made.decode(ids) == "a[TOOL_CALLS] b"
    assert made.stream().push(ids) == "a[TOOL_CALLS] b"
