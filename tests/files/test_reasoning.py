"""How an answer reasons, from the prompts of published families; their templates are shortened to what decides it."""

from __future__ import annotations

import pytest

from jaxspec.io.tokenizers.chat import ChatTemplate

OPENED, MAY = "</think>", ("<think>", "</think>")
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Past answers without their reasoning.
STRIPPED = (
    "{% for m in messages %}{% set said = m.content %}{% if m.role == 'assistant' and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>\n{% endfor %}"
)
ANSWERS = (
    "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}{% set said = said.split('</think>')[-1] %}"
    "{% endif %}{% if loop.last or thought %}{% set said = '<think>\n' + thought + '\n</think>\n\n' + said %}"
    "{% endif %}{% endif %}"
)
TEMPLATES = {
    "qwen 3": STRIPPED.replace(
        "{% if m.role == 'assistant' and '</think>' in said %}", ANSWERS + "{% if false %}"
    )
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false"
    " %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "qwen 3 thinking": STRIPPED + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "olmo 3 thinking": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}",
    "qwen 3 instruct": TURNS + ASK,
    "deepseek r1 distill, old": STRIPPED + ASK,
    "glm 4.5": STRIPPED
    + "{% if add_generation_prompt %}<|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not "
    "enable_thinking) else '' -}}{% endif %}",
    "deepseek 3.1": STRIPPED + "<|Assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}",
    "granite 3.2": (
        "{% if messages[0].role == 'system' %}{% set said = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}"
        "{% set rest = messages %}{% set said = 'I am Granite.' %}{% if tools %}{% set said = said + tools[0].name %}"
        "{% elif documents %}{% set said = said + documents[0] %}"
        "{% elif thinking %}{% set said = said + ' Write your thoughts after \\'Here is my thought process:\\' and the "
        "response after \\'Here is my response:\\'.' %}{% endif %}{% endif %}<|system|>{{ said }}"
        "{% for m in rest %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    ),
    "smollm 3": (
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{% set mode = '/think' if enable_thinking else '/no_think' %}{% set own = '' %}"
        "{% if messages[0].role == 'system' %}{% set own = messages[0].content %}"
        "{% if '/no_think' in own %}{% set mode = '/no_think' %}{% elif '/think' in own %}"
        "{% set mode = '/think' %}{% endif %}"
        "{% set own = own.replace('/no_think', '').replace('/think', '').rstrip() %}{% endif %}<|im_start|>system\n"
        "Reasoning Mode: {{ mode }}\n{% if own %}{{ own }}"
        "{% elif mode == '/think' %}Write <think> Thought </think> Solution."
        "{% endif %}<|im_end|>\n{% for m in messages %}"
        "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if mode == '/no_think' %}<think>\n\n</think>\n{% endif %}"
        "{% endif %}"
    ),
    "exaone 4": STRIPPED
    + "{% if add_generation_prompt %}[|assistant|]\n{% if enable_thinking is defined and enable_thinking is true %}"
    "<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "exaone deep": STRIPPED.replace("think>", "thought>") + "[|assistant|]<thought>\n",
    "phi 4 reasoning": (
        "<|im_start|>system<|im_sep|>You are Phi. Write <think> {Thought} </think> {Solution}."
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% else %}<|im_end|><|im_start|>{{ m.role }}<|im_sep|>"
        "{{ m.content }}{% endif %}{% endfor %}<|im_end|><|im_start|>assistant<|im_sep|>"
    ),
    "hunyuan": STRIPPED
    + "<|hy_Assistant|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}",
    "nemotron": (
        "{% set off = namespace(off=false) %}{% for m in messages %}{% if '/no_think' in m.content %}"
        "{% set off.off = true %}"
        "{% endif %}{{ m.content.split('</think>')[-1] }}{% endfor %}<SPECIAL>Assistant\n"
        "{% if off.off %}<think></think>{% else %}<think>\n{% endif %}"
    ),
    "seed": (
        "{% set end = '</seed:think>' %}{% set thinking_budget = thinking_budget | default(-1) %}"
        "{% for m in messages %}{{ m.content }}"
        "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}{{ end }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<seed:bos>assistant\n"
        "{% if thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>{% endif %}{% endif %}"
    ),
    "magistral": (
        "{% if messages[0].role == 'system' %}{% set said = messages[0].content %}{% else %}"
        "{% set said = 'First draft: [THINK]thoughts[/THINK]' %}{% endif %}[SYSTEM_PROMPT]{{ said }}[/SYSTEM_PROMPT]"
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    ),
    "on by a text": (
        "{% if enable_thinking is not defined or enable_thinking %}Think in <think></think>.{% endif %}"
        + TURNS
        + ASK
    ),
}
TEMPLATES["granite 3.3"] = (
    TEMPLATES["granite 3.2"]
    .replace("after \\'Here is my thought process:\\'", "between <think></think>")
    .replace("after \\'Here is my response:\\'", "between <response></response>")
)
SYSTEM, NO, YES = "Be brief.", "Be brief. /no_think", "/think"
GRANITE = ("Here is my thought process:", "Here is my response:")


