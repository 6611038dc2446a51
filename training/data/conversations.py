"""Conversations become text by a chat template: the model's own, or Vicuna's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.io.chat import ChatTemplate
from jaxspec.io.tokenizer import has_tokenizer, load_tokenizer

# Vicuna's form, for a model whose tokenizer brings no chat template of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} ASSISTANT:"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }} {% endif %}"
    "{% endfor %}"
)


_EOS = "</s>"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat template and its special tokens, by which conversations become text.

    Attributes:
      template: Jinja, as in a tokenizer's `chat_template`.
      bos_token, eos_token: tokens that the template may use.
      other_tokens: more special tokens by name, such as pad_token.
    """

    template: str = CHAT_TEMPLATE
    bos_token: str = ""
    eos_token: str = _EOS
    other_tokens: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def pieces(
        self, messages: Sequence[Mapping[str, Any]], learned: Container[int] | None = None
    ) -> list[tuple[str, bool]]:
        """Returns the text of a conversation up to its last answer, in pieces, each with whether it is learned.

        The answers are the template's `{% generation %}` blocks. For a template without such blocks, an answer is the
        text that an assistant's message adds to the text before it, with the template's end of the message.

        Args:
          messages: with `role` and `content` each.
          learned: the numbers of the messages whose answers are learned; None for all.

        Raises:
          ValueError: the template refuses the conversation, or rewrites earlier turns and marks no answers; one line.
        """
        ends = [at for at, message in enumerate(messages, 1) if message["role"] == "assistant"]
        if not ends:
            return []
        whole = self._template.render(messages[: ends[-1]])
        if whole.answers:
            return _cut(whole.text, whole.answers, _chosen(ends, learned, len(whole.answers)))
        borders, done = [], ""
        for end in ends:
            asked = self._template.render(messages[: end - 1], ask=True).text
            answered = whole.text if end == ends[-1] else self._template.render(messages[:end]).text
            if not answered.startswith(asked) or not asked.startswith(done):
                raise ValueError("the chat template rewrites earlier turns; the answers cannot be separated")
            borders.append((len(asked), len(answered)))
            done = answered
        return _cut(whole.text, borders, _chosen(ends, learned, len(borders)))

    @property
    def _template(self) -> ChatTemplate:
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return ChatTemplate(self.template, {**self.other_tokens, **named})


def chat_of(directory: Path) -> Chat:
    """Returns the chat template of a model's tokenizer, or Vicuna's form if it has none.

    Raises:
      ValueError: the tokenizer or its template is damaged.
    """
    if not has_tokenizer(directory):
        return Chat()
    tokenizer = load_tokenizer(directory)
    named, chat = dict(tokenizer.special_tokens), tokenizer.chat
    marks = named.pop("bos_token", ""), named.pop("eos_token", _EOS)
    return Chat(CHAT_TEMPLATE if chat is None else chat.template, *marks, named)


def _chosen(ends: Sequence[int], learned: Container[int] | None, count: int) -> list[bool]:
    """Returns whether each of `count` answers is learned; answer i ends with message number ends[i] - 1."""
    if learned is None:
        return [True] * count
    if count != len(ends):
        raise ValueError(
            f"the chat template marks {count} answers in {len(ends)} turns of the assistant; give a conversation of "
            "which every answer is learned"
        )
    return [end - 1 in learned for end in ends]


def _cut(text: str, answers: Sequence[tuple[int, int]], learn: Sequence[bool]) -> list[tuple[str, bool]]:
    """Returns a text in alternating pieces, not learned and learned; only the first one may be empty."""
    pieces, at = [], 0
    for (begin, end), wanted in zip(answers, learn, strict=True):
        pieces += [(text[at:begin], False), (text[begin:end], wanted)]
        at = end
    return pieces + ([(text[at:], False)] if text[at:] else [])
