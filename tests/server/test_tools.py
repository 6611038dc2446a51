"""Tools of chats: what the template gets, and calls in answers, whole and in pieces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jsonschema
import pytest

from jaxspec.engine.language_model import LanguageModel
from jaxspec.grammar import Grammar, compile_grammar
from jaxspec.grammar.calls import Calls
from jaxspec.io.tokenizers.chat import ChatTemplate
from jaxspec.io.tokenizers.tokenizer import Tokenizer
from jaxspec.io.tokenizers.tokenizer_file import FileTokenizer
from jaxspec.serving import batch
from jaxspec.serving.batch_files import Results, read_lines
from jaxspec.serving.openai import CHAT, joined, request_of
from jaxspec.serving.tools import FORMS, Reader, told
from jaxspec.serving.translation import Choice, encoded
from tests import refused
from tests.commands import CONFIG
from tests.files.test_tokenizer import byte_ids, directory, tokenizer
from tests.grammar.test_grammar import Bytes, accepts, walk
from tests.server import Scripted, application, client
from tests.server.test_app import asked, chunks

HERMES, PHI, GRANITE, NAMED, MISTRAL, LLAMA = FORMS
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS},
}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "P\\"}{aris", "more": {"a": [1, {}]}}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "now", "arguments": {}}'
WEATHER_CALLED, NOW_CALLED = ("weather", ARGUMENTS), ("now", "{}")
NUMBERS = f'{{"a": {"9" * 5000}, "b": 1.10, "c": "\\u00e9"}}'
# The form, the text, the content and the calls.
ANSWERS = {
    "hermes": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER_CALLED]),
    "two": (HERMES, f"Well. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "Well.",
            [WEATHER_CALLED, NOW_CALLED]),
    "a list": (HERMES, f"<tool_call>[{CALL},\n{OTHER}]</tool_call>", "", [WEATHER_CALLED, NOW_CALLED]),
    "text after": (HERMES, f"<tool_call>{OTHER}</tool_call> Done.", " Done.", [NOW_CALLED]),
    "another order": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "b"}</tool_call>', "", [("b", '{"a": 1}')]),
    "wrong": (HERMES, " <tool_call>{now}</tool_call> Oh ", " <tool_call>{now}</tool_call> Oh ", []),
    "no call": (HERMES, " a <tool_cal \n", " a <tool_cal \n", []),
    "cut": (HERMES, f'Hm.<tool_call>{OTHER}<tool_call>{{"name": "b", "arguments": {{"a": "}}',
            'Hm.<tool_call>{"name": "b", "arguments": {"a": "}', [NOW_CALLED]),
    "type first": (HERMES, '<tool_call>{"type": "function", "parameters": {}, "name": "b"}</tool_call>', "",
                   [("b", "{}")]),
    "an end inside a string": (HERMES, '<tool_call>{"name": "b", "arguments": {"a": "</tool_call>{"}}</tool_call> Hm.',
                               " Hm.", [("b", '{"a": "</tool_call>{"}')]),
    "arguments as text": (HERMES, '<tool_call>{"name": "b", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
                          [("b", '{"a": 1}')]),
    "numbers as they are written": (HERMES, f'<tool_call>{{"name": "b", "arguments": {NUMBERS}}}</tool_call>', "",
                                    [("b", NUMBERS)]),
    "space": (HERMES, f"\n<tool_call>{OTHER}</tool_call>\n\nDone. \n", "\n\nDone. \n", [NOW_CALLED]),
    "a marker alone": (HERMES, f"<tool_call> begins a call.\n<tool_call>{OTHER}</tool_call>",
                       "<tool_call> begins a call.", [NOW_CALLED]),
    "phi": (PHI, f"<|tool_call|>[{OTHER}]<|/tool_call|>", "", [NOW_CALLED]),
    "granite": (GRANITE, f"<|tool_call|>[{OTHER}]", "", [NOW_CALLED]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", [WEATHER_CALLED, NOW_CALLED]),
    "mistral's ids": (MISTRAL, '[TOOL_CALLS][{"name": "b", "arguments": {}, "id": "A"}]', "", [("b", "{}")]),
    "named": (NAMED, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}", "",
              [WEATHER_CALLED, NOW_CALLED]),
    "llama": (LLAMA, '{"name": "b", "parameters": {"a": 1}}', "", [("b", '{"a": 1}')]),
    "llama's tag": (LLAMA, '<|python_tag|>{"name": "b", "parameters": {}}; '
                    '{"type": "function", "name": "c", "parameters": {}}', "", [("b", "{}"), ("c", "{}")]),
    "llama's JSON": (LLAMA, '{"answer": [42]}', '{"answer": [42]}', []),
    "llama's set": (LLAMA, "{x, y} is a set.", "{x, y} is a set.", []),
}  # fmt: skip
# Objects that are no calls: without a name of a tool or without arguments, and those that are no JSON.
NO_CALLS = [
    '{"name": "Ada", "age": 36}',
    '{"name": "unknown", "arguments": {}}',
    '{"name": "now"}',
    '{"name": "now", "arguments": [1]}',
    '{"name": "now", "arguments": null}',
    '{"name": "now", "arguments": "{"}',
    '{"name": ["now"], "arguments": {}}',
    '{"arguments": {}}',
    r'{"name": "n\_ow", "arguments": {}}',
    r'{"name": "\ud83d", "arguments": {}}',
    r'{"name": "now", "arguments": {"a": "\ud800"}}',
    '{"name": "now", "arguments": {\'a\': 1}}',
    '{"name": "now", "arguments": {a: 1}}',
    '{"name": "now", "arguments": {"a": 1,}}',
    '{"name": "now", "arguments": {"a": Rome"}}',
    '{"name": "now", "arguments": {"a": \u201cRome\u201d}}',
    '{"name": "now", "arguments": {"a": NaN}}',
    '{"name": "now", "arguments": {"a": "b\nc"}}',
    '{"name": "now", "arguments": {"a": "b}}',
]
# Deeper than a message may be with which a client returns the call, and deeper than Python 3.11 reads.
DEEP = ['{"name": "now", "arguments": ' + '{"a":' * depth + "1" + "}" * (depth + 1) for depth in (100, 1200)]
NAMES = ("weather", "now", "b", "c")


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
        whole, found = read(Reader(form, NAMES), pieces)
        assert (whole.text, found) == (content, calls), pieces
        assert whole.finish_reason == ("tool_calls" if calls else "stop")


def written(form, *objects):
    """The text of an answer with these objects in place of calls."""
    if form.written == "named":
        called = r'\{"name": "(\w+)", "arguments": (.*)\}'
        parts = [re.sub(called, r"\1[ARGS]\2", one, flags=re.DOTALL) for one in objects]
        return "".join(f"{form.begin}{one}{form.end}" for one in parts)
    if form.written == "bare":
        return "; ".join(objects)
    if form.written == "list":
        return f"{form.begin}[{', '.join(objects)}]{form.end}"
    return "".join(f"{form.begin}\n{one}\n{form.end}" for one in objects)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.mark}{form.written}")
@pytest.mark.parametrize("wrong", [*NO_CALLS, *DEEP])
def test_what_is_no_call_is_content_and_does_not_end_the_reading(form, wrong):
    """The client can parse the arguments of each call, and no letter of the rest is lost."""
    if form.written == "named" and "[ARGS]{" not in written(form, wrong):
        return  # the form has no such text
    kept = wrong.partition("[ARGS]")[2] if form.written == "named" else wrong
    for objects, calls in (((wrong,), []), ((OTHER, wrong), ["now"]), ((wrong, CALL), ["weather"])):
        text = written(form, *objects)
        size = 1 + len(text) // 2000  # the letters of short texts
        short = [text[at : at + size] for at in range(0, len(text), size)]
        for pieces in (short, [text], [text, "\n Done."], [*short, "\n Done."]):
            whole, found = read(Reader(form, NAMES), pieces)
            assert [name for name, _ in found] == calls
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in found)
            assert kept in whole.text or form is NAMED
            assert whole.text.endswith("\n Done.") == (pieces[-1] == "\n Done.")


def test_what_no_parser_can_nest_is_content():
    deep = '{"name": "now", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001
    whole, found = read(Reader(HERMES, NAMES), [written(HERMES, deep, CALL)])
    assert [name for name, _ in found] == ["weather"]
    assert deep in whole.text


@pytest.mark.parametrize("form", [*FORMS, None], ids=lambda form: form and f"{form.mark}{form.written}")
@hypothesis.given(st.data())
def test_any_text_in_any_pieces_is_one_message(form, data):
    marks = [
        "<think>",
        "</think>",
        "<|python_tag|>",
        *(one for f in FORMS for one in (f.begin, f.end) if one),
    ]
    parts = [
        *marks,
        *NO_CALLS,
        OTHER,
        CALL,
        "now[ARGS]{}",
        *'{}[],;:"\\ \n',
        "\ud800",
        '"name": "now"',
        "Hi. ",
    ]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=3)), max_size=9)))
    after = data.draw(st.sampled_from([None, "</think>", ("<think>", "</think>")]))
    options = {"after": after, "document": data.draw(st.booleans())}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    found = [read(Reader(form, NAMES, **options), given) for given in ([text], pieces, [*text])]
    parts = [(whole.text, whole.reasoning, calls) for whole, calls in found]
    assert parts[0] == parts[1] == parts[2]
    for _, arguments in parts[0][2]:
        assert isinstance(json.loads(arguments), dict)
    if form is None and after is None:
        assert parts[0][0] == text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.mark}{form.written}")
def test_a_document_has_no_calls(form):
    """Where the answer is calls or a document, calls are at its beginning."""
    call = written(form, OTHER)
    for text in (
        json.dumps({"name": "Ada", "note": call}),
        '{"a": "[TOOL_CALLS]now[ARGS]{}"}',
        f"yes {call}",
    ):
        for pieces in (text, [text]):
            whole, found = read(Reader(form, NAMES, document=True), pieces)
            assert (whole.text, found) == (text, [])
    whole, found = read(Reader(form, NAMES, document=True), f"\n{call}")
    assert (whole.text.strip(), found) == ("", [("now", "{}")])


def test_reasoning_and_single_calls():
    thought = f"\nHm <b> <tool_call>\n{OTHER}\n</tool_call> </thin\n"
    text = f"<think>{thought}</think>\n\n<tool_call>\n{CALL}"
    for pieces in (text, [text]):
        for after in ("</think>", ("<think>", "</think>")):
            whole, found = read(Reader(HERMES, NAMES, after), pieces)
            assert (whole.reasoning, whole.text, found) == (thought, "", [("weather", ARGUMENTS)])
            whole, found = read(Reader(None, NAMES, after), pieces)
            assert (whole.reasoning, whole.text, found) == (thought, f"<tool_call>\n{CALL}", [])
    begun = text.removeprefix("<think>")
    assert read(Reader(HERMES, NAMES, "</think>"), begun)[0].reasoning == thought.lstrip()
    whole, found = read(Reader(HERMES, NAMES, ("<think>", "</think>")), [f" Hm. {text}"])
    assert (whole.reasoning, len(found)) == ("", 2)
    assert read(Reader(MISTRAL, NAMES, ("[THINK]", "[/THINK]")), "[THINK]a[/THINK]b")[0].reasoning == "a"
    _, found = read(Reader(MISTRAL, NAMES, most=1), f"[TOOL_CALLS] [{CALL}, {OTHER}]")
    assert found == [("weather", ARGUMENTS)]


def test_a_call_comes_when_it_is_whole():
    reader = Reader(HERMES, NAMES)
    assert not reader.push('<tool_call>{"name": "b", "arguments": {"a": "c"}', False).calls
    (call,) = reader.push("}", False).calls
    assert (call.name, call.arguments) == ("b", '{"a": "c"}')


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
            reader = Reader(form, NAMES, document=rest == "document")
            whole, found = read(reader, [b"".join(pieces).decode(errors="replace")])
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


CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
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
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
]


def called(arguments):
    """A message with a call that has these arguments."""
    call = CALLED | {"function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


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


def test_fields_of_messages_that_templates_read_or_that_are_about_no_text_are_taken():
    lm, _ = scripted(
        "{% for m in messages %}{{ m.content }}{{ m.mood }}{% endfor %}{{ messages[-1] | tojson }}"
    )
    cached = {"cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], **cached}
    message |= {"annotations": [{"type": "url"}], "audio": None, "likes": []}
    for more in ({}, {"mood": "glad"}, {"colour": "red"}):
        text = lm.tokenizer.decode(lm.encode([message | more]))
        assert all(value in text for value in more.values())
    with refused(r"messages\[0\] has the field 'colour', which has no effect"):
        lm.encode([message | {"colour": "red"}, message])


def test_the_grammar_of_a_request_follows_from_its_tools():
    lm, _ = scripted(TEMPLATES["qwen"])
    strict = NOW | {"function": NOW["function"] | {"strict": True}}
    form = {"response_format": {"type": "json_object"}}
    for body, kind, several in (
        ({}, None, None),
        ({"tools": [strict, WEATHER]}, "text", True),
        (form, "json_object", True),
        ({"response_format": {"type": "json_object", "schema": SKY}}, "json_schema", True),
        (form | {"tool_choice": "required", "parallel_tool_calls": False}, "calls", False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "calls", False),
        (form | {"tool_choice": "none"}, "json_object", None),
    ):
        request = request_of(CHAT, {"messages": TALK[:2], "tools": [NOW, WEATHER], **body})
        grammar = encoded(lm, request).grammar
        found = (grammar and grammar.kind, grammar and grammar.calls and grammar.calls.several)
        assert found == (kind, several)


def test_grammars_and_readers_have_one_rule_of_reasoning():
    thinks = "{% if thinking %}<think></think>{% endif %}"
    lm, _ = scripted(thinks + TEMPLATES["none"] + "{% if opens %}<think>{% endif %}")
    pair, document = ("<think>", "</think>"), {"response_format": {"type": "json_object"}}
    for variables, after in (({}, None), ({"thinking": True}, pair), ({"opens": True}, "</think>")):
        body = {"messages": TALK[:2], "chat_template_kwargs": variables}
        assert encoded(lm, request_of(CHAT, body)).after == (after or pair)
        prompts = encoded(lm, request_of(CHAT, body | document))
        assert prompts.grammar.after == prompts.after == after


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>", HERMES),
        ("<|tool_call|> <|/tool_call|>", PHI),
        ("<|tool|> <|/tool|>", PHI),
        ("<|tool_call|>", GRANITE),
        ("[TOOL_CALLS] [ARGS]", NAMED),
        ("[TOOL_CALLS]", MISTRAL),
        ('\'{"name": function name, "parameters": dictionary of', LLAMA),
        ("<tool_call><arg_key>", None),
        ("<function_calls>", None),
    ],
)
def test_a_form_is_found_in_the_template(template, form):
    if form is None:
        with refused("its calls have a form that is not read"):
            told([], [NOW], ChatTemplate("{{ tools }}" + template))
    else:
        assert told([], [NOW], ChatTemplate("{{ tools }}" + template))[0] is form
    # The word alone is no place for tools.
    assert told([], [NOW], ChatTemplate("tools" + template))[0] is HERMES


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        *(
            ({"tools": tools}, "tools", "give a list of functions")
            for tools in (
                [{"type": "function"}], {"name": "now"}, [{"function": {"name": "a b"}}], [NOW | {"type": "custom"}],
            )
        ),
        ({"tools": [NOW | {"name": "now"}]}, "tools", "unknown field 'name' of tools; give type, function"),
        ({"tools": [{"function": {"name": "a", "params": {}}}]}, "tools",
         "unknown field 'params' of tools.function; give name, description, parameters, strict, return"),
        ({"tools": [{"function": {"name": "a", "strict": "yes"}}]}, "tools", "strict of a function is 'yes'"),
        ({"tools": [{"function": {"name": "a", "parameters": 5}}]}, "tools", "parameters of a is 5"),
        ({"tools": [{"function": {"name": "now", "description": "\ud800"}}]}, "tools", "tools is not text in UTF-8"),
        *(
            ({"tools": [NOW], "tool_choice": choice}, "tool_choice", "give auto, none, required")
            for choice in (
                "now",
                {"type": "custom", "function": {"name": "now"}},
                {"type": "function", "function": {"name": "weather"}},
            )
        ),
        ({"tool_choice": "required"}, "tool_choice", "give auto, none, required"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "now"}}, "tool_choice",
         "unknown field 'name' of tool_choice; give type, function"),
        ({"tools": [NOW], "tool_choice": {"function": {"name": "now", "arguments": "{}"}}}, "tool_choice",
         "unknown field 'arguments' of tool_choice.function; give name"),
        ({"response_format": {"type": "json_object"},
          "tools": [{"function": {"name": "a", "parameters": {"not": {}}}}]},
         "tools", "function a: JSON schema: $.not cannot be expressed"),
        ({"messages": [*TALK[:2], {"role": "assistant", "content": None}]}, "messages", "has the content None"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
         "messages", "`arguments`"),
        ({"messages": [TALK[0], TALK[1] | {"weight": 1}]}, "messages", "messages[1] has the field 'weight'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "detail": "low"}]}]}, "messages",
         "messages[0] has the field 'detail' in a part"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALLED | {"weight": 1}]}]}, "messages",
         "messages[0].tool_calls[0] has the field 'weight'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": CALLED["function"] | {"result": "a"}}]}]},
         "messages", "messages[0].tool_calls[0] has the field 'result'"),
        *(
            ({"tools": [WEATHER], "messages": [TALK[1], called(arguments), TALK[3]]}, "messages",
             f"messages[1].tool_calls[0] … {why}")
            for arguments, why in {
                '{"city": "\\ud800"}': "function is not text in UTF-8: it has the surrogate",
                '{"\\udfff": 1}': "function is not text in UTF-8: it has the surrogate",
                f'{{"x": {"[" * 100_000}{"]" * 100_000}}}': "and the JSON object `arguments`",
                f'{{"x": {"1" * 5000}}}': "and the JSON object `arguments`",
                "{'city': 1}": "and the JSON object `arguments`",
            }.items()
        ),
    ],
)  # fmt: skip
def test_wrong_tools_and_calls_name_their_field(body, param, said):
    lm, make = scripted(TEMPLATES["qwen"])
    with client(application(make, lm=lm)[0]) as http:
        answer = http.post(CHAT, content=json.dumps({"messages": TALK[:2], **body}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert all(part in error["message"] for part in said.split(" … "))
    assert "\n" not in error["message"]


def test_calls_in_responses_and_streams():
    data = f"Hm.\n<tool_call>\n{CALL}\n</tool_call>".encode()
    lm, make = scripted(TEMPLATES["qwen"], data)
    body = {"messages": TALK[:2], "tools": [WEATHER], "temperature": 0}
    body |= {"max_tokens": len(data), "stop": "call>\n\n"}
    with client(application(make, lm=lm)[0]) as http:
        choice = asked(http, CHAT, **body, logprobs=True)["choices"][0]
        parts = [one["choices"][0] for one in chunks(http, CHAT, **body)]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert message["content"] == "Hm."
    function = {"name": "weather", "arguments": ARGUMENTS}
    assert call == {"id": call["id"], "type": "function", "function": function}
    assert len(call["id"]) == 9
    assert len(choice["logprobs"]["content"]) == len(data)
    (streamed,) = [one for part in parts for one in part["delta"].get("tool_calls", ())]
    assert streamed == {"index": 0, **call, "id": streamed["id"]}
    assert "".join(part["delta"].get("content", "") for part in parts) == "Hm."
    # A call alone has no content.
    lm, make = scripted(TEMPLATES["qwen"], f"<tool_call>{OTHER}</tool_call>xy".encode())
    body |= {"tools": [NOW], "max_tokens": 57, "stop": "xy"}
    with client(application(make, lm=lm)[0]) as http:
        choice = asked(http, CHAT, **body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def odd_answers(form):
    """Answers of a form that are cut, spoiled or random, as bytes."""
    rng, good = random.Random(0), f"<think>Hm.</think>\n{written(form, CALL, OTHER)} Done.".encode()
    found = [good[: rng.randrange(len(good))] for _ in range(6)]
    for wrong in NO_CALLS:
        found.append(written(form, wrong, OTHER).encode())
    for piece in (b"\xed\xa0\x80", b"\xff", b"\\", b'"', b"\x00"):
        found += [bytes([*good[:at], *piece, *good[at:]]) for at in rng.sample(range(len(good)), 2)]
    return [*found, *(rng.randbytes(40) for _ in range(4)), good]


def request_line(number, tokens):
    body = {"messages": TALK[:2], "tools": [WEATHER, NOW], "seed": number, "max_tokens": tokens}
    return {"custom_id": str(number), "url": CHAT, "body": body}


def batch_answers(monkeypatch, path, lm, make, lines):
    """The responses of a batch to lines, whose texts are scripted."""
    monkeypatch.setattr(batch, "Scheduler", lambda lm, **options: make())
    path.joinpath("in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Results(path / "out", {}) as results:
        batch.Batch(lm).run(read_lines(path / "in"), results)
    records = map(json.loads, path.joinpath("out").read_text().splitlines())
    return {int(record["custom_id"]): record["response"] for record in records}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.mark}{form.written}")
def test_each_answer_of_a_model_is_a_result(form, monkeypatch, tmp_path):
    """One message, in a response, in a stream and in a batch, whatever the model has written."""
    marks = f"{{{{ tools | tojson }}}} {form.begin} {form.end} {form.mark}"
    lm, _ = scripted("{% if tools %}" + marks + "{% endif %}" + TEMPLATES["none"])
    answers = odd_answers(form)
    make = functools.partial(Scripted, lm.tokenizer, [byte_ids("byte_level", data) for data in answers])
    lines = [request_line(number, len(data)) for number, data in enumerate(answers)]
    found = batch_answers(monkeypatch, tmp_path, lm, make, lines)
    assert sorted(found) == list(range(len(answers)))
    with client(application(make, lm=lm)[0]) as http:
        for number, line in enumerate(lines):
            message = asked(http, CHAT, **line["body"])["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            for call in calls:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
            assert found[number]["status_code"] == 200
            same = found[number]["body"]["choices"][0]["message"]
            deltas = [one["choices"][0]["delta"] for one in chunks(http, CHAT, **line["body"])]
            streamed = [one for delta in deltas for one in delta.get("tool_calls", ())]
            functions = [call["function"] for call in calls]
            for others in (same.get("tool_calls", []), streamed):
                assert [one["function"] for one in others] == functions
            for name in ("content", "reasoning_content"):
                assert same.get(name) == message.get(name)
                assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    assert (message["reasoning_content"], message["content"], len(calls)) == ("Hm.", message["content"], 2)


def test_an_error_while_an_answer_is_read_is_that_of_its_request(monkeypatch, tmp_path, caplog):
    lm, _ = scripted(TEMPLATES["qwen"])
    answers = [b"Hello", b"Hell!", b"Howdy"]
    make = functools.partial(Scripted, lm.tokenizer, [byte_ids("byte_level", data) for data in answers])
    lines = [request_line(number, 5) for number in range(3)]
    push = Reader.push

    def fails(reader, text, last):
        if "!" in text:
            raise ValueError("odd\ntext")
        return push(reader, text, last)

    monkeypatch.setattr(Reader, "push", fails)
    found = batch_answers(monkeypatch, tmp_path, lm, make, lines)
    assert "Traceback" in caplog.text
    caplog.clear()
    with client(application(make, lm=lm)[0]) as http:
        for number, line in enumerate(lines):
            answer = http.post(CHAT, json=line["body"])
            streamed = http.post(CHAT, json={**line["body"], "stream": True})
            error = found[number]["body"].get("error")
            assert [answer.status_code, found[number]["status_code"]] == [500 if number == 1 else 200] * 2
            assert ("odd text" in streamed.text) == (number == 1) == ("Traceback" in caplog.text)
            assert streamed.text.endswith("data: [DONE]\n\n")
            if number == 1:
                assert error["message"] == answer.json()["error"]["message"] == "ValueError: odd text"
                assert error["type"] == answer.json()["error"]["type"] == "server_error"
            caplog.clear()


def test_tokens_of_calls_are_text():
    """Mistral's and Llama's markers are special tokens, which a text leaves out otherwise."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(directory("byte_level") / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[X]"])
    made = Tokenizer(FileTokenizer(backend, {}))
    ids = made.encode("a[TOOL_CALLS] [X]b")
    assert made.decode(ids) == "a[TOOL_CALLS] b"
    assert made.stream().push(ids) == "a[TOOL_CALLS] b"