@pytest.mark.parametrize(
    ("name", "system", "variables", "found"),
    [
        ("qwen 3", None, {}, MAY),
        ("qwen 3", SYSTEM, {"enable_thinking": True}, MAY),
        ("qwen 3", SYSTEM, {"enable_thinking": False}, None),
        ("qwen 3 thinking", None, {}, OPENED),
        ("olmo 3 thinking", None, {}, OPENED),
        ("qwen 3 instruct", None, {}, None),
        ("deepseek r1 distill, old", None, {}, MAY),
        ("glm 4.5", None, {}, MAY),
        ("glm 4.5", None, {"enable_thinking": False}, None),
        ("deepseek 3.1", None, {}, None),
        ("deepseek 3.1", None, {"thinking": True}, OPENED),
        ("granite 3.2", None, {}, None),
        ("granite 3.2", None, {"thinking": True}, GRANITE),
        ("granite 3.3", None, {}, None),
        ("granite 3.3", SYSTEM, {}, None),
        ("granite 3.3", None, {"thinking": False}, None),
        ("granite 3.3", None, {"thinking": True}, MAY),
        ("granite 3.3", None, {"tools": [{"name": "now"}]}, None),
        ("granite 3.3", None, {"tools": [{"name": "now"}], "thinking": True}, None),
        ("granite 3.3", SYSTEM, {"thinking": True}, None),  # the template ignores the variable then
        ("granite 3.3", "Think in <think></think>.", {}, MAY),
        ("smollm 3", None, {}, MAY),
        ("smollm 3", SYSTEM, {}, MAY),
        ("smollm 3", NO, {}, None),
        ("smollm 3", YES, {"enable_thinking": False}, MAY),
        ("smollm 3", None, {"enable_thinking": False}, None),
        ("exaone 4", None, {}, None),
        ("exaone 4", SYSTEM, {"enable_thinking": True}, OPENED),
        ("exaone deep", None, {}, "</thought>"),
        ("phi 4 reasoning", None, {}, MAY),
        ("phi 4 reasoning", SYSTEM, {}, MAY),
        ("hunyuan", None, {}, MAY),
        ("hunyuan", None, {"enable_thinking": False}, None),
        ("nemotron", None, {}, OPENED),
        ("nemotron", NO, {}, None),
        ("seed", None, {}, ("<seed:think>", "</seed:think>")),
        ("seed", None, {"thinking_budget": 512}, ("<seed:think>", "</seed:think>")),
        ("seed", None, {"thinking_budget": 0}, "</seed:think>"),
        ("magistral", None, {}, ("[THINK]", "[/THINK]")),
        ("magistral", SYSTEM, {}, None),
        ("on by a text", None, {}, MAY),
        ("on by a text", SYSTEM, {"enable_thinking": False}, None),
    ],
)
def test_the_prompt_shows_whether_its_answer_reasons(name, system, variables, found):
    messages = [{"role": "user", "content": "What do <think> and </think> mean?"}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    chat = ChatTemplate(TEMPLATES[name])
    assert chat.reasoning(messages, variables) == found
    past = [*messages, {"role": "assistant", "content": "<think>Hm.</think>Tags."}, messages[-1]]
    assert chat.reasoning(past, variables) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("<think>Hm", OPENED),
        ("<think>Hm</think>\nSo", None),
        ("So", None),
        ("", MAY),
        ("</think><think>", OPENED),
    ],
)
def test_an_answer_goes_on_where_it_was(said, found):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    chat = ChatTemplate(TURNS + "{# </think> #}")
    assert chat.reasoning(messages, {}) == found


def test_a_request_does_not_render_what_shows_a_property_of_the_template_again(monkeypatch):
    rendered = []
    own = ChatTemplate.render

    def render(self, *args, **options):
        rendered.append(args)
        return own(self, *args, **options)

    monkeypatch.setattr(ChatTemplate, "render", render)
    chat = ChatTemplate(TEMPLATES["qwen 3"] + "{# a template that no other test has #}")
    counts = []
    for text in ("Hi", "Hello", "Good morning"):
        before = len(rendered)
        assert chat.reasoning([{"role": "user", "content": text}], {}) == MAY
        counts.append(len(rendered) - before)
    assert counts[0] > 2
    assert counts[1:] == [2, 2]  # the prompt with and without what asks for the answer
