"""Conversations become text by a chat template: the model's own, or Vicuna's form."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jinja2

from jaxspec.io.files import read_json, read_text

SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# Vicuna's form, for a model whose tokenizer brings no chat template of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }} {% endif %}"
    "{% endfor %}"
)


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat template and its special tokens, by which conversations become text.

    Attributes:
      template: Jinja, as in a tokenizer's `chat_template`.
      bos_token, eos_token: what the template may write.
    """

    template: str = CHAT_TEMPLATE
    bos_token: str = ""
    eos_token: str = "</s>"

    def render(self, messages: list[dict[str, str]], ask: bool) -> str:
        """The text of messages with `role` and `content`; `ask` adds what stands before an answer."""
        return _compiled(self.template).render(
            messages=messages,
            add_generation_prompt=ask,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            raise_exception=_refuse,
        )


def chat_of(directory: Path) -> Chat:
    """Reads the chat template of a model's tokenizer; Vicuna's form where it has none."""
    settings = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    template = settings.get("chat_template")
    if (directory / TEMPLATE).is_file():
        template = read_text(directory / TEMPLATE, "a chat template is Jinja")
    if isinstance(template, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")

    def token(name: str, usual: str) -> str:
        value = settings.get(name) or usual
        return value["content"] if isinstance(value, dict) else value

    return Chat(template or CHAT_TEMPLATE, token("bos_token", ""), token("eos_token", "</s>"))


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
