"""Converts conversations to text with a chat template: the model's own, or Vicuna's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.io.tokenizers.chat import ChatTemplate
from jaxspec.io.tokenizers.chat_forms import FORMS, VICUNA_TURNS, template_of
from jaxspec.io.tokenizers.tokenizer import has_tokenizer, load_tokenizer

# For a model whose tokenizer has no chat template.
CHAT_TEMPLATE = VICUNA_TURNS
_EOS = "</s>"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat template and its special tokens. It converts conversations to text.

    Attributes:
      template: a Jinja template, as in a tokenizer's `chat_template`.
      bos_token, eos_token: tokens that the template may use.
      other_tokens: more special tokens by name, such as pad_token.
      assumed: whether `template` was chosen because the model has none.
    """

    template: str = CHAT_TEMPLATE
    bos_token: str = ""
    eos_token: str = _EOS
    other_tokens: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    assumed: bool = dataclasses.field(default=False, compare=False)

    def pieces(
        self, messages: Sequence[Mapping[str, Any]], learned: Container[int] | None = None
    ) -> list[tuple[str, bool]]:
        """Splits the text of a conversation, up to its last answer, into pieces.

        The answers are the template's `{% generation %}` blocks. For a template without such blocks, an answer is the
        text that an assistant's message adds to the text before it, with the template's end of the message.

        Args:
          messages: the turns, each with `role` and `content`.
          learned: indices of the messages whose answers are learned; None for all.

        Returns:
          pairs (text, whether it is learned), in order.

        Raises:
          ValueError: the template refuses the conversation, or rewrites earlier turns and marks no answers.
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


def chat_of(directory: Path | None, template: str | None = None) -> Chat:
    """Returns the chat template for a model's conversations, with the special tokens of its tokenizer.

    Args:
      directory: the tokenizer's directory; None for a tokenizer that is learned.
      template: a Jinja file or a name of `chat_forms.FORMS`; None for the tokenizer's template, or, if it has none,
        Vicuna's form without a system prompt.

    Raises:
      FileNotFoundError: there is no such template.
      ValueError: the tokenizer or its template is damaged.
    """
    given = None if template is None else template_of(template)
    if directory is None or not has_tokenizer(directory):
        return Chat(given or CHAT_TEMPLATE)
    tokenizer = load_tokenizer(directory)
    named, own = dict(tokenizer.special_tokens), None if given else tokenizer.chat
    marks = named.pop("bos_token", ""), named.pop("eos_token", _EOS)
    found = given or (None if own is None else own.template)
    return Chat(found or CHAT_TEMPLATE, *marks, named, assumed=found is None)


def assumption() -> str:
    """Describes the form of conversations for a model without a chat template, in one line."""
    return (
        "the tokenizer has no chat template: conversations are written in Vicuna's form without a system prompt; give "
        f"--chat-template FILE, or {', '.join(FORMS)}, and the same to jaxspec"
    )


def _chosen(ends: Sequence[int], learned: Container[int] | None, count: int) -> list[bool]:
    """Returns whether each of `count` answers is learned; answer i is message `ends[i] - 1`."""
    if learned is None:
        return [True] * count
    if count != len(ends):
        raise ValueError(
            f"the chat template marks {count} answers in {len(ends)} turns of the assistant; give a conversation of "
            "which every answer is learned"
        )
    return [end - 1 in learned for end in ends]


def _cut(text: str, answers: Sequence[tuple[int, int]], learn: Sequence[bool]) -> list[tuple[str, bool]]:
    """Cuts a text into alternating pieces, not learned and learned; only the first one may be empty."""
    pieces, at = [], 0
    for (begin, end), wanted in zip(answers, learn, strict=True):
        pieces += [(text[at:begin], False), (text[begin:end], wanted)]
        at = end
    return pieces + ([(text[at:], False)] if text[at:] else [])
