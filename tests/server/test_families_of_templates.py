"""Tools, roles and earlier calls in the prompts of published families, by templates of their structure."""

from __future__ import annotations

import json

import pytest

from jaxspec.io.tokenizers.chat import ChatTemplate
from jaxspec.serving.tools import FORMS, told
from tests import refused

HERMES, PHI, GRANITE, NAMED, MISTRAL, LLAMA = FORMS
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls in <tool_call>, and results in turns of the user.
TURNS = (
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set text = m.content.split('</think>')[-1] %}{{ text.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}\n<tool_call>\n"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n<tool_call></tool_call>.<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
) + TURNS
ALTERNATING = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}"
)
GEMMA_TURN = (
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ROLE = "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
EXAONE_TURN = (
    "[|{{ m.role }}|]\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}[|endofturn|]\n{% endif %}{% endfor %}{% if add_generation_prompt %}[|assistant|]\n{% endif %}"
)
LLAMA_TURN = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' or m.role == 'ipython' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The form of calls, the text directly before the JSON of the tools, and the template.
FAMILIES = {
    "Hermes 2 Pro and 3": (HERMES, "<tools>", ChatTemplate(
        CHATML,
        tool_use="<|im_start|>system\nCall functions in <tool_call> tags. <tools>{% for t in tools %}"
        "{{ t | tojson }}{% endfor %}</tools><|im_end|>\n"
        + TURNS.replace(" and not loop.first", "")
        + "{% endif %}",
    )),
    "Qwen 2.5": (HERMES, "<tools>", ChatTemplate(QWEN + "{% endif %}")),
    "Qwen 3": (HERMES, "<tools>", ChatTemplate(
        QWEN + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )),
    "SmolLM2": (HERMES, "</tools>:\n<tools>\n", ChatTemplate(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
        "{% endif %}" + CHATML
    )),
    "SmolLM3": (HERMES, "<tools>", ChatTemplate(
        "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
        "{% if xml_tools or python_tools %}### Tools\n{% if xml_tools %}<tools>{% for t in xml_tools %}"
        "{{ t | string }}{% endfor %}</tools> <tool_call>{% endif %}{% endif %}<|im_end|>\n"
        + TURNS
        + "{% endif %}"
    )),
    "EXAONE 4": (HERMES, "<tool>", ChatTemplate(
        "{% if tools %}[|system|]\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
        "{% for t in tools %}<tool>{{ t | tojson }}</tool>{% endfor %}\n<tool_call>[|endofturn|]\n{% endif %}"
        "{% for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}" + EXAONE_TURN
    )),
    "Granite 4": (HERMES, "<tools>", ChatTemplate(
        "{% if tools %}<|start_of_role|>system<|end_of_role|>{% if messages[0].role == 'system' %}"
        "{{ messages[0].content }}{% endif %}<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}</tools>"
        "<tool_call><|end_of_text|>\n{% endif %}{% for m in messages %}"
        "{% if not (tools and loop.first and m.role == 'system') %}<|start_of_role|>{{ m.role }}<|end_of_role|>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
        "{% endfor %}<|end_of_text|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    )),
    "Granite 3": (GRANITE, "<|start_of_role|>tools<|end_of_role|>[", ChatTemplate(
        "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>\n"
        "Write <|tool_call|> and a JSON list.{% endif %}{% for m in messages %}" + ROLE + "{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    )),
    "Phi-4-mini": (PHI, "<|tool|>[", ChatTemplate(
        "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
        "<|system|>{{ m['content'] }}<|tool|>{{ m['tools'] }}<|/tool|><|end|>{% else %}"
        "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )),
    "Llama 3.1 and 3.2": (LLAMA, "}.\n\n", ChatTemplate(
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\n{{ system }}<|eot_id|>{% if tools is not none %}"
        "{% if messages | length == 0 %}{{ raise_exception('no first user message') }}{% endif %}"
        "{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of names}.\n\n'
        "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ first }}<|eot_id|>{% endif %}"
        + LLAMA_TURN
    )),
    "Mistral": (MISTRAL, "[AVAILABLE_TOOLS] [", ChatTemplate(
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
        "{% set asked = turns | selectattr('role', 'equalto', 'user') | list %}{% for m in turns %}"
        "{% if m.role == 'user' %}{% if tools is not none and m == asked[-1] %}[AVAILABLE_TOOLS] "
        "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {% if loop.last and system is defined %}"
        "{{ system }}\n\n{% endif %}{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
        "{{ c.function | tojson }}{% endfor %}]</s>{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}"
        "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
    )),
    "Ministral 3": (NAMED, "[AVAILABLE_TOOLS][", ChatTemplate(
        "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
        "{% set messages = messages[1:] %}{% endif %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
        "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% elif m.role == 'tool' %}"
        "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ raise_exception('') }}{% endif %}{% endfor %}"
    )),
    "Gemma 1 and 2": (HERMES, "</tools>:\n<tools>\n", ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}" + ALTERNATING + GEMMA_TURN
    )),
    "Gemma 3": (HERMES, "</tools>:\n<tools>\n", ChatTemplate(
        "{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set before = '' %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}"
        + ALTERNATING
        + GEMMA_TURN.replace("{{ m.content", "{{ before if loop.first }}{{ m.content")
    )),
    "a system prompt that vanishes": (HERMES, "</tools>:\n<tools>\n", ChatTemplate(
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )),
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "It.", "parameters": {"type": "object"}},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "RESULT-1"},
]
AGAIN = [*TALK, {"role": "assistant", "content": "Warm."}, {"role": "user", "content": "And now?"}]
# Several results at once, which Llama 3 does not have.
TWO = [TALK[0], {**TALK[1], "tool_calls": [CALL, CALL]}, TALK[2], {**TALK[2], "content": "RESULT-2"}]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "before", [[], [SYSTEM], [{**SYSTEM, "role": "developer"}]], ids=["", "system", "developer"]
)
@pytest.mark.parametrize(
    "talk", [TALK[:1], TALK, AGAIN, TWO], ids=["asked", "result", "again", "two results"]
)
def test_tools_calls_and_results_reach_the_model(name, before, talk):
    if talk is TWO and name.startswith("Llama"):
        return
    form, place, chat = FAMILIES[name]
    found, messages, more = told([*before, *talk], [WEATHER], chat)
    assert found is form
    chat.check(messages, more)
    text = chat.prompt(messages, more)
    _, marker, rest = text.partition(place)
    assert marker
    assert rest.lstrip().startswith(("{", '"')), rest[:40]
    assert rest.index("weather") < 120
    for message in [*before, *talk]:
        assert message["content"] in text
    called = text.replace(place, "").count('"city": "Rome"')
    assert called == sum(len(one.get("tool_calls", ())) for one in talk)
    # A call is written in the form that is read from answers.
    if called:
        assert (form.begin in text.partition("Is it warm?")[2]) or form is LLAMA


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_earlier_turns_need_no_tools(name):
    _, _, chat = FAMILIES[name]
    form, messages, more = told(AGAIN, [], chat)
    assert (form, more) == (None, {})
    text = chat.prompt(messages, more)
    assert "RESULT-1" in text
    assert "Rome" in text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_message_is_rendered_or_refused(name):
    """By any template, in any role."""
    _, _, chat = FAMILIES[name]
    for role in ("system", "developer", "user", "tool", "critic", "function"):
        messages = [{"role": role, "content": "KIWI"}, {"role": "user", "content": "Hi"}]
        for talk in (messages, [messages[1], {"role": "assistant", "content": "Yo"}, *messages]):
            known = chat.known(talk)
            said = None
            try:
                chat.check(known)
            except ValueError as error:
                said = str(error)
            assert ("\n" not in said) if said else ("KIWI" in chat.prompt(known))
            if role == "developer":
                assert "developer" not in json.dumps(known)


def test_a_role_that_a_template_knows_is_kept():
    chat = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% else %}[{{ m.role }}]{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    talk = [{"role": "developer", "content": "I am no developer."}, {"role": "user", "content": "Hi"}]
    assert chat.prompt(chat.known(talk)) == "<dev>I am no developer.[user]Hi"


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        ("{{ messages[-1].content }}", 0),
        ("{% for m in messages %}{{ m.content if m.role == 'system' }}{% endfor %}", 1),
        ("{% for m in messages %}{{ m.content | upper | reverse }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", None),
        ("{% for m in messages %}{% if 'mark' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
         "{% endfor %}", None),
    ],
)  # fmt: skip
def test_a_message_without_a_trace_is_refused_in_one_line(template, lost):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi, Ada"}]
    if lost is None:
        ChatTemplate(template).check(talk)
        return
    with refused(rf"leaves out messages\[{lost}\], of role '{talk[lost]['role']}'"):
        ChatTemplate(template).check(talk)


def test_empty_messages_and_calls_leave_no_trace():
    chat = ChatTemplate("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}")
    chat.check([{"role": "system", "content": " \n"}, TALK[0]])
    with refused(r"leaves out messages\[1\], of role 'assistant': its calls would not reach"):
        chat.check(TALK)


def test_tools_in_a_message_as_a_list():
    """GLM-4 9B has them so, with a form of calls that is not read."""
    template = "{% for m in messages %}{% for t in m.tools or [] %}{{ t.function | tojson }}{% endfor %}"
    template += "{{ m.content }}{% endfor %}"
    with refused("its calls have a form that is not read"):
        told(TALK[:1], [WEATHER], ChatTemplate(template))
    form, messages, _ = told(TALK[:1], [WEATHER], ChatTemplate(template + "{# <tool_call> #}"))
    assert (form, messages[0]["tools"]) == (HERMES, [WEATHER])
