"""Chat templates of well-known models whose tokenizer files have none, by name."""

from __future__ import annotations

import os

from jaxspec.host.files import read_text

# Vicuna's form without its system prompt, as Jinja. A system message precedes the first question.
VICUNA_TURNS = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }} {% endif %}"
    "{% endfor %}"
)
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
# Vicuna 1.1 to 1.5 as in FastChat, Llama 2 as in its repository, and OpenAI's ChatML.
FORMS = {
    "vicuna": "{{ bos_token }}{% if messages[0].role != 'system' %}"
    + _VICUNA_SYSTEM
    + " {% endif %}"
    + VICUNA_TURNS,
    "llama-2": (
        "{% for message in messages %}"
        "{% if message.role == 'user' %}{{ bos_token }}[INST] "
        "{% if loop.index0 == 1 and messages[0].role == 'system' %}"
        "<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{{ message.content.strip() }} [/INST]"
        "{% elif message.role == 'assistant' %} {{ message.content.strip() }} {{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def template_of(given: str | os.PathLike[str]) -> str:
    """Returns the template in a Jinja file, or, if there is no such file, the one of `FORMS` with this name.

    Raises:
      FileNotFoundError, ValueError: there is neither, or the file is not text.
    """
    name = os.fspath(given)
    if name in FORMS and not os.path.exists(name):
        return FORMS[name]
    return read_text(given, f"`chat_template` must be a Jinja template, or one of {', '.join(FORMS)}")
