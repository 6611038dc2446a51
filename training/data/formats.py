"""Records become documents: text, prompt and completion, GSM8K, MBPP, ShareGPT, instructions, copy-and-edit tasks.

A document is a row of spans, some of which are to be learned and some only read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from training.data import copy_edit
from training.data.conversations import Chat

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of a document.

    Attributes:
      text: as it stands.
      learn: whether its tokens are to be predicted; the others are only read.
    """

    text: str
    learn: bool = True


@dataclasses.dataclass(frozen=True)
class Document:
    """A text to learn from, some of whose spans may be read only.

    Attributes:
      spans: laid end to end.
      origin: the text by whose hash it is held out or not: what is made of a held-out story is held out too.
      chat: whether it is a conversation, written by the chat template.
    """

    spans: tuple[Span, ...]
    origin: str
    chat: bool = False

    @property
    def text(self) -> str:
        """The document's whole text."""
        return "".join(span.text for span in self.spans)


# A record and the way conversations are written → its documents; raises ValueError where it does not fit.
Convert = Callable[[Mapping[str, Any], Chat], list[Document]]


def plain(text: str) -> list[Document]:
    """Makes one document of a text, all of which is learned; none of an empty text."""
    text = text.strip()
    return [Document((Span(text),), text)] if text else []


def _from_text(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(_string(record, "text"))


def _from_completion(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """Only the completion is learned; records of the same `origin`, if it is there, are held out together.

    A completion with `ended` false was cut off: what would have followed, the end of text too, is not learned.
    """
    del chat
    prompt, completion = _string(record, "prompt"), _string(record, "completion")
    if not completion:
        raise ValueError("`completion` is empty; give the text to be learned")
    origin = _string(record, "origin") if "origin" in record else prompt
    cut = () if record.get("ended", True) else (Span("", learn=False),)
    return [Document((Span(prompt, learn=False), Span(completion), *cut), origin)]


def _from_gsm8k(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(gsm8k_prompt(_string(record, "question")) + " " + _string(record, "answer"))


def _from_mbpp(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    return plain(mbpp_prompt(_string(record, "text")) + _code(record))


def _code(record: Mapping[str, Any]) -> str:
    code = _string(record, "code").replace("\r\n", "\n").expandtabs(4)
    return "\n".join(line.rstrip() for line in code.split("\n"))


def _from_copy_edit(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    del chat
    story = _string(record, "text").strip()
    tasks = copy_edit.tasks(story)
    return [Document((Span(task.prompt + " " + task.answer),), story) for task in tasks]


def _from_sharegpt(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ValueError("no list `conversations`")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or turn.get("from") not in _ROLES:
            raise ValueError(f"a turn is not from {' or '.join(_ROLES)}")
        messages.append({"role": _ROLES[turn["from"]], "content": _string(turn, "value")})
    return _conversation(messages, chat)


def _from_chat(record: Mapping[str, Any], chat: Chat) -> list[Document]:
    """A question and its answer as messages, whatever they are called; of instructions each case.

    All cases are held out together, with the records of the same `origin` if it is there.
    """
    pairs: list[tuple[str, str]] = []
    if "instruction" in record:
        cases = record.get("instances", [record])
        if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
            raise ValueError("`instances` is not a list of objects")
        for case in cases:
            given = [_string(record, "instruction"), _string(case, "input") if "input" in case else ""]
            pairs.append(("\n\n".join(filter(None, given)), _string(case, "output")))
    elif "code" in record:
        pairs.append((_string(record, "text"), _code(record)))
    else:
        names = ("prompt", "completion") if "completion" in record else ("question", "answer")
        asked, answered = (_string(record, name) for name in names)
        pairs.append((asked, answered))
    roles = ("user", "assistant")
    documents = [
        document
        for pair in pairs
        for document in _conversation(
            [{"role": role, "content": text.strip()} for role, text in zip(roles, pair, strict=True)], chat
        )
    ]
    if not documents:
        return []
    origin = _string(record, "origin") if "origin" in record else documents[0].origin
    return [dataclasses.replace(document, origin=origin) for document in documents]


def _conversation(messages: list[dict[str, str]], chat: Chat) -> list[Document]:
    """Only the answers are learned, with the end that the template gives each."""
    spans = tuple(Span(text, learn) for text, learn in chat.pieces(messages))
    return [Document(spans, "".join(span.text for span in spans), chat=True)] if spans else []


def gsm8k_prompt(question: str) -> str:
    """Builds the prompt of a GSM8K problem: what stands before its answer."""
    return f"Question: {question.strip()}\nAnswer:"


def mbpp_prompt(task: str) -> str:
    """Builds the prompt of an MBPP task: the task as a comment, before the code."""
    return f"# {' '.join(task.split())}\n"


FORMATS: dict[str, Convert] = {
    "text": _from_text,
    "completion": _from_completion,
    "gsm8k": _from_gsm8k,
    "mbpp": _from_mbpp,
    "sharegpt": _from_sharegpt,
    "chat": _from_chat,
    "copy-edit": _from_copy_edit,
}
# By which keys `auto` knows the format of a record, the most special first.
_KEYS = {
    "completion": ("prompt", "completion"),
    "gsm8k": ("question", "answer"),
    "mbpp": ("text", "code"),
    "sharegpt": ("conversations",),
    "chat": ("instruction",),
    "text": ("text",),
}
AUTO = "auto"


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is {'missing' if key not in record else 'not a text'}")
    return value


def recognise(record: Mapping[str, Any]) -> str:
    """The format whose keys a record has.

    Raises:
      ValueError: none's.
    """
    for name, keys in _KEYS.items():
        if all(key in record for key in keys):
            return name
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _KEYS.items())
    raise ValueError(f"no known keys in ({', '.join(map(str, record))}); expected one of {known}")
